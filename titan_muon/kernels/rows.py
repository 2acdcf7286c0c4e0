"""Statistics and scaling of the rows of a batch of matrices, each in one pass over memory."""

import torch
from torch import Tensor

from titan_muon.kernels.devices import device_fault, on_device_of

__all__ = ["row_mean_squares", "scale_rows_"]


def row_mean_squares(x: Tensor) -> Tensor:
    """Return the mean square of each row.

    Args:
        x: (B, M, N), any float dtype. Not modified.

    Returns:
        (B, M, 1) float32, float64 for float64.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    return norms.square_().div_(x.shape[-1])


def scale_rows_(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply each row by its factor, rounding once; in place.

    Args:
        x: (B, M, N), any float dtype; modified.
        factors: (B, M, 1) float32, float64 for float64.

    Returns:
        ``x``.
    """
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    if narrow and x.is_cuda and x.is_contiguous() and device_fault(x.device) is None:
        from titan_muon.kernels import triton_rows

        with on_device_of(x):
            triton_rows.scale_rows_(x, factors)
        return x
    return x.copy_(x * factors)
