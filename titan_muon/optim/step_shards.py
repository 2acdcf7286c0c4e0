"""This rank's shards in one step: gradients, momenta, weights, and what was measured of them."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from titan_muon.distributed.wire import exponents, power_of_two
from titan_muon.kernels.pieces import PieceTable, TensorList
from titan_muon.optim.kinds import Kind
from titan_muon.optim.matrix_math import inverse_norms
from titan_muon.optim.members import Gradients, Member

__all__ = ["StepShards"]

# What follows from the measurements, computed when it is asked for: what stays on a rank needs no
# headers, what travels no norms.
_DERIVED = ("inverse_norms", "sent_factors", "headers", "_sent")


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
        squares: (own pieces,), sums of squares of the weights of what was advanced; zeros where no
            option needs them.
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
        for name in _DERIVED:
            self.__dict__.pop(name, None)

    @cached_property
    def inverse_norms(self) -> Tensor:
        """(own pieces,), 1 / norm of the direction, where one rank holds all of it."""
        return inverse_norms(self._statistics[:, 0], self._statistics[:, 1], self._elements)

    @cached_property
    def sent_factors(self) -> Tensor:
        """(own pieces,), the powers of two by which 16-bit parcels are scaled."""
        return power_of_two(-self._sent)

    @cached_property
    def headers(self) -> Tensor:
        """(own pieces, fields), the headers of the parcels."""
        header = [self._sent, self._flags, self.squares, *self._statistics.unbind(dim=1)]
        return torch.stack(header, dim=1).float()

    @cached_property
    def _sent(self) -> Tensor:
        return exponents(self._statistics[:, 0])

    def restore(self) -> None:
        """Write back the weights that had to be copied."""
        for member, shard in zip(self._members, self.params, strict=True):
            member.restore(shard)
