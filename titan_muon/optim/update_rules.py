"""Momentum before the orthogonalization and the write after it, on local shards."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["advance_momentum", "write_updates"]


def advance_momentum(
    buffers: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    momentum: float,
    nesterov: bool,
    maximize: bool = False,
) -> list[Tensor]:
    """Advance the EMA of the gradient and return the direction to orthogonalize.

    Args:
        buffers: ``momentum_buffer`` of each parameter; modified in place.
        grads: Gradients, any float dtype; not modified.
        momentum: EMA factor.
        nesterov: Look ahead by one EMA step.
        maximize: Use the negative gradients.

    Returns:
        One tensor a parameter in the dtype of its buffer; new with Nesterov, else the buffers.
    """
    if not buffers:
        return []
    same = [g if g.dtype == b.dtype else g.to(b.dtype) for g, b in zip(grads, buffers, strict=True)]
    if maximize:
        same = list(torch._foreach_neg(same))
    # lerp(b, g, w) = b + w*(g - b): the EMA in one pass.
    torch._foreach_lerp_(list(buffers), same, 1 - momentum)
    if not nesterov:
        return list(buffers)
    return list(torch._foreach_lerp(same, list(buffers), momentum))


def write_updates(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    cautious: bool,
) -> None:
    """Decay with the plain lr, then ``p -= lr * u``.

    Args:
        params: Local shards; modified in place.
        updates: Scaled updates of the same local shapes, any float dtype. Not modified.
        lr: Number or 0-d tensor; a tensor is never read by the host.
        weight_decay: Decay factor.
        cautious: Decay only where ``u * p > 0``, tested on the weight before the step.
    """
    for param, update in zip(params, updates, strict=True):
        wide = torch.promote_types(param.dtype, torch.float32)
        value, step = param.to(wide), update.to(wide)
        if weight_decay != 0:
            decay = value * (lr * weight_decay)
            if cautious:
                decay = torch.where(step * value > 0, decay, torch.zeros_like(decay))
            value = value - decay
        param.copy_(value - step * lr)
