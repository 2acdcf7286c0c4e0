"""Loading a state dict: everything is checked and prepared first, then nothing can fail."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_muon.distributed.layout import is_dtensor
from titan_muon.distributed.matrices import MatrixRule
from titan_muon.optim.algorithms import get_algorithm
from titan_muon.optim.groups import complete_group, group_names, matrix_rules
from titan_muon.optim.options import from_saved
from titan_muon.optim.rounding import STEP
from titan_muon.optim.state import MOMENTUM, create_state
from titan_muon.optim.state_tensors import copy_state
from titan_muon.orthogonalization import resolve_schedule

__all__ = ["GroupLoad", "apply_load", "prepare_load"]

# Options that decide which state tensors there are and how they are shaped.
_SHAPING = ("algorithm", "flatten", "split")


@dataclass(frozen=True)
class GroupLoad:
    """What loading does to one param group.

    Args:
        group: The live group; not yet modified.
        values: Complete values that replace the group's.
        rules: Matrix rule of each parameter, None for elementwise algorithms.
        states: State of each parameter: the live tensors, or new ones where the algorithm changes.
        saved: Saved state of each parameter, with the same keys and shapes.
    """

    group: dict[str, Any]
    values: dict[str, Any]
    rules: Sequence[MatrixRule | None]
    states: Sequence[dict[str, Tensor]]
    saved: Sequence[Mapping[str, Any]]


def prepare_load(
    groups: Sequence[dict[str, Any]],
    live: Mapping[Tensor, dict[str, Any]],
    state_dict: Mapping[str, Any],
    given: Mapping[str, Any],
    where: str,
) -> list[GroupLoad]:
    """Check a state dict against the live optimizer; touch nothing.

    Args:
        groups: Live param groups.
        live: Live state by parameter.
        state_dict: What ``state_dict()`` returned, integer keys.
        given: Constructor arguments, for options that neither side has.
        where: Prefix of errors.

    Raises:
        ValueError: It is no state dict, group counts or sizes differ, an option is out of range, a
            state key is missing or not known, or a shape or placement differs.
    """
    _check_form(state_dict, where)
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"{where}: the state dict has {len(saved_groups)} param groups, the optimizer "
            f"{len(groups)}; build the optimizer with the same groups. Nothing was loaded."
        )
    loads = []
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        place = f"{where}: param group {index}"
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                f"{place} has {len(saved['params'])} parameters in the state dict and "
                f"{len(group['params'])} in the optimizer. Nothing was loaded."
            )
        tensors = [state_dict["state"].get(number, {}) for number in saved["params"]]
        loads.append(_prepare_group(group, saved, tensors, live, given, place))
    return loads


def apply_load(load: GroupLoad, live: dict[Tensor, Any]) -> None:
    """Copy saved tensors into the live ones, so that pointers and dtypes stay.

    Args:
        load: One result of :func:`prepare_load`; its group is modified.
        live: Live state by parameter; modified.
    """
    known_before = get_algorithm(load.group["algorithm"]).options
    lr = _loaded_lr(load.group["lr"], load.values["lr"])
    for key in set(known_before) - set(load.values):
        load.group.pop(key, None)
    load.group.update({**load.values, "lr": lr})
    for param, state, saved in zip(load.group["params"], load.states, load.saved, strict=True):
        live[param] = state
        for key, target in state.items():
            copy_state(target, torch.as_tensor(saved[key]))


def _check_form(state_dict: Any, where: str) -> None:
    """Refuse what is no optimizer's state dict, a whole checkpoint above all."""
    is_mapping = isinstance(state_dict, Mapping)
    keys = sorted(map(str, state_dict)) if is_mapping else []
    state, groups = (state_dict[k] if k in keys else None for k in ("state", "param_groups"))
    if not isinstance(state, Mapping) or not isinstance(groups, list | tuple):
        shown = f"the keys {keys[:8]}" if is_mapping else f"a {type(state_dict).__name__}"
        raise ValueError(
            f"{where}: a state dict has 'state' and 'param_groups', got {shown}; give what an "
            "optimizer's state_dict() returned. Nothing was loaded."
        )
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(
                f"{where}: param group {index} of the state dict has no 'params'; give what an "
                "optimizer's state_dict() returned. Nothing was loaded."
            )
    for number, value in state.items():
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{where}: the state dict's state of parameter {number} is a "
                f"{type(value).__name__}, no dict of tensors. Nothing was loaded."
            )


