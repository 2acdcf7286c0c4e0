"""Stochastic rounding to bfloat16 by noise that depends on nothing but key, row and column."""

import torch
from torch import Tensor

from titan_muon.kernels.dispatch import device_fault, on_device_of

__all__ = ["mixed", "round_reference", "round_to_bfloat16"]

# Two rounds of xor-shift and multiply, constants of a search for the least bias by "TheIronBorn" in
# https://github.com/skeeto/hash-prospector/issues/19.
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97
_INFINITE = 0x7F800000


def mixed(x: Tensor) -> Tensor:
    """Return 32 well-mixed bits of each int32; products wrap around."""
    x = (x ^ (x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))


def round_to_bfloat16(
    values: Tensor, out: Tensor, rows: Tensor, columns: Tensor, start: int = 0
) -> None:
    """Round to one of the two neighbours, to each in proportion to how near it is.

    Args:
        values: (n,) float32, elements ``start`` to ``start + n`` of a row-major matrix. Not
            modified.
        out: (n,) bfloat16; modified. Infinities and NaNs stay what they are.
        rows: (R,) int32, random bits of each row.
        columns: (C,) int32, number of each column.
        start: Place of the first value in the matrix.
    """
    if not values.numel():
        return
    if values.is_cuda and device_fault(values.device) is None:
        from titan_muon.kernels import triton_rounding

        with on_device_of(values):
            triton_rounding.round_to_bfloat16(values, out, rows, columns, start)
    else:
        round_reference(values, out, rows, columns, start)


def round_reference(values: Tensor, out: Tensor, rows: Tensor, columns: Tensor, start: int) -> None:
    """See :func:`round_to_bfloat16`; its torch definition."""
    width, count = len(columns), len(values)
    if start % width == 0 and count % width == 0:
        first = start // width
        mine = rows[first : first + count // width]
        noise = (mine.view(-1, 1) ^ columns).view(-1)
    else:
        place = torch.arange(start, start + count, device=values.device)
        noise = rows[place // width] ^ columns[place % width]
    noise = (mixed(noise) >> 16).bitwise_and_(0xFFFF)
    bits = values.view(torch.int32)
    rounded = (bits + noise).bitwise_and_(-0x10000).view(torch.float32)
    finite = bits.bitwise_and(_INFINITE) != _INFINITE
    out.copy_(torch.where(finite, rounded, values))
