"""From a parameter to the matrices it consists of: experts, fused blocks, flattened convolutions.

Works on whole tensors in global coordinates and is pure: views and copies, no communication.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = [
    "MatrixRule",
    "RowRange",
    "block_rows",
    "by_row",
    "matrix_blocks",
    "matrix_rule",
    "row_shape",
]

SPLIT_KINDS: dict[str, tuple[str, ...]] = {
    "blocks": ("rows",),
    "strided": ("count",),
    "interleaved_qkv": ("n_kv_heads", "heads_per_kv", "head_dim"),
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
    """

    shape: tuple[int, ...]
    stack: tuple[int, int, int]
    kind: str
    numbers: tuple[int, ...]
    flattened: bool = False


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
            "of two dims or more. Put it into a group with algorithm = 'adamw'."
        )
    if flatten:
        stack = (1, shape[0], math.prod(shape[1:]))
    else:
        stack = (math.prod(shape[:-2]), shape[-2], shape[-1])
    kind, numbers = _parse_split(split, name)
    _check_rows(kind, numbers, stack[1], name)
    return MatrixRule(shape, stack, kind, numbers, flatten)


def matrix_blocks(x: Tensor, rule: MatrixRule) -> list[Tensor]:
    """Return the matrices of a whole tensor, one (B, M, N) stack for each block of the split.

    Args:
        x: Whole tensor of ``rule.shape``. Not modified; the blocks are views where strides allow.
        rule: Result of :func:`matrix_rule`.
    """
    views = _views(x.reshape(rule.stack), rule)
    return [v.reshape(v.shape[0] * v.shape[1], -1, v.shape[-1]) for v in views]


def assemble(blocks: Sequence[Tensor], rule: MatrixRule) -> Tensor:
    """Invert :func:`matrix_blocks`.

    Args:
        blocks: (B, M, N) for each block, in the order of :func:`matrix_blocks`; the last dim may
            be 1 instead of N (one value a row). Not modified.
        rule: The same rule.

    Returns:
        ``rule.shape``, or ``(..., M, 1)`` for one value a row.
    """
    per_row = blocks[0].shape[-1] == 1 and rule.stack[2] != 1
    if rule.kind == "whole":
        return blocks[0].reshape(row_shape(rule) if per_row else rule.shape)
    stacks, rows, columns = rule.stack
    out = blocks[0].new_empty((stacks, rows, 1 if per_row else columns))
    for view, block in zip(_views(out, rule), blocks, strict=True):
        view.copy_(block.reshape(view.shape))
    return out.view(row_shape(rule) if per_row else rule.shape)


@dataclass(frozen=True)
class RowRange:
    """Rows ``start, start + step, ...`` of a fused matrix, ``count`` of them."""

    start: int
    count: int
    step: int = 1


def block_rows(rule: MatrixRule) -> list[tuple[RowRange, ...]]:
    """Return, for every matrix of one stack element, which rows of the fused matrix it consists of.

    The order is that of :func:`matrix_blocks`: its blocks one after another.
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
    return MatrixRule(row_shape(rule), (stacks, rows, 1), rule.kind, rule.numbers)


def row_shape(rule: MatrixRule) -> tuple[int, ...]:
    """Return the shape of a buffer with one value a row of the parameter."""
    return (rule.shape[0], 1) if rule.flattened else (*rule.shape[:-1], 1)


def _parse_split(split: Any, name: str) -> tuple[str, tuple[int, ...]]:
    if split is None:
        return "whole", ()
    if not isinstance(split, Mapping):
        return "rows", tuple(int(r) for r in split)
    kind = split.get("kind")
    if kind not in SPLIT_KINDS:
        raise ValueError(f"{name}: split kind {kind!r} is unknown; use one of {list(SPLIT_KINDS)}.")
    keys = SPLIT_KINDS[kind]
    given = {k: v for k, v in split.items() if k != "kind"}
    if set(given) != set(keys) or not all(isinstance(v, int) and v >= 1 for v in given.values()):
        raise ValueError(
            f"{name}: split kind {kind!r} needs the positive integers {', '.join(keys)}; "
            f"got {given}."
        )
    return kind, tuple(given[k] for k in keys)


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


def _views(x: Tensor, rule: MatrixRule) -> list[Tensor]:
    """Return one view of ``x`` (S, R, C) a block: (S, matrices, dims of the rows ..., C)."""
    stacks, rows, columns = x.shape
    if rule.kind == "whole":
        return [x.unsqueeze(1)]
    if rule.kind == "rows":
        return [block.unsqueeze(1) for block in x.split(list(rule.numbers), dim=1)]
    if rule.kind == "blocks":
        (block,) = rule.numbers
        return [x.view(stacks, rows // block, block, columns)]
    if rule.kind == "strided":
        (count,) = rule.numbers
        return [x.view(stacks, rows // count, count, columns).transpose(1, 2)]
    n_kv, per_kv, head_dim = rule.numbers
    groups = x.view(stacks, 1, n_kv, per_kv + 2, head_dim, columns)
    return [groups[:, :, :, :per_kv], groups[:, :, :, per_kv], groups[:, :, :, per_kv + 1]]