def _prepare_group(
    group: dict[str, Any],
    saved: Mapping[str, Any],
    tensors: Sequence[Mapping[str, Any]],
    live: Mapping[Tensor, dict[str, Any]],
    given: Mapping[str, Any],
    where: str,
) -> GroupLoad:
    saved = _in_our_words(saved)
    algorithm = get_algorithm(saved.get("algorithm", group["algorithm"]))
    values = {k: v for k, v in group.items() if k in algorithm.options}
    for key, option in algorithm.options.items():
        if option.saved and key in saved:
            values[key] = from_saved(saved[key])
    identity = {k: group[k] for k in ("params", "param_names") if k in group}
    complete = complete_group({**values, **identity}, algorithm.name, given, where)
    if "initial_lr" in saved:
        complete["initial_lr"] = _own(saved["initial_lr"])
    rules = matrix_rules(complete, where)
    same = all(complete.get(key) == group.get(key) for key in _SHAPING)
    states = [
        live[param] if same else create_state(param, complete, rule)
        for param, rule in zip(group["params"], rules, strict=True)
    ]
    tensors = [_counted(state, saved) for state, saved in zip(states, tensors, strict=True)]
    names = group_names(group)
    for name, state, tensor in zip(names, states, tensors, strict=True):
        _check_param_state(f"{where}: {name}", state, tensor)
    return GroupLoad(group, complete, rules, states, tensors)


def _counted(live: Mapping[str, Any], saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Let stochastic rounding, which counts the steps of a matrix, go on or off at a load."""
    if MOMENTUM not in live:
        return saved
    others = {key: value for key, value in saved.items() if key != STEP}
    if STEP in live:
        others[STEP] = saved.get(STEP, torch.zeros((), dtype=torch.float32))
    return others


def _in_our_words(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate a group of ``torch.optim.Muon``, which says some things otherwise."""
    if "ns_coefficients" not in saved or "algorithm" in saved:
        return saved
    translated = {**saved, "adjust_lr_fn": saved.get("adjust_lr_fn") or "original"}
    triple = tuple(float(c) for c in saved["ns_coefficients"])
    is_named = triple == resolve_schedule("newton_schulz", 1).triples[0]
    translated["ns_method"] = "newton_schulz" if is_named else [triple] * saved["ns_steps"]
    return translated


def _check_param_state(where: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    if set(saved) != set(live):
        raise ValueError(
            f"{where}: the state dict has {sorted(saved) or 'no state'}, the algorithm needs "
            f"{sorted(live)}. Nothing was loaded."
        )
    for key, tensor in live.items():
        fault = _fault(saved[key], tensor)
        if fault is not None:
            raise ValueError(
                f"{where}: {key!r} is {fault} in the state dict; it must be a real tensor with "
                "values. Nothing was loaded."
            )
        shape = tuple(getattr(saved[key], "shape", ()))
        if shape != tuple(tensor.shape):
            raise ValueError(
                f"{where}: {key!r} has shape {shape} in the state dict and {tuple(tensor.shape)} "
                "in the optimizer. Nothing was loaded."
            )
        if _placement(saved[key]) != _placement(tensor):
            raise ValueError(
                f"{where}: {key!r} lies as {_placement(saved[key])} in the state dict and as "
                f"{_placement(tensor)} in the optimizer. Load across layouts through "
                "torch.distributed.checkpoint. Nothing was loaded."
            )


def _fault(saved: Any, live: Tensor) -> str | None:
    """Return why a saved value cannot be copied into a live tensor of its shape."""
    if not isinstance(saved, Tensor | int | float):
        return f"a {type(saved).__name__}"
    if not isinstance(saved, Tensor):
        return None
    if saved.is_complex():
        return f"of dtype {saved.dtype}"
    return "on the meta device" if saved.is_meta and not live.is_meta else None


def _placement(value: Any) -> Any:
    if isinstance(value, Tensor) and is_dtensor(value):
        return value.device_mesh, tuple(value.placements)
    return "a plain tensor"


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _loaded_lr(live: float | Tensor, saved: float | Tensor) -> float | Tensor:
    """Return the loaded lr; a live tensor keeps its identity, since a CUDA graph may read it."""
    if isinstance(live, Tensor):
        return live.copy_(torch.as_tensor(saved))
    return _own(saved)
