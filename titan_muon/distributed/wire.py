"""Headers of parcels, and the power-of-two scale of 16-bit ones.

A 16-bit parcel is divided by the power of two that brings its largest element near the top of the
range, so that its precision does not depend on its scale; that scale travels in the header.
Powers of two round nothing, so the scaling itself is exact.
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["Back", "There", "columns", "parcel_scales", "read_headers", "rows", "write_headers"]

# float16 reaches 2**15; one power less leaves room for rounding.
_TOP = 14
# From here on the reciprocal of a scale is a normal number too.
_SMALLEST = 2.0**-100
_EXPONENT_BITS = 0x7F800000


class There(NamedTuple):
    """Headers of parcels on their way to the owners, or their sums and maxima: (P,) each.

    Args:
        scale: What the direction was divided by.
        flag: 1 where the sender has a gradient.
        weights: Sum of squares of the weights.
        largest, squares: Largest magnitude and sum of squares of the direction.
    """

    scale: Tensor
    flag: Tensor
    weights: Tensor
    largest: Tensor
    squares: Tensor


class Back(NamedTuple):
    """Headers of parcels on their way back: (P,) each.

    Args:
        scale: What the update was divided by.
        flag: 1 where some rank had a gradient.
        length: How far the update goes.
    """

    scale: Tensor
    flag: Tensor
    length: Tensor


_Header = TypeVar("_Header", There, Back)


def columns(kind: type[_Header], headers: Tensor) -> _Header:
    """Return the fields of (P, fields), headers of a kind."""
    return kind(*headers.unbind(dim=1))


def rows(headers: There | Back) -> Tensor:
    """Return (P, fields) float32."""
    return torch.stack(headers, dim=1).float()


def write_headers(packets: Tensor, index: Tensor, headers: Tensor) -> None:
    """Write the headers of many parcels.

    Args:
        packets: All packets of one end, uint8; modified.
        index: (P, fields) int64, float32 elements of each header.
        headers: (P, fields) float32.
    """
    packets.view(torch.float32)[index] = headers


def read_headers(packets: Tensor, index: Tensor) -> Tensor:
    """Return (P, fields) float32, the headers of many parcels."""
    return packets.view(torch.float32)[index]


def parcel_scales(largest: Tensor) -> Tensor:
    """Return the scales of parcels, float32, by their largest magnitudes.

    An infinite or NaN magnitude gives 1, so that bad values travel on, and those beside them.
    """
    # A float without its fraction is the power of two at or below it.
    bits = largest.to(torch.float32).view(torch.int32)
    power = bits.bitwise_and(_EXPONENT_BITS).view(torch.float32)
    return power.nan_to_num_(posinf=2.0**_TOP).clamp_min_(_SMALLEST).mul_(2.0**-_TOP)
