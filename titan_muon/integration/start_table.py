"""The table that says, at start-up, what the optimizer does with which parameter."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from titan_muon.integration.text_table import table
from titan_muon.optim import Muon
from titan_muon.optim.algorithms import get_algorithm
from titan_muon.optim.param_groups import HIDDEN, Assignment

if TYPE_CHECKING:
    from titan_muon.integration.config import OptimizerConfig

__all__ = ["elementwise_matrices", "start_table", "unused_options"]

_HEADINGS = ("algorithm", "tensors", "parameters", "lr", "weight decay", "options", "first")


def start_table(optimizer: Muon, assignments: Sequence[Assignment], ignored: Sequence[str]) -> str:
    """Return the groups as text: algorithm, counts, lr, decay; then what went to AdamW and why.

    Args:
        optimizer: Built from the assignments.
        assignments: The decisions on this rank's parameters.
        ignored: Options that no group uses.
    """
    rows = [
        (
            get_algorithm(group["algorithm"]).title,
            len(group["params"]),
            f"{sum(p.numel() for p in group['params']):,}",
            f"{float(group['lr']):g}",
            f"{group['weight_decay']:g}",
            ", ".join(key for key in ("split", "flatten") if group.get(key)) or "-",
            group["param_names"][0],
        )
        for group in optimizer.param_groups
    ]
    lines = [table(_HEADINGS, rows, left=("algorithm", "first"))]
    lines += elementwise_matrices(assignments)
    if ignored:
        lines.append(f"not used by any group: {', '.join(ignored)}")
    return "\n".join(lines)


def unused_options(config: "OptimizerConfig", assignments: Sequence[Assignment]) -> list[str]:
    """Return the options of a config that none of these parameters' algorithms has."""
    unused = config.ignored_options()
    for pattern, algorithm, options in config.group_specs():
        found = {item.algorithm for item in assignments if item.pattern == pattern}
        if algorithm is None and found:
            known = {key for name in found for key in get_algorithm(name).options}
            unused += [f"{key} of pattern {pattern!r}" for key in options if key not in known]
    return unused


def elementwise_matrices(assignments: Sequence[Assignment]) -> list[str]:
    """Return one line for each kind of parameter; layers that differ in their number share it."""
    counts: Counter[tuple[str, ...]] = Counter()
    for item in assignments:
        algorithm = get_algorithm(item.algorithm)
        # Hidden matrices of a run with AdamW are where its config wants them.
        if item.param.ndim >= 2 and not algorithm.is_matrix and item.reason != HIDDEN:
            name = re.sub(r"(?<=\.)\d+(?=\.)", "*", item.name)
            counts[name, str(tuple(item.param.shape)), algorithm.title, item.reason] += 1
    return [
        f"not orthogonalized: {count} x {name} {shape} -> {title} ({reason})"
        for (name, shape, title, reason), count in counts.items()
    ]
