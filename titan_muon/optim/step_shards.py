"""This rank's shards in one step: gradients, momenta, weights, and what was measured of them."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from titan_muon.distributed.indices import OwnIndex
from titan_muon.distributed.wire import There, parcel_scales, rows
from titan_muon.kernels.pieces import PieceTable, TensorList
from titan_muon.optim.kinds import Kind
from titan_muon.optim.matrix_math import inverse_norms
from titan_muon.optim.members import Gradients, Member

__all__ = ["Measured", "StepShards"]


class Measured:
    """What is known of the own pieces that were advanced; means nothing for others.

    What follows from the measurements is computed when it is asked for: what stays on a rank needs
    no headers, what travels no norms.

    Args:
        own: The own pieces.
        flags: (own pieces,), or None for 1.
        statistics: (own pieces, 2), largest magnitude and sum of squares of the direction.
        squares: (own pieces,), sums of squares of the weights; zeros where no option needs them.
    """

    def __init__(
        self, own: OwnIndex, flags: Tensor | None, statistics: Tensor, squares: Tensor
    ) -> None:
        self._own, self._flags, self._statistics, self.squares = own, flags, statistics, squares

    @cached_property
    def inverse_norms(self) -> Tensor:
        """(own pieces,), 1 / norm of the direction, where one rank holds all of it."""
        largest, squares = self._statistics.unbind(dim=1)
        return inverse_norms(largest, squares, self._own.roots)

    @cached_property
    def sent_factors(self) -> Tensor:
        """(own pieces,), the powers of two by which 16-bit parcels are multiplied."""
        return self._scales.reciprocal()

    @cached_property
    def headers(self) -> Tensor:
        """(own pieces, fields), the headers of the parcels."""
        flags = torch.ones_like(self._scales) if self._flags is None else self._flags
        largest, squares = self._statistics.unbind(dim=1)
        return rows(There(self._scales, flags, self.squares, largest, squares))

    @cached_property
    def _scales(self) -> Tensor:
        return parcel_scales(self._statistics[:, 0])


class StepShards:
    """Advances the momentum of every parameter, in parts, and measures its direction.

    Args:
        members: All parameters of the plan.
        kinds: Their kinds by number.
        own: The own pieces.
        take: 0-d, 0 where the step must not write anything; None for 1.

    Attributes:
        gradients, params: Local tensors, one a parameter.
        flags: (own pieces,), 1 where this rank has a gradient and the step writes; None if
            everywhere.
        measured: Of all that was advanced so far.
    """

    def __init__(
        self,
        members: Sequence[Member],
        kinds: Mapping[int, Kind],
        own: OwnIndex,
        take: Tensor | None,
    ) -> None:
        self._kinds, self._own, self._take = kinds, own, take
        self.gradients = Gradients(members)
        live = [member.shard() for member in members]
        self.params = TensorList(shard.contiguous() for shard in live)
        pairs = zip(live, self.params, strict=True)
        self._copied = [(old, new) for old, new in pairs if old is not new]
        device, count = own.params.device, len(own.params)
        self.flags = None
        if not self.gradients.all_present:
            self.flags = self.gradients.flags(device)[own.params]
        if take is not None:
            self.flags = (take.new_ones(count) if self.flags is None else self.flags) * take
        self._statistics = torch.zeros((count, 2), dtype=torch.float32, device=device)
        self._squares = torch.zeros(count, dtype=torch.float32, device=device)
        self.measured = self._measured()

    def advance(self, tables: Mapping[int, PieceTable]) -> None:
        """Advance the momentum of some parameters.

        Args:
            tables: By kind, every element of their shards once; pieces are own pieces.
        """
        device = self._squares.device
        for number, table in tables.items():
            kind = self._kinds[number]
            measured = kind.ops.advance(
                self.gradients.grads,
                self.gradients.momenta,
                table,
                **kind.momentum_options(),
                keep=self._take,
            )
            # Every own piece is in one table and is zero in the others.
            self._statistics = self._statistics + measured.to(device)
            if kind.reads_weights:
                squares = kind.ops.statistics(self.params, table)[:, 1]
                self._squares = self._squares + squares.to(device)
        self.measured = self._measured()

    def _measured(self) -> Measured:
        return Measured(self._own, self.flags, self._statistics, self._squares)

    def restore(self) -> None:
        """Write back the weights that had to be copied."""
        for live, shard in self._copied:
            live.copy_(shard)
