"""Who watches a step: the seam between the optimizer and whatever measures it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from titan_muon.distributed.exchange import Message
    from titan_muon.optim.batches import Batch
    from titan_muon.optim.members import Member

__all__ = ["ElementwiseStep", "Observer", "StepParts"]

ElementwiseStep = Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[Mapping[str, Tensor]], Mapping[str, Any]], None
]


class StepParts(Protocol):
    """The parts of a step on one set of ranks, as ``MatrixWork`` has them."""

    members: "list[Member]"
    stages: range

    def begin(self, take: Tensor | None) -> None:
        """Advance what travels first; ``take`` is 0-d, 0 for a step that writes nothing."""

    def send(self, stage: int) -> "Message | None":
        """Send directions to the owners."""

    def advance(self) -> None:
        """Advance all other momentum."""

    def receive(self, stage: int, message: "Message | None") -> "list[Batch]":
        """Return the matrices of a stage."""

    def compute(self, batches: "Sequence[Batch]") -> None:
        """Turn directions into updates."""

    def write(self, batches: "Sequence[Batch]") -> None:
        """Write what stays on this rank."""

    def send_back(self, stage: int, batches: "Sequence[Batch]") -> "Message | None":
        """Send updates back."""

    def land(self, message: "Message | None") -> None:
        """Write updates that come back."""

    def finish(self) -> None:
        """End the step."""


class Observer:
    """Stands between a step and its parts; this one lets everything pass.

    A subclass may wrap what it is given, and must leave what it does unchanged.
    """

    def works(self, works: "Sequence[StepParts]") -> "Sequence[StepParts]":
        """Return the parts of this step for each set of ranks; called once, at its start."""
        return works

    def elements(self, step: ElementwiseStep, params: Sequence[Tensor]) -> ElementwiseStep:
        """Return the step of one group of an elementwise algorithm.

        Args:
            step: Takes shards, gradients, states and the group.
            params: The group's parameters that have a gradient, in the order of the shards.
        """
        return step
