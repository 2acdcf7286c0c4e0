"""Orthogonalize stacks of whole matrices, same shapes together, and scale the result."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_muon.optim.algorithms.base import MatrixAlgorithm
from titan_muon.optim.lr_adjust import lr_factor
from titan_muon.orthogonalization import orthogonalize_batch, resolve_dtype, resolve_schedule

__all__ = ["mean_squares", "matrix_updates"]


def matrix_updates(
    directions: Sequence[Tensor],
    buffers: Mapping[str, Sequence[Tensor]],
    weight_mean_squares: Sequence[Tensor] | None,
    algorithm: MatrixAlgorithm,
    group: Mapping[str, Any],
) -> list[Tensor]:
    """Return the scaled update of every stack.

    Args:
        directions: K stacks (B, M, N) of whole matrices. Not modified.
        buffers: For each buffer of the algorithm K stacks, (B, M, N) or (B, M, 1); modified in
            place.
        weight_mean_squares: K tensors (B, 1, 1), read for ``match_param_rms`` only.
        algorithm: What happens to the orthogonalized update.
        group: The param group.

    Returns:
        K stacks (B, M, N) in the dtype of the iteration, scaled by the lr factor of their shape.
    """
    schedule = resolve_schedule(group["ns_method"], group["ns_steps"])
    updates: dict[int, Tensor] = {}
    for members in _same_shapes(directions):
        batch = _join([directions[i] for i in members])
        dtype = resolve_dtype(group["ns_dtype"], batch.device, batch.dtype)
        update = orthogonalize_batch(batch, schedule, dtype=dtype, batch_size=group["batch_size"])
        joined = {name: _join([stacks[i] for i in members]) for name, stacks in buffers.items()}
        update = algorithm.update(update, joined, group)
        update = update.mul_(lr_factor(group["adjust_lr_fn"], *batch.shape[-2:]))
        if group["adjust_lr_fn"] == "match_param_rms" and weight_mean_squares is not None:
            update = update.mul_(_join([weight_mean_squares[i] for i in members]).sqrt())
        sizes = [directions[i].shape[0] for i in members]
        for i, piece in zip(members, update.split(sizes), strict=True):
            updates[i] = piece
        for name, value in joined.items():
            for i, piece in zip(members, value.split(sizes), strict=True):
                if piece.data_ptr() != buffers[name][i].data_ptr():
                    buffers[name][i].copy_(piece)
    return [updates[i] for i in range(len(directions))]


def mean_squares(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the mean square of each matrix, (B, 1, 1) in float32 or wider, for (B, M, N)."""
    return [
        w.to(torch.promote_types(w.dtype, torch.float32)).square().mean(dim=(-2, -1), keepdim=True)
        for w in weights
    ]


def _same_shapes(stacks: Sequence[Tensor]) -> list[list[int]]:
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, stack in enumerate(stacks):
        groups.setdefault((stack.shape[1:], stack.dtype, stack.device), []).append(index)
    return list(groups.values())


def _join(stacks: Sequence[Tensor]) -> Tensor:
    return stacks[0] if len(stacks) == 1 else torch.cat(list(stacks))
