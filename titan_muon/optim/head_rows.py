"""Which rows of a query or key weight belong to which attention head. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["POWERS", "HeadRows", "factor_indices", "head_rows", "interleaved_rows"]

POWERS = (0.0, 0.5, 1.0)


class HeadRows(NamedTuple):
    """Rows of a weight that belong to one head.

    Args:
        head: Index of the head among all query heads of the layer.
        start: First row, in the whole weight.
        count: Number of rows.
        power: They are scaled by ``gamma[head] ** power``; 0, 0.5 or 1.
    """

    head: int
    start: int
    count: int
    power: float


def head_rows(n_heads: int, *parts: tuple[int, float]) -> list[HeadRows]:
    """Return the rows of a weight in which the heads follow each other.

    ``head_rows(n, (128, 0.5))`` are the queries or the keys of multi-head attention,
    ``head_rows(n, (128, 1.0))`` the queries of attention whose keys are shared,
    ``head_rows(n, (128, 0.5), (64, 1.0))`` the queries of latent attention, plain then rotary.

    Args:
        n_heads: Number of heads.
        *parts: Rows and power of each part of a head, in order; the same for every head.
    """
    width = sum(count for count, _ in parts)
    rows = []
    for head in range(n_heads):
        start = head * width
        for count, power in parts:
            rows.append(HeadRows(head, start, count, power))
            start += count
    return rows


def interleaved_rows(n_kv_heads: int, heads_per_kv: int, head_dim: int) -> list[HeadRows]:
    """Return the rows of a fused weight (n_kv_heads, heads_per_kv queries + key + value, head_dim).

    Keys that several heads share stay as they are, and their queries take gamma whole; with one
    query head a key both take its root.

    Args:
        n_kv_heads: Number of key heads.
        heads_per_kv: Query heads that share a key head.
        head_dim: Rows of a head.
    """
    rows = []
    for kv in range(n_kv_heads):
        first = kv * (heads_per_kv + 2)
        if heads_per_kv == 1:
            rows.append(HeadRows(kv, first * head_dim, 2 * head_dim, 0.5))
            continue
        for query in range(heads_per_kv):
            head = kv * heads_per_kv + query
            rows.append(HeadRows(head, (first + query) * head_dim, head_dim, 1.0))
    return rows


def factor_indices(n_rows: int, rows: Sequence[HeadRows], first_slot: int) -> Tensor:
    """Return for every row of a whole weight where its factor stands in a table of factors.

    Args:
        n_rows: Rows of the weight.
        rows: Those that are scaled.
        first_slot: Slot of the layer's head 0.

    Returns:
        (n_rows,) int64 on the CPU, into the table: 1, then of each slot gamma and its root.
    """
    indices = torch.zeros(n_rows, dtype=torch.int64)
    for row in rows:
        if row.power:
            index = 1 + 2 * (first_slot + row.head) + (row.power == 0.5)
            indices[row.start : row.start + row.count] = index
    return indices
