"""Momentum before the orthogonalization and the write after it, on local shards."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["advance_momentum", "look_ahead", "square_sum", "write_update"]


def advance_momentum(
    momenta: Sequence[Tensor], grads: Sequence[Tensor], *, momentum: float
) -> None:
    """Advance the EMA of the gradient, ``m += (1 - momentum) * (g - m)``.

    Args:
        momenta: ``momentum_buffer`` of each parameter; modified in place.
        grads: Gradients in the dtype of their buffer. Not modified.
        momentum: EMA factor.
    """
    if momenta:
        torch._foreach_lerp_(list(momenta), list(grads), 1 - momentum)


def look_ahead(grad: Tensor | None, momentum_buffer: Tensor, momentum: float) -> Tensor:
    """Return the Nesterov direction ``(1 - momentum) * g + momentum * m``.

    Args:
        grad: Gradient in the dtype of the buffer; None counts as zero. Not modified.
        momentum_buffer: The advanced EMA. Not modified.
        momentum: EMA factor.
    """
    if grad is None:
        return momentum_buffer * momentum
    return torch.lerp(grad, momentum_buffer, momentum)


def square_sum(weights: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements, 0-d float32 (float64 for float64)."""
    dtype = torch.promote_types(weights[0].dtype, torch.float32)
    return torch.stack([w.to(dtype).square().sum() for w in weights]).sum()


def write_update(
    param: Tensor,
    update: Tensor,
    scale: Tensor | None,
    *,
    lr: float | Tensor,
    weight_decay: float,
    cautious: bool,
    flag: Tensor | None = None,
) -> None:
    """Decay with the plain lr, then ``p -= lr * scale * u``.

    Args:
        param: Weights; modified in place.
        update: Same shape, any float dtype and device. Not modified.
        scale: 0-d factor of the update, positive; None for 1.
        lr: Number or 0-d tensor; a tensor is never read by the host.
        weight_decay: Decay factor.
        cautious: Decay only where ``u * p > 0``, tested on the weight before the step.
        flag: 0-d; where it is 0 the weights stay as they are. None for 1.
    """
    wide = torch.promote_types(param.dtype, torch.float32)
    value, step = param.to(wide), update.to(wide)
    if scale is not None:
        step = step * scale.to(wide)
    step = step.to(param.device)
    if isinstance(lr, Tensor):
        lr = lr.to(param.device, wide)
    result = value - step * lr
    if weight_decay != 0:
        decay = value * (lr * weight_decay)
        if cautious:
            decay = torch.where(step * value > 0, decay, 0.0)
        result -= decay
    if flag is not None:
        result = torch.where(flag.to(param.device) > 0, result, value)
    param.copy_(result)
