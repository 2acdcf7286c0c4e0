"""The table that says, at start-up, what the optimizer does with which parameter."""

import io
import re
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from titan_muon.optim import Muon
from titan_muon.optim.algorithms import get_algorithm
from titan_muon.optim.param_groups import HIDDEN, Assignment

__all__ = ["elementwise_matrices", "start_table"]

_WIDTH = 110


def start_table(optimizer: Muon, assignments: Sequence[Assignment], ignored: Sequence[str]) -> str:
    """Return the groups as text: algorithm, counts, lr, decay; then what went to AdamW and why.

    Args:
        optimizer: Built from the assignments.
        assignments: The decisions on this rank's parameters.
        ignored: Options that no group uses.
    """
    table = Table(box=None, pad_edge=False)
    for heading in ("algorithm", "tensors", "parameters", "lr", "weight decay", "options", "first"):
        table.add_column(heading, justify="left" if heading in ("algorithm", "first") else "right")
    for group in optimizer.param_groups:
        algorithm = get_algorithm(group["algorithm"])
        special = [k for k in ("split", "flatten") if group.get(k)]
        table.add_row(
            algorithm.title,
            f"{len(group['params'])}",
            f"{sum(p.numel() for p in group['params']):,}",
            f"{float(group['lr']):g}",
            f"{group['weight_decay']:g}",
            ", ".join(special) or "-",
            group["param_names"][0],
        )
    buffer = io.StringIO()
    Console(file=buffer, width=_WIDTH, force_terminal=False).print(table)
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    lines += elementwise_matrices(assignments)
    if ignored:
        lines.append(f"not used by any group: {', '.join(ignored)}")
    return "\n".join(lines)


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
