"""State tensors: created at construction, loaded in place, saved with plain group values."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from titan_muon.distributed.exchange import zeros_by_row
from titan_muon.distributed.matrices import MatrixRule
from titan_muon.optim.algorithms.base import (
    ElementwiseAlgorithm,
    MatrixAlgorithm,
    get_algorithm,
)
from titan_muon.optim.options import from_saved, resolve_state_dtype, to_saved

__all__ = ["check_state", "copy_state", "create_state", "copy_state", "saved_groups"]

MOMENTUM = "momentum_buffer"
# Keys of a group that are no options of its algorithm and yet belong to a checkpoint.
_ALWAYS_SAVED = ("params", "param_names", "algorithm", "initial_lr")


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
    if isinstance(algorithm, ElementwiseAlgorithm):
        return algorithm.create_state(param, group)
    if not isinstance(algorithm, MatrixAlgorithm) or rule is None:
        raise AssertionError(f"{algorithm.name} without a matrix rule")
    dtype = resolve_state_dtype(group["state_dtype"], param.dtype)
    rows_dtype = torch.promote_types(dtype, torch.float32)
    state = {MOMENTUM: torch.zeros_like(param, dtype=dtype)}
    for buffer in algorithm.buffers:
        state[buffer.name] = (
            zeros_by_row(param, rule, rows_dtype)
            if buffer.like == "rows"
            else torch.zeros_like(param, dtype=dtype)
        )
    return {key: value.detach() for key, value in state.items()}


def saved_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep of each group what a checkpoint holds: identity and the options that change the math."""
    result = []
    for group in groups:
        options = get_algorithm(group["algorithm"]).options
        result.append(
            {
                key: to_saved(value) if key not in ("params", "param_names") else value
                for key, value in group.items()
                if key in _ALWAYS_SAVED or (key in options and options[key].saved)
            }
        )
    return result


def check_state(
    groups: list[dict[str, Any]],
    live: Mapping[Tensor, dict[str, Any]],
    saved: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Check a state dict against the live optimizer; touch nothing.

    Args:
        groups: Live param groups.
        live: Live state by parameter.
        saved: What ``state_dict()`` returned, integer keys.

    Returns:
        The saved options of each group.

    Raises:
        ValueError: Group counts or sizes differ, a state key is missing, or a shape differs.
    """
    saved_list = saved["param_groups"]
    if len(saved_list) != len(groups):
        raise ValueError(
            f"the state dict has {len(saved_list)} param groups, the optimizer {len(groups)}; "
            "build the optimizer with the same groups"
        )
    loaded = []
    for index, (group, other) in enumerate(zip(groups, saved_list, strict=True)):
        if len(group["params"]) != len(other["params"]):
            raise ValueError(
                f"param group {index} has {len(other['params'])} parameters in the state dict and "
                f"{len(group['params'])} in the optimizer"
            )
        options = {k: from_saved(v) for k, v in other.items() if k not in ("params", "param_names")}
        loaded.append(options)
    for param, number, name in _numbered(groups, saved_list):
        _check_param_state(name, live[param], saved["state"].get(number, {}))
    return loaded


def copy_state(
    groups: list[dict[str, Any]],
    live: Mapping[Tensor, dict[str, Any]],
    saved: Mapping[str, Any],
) -> None:
    """Copy saved tensors into the live ones, so that pointers and dtypes stay.

    Args:
        groups: Live param groups.
        live: Live state by parameter; modified in place.
        saved: A state dict that :func:`check_state` accepted.
    """
    with torch.no_grad():
        for param, number, _ in _numbered(groups, saved["param_groups"]):
            for key, value in saved["state"].get(number, {}).items():
                target = live[param][key]
                target.copy_(value if isinstance(value, Tensor) else torch.as_tensor(value))


def _numbered(groups: list[dict[str, Any]], saved: list[dict[str, Any]]):
    params = chain.from_iterable(g["params"] for g in groups)
    numbers = chain.from_iterable(g["params"] for g in saved)
    names = chain.from_iterable(g.get("param_names") or [None] * len(g["params"]) for g in groups)
    for param, number, name in zip(params, numbers, names, strict=True):
        yield param, number, name or f"parameter {number}"


def _check_param_state(name: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for key, tensor in live.items():
        if key not in saved:
            raise ValueError(
                f"{name}: the state dict has no {key!r} (it has {sorted(saved) or 'nothing'}); "
                "nothing was loaded"
            )
        shape = tuple(getattr(saved[key], "shape", ()))
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"{name}: {key!r} has shape {shape} in the state dict and {tuple(tensor.shape)} in "
                "the optimizer; nothing was loaded"
            )
