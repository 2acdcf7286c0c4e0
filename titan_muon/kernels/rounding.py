"""Stochastic rounding to bfloat16."""

import torch
from torch import Tensor

from titan_muon.kernels.devices import device_fault, on_device_of
from titan_muon.kernels.noise import Noise, noise_reference

__all__ = ["round_reference", "round_to_bfloat16"]

_INFINITE = 0x7F800000


def round_to_bfloat16(values: Tensor, out: Tensor, noise: Noise, start: int = 0) -> None:
    """Round to one of the two neighbours, to each in proportion to how near it is.

    Args:
        values: (n,) float32, elements ``start`` to ``start + n`` of a row-major matrix. Not
            modified.
        out: (n,) bfloat16; modified. Infinities and NaNs stay what they are.
        noise: Of the matrix, its tensors on the device of the values; the step on any.
        start: Place of the first value in the matrix.
    """
    if not values.numel():
        return
    noise = noise._replace(step=noise.step.to(values.device))
    if values.is_cuda and device_fault(values.device) is None:
        from titan_muon.kernels import triton_rounding

        with on_device_of(values):
            triton_rounding.round_to_bfloat16(values, out, noise, start)
    else:
        round_reference(values, out, noise, start)


def round_reference(values: Tensor, out: Tensor, noise: Noise, start: int) -> None:
    """See :func:`round_to_bfloat16`; its torch definition."""
    bits = values.view(torch.int32)
    rounded = bits + noise_reference(noise, start, len(values))
    rounded = rounded.bitwise_and_(-0x10000).view(torch.float32)
    finite = bits.bitwise_and(_INFINITE) != _INFINITE
    out.copy_(torch.where(finite, rounded, values))
