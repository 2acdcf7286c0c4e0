"""Shards fetched for one operation, and stored again."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from titan_muon.optim.quantized import decode, encode, is_quantized, stored

__all__ = ["Loan", "Narrow", "Transfers"]

Narrow = Callable[[int, Tensor], Tensor]


# Operations on fetched tensors that the host may be ahead of the device: one is worked on while the
# next is fetched and the last is stored. What was fetched for them is the memory that is taken.
_AHEAD = 3


class Transfers:
    """Copies between the host and a device, beside what the device computes.

    Args:
        device: Where tensors are worked on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: tuple[Any, Any] | None = None
        # When a tensor, by its address, has been stored; and when fetched ones were last used.
        self._arrivals: dict[int, Any] = {}
        self._uses: deque[Any] = deque()

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors on the device, themselves where they lie there; see :meth:`wait`."""
        if all(tensor.device == self.device for tensor in tensors):
            return list(tensors)
        if self.device.type != "cuda":
            return [tensor.to(self.device) for tensor in tensors]
        while len(self._uses) >= _AHEAD:
            self._uses.popleft().synchronize()
        fetching, _ = self._both()
        for event in {self._arrivals.pop(t.data_ptr(), None) for t in tensors} - {None}:
            fetching.wait_event(event)
        with torch.cuda.stream(fetching):
            return [tensor.to(self.device, non_blocking=True) for tensor in tensors]

    def wait(self, fetched: Sequence[Tensor]) -> None:
        """Let the current stream wait for what was fetched."""
        if self._streams is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._streams[0])
            for tensor in fetched:
                tensor.record_stream(current)

    def used(self) -> None:
        """Note that the current stream will be done with what was fetched for an operation."""
        if self._streams is not None:
            self._uses.append(torch.cuda.current_stream(self.device).record_event())

    def store(self, values: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy values to where their tensors lie."""
        if self._streams is None or all(t.device == self.device for t in targets):
            torch._foreach_copy_(list(targets), list(values))
            return
        _, storing = self._streams
        storing.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(storing):
            for value, target in zip(values, targets, strict=True):
                target.copy_(value, non_blocking=True)
                value.record_stream(storing)
        arrival = storing.record_event()
        self._arrivals.update((target.data_ptr(), arrival) for target in targets)

    def finish(self) -> None:
        """Let the host wait until everything has arrived."""
        if self._streams is not None:
            self._streams[1].synchronize()
            self._arrivals.clear()
            self._uses.clear()

    def _both(self) -> tuple[Any, Any]:
        if self._streams is None:
            self._streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        return self._streams


class Loan:
    """Some tensors of one kind as an operation can work on them.

    Args:
        tensors: Local tensors, all quantised in one way or none.
        transfers: Between where they lie and where they are worked on.
        dtype: Dtype in which they are worked on; None for their own, float32 where quantised.
        narrow: Takes the number of a tensor and what it was worked on, flat, and returns what is
            stored; None for torch's rounding.

    Attributes:
        work: What operations work on, once :meth:`open` was called: the tensors themselves where
            that is possible.
        rounds: Whether storing rounds.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        transfers: Transfers,
        dtype: torch.dtype | None = None,
        narrow: Narrow | None = None,
    ) -> None:
        self.work: Sequence[Tensor] = tensors
        self.rounds = is_quantized(tensors[0])
        self._tensors, self._transfers = tensors, transfers
        self._dtype, self._narrow = dtype, narrow
        self._parts = [part for tensor in tensors for part in stored(tensor)]
        self._fetched = transfers.fetch(self._parts)
        self._encoded: tuple[Tensor, Tensor] | None = None

    def open(self) -> None:
        """Make ``work`` ready on the current stream."""
        self._transfers.wait(self._fetched)
        self.work = self._decoded(self._fetched) if self.rounds else self._fetched
        if self._dtype is not None:
            self.work = [tensor.to(self._dtype) for tensor in self.work]

    def store(self, *, only_changed: bool = False) -> None:
        """Store ``work`` in the tensors.

        Args:
            only_changed: Keep the bits of quantised blocks in which no value has changed; encoding
                is not the inverse of decoding.
        """
        if not self.rounds:
            values = self.work
            if self._narrow is not None:
                values = [
                    self._narrow(i, w.view(-1)).view(w.shape) for i, w in enumerate(self.work)
                ]
            pairs = zip(values, self._tensors, strict=True)
            moved = [(w, t) for w, t in pairs if w is not t]
            if moved:
                self._transfers.store(*map(list, zip(*moved, strict=True)))
            return
        values = self._flat(self.work)
        if values.dtype != torch.float32:
            values = values.float()
        codes, scales = encode(self._tensors, values)
        if only_changed:
            codes, scales = self._where_changed(values, codes, scales)
        self._encoded = codes, scales
        sizes = [part.numel() for part in self._parts]
        split = zip(codes.split(sizes[::2]), scales.split(sizes[1::2]), strict=True)
        pieces = [piece for pair in split for piece in pair]
        shaped = [p.view(part.shape) for p, part in zip(pieces, self._parts, strict=True)]
        self._transfers.store(shaped, self._parts)

    def stored(self) -> list[Tensor]:
        """Return the values as they were stored, after :meth:`store`."""
        if self._encoded is None:
            raise AssertionError("nothing has been stored")
        return self._decoded(self._encoded)

    def _decoded(self, parts: Sequence[Tensor]) -> list[Tensor]:
        pairs = [cast(Any, tuple(parts[i : i + 2])) for i in range(0, len(parts), 2)]
        return decode(self._tensors, pairs)

    def _flat(self, work: Sequence[Tensor]) -> Tensor:
        """Return the one tensor that decoded values are views of."""
        count = sum(tensor.numel() for tensor in work)
        return work[0].as_strided((count,), (1,), 0)

    def _where_changed(
        self, values: Tensor, codes: Tensor, scales: Tensor
    ) -> tuple[Tensor, Tensor]:
        before = self._flat(self._decoded(self._fetched))
        changed = (values != before).view(len(scales), -1).any(dim=1)
        old_codes, old_scales = (
            torch.cat([part.view(-1) for part in self._fetched[i::2]]) for i in (0, 1)
        )
        by_block = torch.where(
            changed.view(-1, 1), codes.view(len(scales), -1), old_codes.view(len(scales), -1)
        )
        return by_block.view(-1), torch.where(changed, scales, old_scales)
