"""This rank's shards in one step: gradients, momenta, weights, and what was measured of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from titan_muon.distributed.wire import exponents, power_of_two
from titan_muon.kernels.pieces import PieceTable, TensorList
from titan_muon.optim.kinds import Kind
from titan_muon.optim.matrix_math import inverse_norms
from titan_muon.optim.members import Gradients, Member

__all__ = ["StepShards"]


class StepShards:
    """Advances the momentum of every parameter, in parts, and measures its direction.

    Args:
        members: All parameters of the plan.
        kinds: Their kinds by number.
        own_params: (own pieces,) int64, parameter of each own piece.
        take: 0-d, 0 where the step must not write anything; None for 1.

    Attributes:
        gradients, params: Local tensors, one a parameter.
        flags: (own pieces,), 1 where this rank has a gradient and the step writes; None if
            everywhere.
        inverse_norms: (own pieces,), 1 / norm of the direction, where one rank holds all of it.
            Like all that follows, of the pieces that were advanced.
        sent, sent_factors: (own pieces,), exponents by which 16-bit parcels are scaled, and the
            powers of two themselves.
        squares: (own pieces,), sums of squares of the weights; zeros where no option needs them.
        headers: (own pieces, fields), the headers of the parcels.
    """

    def __init__(
        self,
        members: Sequence[Member],
        kinds: Mapping[int, Kind],
        own_params: Tensor,
        take: Tensor | None,
    ) -> None:
        self._members, self._kinds, self._take = members, kinds, take
        device, count = own_params.device, len(own_params)
        self.gradients = Gradients(members)
        self.params = TensorList(m.shard() for m in members)
        self._flags = self.gradients.flags(device)[own_params]
        if take is not None:
            self._flags = self._flags * take
        self.flags = None if self.gradients.all_present and take is None else self._flags
        self._statistics = torch.zeros((count, 2), device=device)
        self._elements = torch.zeros(count, device=device)
        self.squares = torch.zeros(count, device=device)

    def advance(self, tables: Mapping[int, PieceTable]) -> None:
        """Advance the momentum of some parameters.

        Args:
            tables: By kind, every element of their shards once; pieces are own pieces.
        """
        device = self._elements.device
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
            self._elements = self._elements + table.on(device).elements
            if kind.group["adjust_lr_fn"] == "match_param_rms":
                squares = kind.ops.statistics(self.params, table)[:, 1]
                self.squares = self.squares + squares.to(device)
        largest, square_sums = self._statistics.unbind(dim=1)
        self.inverse_norms = inverse_norms(largest, square_sums, self._elements)
        self.sent = exponents(largest)
        self.sent_factors = power_of_two(-self.sent)
        header = [self.sent, self._flags, self.squares, largest, square_sums]
        self.headers = torch.stack(header, dim=1).float()

    def restore(self) -> None:
        """Write back the weights that had to be copied."""
        for member, shard in zip(self._members, self.params, strict=True):
            member.restore(shard)
