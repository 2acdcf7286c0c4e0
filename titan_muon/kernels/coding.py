"""What codes stand for, and how a kernel finds the nearest one."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Coding", "Search", "search_of"]

# Below this a block counts as zero; far from where float32 loses precision.
SMALLEST_SCALE = 1e-30
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
    ended = torch.cat([middles, middles.new_full((1,), float("nan"))])
    return Search(first.to(torch.uint8), ended, shift, lowest, int((last - first).max()))
