"""Where every matrix of a parameter lies: which ranks hold it, and which rectangles each of them.

[Note: axes]
A mesh axis is a lead axis where it cuts a leading dim (experts), a matrix axis where it cuts rows
or columns, and a replica axis where it replicates. Matrices lie whole along lead axes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from titan_muon.distributed.layout import Interval, Layout, local_region
from titan_muon.distributed.matrices import MatrixRule, RowRange, block_rows

__all__ = ["Geometry", "Segment", "coordinate_of", "geometry", "segments"]


@dataclass(frozen=True)
class Segment:
    """One rectangle of a matrix on one rank.

    Args:
        rows, columns: Size of the rectangle.
        local_offset, local_stride: First element and row stride in the flat local tensor.
        unit_offset: First element in the flat (M, N) matrix, whose row stride is N.
    """

    rows: int
    columns: int
    local_offset: int
    local_stride: int
    unit_offset: int


@dataclass(frozen=True)
class Geometry:
    """Which ranks may compute a parameter's matrices without moving more than they must.

    Args:
        homes: For each matrix of the parameter the global ranks that may own it.
        whole: For each matrix whether every home holds all of it.
    """

    homes: tuple[tuple[int, ...], ...]
    whole: tuple[bool, ...]


def coordinate_of(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the mesh coordinate of a global rank."""
    return _unravel(_positions_of(layout)[rank], layout.mesh_shape)


@lru_cache(maxsize=1024)
def _positions_of(layout: Layout) -> dict[int, int]:
    # A layout hashes once, its tuple of ranks again on each call.
    return _positions(layout.ranks)


@lru_cache(maxsize=64)
def _positions(ranks: tuple[int, ...]) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(ranks)}


@lru_cache(maxsize=1024)
def geometry(layout: Layout, rule: MatrixRule) -> Geometry:
    """Find the homes of every matrix of a parameter.

    A matrix that some rank holds whole stays there (or on a replica of it), unless an axis cuts
    columns; any other one may go to every rank along the matrix and replica axes, also to those
    whose shard is empty.
    """
    lead_dims = _lead_dims(rule)
    lead_axes = _axes(layout, lambda dim: dim < lead_dims)
    matrix_axes = _axes(layout, lambda dim: dim >= lead_dims)
    replica_axes = [a for a in range(len(layout.cuts)) if layout.cuts[a].dim is None]
    lead_home = _lead_homes(layout, rule, lead_axes)
    block_home = _block_homes(layout, rule, matrix_axes)

    @cache
    def ranks(lead: tuple[int, ...], matrix: tuple[int, ...] | None) -> tuple[int, ...]:
        fixed = dict(zip(lead_axes, lead, strict=True))
        if matrix is not None:
            fixed.update(zip(matrix_axes, matrix, strict=True))
        free = [a for a in (*matrix_axes, *replica_axes) if a not in fixed]
        return tuple(sorted(_ranks(layout, fixed, free)))

    homes, whole = [], []
    for lead in lead_home:
        for matrix in block_home:
            homes.append(ranks(lead, matrix))
            whole.append(matrix is not None)
    return Geometry(tuple(homes), tuple(whole))


@lru_cache(maxsize=1 << 16)
def segments(
    layout: Layout, rule: MatrixRule, coordinate: tuple[int, ...], unit: int
) -> tuple[Segment, ...]:
    """Return the rectangles of one matrix that the rank at a coordinate holds; maybe none.

    Args:
        layout: Layout of the parameter, or of a buffer placed like it.
        rule: Its matrix rule.
        coordinate: Mesh coordinate of the rank.
        unit: Index of the matrix: stack element times matrices a stack element, plus block.
    """
    blocks = _blocks(rule)
    stack, block = divmod(unit, len(blocks))
    lead, rows, columns = _folded_region(layout, rule, coordinate)
    local_stack = _position(lead, stack)
    if local_stack is None:
        return ()
    local_rows, local_columns = _length(rows), _length(columns)
    base = local_stack * local_rows * local_columns
    found = []
    for unit_row, count, local_row, step in _row_pieces(blocks[block], rows):
        local_column = 0
        for start, stop in columns:
            found.append(
                Segment(
                    rows=count,
                    columns=stop - start,
                    local_offset=base + local_row * local_columns + local_column,
                    local_stride=step * local_columns,
                    unit_offset=unit_row * rule.stack[2] + start,
                )
            )
            local_column += stop - start
    return tuple(found)


@lru_cache(maxsize=256)
def _blocks(rule: MatrixRule) -> list[tuple[RowRange, ...]]:
    return block_rows(rule)


def _lead_dims(rule: MatrixRule) -> int:
    """Return how many leading dims are a stack; 0 for flattened parameters."""
    return 0 if rule.flattened else len(rule.shape) - 1 - rule.row_dims


