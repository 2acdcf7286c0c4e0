"""AdaMuon: Muon on signs, every element divided by the root of its running second moment."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan_muon.optim.algorithms.base import Buffer, MatrixAlgorithm, Polar
from titan_muon.optim.options import BETA2, MATRIX_OPTIONS

__all__ = ["AdaMuonAlgorithm"]

_EPS = 1e-8


class AdaMuonAlgorithm(MatrixAlgorithm):
    """Orthogonalize the signs of the direction, then scale element by element as Adam does.

    For one matrix (M, N) with direction d (momentum, Nesterov and split as for Muon)::

        q = orthogonalize(sign(d))
        v = beta2 * v + (1 - beta2) * q * q
        a = q / (sqrt(v) + 1e-8)
        q' = a * sqrt(min(M, N)) / ||a||

    Decay and write are Muon's, and q' has the norm of a semi-orthogonal matrix, so that every
    ``adjust_lr_fn`` keeps its meaning. With ``match_rms_adamw`` the update has RMS 0.2, the paper's
    factor 0.2 * sqrt(M * N) / ||a||. A bias correction of v would cancel in q'. The paper has no
    Nesterov step: ``nesterov=False``.

    Source: AdaMuon, https://arxiv.org/abs/2507.11005, third version, with the sign that the first
    did not have.
    """

    name = "adamuon"
    title = "AdaMuon"
    options = {**MATRIX_OPTIONS, "beta2": BETA2}
    buffers = (Buffer("second_moment_buffer", "grad", signed=False),)

    def orthogonalize(self, directions: Tensor, polar: Polar, options: Mapping[str, Any]) -> Tensor:
        """Return the orthogonalized signs of ``directions`` (B, M, N)."""
        # torch's sign of a NaN is 0, which would hide it; 0 * NaN and 0 * inf are NaN.
        return polar(directions.sign().add_(directions, alpha=0.0))

    def update(
        self, update: Tensor, buffers: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> Tensor:
        """Return ``update`` (B, M, N) divided element by element, at the norm of a polar factor."""
        second_moment, beta2 = buffers["second_moment_buffer"], options["beta2"]
        # float32 or wider whatever is stored, and rounded once on the way back.
        moment = second_moment.to(torch.promote_types(second_moment.dtype, torch.float32))
        moment.mul_(beta2).addcmul_(update, update, value=1 - beta2)
        second_moment.copy_(moment)
        scaled = moment.sqrt().add_(_EPS)
        torch.div(update, scaled, out=scaled)
        norm = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True)
        # A zero matrix has norm 0 and stays zero.
        factor = min(update.shape[-2:]) ** 0.5 / norm.clamp_min(1e-30)
        return update.copy_(scaled.mul_(factor))
