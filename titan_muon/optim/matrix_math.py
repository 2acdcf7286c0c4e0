"""Orthogonalize a batch of whole matrices and say how far the update goes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan_muon.distributed.exchange import Batch
from titan_muon.optim.algorithms.base import MatrixAlgorithm
from titan_muon.optim.lr_adjust import lr_factor
from titan_muon.orthogonalization import orthogonalize_batch, resolve_dtype, resolve_schedule

__all__ = ["batch_update"]


def batch_update(batch: Batch, algorithm: MatrixAlgorithm, group: Mapping[str, Any]) -> Tensor:
    """Replace the direction of a batch by its update.

    Args:
        batch: Its ``stack`` (B, M, N) is replaced, its buffers are modified in place.
        algorithm: What happens to the orthogonalized update.
        group: The param group.

    Returns:
        (B,) float32 (float64 for float64), the factor that the shape of the matrix, and with
        ``match_param_rms`` its weight, puts on the lr.
    """
    rows, columns = batch.stack.shape[-2:]
    schedule = resolve_schedule(group["ns_method"], group["ns_steps"])
    dtype = resolve_dtype(group["ns_dtype"], batch.stack.device, batch.stack.dtype)
    update = orthogonalize_batch(batch.stack, schedule, dtype=dtype, batch_size=group["batch_size"])
    batch.stack = algorithm.update(update, batch.buffers, group)
    factor = lr_factor(group["adjust_lr_fn"], rows, columns)
    if batch.square_sums is not None and group["adjust_lr_fn"] == "match_param_rms":
        return factor * (batch.square_sums / (rows * columns)).sqrt()
    wide = torch.promote_types(dtype, torch.float32)
    return torch.full((len(batch.units),), factor, dtype=wide, device=update.device)
