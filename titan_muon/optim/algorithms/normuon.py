"""NorMuon: Muon whose rows are normalised by a running second moment."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from titan_muon.kernels.rows import row_mean_squares, scale_rows_
from titan_muon.optim.algorithms.base import Buffer, MatrixAlgorithm
from titan_muon.optim.options import BETA2, MATRIX_OPTIONS

__all__ = ["NorMuonAlgorithm"]

_EPS = 1e-8


class NorMuonAlgorithm(MatrixAlgorithm):
    """Divide each row of the update by the root of its running mean square, keep the norm.

    Source: NorMuon, https://arxiv.org/abs/2510.05491
    """

    name = "normuon"
    title = "NorMuon"
    options = {**MATRIX_OPTIONS, "beta2": BETA2}
    buffers = (Buffer("second_moment_buffer", "rows"),)

    def update(
        self, update: Tensor, buffers: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> Tensor:
        """Return ``update`` (B, M, N) with rows rescaled; one matrix keeps its Frobenius norm."""
        second_moment = buffers["second_moment_buffer"]
        mean_square = row_mean_squares(update)
        second_moment.lerp_(mean_square.to(second_moment.dtype), 1 - options["beta2"])
        scale = second_moment.sqrt().add_(_EPS).reciprocal_()
        # ||q||^2 = N * sum of mean squares, so both norms come from the (B, M, 1) statistics.
        before = mean_square.sum(dim=-2, keepdim=True)
        after = (mean_square * scale.square()).sum(dim=-2, keepdim=True)
        # A zero matrix has after == 0 and stays zero.
        restore = (before / after.clamp_min(1e-38)).sqrt_()
        return scale_rows_(update, scale.mul_(restore))
