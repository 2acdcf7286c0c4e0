"""The standard iteration: every step multiplies the matrix itself."""

from torch import Tensor

from titan_muon.kernels import Operations
from titan_muon.orthogonalization.coefficients import Triple


def iterate(x: Tensor, spare: Tensor, triples: tuple[Triple, ...], ops: Operations) -> Tensor:
    """Run ``X = aX + (bA + cA^2) X`` with ``A = X X^T`` once for each triple.

    Args:
        x: (B, M, N), M <= N, singular values at most 1. Overwritten.
        spare: Like ``x``; its contents do not matter. Overwritten.
        triples: (a, b, c) of each step.
        ops: The dense operations.

    Returns:
        ``x`` after an even number of steps, else ``spare``.
    """
    gram = square = None
    for a, b, c in triples:
        gram = ops.gram(x, out=gram)
        square = ops.symmetric_product(gram, gram, gram, alpha=c, beta=b, out=square)
        spare = ops.product(square, x, beta=a, out=spare)
        x, spare = spare, x
    return x


def writes(steps: int) -> int:
    """Return how often :func:`iterate` moves the matrix from one buffer to the other."""
    return steps
