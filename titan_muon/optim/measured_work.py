"""The parts of a step, each timed, with a look at what was computed."""

from collections.abc import Callable, Sequence

from torch import Tensor

from titan_muon.distributed.exchange import Message
from titan_muon.optim.batches import Batch
from titan_muon.optim.observer import StepParts
from titan_muon.optim.stopwatch import Stopwatch

__all__ = ["MeasuredWork"]


class MeasuredWork:
    """Does what the work does and writes down how long it takes.

    Args:
        work: The parts of the step.
        watch: Takes the time.
        look: Sees the batches of every stage once they are computed.
    """

    def __init__(
        self, work: StepParts, watch: Stopwatch, look: Callable[[Sequence[Batch]], None]
    ) -> None:
        self._work, self._watch, self._look = work, watch, look
        self.members, self.stages = work.members, work.stages

    def begin(self, take: Tensor | None) -> None:
        """Advance the momentum of what travels first."""
        with self._watch.part("momentum"):
            self._work.begin(take)

    def advance(self) -> None:
        """Advance all other momentum."""
        with self._watch.part("momentum"):
            self._work.advance()

    def send(self, stage: int) -> Message | None:
        """Pack and start."""
        with self._watch.part("pack"):
            return self._timed(self._work.send(stage))

    def receive(self, stage: int, message: Message | None) -> list[Batch]:
        """Wait and unpack."""
        with self._watch.part("pack"):
            return self._work.receive(stage, message)

    def compute(self, batches: Sequence[Batch]) -> None:
        """Orthogonalize, then look."""
        with self._watch.part("orthogonalize"):
            self._work.compute(batches)
        with self._watch.part("measure"):
            self._look(batches)

    def write(self, batches: Sequence[Batch]) -> None:
        """Write what stays."""
        with self._watch.part("write"):
            self._work.write(batches)

    def send_back(self, stage: int, batches: Sequence[Batch]) -> Message | None:
        """Pack and start."""
        with self._watch.part("pack"):
            return self._timed(self._work.send_back(stage, batches))

    def land(self, message: Message | None) -> None:
        """Wait and write."""
        with self._watch.part("write"):
            self._work.land(message)

    def finish(self) -> None:
        """End the step."""
        with self._watch.part("write"):
            self._work.finish()

    def _timed(self, message: Message | None) -> Message | None:
        if message is None:
            return None
        return _TimedMessage(message, self._watch)


class _TimedMessage(Message):
    """A message whose wait counts as exchange, in whatever part it is waited for."""

    def __init__(self, message: Message, watch: Stopwatch) -> None:
        super().__init__(message.stage, message.packets, message.work)
        self._watch = watch

    def wait(self) -> Tensor:
        """Return the arrived bytes."""
        with self._watch.part("exchange"):
            return super().wait()
