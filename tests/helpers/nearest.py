"""The search for the nearest code of any numbers, by the function that the kernels call."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_muon.kernels.coding import Search
from titan_muon.kernels.triton_quantize import _nearest

_BLOCK = 1024


@triton.jit
def _kernel(
    values, codes, starts, middles, shift, lowest, buckets, count,
    STEPS: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + place, mask=place < count, other=0.0)
    code = _nearest(value, starts, middles, shift, lowest, buckets, STEPS, LAST)
    tl.store(codes + place, code, mask=place < count)


def nearest(values: Tensor, search: Search) -> Tensor:
    """Return (n,) int32 codes of (n,) float32 values."""
    codes, count = torch.empty_like(values, dtype=torch.int32), len(values)
    starts, middles, shift, lowest, steps = search
    _kernel[(triton.cdiv(count, _BLOCK),)](
        values, codes, starts, middles, shift, lowest, len(starts) // 2, count,
        STEPS=steps, LAST=len(middles) - 1, BLOCK=_BLOCK,
    )  # fmt: skip
    return codes
