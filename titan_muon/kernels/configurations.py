"""Launch shapes of the symmetric products: known-good ones, and how to pick among them."""

from dataclasses import dataclass
from functools import lru_cache

import torch

# Tiles of 128 x 256 do more arithmetic per byte read, tiles of 128 x 128 waste less on the
# diagonal and fill the last wave better. Per element, the small tile takes this much longer.
# H200, float16, results of 2048 and 4096 rows, in batches of 4 to 16: 1.0 to 1.06.
_SMALL_TILE_COST = 1.03


@dataclass(frozen=True)
class Configuration:
    """How one symmetric product is cut and run.

    Attributes:
        kernel: ``"hopper"`` (warp-specialised, persistent, copy engine) or ``"pointer"``.
        bm: Tile rows.
        bn: Tile columns; ``bm`` or ``2 * bm``.
        bk: Depth of one step of the inner loop.
        warps: Warps in one program of the pointer kernel; the Hopper kernel fixes its own.
        stages: Tiles of each operand in flight.
        group: Tile rows that share their operands in the L2 cache; a multiple of ``bn // bm``.
    """

    kernel: str
    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 8

    @property
    def ratio(self) -> int:
        """Tile columns per tile row, ``bn // bm``."""
        return self.bn // self.bm

    def tiles(self, rows: int) -> int:
        """Return how many tiles touch the lower triangle of a (rows, rows) matrix."""
        full, rest = divmod(-(-rows // self.bm), self.ratio)
        return self.ratio * full * (full + 1) // 2 + rest * (full + 1)

    def all_tiles(self, rows: int, columns: int) -> int:
        """Return how many tiles cover a (rows, columns) matrix."""
        return -(-rows // self.bm) * -(-columns // self.bn)


HOPPER_LARGE = Configuration("hopper", 128, 256, 64, 4, 3)
HOPPER_SMALL = Configuration("hopper", 128, 128, 64, 4, 5)
FLOAT32 = Configuration("pointer", 64, 64, 32, 4, 3)

# Pointer kernel by compute capability: the first entry is for large matrices, the second for small.
_POINTER = {
    (8, 0): (
        Configuration("pointer", 128, 128, 32, 4, 4),
        Configuration("pointer", 64, 64, 64, 4, 4),
    ),
    (9, 0): (
        Configuration("pointer", 128, 256, 64, 8, 3),
        Configuration("pointer", 64, 64, 64, 4, 4),
    ),
}
CANDIDATES = (
    Configuration("pointer", 128, 128, 32, 4, 4),
    Configuration("pointer", 128, 128, 64, 8, 3),
    Configuration("pointer", 64, 128, 32, 4, 4),
    Configuration("pointer", 64, 64, 64, 4, 3),
)
_SMALL_ROWS = 512


def known_configuration(
    rows: int, batch: int, dtype: torch.dtype, capability: tuple[int, int], multiprocessors: int
) -> Configuration | None:
    """Return the launch shape for ``batch`` results of (rows, rows), or None if none is known.

    Args:
        rows: Side of the result.
        batch: Number of results.
        dtype: Dtype of the operands.
        capability: Compute capability of the device.
        multiprocessors: Its number of multiprocessors.
    """
    if dtype == torch.float32:
        return FLOAT32
    if capability == (9, 0) and 2 * batch * HOPPER_SMALL.tiles(rows) > multiprocessors:
        return _hopper(rows, batch, multiprocessors)
    if capability == (9, 0):
        # Too few large tiles to fill the GPU.
        return _POINTER[capability][1]
    known = _POINTER.get(capability)
    return None if known is None else known[rows <= _SMALL_ROWS]


def pointer_configuration(rows: int, capability: tuple[int, int]) -> Configuration:
    """Return a pointer launch shape that runs anywhere, for where the Hopper kernel cannot."""
    return _POINTER.get(capability, CANDIDATES[1:3])[rows <= _SMALL_ROWS]


@lru_cache(maxsize=256)
def _hopper(rows: int, batch: int, multiprocessors: int) -> Configuration:
    large = 2 * -(-batch * HOPPER_LARGE.tiles(rows) // multiprocessors)
    small = _SMALL_TILE_COST * -(-batch * HOPPER_SMALL.tiles(rows) // multiprocessors)
    return HOPPER_SMALL if small <= large else HOPPER_LARGE
