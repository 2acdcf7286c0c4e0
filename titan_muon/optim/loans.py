"""Shards fetched for one operation, and stored again."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_muon.kernels.coding import Coding
from titan_muon.kernels.quantize import decode, encode
from titan_muon.optim.quantized import Quantized

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
        tensors: Sequence[Tensor | Quantized],
        transfers: Transfers,
        dtype: torch.dtype | None = None,
        narrow: Narrow | None = None,
    ) -> None:
        self._transfers, self._dtype, self._narrow = transfers, dtype, narrow
        self._coding: Coding | None = None
        self._shapes: list[tuple[int, ...]] = []
        self._parts: list[Tensor] = []
        for tensor in tensors:
            if isinstance(tensor, Quantized):
                self._coding = self._coding or tensor.coding(transfers.device)
                self._shapes.append(tensor.shape)
                self._parts += tensor.codes, tensor.scale
            else:
                self._parts.append(tensor)
        self.rounds = self._coding is not None
        self._fetched = transfers.fetch(self._parts)
        self.work: Sequence[Tensor] = []

    def open(self) -> None:
        """Make ``work`` ready on the current stream."""
        self._transfers.wait(self._fetched)
        if self._coding is not None:
            values = decode(self._fetched, self._coding)
            given = self._dtype is None or self._dtype == values.dtype
            self._values = values if given else values.to(self._dtype)
            self.work = self._cut(self._values)
        elif self._dtype in (None, self._fetched[0].dtype):
            self.work = self._fetched
        else:
            self.work = [tensor.to(self._dtype) for tensor in self._fetched]

    def store(self, *, only_changed: bool = False) -> None:
        """Store ``work`` in the tensors.

        Args:
            only_changed: Keep the bits of quantised blocks in which no value has changed.
        """
        values = self.work
        if self._coding is not None:
            encode(self._values.float(), self._fetched, self._coding, only_changed=only_changed)
            values = self._fetched
        elif self._narrow is not None:
            values = [self._narrow(i, w.view(-1)).view(w.shape) for i, w in enumerate(values)]
        pairs = zip(values, self._parts, strict=True)
        moved = [(value, part) for value, part in pairs if value is not part]
        if moved:
            self._transfers.store(*map(list, zip(*moved, strict=True)))

    def stored(self) -> list[Tensor]:
        """Return the values as they were stored, after :meth:`store` of quantised tensors."""
        if self._coding is None:
            raise AssertionError("storing these tensors rounds nothing")
        return self._cut(decode(self._fetched, self._coding))

    def _cut(self, values: Tensor) -> list[Tensor]:
        """Return views of flat values, one a tensor."""
        if len(self._shapes) == 1:
            return [values.view(self._shapes[0])]
        pieces = values.split_with_sizes([math.prod(shape) for shape in self._shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]
