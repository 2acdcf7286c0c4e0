"""Noise of stochastic rounding, which depends on nothing but step, row and column."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Noise", "noise_reference", "touched"]

# Two rounds of xor-shift and multiply, constants of a search for the least bias by "TheIronBorn" in
# https://github.com/skeeto/hash-prospector/issues/19.
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97


class Noise(NamedTuple):
    """What the noise of a row-major matrix depends on.

    Args:
        rows: (R,) int32, number of each row.
        columns: (C,) int32, number of each column.
        step: 0-d, number of the step.
        base: 0-d int32, tells matrices apart.
    """

    rows: Tensor
    columns: Tensor
    step: Tensor
    base: Tensor


def noise_reference(noise: Noise, start: int, count: int) -> Tensor:
    """Return (count,) int32, the noise of elements of a matrix, 16 bits each."""
    noise, start = touched(noise, start, count)
    key = _mixed(noise.step.to(torch.int32) + noise.base)
    rows, columns = _mixed(_mixed(noise.rows) ^ key), noise.columns
    width = len(columns)
    if start == 0 and count % width == 0:
        bits = (rows.view(-1, 1) ^ columns).view(-1)
    else:
        place = torch.arange(start, start + count, device=rows.device)
        bits = rows[place // width] ^ columns[place % width]
    return (_mixed(bits) >> 16).bitwise_and_(0xFFFF)


def touched(noise: Noise, start: int, count: int) -> tuple[Noise, int]:
    """Return the noise of the rows, or of the part of one row, in which elements lie.

    Args:
        noise: Of the whole matrix.
        start: Place of the first element.
        count: How many there are, one or more.

    Returns:
        It, and the place of the first element in it, less than the number of its columns.
    """
    rows, columns, width = noise.rows, noise.columns, noise.columns.numel()
    first, last = start // width, (start + count - 1) // width
    start -= first * width
    if first == last and count < width:
        columns, start = columns[start : start + count], 0
    if last - first + 1 < rows.numel():
        rows = rows[first : last + 1]
    return noise._replace(rows=rows, columns=columns), start


def _mixed(x: Tensor) -> Tensor:
    """Return 32 well-mixed bits of each int32; products wrap around."""
    x = (x ^ (x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
