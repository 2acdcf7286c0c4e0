"""Stochastic rounding to bfloat16 by noise that depends on nothing but step, row and column."""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_muon.kernels.dispatch import device_fault, on_device_of

__all__ = ["Noise", "noise_reference", "round_reference", "round_to_bfloat16", "touched"]

# Two rounds of xor-shift and multiply, constants of a search for the least bias by "TheIronBorn" in
# https://github.com/skeeto/hash-prospector/issues/19.
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97
_INFINITE = 0x7F800000


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


def round_to_bfloat16(values: Tensor, out: Tensor, noise: Noise, start: int = 0) -> None:
    """Round to one of the two neighbours, to each in proportion to how near it is.

    Args:
        values: (n,) float32, elements ``start`` to ``start + n`` of a row-major matrix. Not
            modified.
        out: (n,) bfloat16; modified. Infinities and NaNs stay what they are.
        noise: Of the matrix, its tensors on the device of the values; the step on any.
        start: Place of the first value in the matrix.
    """
    if not values.numel():
        return
    noise = noise._replace(step=noise.step.to(values.device))
    if values.is_cuda and device_fault(values.device) is None:
        from titan_muon.kernels import triton_rounding

        with on_device_of(values):
            triton_rounding.round_to_bfloat16(values, out, noise, start)
    else:
        round_reference(values, out, noise, start)


def round_reference(values: Tensor, out: Tensor, noise: Noise, start: int) -> None:
    """See :func:`round_to_bfloat16`; its torch definition."""
    bits = values.view(torch.int32)
    rounded = bits + noise_reference(noise, start, len(values))
    rounded = rounded.bitwise_and_(-0x10000).view(torch.float32)
    finite = bits.bitwise_and(_INFINITE) != _INFINITE
    out.copy_(torch.where(finite, rounded, values))


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
