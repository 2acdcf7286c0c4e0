"""The same polynomial, evaluated on the small Gram matrix.

The steps between two restarts multiply (M, M) matrices only: ``R``, the Gram matrix of the current
iterate, and ``Q``, the polynomial so far. The long (M, N) matrix is touched at the restarts and at
the end. All square matrices are polynomials in one symmetric matrix, so they commute and every
product of two of them is symmetric.

Idea: Dao-AILab, Gram Newton-Schulz, https://github.com/Dao-AILab/gram-newton-schulz.
"""

import math

import torch
from torch import Tensor

from titan_muon.kernels import Operations
from titan_muon.orthogonalization.coefficients import Schedule, Triple

_LARGEST_SQUARED_SCALE = 2.0**10


def iterate(
    x: Tensor, spare: Tensor, schedule: Schedule, ops: Operations, scale: float = 1.0
) -> Tensor:
    """Run the schedule, segment by segment between its restarts.

    Args:
        x: (B, M, N), M <= N, ``scale`` times a matrix with singular values at most 1. Overwritten.
        spare: Like ``x``; its contents do not matter. Overwritten.
        schedule: Triples and restarts.
        ops: The dense operations.
        scale: Result of :func:`input_scale`.

    Returns:
        The polynomial of the unscaled matrix: in ``x`` after an even number of segments, else in
        ``spare``.
    """
    buffers = [x.new_empty(x.shape[0], x.shape[1], x.shape[1]) for _ in range(4)]
    cut = segments(schedule)
    for index, triples in enumerate(cut):
        polynomial = _segment_polynomial(x, triples, buffers, ops, scale * scale)
        alpha = 1.0 / scale if index == len(cut) - 1 else 1.0
        spare = ops.product(polynomial, x, alpha=alpha, out=spare)
        x, spare = spare, x
    return x


def input_scale(rows: int, dtype: torch.dtype) -> float:
    """Return the power of two by which :func:`iterate` wants its input enlarged.

    A matrix of Frobenius norm 1 has a Gram matrix with entries of about 1 / rows on the diagonal
    and far less beside it, below the normal numbers of float16. Every other dtype has the range.
    """
    if dtype != torch.float16:
        return 1.0
    squared = min(float(rows), _LARGEST_SQUARED_SCALE)
    return 2.0 ** round(math.log2(squared) / 2)


def segments(schedule: Schedule) -> list[tuple[Triple, ...]]:
    """Cut the triples at the restarts."""
    cuts = (0, *schedule.restarts, len(schedule.triples))
    return [schedule.triples[i:j] for i, j in zip(cuts, cuts[1:], strict=False)]


def writes(schedule: Schedule) -> int:
    """Return how often :func:`iterate` moves the matrix from one buffer to the other."""
    return len(schedule.restarts) + 1


def _segment_polynomial(
    x: Tensor,
    triples: tuple[Triple, ...],
    buffers: list[Tensor],
    ops: Operations,
    square: float,
) -> Tensor:
    """Return the (B, M, M) polynomial Q with which one segment multiplies ``x``; in a buffer.

    R and T carry the factor ``square`` throughout, Z and Q none. ``a*I`` enters Q only, on its
    diagonal, and R by the separate term ``a*R``: adding it to ``Z`` in a 16-bit dtype would round
    away the small part of ``Z`` that decides the result.
    """
    r, z, t, q = buffers
    ops.gram(x, out=r)
    last = len(triples) - 1
    for index, (a, b, c) in enumerate(triples):
        ops.symmetric_product(r, r, r, alpha=c / square**2, beta=b / square, out=z)
        if index < last:
            ops.symmetric_product(r, z, r, beta=a, out=t)
            ops.symmetric_product(z, t, t, beta=a, out=r)
        if index == 0:
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            q, z = z, q
        else:
            ops.symmetric_product(q, z, q, beta=a, out=t)
            q, t = t, q
    return q
