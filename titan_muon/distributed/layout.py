"""From a DTensor to the exact region of the global tensor that every rank holds. Pure arithmetic.

[Note: terms]
mesh axis: one dimension of a device mesh. tensor dim: one dimension of a tensor.
region: for every tensor dim the global indices that a rank holds, as half-open intervals in the
order in which they lie in the local tensor. A strided shard holds several intervals of one dim.
"""

import sys
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "Cut",
    "Layout",
    "is_dtensor",
    "layout_of",
    "local_region",
    "region_shape",
    "shard_sizes",
]

Interval = tuple[int, int]
Region = tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True)
class Cut:
    """How one mesh axis cuts a tensor.

    Args:
        dim: Tensor dim that is cut, or None where the axis replicates.
        split_factor: 1 for ``Shard``; for ``_StridedShard`` the number of pieces that a later axis
            has already made of the dim.
    """

    dim: int | None
    split_factor: int = 1


@dataclass(frozen=True)
class Layout:
    """Where a tensor lies.

    Args:
        shape: Global shape.
        mesh_shape: Size of each mesh axis; empty for a plain tensor.
        ranks: Global ranks of the mesh, row-major.
        cuts: One entry a mesh axis.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...] = ()
    ranks: tuple[int, ...] = (0,)
    cuts: tuple[Cut, ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.mesh_shape, self.ranks, self.cuts))

    def __hash__(self) -> int:
        """Hash once: a mesh can have thousands of ranks, and layouts are cache keys."""
        return self._hash

    @property
    def replicated(self) -> bool:
        """Whether more than one rank holds each element."""
        axes = zip(self.cuts, self.mesh_shape, strict=True)
        return any(cut.dim is None and size > 1 for cut, size in axes)

    def by_row(self, shape: tuple[int, ...]) -> "Layout":
        """Return the layout of a buffer with one value a row: axes that cut columns replicate.

        Args:
            shape: Shape of the buffer; its last dim is 1.
        """
        last = len(shape) - 1
        cuts = tuple(c if c.dim is not None and c.dim < last else Cut(None) for c in self.cuts)
        return Layout(shape, self.mesh_shape, self.ranks, cuts)


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Tell a DTensor from a plain tensor without importing the DTensor package."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def layout_of(tensor: Tensor, name: str = "tensor") -> Layout:
    """Describe where a tensor lies.

    Args:
        tensor: Plain tensor or DTensor. Not read.
        name: Used in errors.

    Raises:
        NotImplementedError: A placement is ``Partial`` or of an unknown kind.
    """
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return Layout(shape)
    mesh = tensor.device_mesh
    cuts = tuple(_cut(placement, name, shape) for placement in tensor.placements)
    ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
    return Layout(shape, tuple(mesh.shape), _INTERNED.setdefault(ranks, ranks), cuts)


# One tuple for each mesh, so that comparing layouts compares identities.
_INTERNED: dict[tuple[int, ...], tuple[int, ...]] = {}


def _cut(placement: Any, name: str, shape: tuple[int, ...]) -> Cut:
    # By type name: _StridedShard is no Shard, and its is_shard() is False on some versions.
    kind = type(placement).__name__
    if kind == "Replicate":
        return Cut(None)
    if kind == "Shard":
        return Cut(placement.dim % len(shape))
    if kind == "_StridedShard":
        return Cut(placement.dim % len(shape), int(placement.split_factor))
    raise NotImplementedError(
        f"{name}: shape {shape} has placement {placement}; the optimizer needs Shard or Replicate. "
        "Reduce a Partial gradient first (finish gradient accumulation before step())."
    )


@lru_cache(maxsize=1 << 16)
def local_region(layout: Layout, coordinate: tuple[int, ...]) -> Region:
    """Return the region that the rank at a mesh coordinate holds.

    Args:
        layout: Result of :func:`layout_of`.
        coordinate: Index along each mesh axis.
    """
    intervals: list[tuple[Interval, ...]] = [((0, size),) for size in layout.shape]
    for cut, size, index in zip(layout.cuts, layout.mesh_shape, coordinate, strict=True):
        if cut.dim is not None:
            intervals[cut.dim] = _cut_intervals(intervals[cut.dim], cut, size, index)
    return tuple(intervals)


def region_shape(region: Region) -> tuple[int, ...]:
    """Return the shape of the local tensor that holds a region."""
    return tuple(sum(stop - start for start, stop in dim) for dim in region)


@lru_cache(maxsize=1 << 12)
def shard_sizes(layout: Layout) -> frozenset[int]:
    """Return the numbers of elements that ranks hold."""
    sizes = {1}
    for dim in range(len(layout.shape)):
        cutting = [cut.dim == dim for cut in layout.cuts]
        axes = [range(n if cuts else 1) for n, cuts in zip(layout.mesh_shape, cutting, strict=True)]
        regions = {local_region(layout, coordinate)[dim] for coordinate in product(*axes)}
        lengths = {sum(stop - start for start, stop in region) for region in regions}
        sizes = {size * length for size in sizes for length in lengths}
    return frozenset(sizes)


def _cut_intervals(
    intervals: tuple[Interval, ...], cut: Cut, size: int, index: int
) -> tuple[Interval, ...]:
    length = sum(stop - start for start, stop in intervals)
    taken: list[Interval] = []
    for piece in range(cut.split_factor):
        start, stop = _chunk(length, cut.split_factor, piece)
        inner_start, inner_stop = _chunk(stop - start, size, index)
        taken.extend(_take(intervals, start + inner_start, start + inner_stop))
    return _merge(taken)


def _chunk(length: int, count: int, index: int) -> Interval:
    """Return piece ``index`` of ``torch.chunk``, with the empty pieces at the end kept."""
    step = -(-length // count)
    return min(index * step, length), min((index + 1) * step, length)


def _take(intervals: tuple[Interval, ...], start: int, stop: int) -> list[Interval]:
    """Return the global intervals behind local positions ``start`` to ``stop``."""
    taken, position = [], 0
    for low, high in intervals:
        first, last = max(start, position), min(stop, position + high - low)
        if first < last:
            taken.append((low + first - position, low + last - position))
        position += high - low
    return taken


def _merge(intervals: list[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
