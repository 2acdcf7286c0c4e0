"""What a user should look at before a run, and what else to know of it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from titan_muon.cli.report import SetReport
from titan_muon.integration.start_table import elementwise_matrices, unused_options
from titan_muon.optim.algorithms import get_algorithm
from titan_muon.optim.options import MATRIX_OPTIONS
from titan_muon.optim.param_groups import HIDDEN, Assignment

__all__ = ["find_notes", "find_warnings"]

# Below this share of the mean, the busiest rank holds up the others for long enough to matter.
POOR_BALANCE = 0.9


def find_warnings(
    config: Any, assignments: Sequence[Assignment], sets: Sequence[SetReport]
) -> list[str]:
    """Return a sentence for each thing that is probably not meant.

    Args:
        config: The optimizer config.
        assignments: The decisions on all parameters of the model.
        sets: The plans.
    """
    return [
        *_dead_patterns(config, assignments),
        *_stray_matrices(config, assignments),
        *(text for found in sets for text in _of_set(found)),
        *_over_budget(assignments, sets),
    ]


def find_notes(config: Any, assignments: Sequence[Assignment]) -> list[str]:
    """Return what went to an elementwise algorithm by rule, and options that nothing uses.

    Args:
        config: The optimizer config.
        assignments: The decisions on all parameters of the model.
    """
    routed = [a for a in assignments if not a.is_exception]
    notes = elementwise_matrices(routed)
    ignored = unused_options(config, assignments)
    return [*notes, *([f"not used by any group: {', '.join(ignored)}"] if ignored else [])]


def _dead_patterns(config: Any, assignments: Sequence[Assignment]) -> list[str]:
    alive = {item.pattern for item in assignments}
    return [
        f"pattern {group.pattern!r} decides on no trainable parameter of the model; training "
        "refuses to start. Correct it, or put it before the pattern that takes its parameters."
        for group in config.param_groups
        if group.pattern not in alive
    ]


def _stray_matrices(config: Any, assignments: Sequence[Assignment]) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    elements: Counter[tuple[str, str]] = Counter()
    for item in assignments:
        algorithm = get_algorithm(item.algorithm)
        if algorithm.is_matrix or item.param.ndim < 2:
            continue
        if item.is_exception or item.reason == HIDDEN:
            counts[algorithm.title, item.reason] += 1
            elements[algorithm.title, item.reason] += item.param.numel()
    warnings = [
        f"{count} tensors of matrices ({elements[title, why]:,} parameters) go to {title}: "
        + (f"name = {config.name!r}" if why == HIDDEN else why)
        for (title, why), count in counts.items()
    ]
    is_matrix = get_algorithm(config.name).is_matrix
    if is_matrix and not any(get_algorithm(a.algorithm).is_matrix for a in assignments):
        warnings.append(
            "no parameter goes to the Muon family; training refuses to start. Remove the patterns "
            'that take all matrices, or use name = "AdamW".'
        )
    return warnings


def _over_budget(assignments: Sequence[Assignment], sets: Sequence[SetReport]) -> list[str]:
    """Say where a single matrix needs more work memory than a stage should take."""
    matrix = [a for a in assignments if get_algorithm(a.algorithm).is_matrix]
    default = MATRIX_OPTIONS["max_stage_bytes"].default
    limit = max((a.options.get("max_stage_bytes", default) for a in matrix), default=default)
    most = max((found.work_bytes for found in sets), default=0)
    if most <= limit:
        return []
    return [
        f"the work memory of one matrix, {most / 2**20:,.0f} MiB, exceeds max_stage_bytes, "
        f"{limit / 2**20:,.0f} MiB; it gets a stage of its own."
    ]


def _of_set(found: SetReport) -> list[str]:
    last = found.first_rank + found.ranks - 1
    where = f"ranks {found.first_rank} to {last}: "
    warnings = []
    if found.balance < POOR_BALANCE:
        best = (
            f"no assignment of whole matrices exceeds {found.best_balance:.2f}"
            if found.best_balance < 1.0
            else "no bound is known that forbids a better one"
        )
        warnings.append(
            f"{where}balance {found.balance:.2f}: the busiest rank computes "
            f"{1 / found.balance:.2f} times the mean; {best}."
        )
    if found.idle:
        warnings.append(
            f"{where}{found.idle} of {found.ranks} ranks compute no matrix, of {found.matrices} "
            "in all."
        )
    return warnings
