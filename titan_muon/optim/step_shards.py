"""This rank's shards in one step: gradients, momenta, weights, and what was measured of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from titan_muon.distributed.tables import RankTables
from titan_muon.distributed.wire import exponents, power_of_two
from titan_muon.kernels.pieces import TensorList
from titan_muon.optim.kinds import Kind
from titan_muon.optim.matrix_math import inverse_norms
from titan_muon.optim.members import Gradients, Member

__all__ = ["StepShards"]


class StepShards:
    """Advances the momentum of every parameter and measures its direction.

    Args:
        members: All parameters of the plan.
        kinds: Their kinds by number.
        tables: This rank's tables.
        own_params: (own pieces,) int64, parameter of each own piece.
        take: 0-d, 0 where the step must not write anything; None for 1.

    Attributes:
        gradients, params: Local tensors, one a parameter.
        inverse_norms: (own pieces,), 1 / norm of the direction, where one rank holds all of it.
        sent, sent_factors: (own pieces,), exponents by which 16-bit parcels are scaled, and the
            powers of two themselves.
        squares: (own pieces,), sums of squares of the weights; zeros where no option needs them.
        headers: (own pieces, fields), the headers of the parcels.
        flags: (own pieces,), 1 where this rank has a gradient and the step writes; None if
            everywhere.
    """

    def __init__(
        self,
        members: Sequence[Member],
        kinds: Mapping[int, Kind],
        tables: RankTables,
        own_params: Tensor,
        take: Tensor | None,
    ) -> None:
        self._members, self._kinds, self._tables = members, kinds, tables
        device = own_params.device
        self.gradients = Gradients(members)
        self.params = TensorList(m.shard() for m in members)
        statistics = torch.zeros((len(own_params), 2), device=device)
        elements = torch.zeros(len(own_params), device=device)
        for number, table in tables.own.items():
            measured = kinds[number].ops.advance(
                self.gradients.grads,
                self.gradients.momenta,
                table,
                **kinds[number].momentum_options(),
                keep=take,
            )
            # Every own piece has one kind and is zero in the others.
            statistics = statistics + measured.to(device)
            elements = elements + table.on(device).elements
        self.inverse_norms = inverse_norms(statistics[:, 0], statistics[:, 1], elements)
        self.sent = exponents(statistics[:, 0])
        self.sent_factors = power_of_two(-self.sent)
        self.squares = self._weight_squares(statistics)
        flags = self.gradients.flags(device)[own_params]
        if take is not None:
            flags = flags * take
        header = [self.sent, flags, self.squares, statistics[:, 0], statistics[:, 1]]
        self.headers = torch.stack(header, dim=1).float()
        self.flags = None if self.gradients.all_present and take is None else flags

    def restore(self) -> None:
        """Write back the weights that had to be copied."""
        for member, shard in zip(self._members, self.params, strict=True):
            member.restore(shard)

    def _weight_squares(self, statistics: Tensor) -> Tensor:
        result = torch.zeros_like(statistics[:, 0])
        for number, table in self._tables.own.items():
            kind = self._kinds[number]
            if kind.group["adjust_lr_fn"] == "match_param_rms":
                squares = kind.ops.statistics(self.params, table)[:, 1]
                result = result + squares.to(result.device)
        return result
