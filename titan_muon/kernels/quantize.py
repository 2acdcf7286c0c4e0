"""Values as codes and one scale a block, decoded and encoded, many tensors at once.

Tensors are given by their parts, codes and scales in turn: bytes, one or half of one an element,
and (blocks,) float32. Both are contiguous, and values are flat, one tensor after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from titan_muon.kernels.dispatch import device_fault, on_device_of

__all__ = [
    "Coding",
    "Search",
    "decode",
    "decode_reference",
    "encode",
    "encode_reference",
    "search_of",
]

# Below this a block counts as zero; far from where float32 loses precision.
SMALLEST_SCALE = 1e-30
_FLOAT8 = torch.float8_e4m3fn
# Quotients of a float8 block reach as far as the format does.
FLOAT8_MAX = 448.0
# What the table of a search spans, down from the largest middle; those of torchao span 23.
_BINADES = 24
# Steps of a search for which the table is made large enough: each waits for memory once more. With
# torchao's maps of 256 codes one needs 6 KiB at most; eight bits of the fraction are 12.
_STEPS, _MOST_BITS = 1, 8


class Search(NamedTuple):
    """How a kernel finds codes: a table gives the first one possible, and steps lead on from there.

    The upper bits of a quotient, without its sign, are the number of its bucket; first and last
    bucket hold all that is smaller and larger. Buckets of negative quotients follow the others.

    Args:
        starts: (2 * buckets,) uint8, the code of the smallest quotient of each bucket.
        middles: (codes,) float32, those of the coding and a NaN.
        shift: Lower bits that buckets leave out.
        lowest: Upper bits of the first bucket.
        steps: Middles in a bucket, where they are the most.
    """

    starts: Tensor
    middles: Tensor
    shift: int
    lowest: int
    steps: int


@dataclass(frozen=True, eq=False)
class Coding:
    """What codes stand for.

    Args:
        block: Elements that share a scale.
        qmap: (256,) or (16,) float32, ascending, the value of each code; with 16 of them two codes
            share a byte, the first in its upper half. None: codes are float8_e4m3fn.
        middles: (255,) or (15,) float32, where the nearest code turns into the next.
    """

    block: int
    qmap: Tensor | None = None
    middles: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.qmap is not None and len(self.qmap) == 16

    @cached_property
    def search(self) -> Search | None:
        """How a kernel finds the codes of a map."""
        return None if self.middles is None else search_of(self.middles)


def search_of(middles: Tensor) -> Search:
    """Return the search with the smallest table that few steps are enough for.

    Args:
        middles: (codes - 1,) float32, ascending, finite.
    """
    on_host, bits = middles.cpu(), 0
    while (search := _search(on_host, bits)).steps > _STEPS and bits < _MOST_BITS:
        bits += 1
    starts, ended = (table.to(middles.device) for table in (search.starts, search.middles))
    return search._replace(starts=starts, middles=ended)


def _search(middles: Tensor, bits: int) -> Search:
    """Return the search whose buckets differ in sign, exponent and some bits of the fraction."""
    shift, buckets = 23 - bits, _BINADES << bits
    largest = int(middles.abs().max().view(torch.int32)) >> shift
    lowest = max(largest + 1 - buckets, 0)
    edges = torch.arange(lowest, lowest + buckets + 1, dtype=torch.int32) << shift
    edges[0] = 0
    low, high = edges[:-1].view(torch.float32), (edges[1:] - 1).view(torch.float32)
    # Of buckets of both signs; no middle is larger than the last one.
    smallest, greatest = torch.cat([low, -high]), torch.cat([high, -low])
    first, last = (torch.bucketize(x, middles, right=True) for x in (smallest, greatest))
    ended = torch.cat([middles, torch.full((1,), float("nan"))])
    return Search(first.to(torch.uint8), ended, shift, lowest, int((last - first).max()))


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
        scales.div_(torch.full((), FLOAT8_MAX, device=scales.device))
        return blocks.div(scales.view(-1, 1)).to(_FLOAT8).view(torch.uint8)
    quotients = blocks / scales.view(-1, 1)
    # The nearest entry of the map: one search, where torchao's own way takes thirty passes.
    codes = torch.bucketize(quotients, coding.middles, out_int32=True, right=True).to(torch.uint8)
    return (codes[:, ::2] << 4) | codes[:, 1::2] if coding.packed else codes


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.view(-1) for tensor in tensors]
    return torch.cat(flat) if len(flat) > 1 else flat[0]
