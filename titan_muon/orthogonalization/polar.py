"""The exact polar factor, by SVD: for tests and diagnosis, never in a training step."""

import torch
from torch import Tensor


def polar_factor(x: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrix, ``U V^T`` of ``x = U S V^T``.

    Args:
        x: (..., M, N), float32 or float64; of full rank, or the factor is not unique. Not modified.

    Returns:
        (..., M, N) in the dtype of ``x``.
    """
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh
