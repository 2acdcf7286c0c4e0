"""Aurora: Muon whose update of a tall matrix has rows of equal norm."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan_muon.kernels.rows import row_mean_squares
from titan_muon.optim.algorithms.base import MatrixAlgorithm, Polar
from titan_muon.optim.options import MATRIX_OPTIONS, PP_BETA, PP_ITERATIONS

__all__ = ["AuroraAlgorithm"]


class AuroraAlgorithm(MatrixAlgorithm):
    """Scale the rows of a tall direction until its polar factor has rows of equal norm.

    For one matrix (M, N) with M > N and direction d (momentum, Nesterov and split as for Muon)::

        D = 1 / row norms of d
        pp_iterations times:
            q = orthogonalize(D * d)
            D = D * (N / M / squared row norms of q) ** pp_beta     (not after the last)

    The update is the last q: semi-orthogonal as Muon's, with rows that are nearly equally long,
    which for a tall matrix they otherwise are not. Square and wide matrices are Muon's. Decay, lr
    factor and write are Muon's too; ``adjust_lr_fn = "original"`` is the paper's.

    Source: Aurora, https://arxiv.org/abs/2606.27715, and
    https://github.com/tilde-research/aurora-release, whose first release also balanced the columns
    of wide matrices. There each orthogonalization has twelve steps; here ``ns_method`` and
    ``ns_steps`` say how it is done. Row norms are not clamped at 1e-7 as there: a row of any size
    is scaled and a zero row stays zero, so that the scale of a gradient does not matter.
    """

    name = "aurora"
    title = "Aurora"
    options = {**MATRIX_OPTIONS, "pp_iterations": PP_ITERATIONS, "pp_beta": PP_BETA}

    def orthogonalizations(self, rows: int, columns: int, options: Mapping[str, Any]) -> int:
        """Return ``pp_iterations`` for a tall matrix, else 1."""
        return options["pp_iterations"] if rows > columns else 1

    def orthogonalize(self, directions: Tensor, polar: Polar, options: Mapping[str, Any]) -> Tensor:
        """Return the row-balanced polar factors of ``directions`` (B, M, N)."""
        rows, columns = directions.shape[-2:]
        if rows <= columns:
            return polar(directions)
        unit_rows = _with_unit_rows(directions)
        update = polar(unit_rows)
        scale = torch.ones_like(unit_rows[..., :1])
        for _ in range(options["pp_iterations"] - 1):
            # (N / M) / squared row norm; a row without any keeps its scale.
            share = row_mean_squares(update).to(scale.dtype).mul_(rows)
            scale *= torch.where(share > 0, share, 1.0).pow_(-options["pp_beta"])
            update = polar(unit_rows * scale)
        return update


def _with_unit_rows(x: Tensor) -> Tensor:
    """Return (B, M, N) in float32 or wider with rows of norm 1; zero rows stay zero.

    Args:
        x: (B, M, N), modified if it is as wide.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # First by the largest element, so that no square underflows or overflows.
    for order in (torch.inf, 2):
        size = torch.linalg.vector_norm(wide, ord=order, dim=-1, keepdim=True)
        tiny = torch.finfo(size.dtype).tiny
        wide.div_(size.where(size >= tiny, torch.inf))
    return wide
