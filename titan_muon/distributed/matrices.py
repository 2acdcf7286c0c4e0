"""From a parameter to the matrices it consists of: experts, fused blocks, flattened convolutions.

Pure arithmetic in global coordinates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "MatrixRule",
    "RowRange",
    "block_rows",
    "by_row",
    "matrix_rule",
    "parse_split",
    "row_shape",
]

SPLIT_KINDS: dict[str, tuple[str, ...]] = {
    "blocks": ("rows",),
    "strided": ("count",),
    "interleaved_qkv": ("n_kv_heads", "heads_per_kv", "head_dim"),
    "fused_dim": (),
}


@dataclass(frozen=True)
class MatrixRule:
    """How one parameter divides into matrices; see :func:`matrix_rule`.

    Args:
        shape: Global shape of the parameter.
        stack: (S, R, C): S independent fused matrices of R rows and C columns.
        kind: ``"whole"``, ``"rows"`` or one of the split kinds.
        numbers: Row counts, or the arguments of the split kind.
        flattened: Whether dim 0 is the rows and all other dims are the columns.
        row_dims: How many tensor dims the rows of a fused matrix consist of.
    """

    shape: tuple[int, ...]
    stack: tuple[int, int, int]
    kind: str
    numbers: tuple[int, ...]
    flattened: bool = False
    row_dims: int = 1


def matrix_rule(
    shape: Sequence[int],
    *,
    flatten: bool = False,
    split: Sequence[int] | Mapping[str, Any] | None = None,
    name: str = "parameter",
) -> MatrixRule:
    """Check the options of one parameter and return its rule.

    Args:
        shape: Global shape, two dims or more.
        flatten: One matrix ``(dim 0, all others)`` instead of a stack over the leading dims.
        split: Row counts, or a table with ``kind`` and that kind's numbers.
        name: Used in errors.

    Raises:
        ValueError: Fewer than two dims, or a split that does not fit the rows.
    """
    shape = tuple(shape)
    if len(shape) < 2:
        raise ValueError(
            f"{name}: shape {shape} has no rows and columns; a Muon-family group takes parameters "
            "of two dims or more. Put it into a group with algorithm = 'adamw' (in a train config "
            'name = "AdamW"); titan_muon.param_groups(model) sorts a whole model so.'
        )
    if isinstance(split, Mapping) and split.get("kind") == "fused_dim":
        return _fused_dim_rule(shape, split, flatten, name)
    if flatten:
        stack = (1, shape[0], math.prod(shape[1:]))
    else:
        stack = (math.prod(shape[:-2]), shape[-2], shape[-1])
    kind, numbers = parse_split(split, name)
    _check_rows(kind, numbers, stack[1], name)
    return MatrixRule(shape, stack, kind, numbers, flatten)


def _fused_dim_rule(
    shape: tuple[int, ...], split: Mapping[str, Any], flatten: bool, name: str
) -> MatrixRule:
    """Return the rule of (..., M, n, N), which is n matrices (M, N): strided rows of (M * n, N)."""
    parse_split(split, name)
    if len(shape) < 3 or flatten:
        raise ValueError(
            f"{name}: split kind 'fused_dim' takes (..., M, n, N), three dims or more, not "
            f"flattened; got shape {shape} with flatten = {flatten}."
        )
    stack = (math.prod(shape[:-3]), shape[-3] * shape[-2], shape[-1])
    return MatrixRule(shape, stack, "strided", (shape[-2],), row_dims=2)


@dataclass(frozen=True)
class RowRange:
    """Rows ``start, start + step, ...`` of a fused matrix, ``count`` of them."""

    start: int
    count: int
    step: int = 1


def block_rows(rule: MatrixRule) -> list[tuple[RowRange, ...]]:
    """Return, for every matrix of one stack element, which rows of the fused matrix it consists of.

    Args:
        rule: Result of :func:`matrix_rule`.

    Returns:
        One entry a matrix, in the order of its first row; together they hold every row once. The
        rows of one matrix are its ranges one after another.
    """
    rows = rule.stack[1]
    if rule.kind == "whole":
        return [(RowRange(0, rows),)]
    if rule.kind == "rows":
        starts = [sum(rule.numbers[:i]) for i in range(len(rule.numbers))]
        return [(RowRange(a, n),) for a, n in zip(starts, rule.numbers, strict=True)]
    if rule.kind == "blocks":
        (block,) = rule.numbers
        return [(RowRange(start, block),) for start in range(0, rows, block)]
    if rule.kind == "strided":
        (count,) = rule.numbers
        return [(RowRange(i, rows // count, count),) for i in range(count)]
    n_kv, per_kv, head_dim = rule.numbers
    group = (per_kv + 2) * head_dim
    parts = ((0, per_kv), (per_kv, 1), (per_kv + 1, 1))
    return [
        tuple(RowRange(g * group + first * head_dim, n * head_dim) for g in range(n_kv))
        for first, n in parts
    ]


def by_row(rule: MatrixRule) -> MatrixRule:
    """Return the rule of a buffer with one value a row of the parameter."""
    stacks, rows, _ = rule.stack
    shape, stack = row_shape(rule), (stacks, rows, 1)
    return MatrixRule(shape, stack, rule.kind, rule.numbers, row_dims=rule.row_dims)


def row_shape(rule: MatrixRule) -> tuple[int, ...]:
    """Return the shape of a buffer with one value a row of the parameter."""
    return (rule.shape[0], 1) if rule.flattened else (*rule.shape[:-1], 1)


def parse_split(split: Any, name: str) -> tuple[str, tuple[int, ...]]:
    """Return kind and numbers of a ``split``, as far as they can be checked without a shape.

    Args:
        split: As in :func:`matrix_rule`.
        name: Used in errors.

    Raises:
        ValueError: An unknown kind, or numbers that it does not take.
    """
    if split is None:
        return "whole", ()
    if not isinstance(split, Mapping):
        if not all(_is_positive(rows) for rows in split):
            raise ValueError(f"{name}: split {split!r} must list positive row counts.")
        return "rows", tuple(split)
    kind = split.get("kind")
    if kind not in SPLIT_KINDS:
        raise ValueError(f"{name}: split kind {kind!r} is unknown; use one of {list(SPLIT_KINDS)}.")
    keys = SPLIT_KINDS[kind]
    given = {k: v for k, v in split.items() if k != "kind"}
    if set(given) != set(keys) or not all(_is_positive(v) for v in given.values()):
        raise ValueError(
            f"{name}: split kind {kind!r} needs {_positive_integers(keys)}; got {given}."
        )
    return kind, tuple(given[k] for k in keys)


def _positive_integers(keys: Sequence[str]) -> str:
    if not keys:
        return "nothing beside it"
    return f"the positive integer{'s' * (len(keys) > 1)} {', '.join(keys)}"


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_rows(kind: str, numbers: tuple[int, ...], rows: int, name: str) -> None:
    if kind == "rows" and sum(numbers) != rows:
        raise ValueError(
            f"{name}: split {list(numbers)} sums to {sum(numbers)}, but the matrix has {rows} rows."
        )
    if kind in ("blocks", "strided") and rows % numbers[0]:
        raise ValueError(
            f"{name}: split kind {kind!r} with {SPLIT_KINDS[kind][0]} = {numbers[0]} does not "
            f"divide the matrix's {rows} rows."
        )
    if kind == "interleaved_qkv":
        n_kv, per_kv, head_dim = numbers
        if n_kv * (per_kv + 2) * head_dim != rows:
            raise ValueError(
                f"{name}: split interleaved_qkv describes n_kv_heads * (heads_per_kv + 2) * "
                f"head_dim = {n_kv * (per_kv + 2) * head_dim} rows, but the matrix has {rows}."
            )
