"""Torch definition of every dense operation: the oracle of the kernels and the CPU path.

All tensors are plain and three-dimensional, (B, M, N): a batch of independent matrices. Any
strides are accepted. Results go to ``out`` when it is given, which must not overlap an input.
"""

import torch
from torch import Tensor


def gram(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply each matrix by its own transpose, ``x @ x.mT``.

    Args:
        x: (B, M, N), any float dtype. Not modified. Pass ``x.mT`` for ``X^T X``.
        out: (B, M, M) in the dtype of ``x``, or None to allocate.

    Returns:
        (B, M, M), symmetric up to the order of sums.
    """
    return torch.bmm(x, x.mT, out=out)


def symmetric_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Compute ``alpha * a @ b + beta * c``, which the caller knows to be symmetric.

    Args:
        a: (B, M, K). Not modified.
        b: (B, K, M), such that ``a @ b`` is symmetric. Not modified.
        c: (B, M, M), symmetric; read only where ``beta`` is not 0. Not modified.
        alpha: Factor of the product.
        beta: Factor of ``c``.
        out: (B, M, M), or None to allocate.

    Returns:
        (B, M, M), symmetric up to the order of sums.
    """
    return _addmm(a, b, c, alpha, beta, out)


def product(
    a: Tensor, x: Tensor, *, alpha: float = 1.0, beta: float = 0.0, out: Tensor | None = None
) -> Tensor:
    """Compute ``alpha * a @ x + beta * x`` for square ``a``.

    Args:
        a: (B, M, M). Not modified.
        x: (B, M, N). Not modified.
        alpha: Factor of the product.
        beta: Factor of ``x`` itself.
        out: (B, M, N), or None to allocate.

    Returns:
        (B, M, N).
    """
    return _addmm(a, x, x, alpha, beta, out)


def divide(x: Tensor, divisor: Tensor, *, out: Tensor) -> Tensor:
    """Divide each matrix by its own number and cast the quotient.

    Args:
        x: (B, M, N), any float dtype. Not modified.
        divisor: (B, 1, 1), float32 or float64. Not modified.
        out: (B, M, N); its dtype and strides may differ from those of ``x``.

    Returns:
        ``out``.
    """
    return torch.div(x, divisor, out=out)


def _addmm(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, out: Tensor | None
) -> Tensor:
    if beta == 0.0 and alpha == 1.0:
        return torch.bmm(a, b, out=out)
    if c is None:
        if beta != 0.0:
            raise AssertionError(f"{beta=} without c")
        c = a.new_zeros(())
    return torch.baddbmm(c, a, b, beta=beta, alpha=alpha, out=out)