def _folded_region(
    layout: Layout, rule: MatrixRule, coordinate: tuple[int, ...]
) -> tuple[tuple[Interval, ...], tuple[Interval, ...], tuple[Interval, ...]]:
    """Return the region as intervals of stack elements, rows and columns, in local order."""
    region = local_region(layout, coordinate)
    lead, columns = _lead_dims(rule), _lead_dims(rule) + rule.row_dims
    shape = layout.shape
    return (
        _flatten(shape[:lead], region[:lead]),
        _flatten(shape[lead:columns], region[lead:columns]),
        _flatten(shape[columns:], region[columns:]),
    )


def _flatten(shape: Sequence[int], region: Sequence[tuple[Interval, ...]]) -> tuple[Interval, ...]:
    """Return the flat indices of a product of intervals, in local order."""
    flat: list[Interval] = [(0, 1)]
    for size, intervals in zip(shape, region, strict=True):
        following: list[Interval] = []
        for start, stop in flat:
            if intervals == ((0, size),):
                following.append((start * size, stop * size))
                continue
            for index in range(start, stop):
                following.extend((index * size + a, index * size + b) for a, b in intervals)
        flat = following
    return tuple(flat)


def _row_pieces(
    ranges: Sequence[RowRange], intervals: Sequence[Interval]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row in the matrix, count, first local row, local step) of each overlap."""
    unit_row = 0
    for rows in ranges:
        local = 0
        for start, stop in intervals:
            first = max(0, -(-(start - rows.start) // rows.step))
            last = min(rows.count, -(-(stop - rows.start) // rows.step))
            if first < last:
                row = rows.start + first * rows.step
                yield unit_row + first, last - first, local + row - start, rows.step
            local += stop - start
        unit_row += rows.count


def _axes(layout: Layout, wanted: Callable[[int], bool]) -> list[int]:
    return [a for a, cut in enumerate(layout.cuts) if cut.dim is not None and wanted(cut.dim)]


def _lead_homes(layout: Layout, rule: MatrixRule, axes: list[int]) -> list[tuple[int, ...]]:
    """Return for every stack element the coordinate along the lead axes that holds it."""
    homes: list[tuple[int, ...]] = [()] * rule.stack[0]
    for lead in _coordinates(layout, axes):
        intervals, _, _ = _folded_region(layout, rule, _complete(layout, axes, lead))
        for start, stop in intervals:
            homes[start:stop] = [lead] * (stop - start)
    return homes


def _block_homes(layout: Layout, rule: MatrixRule, axes: list[int]) -> list[tuple[int, ...] | None]:
    """Return for every block the coordinate along the matrix axes that holds all of it, or None."""
    blocks = _blocks(rule)
    homes: list[tuple[int, ...] | None] = [None] * len(blocks)
    sizes = [sum(r.count for r in ranges) for ranges in blocks]
    # Where columns are cut, every rank along that axis has the buffers by row, even one that holds
    # no column: they must come back to it.
    first_column_dim = _lead_dims(rule) + rule.row_dims
    if any(
        (layout.cuts[a].dim or 0) >= first_column_dim and layout.mesh_shape[a] > 1 for a in axes
    ):
        return homes
    # The first coordinate holds the most.
    _, rows, columns = _folded_region(layout, rule, (0,) * len(layout.cuts))
    if _length(columns) != rule.stack[2] or _length(rows) < min(sizes):
        return homes
    for matrix in _coordinates(layout, axes):
        _, rows, columns = _folded_region(layout, rule, _complete(layout, axes, matrix))
        if _length(columns) != rule.stack[2] or not rows:
            continue
        for block, ranges in enumerate(blocks):
            if homes[block] is None and sizes[block] <= _length(rows):
                held = sum(count for _, count, _, _ in _row_pieces(ranges, rows))
                homes[block] = matrix if held == sizes[block] else None
    return homes


def _coordinates(layout: Layout, axes: list[int]) -> Iterator[tuple[int, ...]]:
    sizes = tuple(layout.mesh_shape[a] for a in axes)
    for index in range(math.prod(sizes)):
        yield _unravel(index, sizes)


def _complete(layout: Layout, axes: list[int], part: tuple[int, ...]) -> tuple[int, ...]:
    coordinate = [0] * len(layout.cuts)
    for axis, value in zip(axes, part, strict=True):
        coordinate[axis] = value
    return tuple(coordinate)


def _ranks(layout: Layout, fixed: dict[int, int], free: list[int]) -> Iterator[int]:
    for values in _coordinates(layout, free):
        full = {**fixed, **dict(zip(free, values, strict=True))}
        index = 0
        for axis, size in enumerate(layout.mesh_shape):
            index = index * size + full[axis]
        yield layout.ranks[index]


def _unravel(index: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    coordinate = []
    for size in reversed(sizes):
        index, value = divmod(index, size)
        coordinate.append(value)
    return tuple(reversed(coordinate))


def _position(intervals: Sequence[Interval], index: int) -> int | None:
    local = 0
    for start, stop in intervals:
        if start <= index < stop:
            return local + index - start
        local += stop - start
    return None


def _length(intervals: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)
