# pyrefly: ignore-errors
# Triton is a language of its own: its values have no Python types.
"""Divide every matrix of a batch by one number and cast it, in one pass at memory speed.

Importing this module imports triton. torch's own division takes three times as long where the
result has another dtype than the input (H200: 0.99 ms against 0.33 for 4 x (4096, 14336)).
"""

import triton
import triton.language as tl
from torch import Tensor

from titan_muon.kernels.launcher import launch

_BLOCK = 4096


@triton.jit(do_not_specialize=["blocks"])
def _divide_kernel(
    x_ptr, divisor_ptr, out_ptr, size, stride_x, stride_out, blocks, BLOCK: tl.constexpr
):
    index = tl.program_id(0)
    batch = (index // blocks).to(tl.int64)
    offsets = (index % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    x = tl.load(x_ptr + batch * stride_x + offsets, mask=inside, other=0.0).to(tl.float32)
    divisor = tl.load(divisor_ptr + batch).to(tl.float32)
    result = tl.div_rn(x, tl.zeros_like(x) + divisor)
    tl.store(
        out_ptr + batch * stride_out + offsets, result.to(out_ptr.dtype.element_ty), mask=inside
    )


def divide(x: Tensor, divisor: Tensor, out: Tensor) -> None:
    """Write ``x / divisor`` to ``out``.

    Args:
        x: (B, M, N), each matrix without gaps in rows or in columns. Not modified.
        divisor: (B, 1, 1) float32, contiguous. Not modified.
        out: (B, M, N), each matrix laid out as in ``x``.
    """
    size = x.shape[1] * x.shape[2]
    blocks = triton.cdiv(size, _BLOCK)
    arguments = (x, divisor, out, size, x.stride(0), out.stride(0), blocks)
    launch(_divide_kernel, (x.shape[0] * blocks,), arguments, {"BLOCK": _BLOCK}, num_warps=8)
