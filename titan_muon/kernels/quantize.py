"""Values as codes and one scale a block, decoded and encoded, many tensors at once.

Tensors are given by their parts, codes and scales in turn: bytes, one or half of one an element,
and (blocks,) float32. Both are contiguous, and values are flat, one tensor after another.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_muon.kernels.coding import FLOAT8_MAX, SMALLEST_SCALE, Coding
from titan_muon.kernels.devices import device_fault, on_device_of

__all__ = ["decode", "decode_reference", "encode", "encode_reference"]

_FLOAT8 = torch.float8_e4m3fn


def decode(parts: Sequence[Tensor], coding: Coding) -> Tensor:
    """Return what codes stand for.

    Args:
        parts: Codes and scales of each tensor in turn, on one device. Not modified.
        coding: Of all of them, its tensors on their device.

    Returns:
        (elements of all tensors,) float32.
    """
    if parts[0].is_cuda and device_fault(parts[0].device) is None:
        from titan_muon.kernels import triton_quantize

        with on_device_of(parts[0]):
            return triton_quantize.decode(parts, coding)
    return decode_reference(parts, coding)


def encode(
    values: Tensor, parts: Sequence[Tensor], coding: Coding, *, only_changed: bool = False
) -> None:
    """Write values as codes and scales, to the nearest code.

    A NaN makes the scale of its block NaN, an infinity makes it infinite.

    Args:
        values: (elements of all tensors,) float32. Not modified.
        parts: Codes and scales of each tensor in turn, on the device of the values; modified.
        coding: Of all of them, its tensors on their device.
        only_changed: Keep the bits of blocks whose values are what they stand for already; encoding
            is not the inverse of decoding.
    """
    if values.is_cuda and device_fault(values.device) is None:
        from titan_muon.kernels import triton_quantize

        with on_device_of(values):
            triton_quantize.encode(values, parts, coding, only_changed)
    else:
        encode_reference(values, parts, coding, only_changed)


def decode_reference(parts: Sequence[Tensor], coding: Coding) -> Tensor:
    """See :func:`decode`; its torch definition."""
    codes, scales = _joined(parts[::2]), _joined(parts[1::2])
    if coding.qmap is None:
        values = codes.view(_FLOAT8).float()
    else:
        if coding.packed:
            codes = torch.stack([codes >> 4, codes & 15], dim=-1).view(-1)
        values = coding.qmap[codes.int()]
    return values.view(-1, coding.block).mul_(scales.view(-1, 1)).view(-1)


def encode_reference(
    values: Tensor, parts: Sequence[Tensor], coding: Coding, only_changed: bool
) -> None:
    """See :func:`encode`; its torch definition."""
    blocks = values.view(-1, coding.block)
    scales = blocks.abs().amax(dim=1).clamp_min_(SMALLEST_SCALE)
    codes = _codes(blocks, scales, coding)
    if only_changed:
        changed = (values != decode_reference(parts, coding)).view(blocks.shape).any(dim=1)
        codes = torch.where(changed.view(-1, 1), codes, _joined(parts[::2]).view(codes.shape))
        scales = torch.where(changed, scales, _joined(parts[1::2]))
    sizes = [part.numel() for part in parts]
    for whole, first in ((codes.view(-1), 0), (scales, 1)):
        targets = [part.view(-1) for part in parts[first::2]]
        torch._foreach_copy_(targets, list(whole.split(sizes[first::2])))


def _codes(blocks: Tensor, scales: Tensor, coding: Coding) -> Tensor:
    """Return (blocks, bytes of a block); divides the scales by the largest code, if it is not 1."""
    if coding.middles is None:
        # A tensor: by a number, a GPU would multiply with its rounded reciprocal.
        scales.div_(scales.new_full((), FLOAT8_MAX))
        return blocks.div(scales.view(-1, 1)).to(_FLOAT8).view(torch.uint8)
    quotients = blocks / scales.view(-1, 1)
    # The nearest entry of the map: one search, where torchao's own way takes thirty passes.
    codes = torch.bucketize(quotients, coding.middles, out_int32=True, right=True).to(torch.uint8)
    return (codes[:, ::2] << 4) | codes[:, 1::2] if coding.packed else codes


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.view(-1) for tensor in tensors]
    return torch.cat(flat) if len(flat) > 1 else flat[0]
