"""From what a user writes to complete param groups."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from titan_muon.distributed.matrices import MatrixRule, matrix_rule
from titan_muon.optim.algorithms import check_options, get_algorithm
from titan_muon.optim.options import check_values
from titan_muon.optim.state_tensors import check_state_fits
from titan_muon.orthogonalization import DTYPES, resolve_schedule

__all__ = [
    "ParamGroup",
    "check_foreach",
    "complete_group",
    "full_names",
    "group_names",
    "is_saved",
    "matrix_rules",
    "planned_options",
]

# Keys that torch, schedulers and torchtitan put into groups; no options of ours.
_FOREIGN = ("params", "param_names", "algorithm", "initial_lr")


class ParamGroup(dict[str, Any]):
    """A param group; iterating over it yields the keys that a state dict holds.

    torch (``StateDictOptions(flatten_optimizer_state_dict=True)``) and torchtitan iterate over the
    live groups to know what to take from a flat state dict, and fail on keys that are not in it.
    ``keys()``, ``items()`` and everything else show all keys.
    """

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.keys() if is_saved(self, key))


def is_saved(group: Mapping[str, Any], key: str) -> bool:
    """Whether a key of a complete group belongs to a checkpoint."""
    if key in _FOREIGN:
        return True
    option = get_algorithm(group["algorithm"]).options.get(key)
    return option is not None and option.saved


def complete_group(
    group: Mapping[str, Any], algorithm: str, given: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Check a group and fill in the options of its algorithm.

    Args:
        group: ``params`` and explicit options. Not modified.
        algorithm: Name used where the group has none.
        given: Constructor arguments, which stand between the group and the defaults.
        where: Prefix of errors.

    Returns:
        A new group: parameters, names, ``algorithm``, and exactly the options of the algorithm.

    Raises:
        ValueError: Unknown algorithm or option, or a value out of range.
        TypeError: The group is not a dict with ``params``.
    """
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(
            f"{where}: a param group must be a dict with 'params', got {type(group).__name__}; "
            "give either parameters only or groups only"
        )
    try:
        chosen = get_algorithm(group.get("algorithm", algorithm))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    explicit = {k: v for k, v in group.items() if k not in _FOREIGN}
    check_options(chosen.name, explicit, where=where)
    complete = ParamGroup({k: group[k] for k in _FOREIGN if k in group})
    complete["algorithm"] = chosen.name
    for key, option in chosen.options.items():
        complete[key] = explicit.get(key, given.get(key, option.default))
    check_values(chosen.options, complete, where=where)
    if complete.get("fused") and complete.get("foreach"):
        raise ValueError(f"{where}: fused and foreach exclude each other; set one of them to true.")
    if "betas" in complete:
        complete["betas"] = tuple(float(beta) for beta in complete["betas"])
    if chosen.is_matrix:
        try:
            schedule = resolve_schedule(complete["ns_method"], complete["ns_steps"])
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from None
        complete["ns_steps"] = len(schedule.triples)
    return complete


def group_names(group: Mapping[str, Any]) -> list[str]:
    """Return a name for each parameter: its own where the group has names, else its position."""
    return group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]


def full_names(number: int, group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's parameters, with its number where they have no names."""
    names = group_names(group)
    return names if group.get("param_names") else [f"param group {number}: {n}" for n in names]


def check_foreach(group: Mapping[str, Any], where: str) -> None:
    """Refuse what torch's foreach kernels refuse in the middle of a step.

    Raises:
        ValueError: A tensor lr for parameters on a CPU.
    """
    is_tensor = group.get("foreach") and isinstance(group["lr"], Tensor)
    if is_tensor and any(param.device.type == "cpu" for param in group["params"]):
        raise ValueError(
            f"{where}: foreach = True takes no tensor lr on a CPU; use fused = True or a number."
        )


def planned_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what plans are made with: algorithm and options of a complete group, but the lr."""
    options = get_algorithm(group["algorithm"]).options
    return {key: group[key] for key in ("algorithm", *options) if key != "lr"}


def matrix_rules(group: Mapping[str, Any], where: str) -> list[MatrixRule | None]:
    """Check the parameters of a complete group and return their matrix rules.

    Args:
        group: Result of :func:`complete_group`, parameters as a list.
        where: Prefix of errors.

    Returns:
        One rule a parameter; None in groups of elementwise algorithms.

    Raises:
        TypeError: A parameter is complex, quantised or not floating point.
        ValueError: A parameter is listed twice or has fewer than two dims, the split does not fit
            its rows, or a shard does not fit the blocks of a quantised state.
        ImportError: Quantised state without torchao.
    """
    is_matrix = get_algorithm(group["algorithm"]).is_matrix
    rules: list[MatrixRule | None] = []
    seen: set[int] = set()
    for param, name in zip(group["params"], group_names(group), strict=True):
        label = f"{where}: {name}"
        if id(param) in seen:
            raise ValueError(f"{label} is listed twice and would be stepped twice; list it once.")
        seen.add(id(param))
        if param.dtype not in DTYPES.values():
            raise TypeError(
                f"{label}: dtype {param.dtype} cannot be optimized; use float16, bfloat16, float32 "
                "or float64"
            )
        if "state_dtype" in group:
            check_state_fits(param, group["state_dtype"], label)
        rules.append(
            matrix_rule(param.shape, flatten=group["flatten"], split=group["split"], name=label)
            if is_matrix
            else None
        )
    return rules
