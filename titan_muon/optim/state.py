"""State tensors, created at construction, and the group values that a checkpoint holds."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan_muon.distributed.matrices import MatrixRule, row_shape
from titan_muon.distributed.tensors import zeros_by_row
from titan_muon.optim.algorithms.base import (
    ElementwiseAlgorithm,
    MatrixAlgorithm,
    get_algorithm,
)
from titan_muon.optim.groups import is_saved
from titan_muon.optim.options import resolve_state_dtype, to_saved
from titan_muon.optim.rounding import STEP, is_rounded
from titan_muon.optim.state_tensors import new_state

__all__ = ["MOMENTUM", "create_state", "saved_groups"]

MOMENTUM = "momentum_buffer"


def create_state(
    param: Tensor, group: Mapping[str, Any], rule: MatrixRule | None
) -> dict[str, Tensor]:
    """Return the zero state of one parameter.

    Args:
        param: Plain tensor or DTensor; a DTensor's state has its mesh and placements.
        group: The complete param group.
        rule: Matrix rule of the parameter, None for an elementwise algorithm.
    """
    algorithm = get_algorithm(group["algorithm"])
    rounds = is_rounded(param, group)
    if isinstance(algorithm, ElementwiseAlgorithm):
        state = algorithm.create_state(param, group)
        if rounds and STEP not in state:
            raise ValueError(
                f"{algorithm.title} keeps no {STEP!r} in its state, by which stochastic_rounding "
                "draws other noise in every step; use stochastic_rounding = false."
            )
        return state
    if not isinstance(algorithm, MatrixAlgorithm) or rule is None:
        raise AssertionError(f"{algorithm.name} without a matrix rule")
    state_dtype = group["state_dtype"]
    rows_dtype = torch.promote_types(resolve_state_dtype(state_dtype, param.dtype), torch.float32)
    state = {MOMENTUM: new_state(param, state_dtype)}
    for buffer in algorithm.buffers:
        state[buffer.name] = (
            zeros_by_row(param, row_shape(rule), rows_dtype).detach()
            if buffer.like == "rows"
            else new_state(param, state_dtype, signed=buffer.signed)
        )
    if rounds:
        state[STEP] = torch.zeros((), dtype=torch.float32, device=param.device)
    return state


def saved_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep of each group what a checkpoint holds: identity and the options that change the math."""
    return [
        {
            key: to_saved(value) if key not in ("params", "param_names") else value
            for key, value in group.items()
            if is_saved(group, key)
        }
        for group in groups
    ]
