# pyrefly: ignore-errors
# Triton is a language of its own: its values have no Python types.
"""Triton kernel of stochastic rounding; see ``rounding`` for what it computes.

A tile lies in rows and columns, so that a row's bits are mixed once in a tile and no element has
to find its row by a division.
"""

import triton
import triton.language as tl
from torch import Tensor

from titan_muon.kernels.launcher import launch
from titan_muon.kernels.noise import Noise, touched

__all__ = ["round_to_bfloat16"]

_TILE = 1024


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _kernel(
    values, out, rows, columns, step, base, start, count, height, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(width, COLUMNS)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    key = _mixed((tl.load(step).to(tl.int32) + tl.load(base)).to(tl.uint32, bitcast=True))
    of_row = tl.load(rows + row, mask=row < height, other=0).to(tl.uint32, bitcast=True)
    of_column = tl.load(columns + column, mask=column < width, other=0)
    of_column = of_column.to(tl.uint32, bitcast=True)
    noise = _mixed(_mixed(_mixed(of_row) ^ key)[:, None] ^ of_column[None, :]) >> 16
    place = row[:, None] * width + column[None, :] - start
    inside = (column < width)[None, :] & (place >= 0) & (place < count)
    value = tl.load(values + place, mask=inside, other=0.0)
    bits = value.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = ((bits + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
    result = tl.where(finite, rounded, value)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


def round_to_bfloat16(values: Tensor, out: Tensor, noise: Noise, start: int) -> None:
    """See ``rounding.round_to_bfloat16``; the step lies on the device of the values."""
    count = values.numel()
    (rows, columns, step, base), start = touched(noise, start, count)
    height, width = rows.numel(), columns.numel()
    across = min(_TILE, triton.next_power_of_2(width))
    down = _TILE // across
    grid = (triton.cdiv(height, down) * triton.cdiv(width, across),)
    arguments = (values, out, rows, columns, step, base, start, count, height, width)
    launch(_kernel, grid, arguments, {"ROWS": down, "COLUMNS": across}, num_warps=4)
