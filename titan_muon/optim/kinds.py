"""Parameters that are computed alike: same param group, same dtypes."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from titan_muon.distributed.tensors import local_of
from titan_muon.kernels.pieces import TensorList
from titan_muon.kernels.pieces_dispatch import PieceOperations, select_piece_operations
from titan_muon.optim.loans import Transfers
from titan_muon.optim.members import Member
from titan_muon.optim.staging import StagedOperations
from titan_muon.optim.state_tensors import arithmetic_dtype

__all__ = ["Kind", "number_kinds"]


def number_kinds(members: Sequence[Member]) -> list[int]:
    """Number the members so that equal numbers mean equal param group and dtypes."""
    numbers: dict[tuple[Any, ...], int] = {}
    return [
        numbers.setdefault(
            (id(m.group), *m.dtypes(), m.channels, m.quantized_as, m.is_staged), len(numbers)
        )
        for m in members
    ]


class Kind:
    """What holds for all parameters of one kind.

    Args:
        member: Any parameter of the kind.
        members: All parameters of the plan, in its order.
        transfers: To where matrices are computed.
    """

    def __init__(self, member: Member, members: Sequence[Member], transfers: Transfers) -> None:
        device = transfers.device
        self.group, self.algorithm, self.channels = member.group, member.algorithm, member.channels
        self.ops = select_piece_operations(device, member.dtypes())
        if member.is_staged:

            def rounded(index: int, values: Tensor) -> Tensor:
                return members[index].rounded(values)

            staged = StagedOperations(
                self.ops,
                transfers,
                self.group["max_stage_bytes"],
                rounded if member.is_rounded else None,
            )
            self.ops = cast(PieceOperations, staged)
        self.state_dtype = arithmetic_dtype(member.momentum)
        self.wide = torch.promote_types(member.param.dtype, torch.float32)
        self._device = device
        self.take_states(members)

    def take_states(self, members: Sequence[Member]) -> None:
        """Look up the states of all members of the plan again."""
        # By channel; tables of a kind never touch the tensors of another.
        self.states = [
            TensorList(
                local_of(m.state[spec.name]) if spec.name in m.state else m.momentum
                for m in members
            )
            for spec in self.channels
        ]

    def dtype(self, channel: int) -> torch.dtype:
        """Return the dtype in which a channel travels."""
        return getattr(torch, self.channels[channel].dtype)

    @property
    def reads_weights(self) -> bool:
        """Whether sums of squares of the weights are needed."""
        return self.group["adjust_lr_fn"] == "match_param_rms"

    def momentum_options(self) -> dict[str, Any]:
        """Return the arguments of ``advance`` and ``emit``."""
        sign = -1.0 if self.group["maximize"] else 1.0
        return {
            "momentum": float(self.group["momentum"]),
            "nesterov": self.group["nesterov"],
            "sign": sign,
        }

    def write_options(self) -> dict[str, Any]:
        """Return the arguments of ``write``, a tensor lr on the device."""
        lr = self.group["lr"]
        return {
            "lr": lr.to(self._device, non_blocking=True) if isinstance(lr, Tensor) else float(lr),
            "weight_decay": float(self.group["weight_decay"]),
            "cautious": self.group["cautious_weight_decay"],
        }
