"""Operations on shards that no kernel can work on as they lie: in chunks, fetched and stored.

[Note: staging]
Quantised state is decoded to float32, worked on by the same operations as plain state, and encoded
again. Weights that are rounded stochastically are written in float32 and rounded after; where an
operation leaves an element alone, rounding it changes nothing, as it is a bfloat16 already. Shards
that were offloaded to the CPU travel to the device of their mesh and back. At most
``max_stage_bytes / 64`` elements are under way at once, or one shard, if that is larger.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_muon.kernels.pieces import PieceTable
from titan_muon.kernels.pieces_dispatch import PieceOperations
from titan_muon.optim.loans import Loan, Narrow, Transfers
from titan_muon.optim.quantized import unwrapped

__all__ = ["StagedOperations"]

# Work memory of one element: its float32 value, a copy, and what encoding it takes.
_BYTES_PER_ELEMENT = 64


class StagedOperations:
    """The functions of ``pieces_reference`` on tensors that have to be fetched first.

    Args:
        ops: What works on fetched tensors.
        transfers: To where they are worked on, and back.
        max_bytes: The group's ``max_stage_bytes``.
        rounded: Takes the index of a parameter and its new values, float32, and returns them in its
            own dtype; None for torch's rounding.
    """

    def __init__(
        self,
        ops: PieceOperations,
        transfers: Transfers,
        max_bytes: int,
        rounded: Narrow | None = None,
    ) -> None:
        self.FUSES_NORM = ops.FUSES_NORM
        self._ops = ops
        self._most, self._rounded = max_bytes // _BYTES_PER_ELEMENT, rounded
        self._transfers = transfers
        # By table: what it names has one size, and sizes of quantised tensors take time.
        self._cuts: dict[PieceTable, list[tuple[int, ...]]] = {}

    def advance(
        self,
        grads: Sequence[Tensor],
        momenta: Sequence[Tensor],
        table: PieceTable,
        *,
        keep: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """See ``pieces_reference.advance``; what is measured is what was stored."""
        found = []
        for part, (grad, momentum) in self._chunks(table, grads, momenta):
            measured = self._ops.advance(grad.work, momentum.work, part, keep=keep, **options)
            momentum.store(only_changed=keep is not None)
            if momentum.rounds:
                measured = self._ops.measure(grad.work, momentum.stored(), part, **options)
            found.append(measured)
        # Every piece lies in one chunk and is zero in the others.
        return torch.stack(found).sum(dim=0)

    def emit(
        self,
        grads: Sequence[Tensor],
        momenta: Sequence[Tensor],
        flat: Tensor,
        table: PieceTable,
        factors: Tensor | None,
        **options: Any,
    ) -> None:
        """See ``pieces_reference.emit``."""
        for part, (grad, momentum) in self._chunks(table, grads, momenta):
            self._ops.emit(grad.work, momentum.work, flat, part, factors, **options)

    def statistics(self, tensors: Sequence[Tensor], table: PieceTable) -> Tensor:
        """See ``pieces_reference.statistics``."""
        found = [
            self._ops.statistics(loan.work, part) for part, (loan,) in self._chunks(table, tensors)
        ]
        return torch.stack(found).sum(dim=0)

    def copy_to_flat(
        self,
        tensors: Sequence[Tensor],
        flat: Tensor,
        table: PieceTable,
        factors: Tensor | None = None,
    ) -> None:
        """See ``pieces_reference.copy_to_flat``."""
        for part, (loan,) in self._chunks(table, tensors):
            self._ops.copy_to_flat(loan.work, flat, part, factors)

    def copy_to_tensors(
        self,
        flat: Tensor,
        tensors: Sequence[Tensor],
        table: PieceTable,
        factors: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> None:
        """See ``pieces_reference.copy_to_tensors``."""
        for part, (loan,) in self._chunks(table, tensors):
            self._ops.copy_to_tensors(flat, loan.work, part, factors, keep)
            loan.store(only_changed=True)

    def merge(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        table: PieceTable,
        keep: Tensor,
    ) -> None:
        """See ``pieces_reference.merge``."""
        for part, (source, target) in self._chunks(table, sources, targets):
            self._ops.merge(source.work, target.work, part, keep)
            target.store(only_changed=True)

    def write(
        self,
        params: Sequence[Tensor],
        flat: Tensor,
        table: PieceTable,
        factors: Tensor,
        **options: Any,
    ) -> None:
        """See ``pieces_reference.write``."""
        for part, (loan,) in self._chunks(table, params, rounded=self._rounded):
            self._ops.write(loan.work, flat, part, factors, **options)
            loan.store()

    def _chunks(
        self, table: PieceTable, *lists: Sequence[Tensor], rounded: Narrow | None = None
    ) -> Iterator[tuple[PieceTable, list[Loan]]]:
        """Yield tables and the tensors they work on, the next chunk already on its way."""
        if table not in self._cuts:
            self._cuts[table] = self._cut(table, lists[-1])
        chunks = self._cuts[table]
        coming = self._loans(chunks[0], lists, rounded) if chunks else []
        for number, chunk in enumerate(chunks):
            loans = coming
            if number + 1 < len(chunks):
                coming = self._loans(chunks[number + 1], lists, rounded)
            for loan in loans:
                loan.open()
            yield table.part(chunk), loans
            self._transfers.used()

    def _loans(
        self,
        chunk: tuple[int, ...],
        lists: Sequence[Sequence[Tensor]],
        rounded: Narrow | None,
    ) -> list[Loan]:
        dtype = narrow = None
        if rounded is not None:
            dtype = torch.float32

            def narrow(place: int, values: Tensor) -> Tensor:
                return rounded(chunk[place], values)

        return [
            Loan([unwrapped(tensors[i]) for i in chunk], self._transfers, dtype, narrow)
            for tensors in lists
        ]

    def _cut(self, table: PieceTable, tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
        chunks: list[list[int]] = []
        used = 0
        for index in table.tensors:
            size = tensors[index].numel()
            if not chunks or used + size > self._most:
                chunks.append([])
                used = 0
            chunks[-1].append(index)
            used += size
        return [tuple(chunk) for chunk in chunks]
