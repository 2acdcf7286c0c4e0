# pyrefly: ignore-errors
# Triton is a language of its own: its values have no Python types.
"""Triton kernel of stochastic rounding; see ``rounding`` for what it computes."""

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["round_to_bfloat16"]

_BLOCK = 1024


@triton.jit
def _kernel(values, out, rows, columns, start, count, width, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    place = offset + start
    x = tl.load(rows + place // width, mask=inside, other=0).to(tl.uint32, bitcast=True)
    x = x ^ tl.load(columns + place % width, mask=inside, other=0).to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    x = x ^ (x >> 15)
    value = tl.load(values + offset, mask=inside, other=0.0)
    bits = value.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    rounded = ((bits + (x >> 16)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    result = tl.where(finite, rounded, value)
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=inside)


def round_to_bfloat16(
    values: Tensor, out: Tensor, rows: Tensor, columns: Tensor, start: int
) -> None:
    """See ``rounding.round_to_bfloat16``."""
    count = values.numel()
    _kernel[(triton.cdiv(count, _BLOCK),)](
        values, out, rows, columns, start, count, len(columns), BLOCK=_BLOCK, num_warps=4
    )
