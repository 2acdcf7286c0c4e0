"""Rectangles that move between many tensors and one flat buffer, as tables.

[Note: sides]
Every segment of a table names one rectangle twice: in one tensor of a list (the tensor side) and in
one flat buffer (the flat side), each by the offset of its first element and its row stride. Tensors
are contiguous and used as flat memory. Segments belong to pieces; factors and statistics are per
piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PieceTable", "Row", "TILE", "TileClass"]

# Elements of one tile, the unit of work of a kernel.
TILE = 4096


class Row(NamedTuple):
    """One segment.

    Args:
        tensor: Index of the tensor in the list.
        rows, columns: Size of the rectangle, both at least 1.
        tensor_offset, tensor_stride: First element and row stride in the tensor.
        flat_offset, flat_stride: First element and row stride in the flat buffer.
        piece: What it belongs to.
    """

    tensor: int
    rows: int
    columns: int
    tensor_offset: int
    tensor_stride: int
    flat_offset: int
    flat_stride: int
    piece: int


@dataclass(frozen=True)
class TileClass:
    """Tiles of one shape.

    Args:
        columns: Width of a tile, a power of two; its height is ``TILE // columns``.
        aligned: Whether all offsets and strides are multiples of 8 elements.
        tiles: (T, 4) int64: segment, first row, first column, slot. Slots of one piece are
            consecutive, so that statistics can be reduced in a fixed order.
    """

    columns: int
    aligned: bool
    tiles: Tensor


class PieceTable:
    """Segments, and their tiles for kernels; immutable.

    Args:
        rows: Segments in any order.
        pieces: Number of pieces.
    """

    def __init__(self, rows: Sequence[Row], pieces: int) -> None:
        self.rows = tuple(_joined(row) for row in rows)
        self.pieces = pieces
        self._on: dict[torch.device, DeviceTable] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.rows)

    def on(self, device: torch.device) -> "DeviceTable":
        """Return the table's tensors on a device; copied there once."""
        if device not in self._on:
            self._on[device] = DeviceTable(self, device)
        return self._on[device]

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Indices of the tensors that occur, ascending."""
        return tuple(sorted({row.tensor for row in self.rows}))


class DeviceTable:
    """The tensors of a table on one device.

    Args:
        table: The table.
        device: Where.
    """

    def __init__(self, table: PieceTable, device: torch.device) -> None:
        self.segments = torch.tensor(table.rows, dtype=torch.int64).reshape(-1, 8).to(device)
        tiles, bounds = _tiles(table)
        self.slots = bounds[-1]
        self.bounds = torch.tensor(bounds, dtype=torch.int64, device=device)
        self.classes = [
            TileClass(columns, aligned, torch.tensor(rows, dtype=torch.int64, device=device))
            for (columns, aligned), rows in tiles.items()
        ]


def _joined(row: Row) -> Row:
    """Turn a rectangle that is one run on both sides into a single row."""
    if row.rows > 1 and row.columns == row.tensor_stride == row.flat_stride:
        length = row.rows * row.columns
        return row._replace(rows=1, columns=length, tensor_stride=length, flat_stride=length)
    return row


def _tiles(
    table: PieceTable,
) -> tuple[dict[tuple[int, bool], list[tuple[int, int, int, int]]], list[int]]:
    """Cut all segments into tiles; return them by class, and each piece's range of slots."""
    by_piece: list[list[int]] = [[] for _ in range(table.pieces)]
    for index, row in enumerate(table.rows):
        by_piece[row.piece].append(index)
    tiles: dict[tuple[int, bool], list[tuple[int, int, int, int]]] = {}
    bounds, slot = [0], 0
    for indices in by_piece:
        for index in indices:
            row = table.rows[index]
            width = min(TILE, 1 << (row.columns - 1).bit_length())
            height = TILE // width
            numbers = [row.tensor_offset, row.flat_offset, row.columns]
            numbers += [row.tensor_stride, row.flat_stride] if row.rows > 1 else []
            target = tiles.setdefault((width, all(n % 8 == 0 for n in numbers)), [])
            for first_row in range(0, row.rows, height):
                for first_column in range(0, row.columns, width):
                    target.append((index, first_row, first_column, slot))
                    slot += 1
        bounds.append(slot)
    return tiles, bounds
