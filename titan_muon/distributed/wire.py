"""Headers of parcels, and the power-of-two scale of 16-bit ones.

A 16-bit parcel is divided by the power of two that brings its largest element near the top of the
range, so that its precision does not depend on its scale; that scale travels in the header.
Powers of two round nothing, so the scaling itself is exact.
"""

import torch
from torch import Tensor

__all__ = [
    "FIELDS_BACK",
    "FIELDS_THERE",
    "parcel_scales",
    "read_headers",
    "write_headers",
]

# float16 reaches 2**15; one power less leaves room for rounding.
_TOP = 14
# By either end the scale and its reciprocal are normal numbers.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**126
_EXPONENT_BITS = 0x7F800000
# Scale, flag, sum of squares of the weights, and of the direction largest magnitude and sum of
# squares.
FIELDS_THERE = 5
# Scale, flag, length of the update.
FIELDS_BACK = 3


def write_headers(packets: Tensor, index: Tensor, headers: Tensor) -> None:
    """Write the headers of many parcels.

    Args:
        packets: All packets of one end, uint8; modified.
        index: (P, fields) int64, float32 elements of each header.
        headers: (P, fields) float32, as ``FIELDS_THERE`` or ``FIELDS_BACK`` has them.
    """
    packets.view(torch.float32)[index] = headers


def read_headers(packets: Tensor, index: Tensor) -> Tensor:
    """Return (P, fields) float32, as ``FIELDS_THERE`` or ``FIELDS_BACK`` has them."""
    return packets.view(torch.float32)[index]


def parcel_scales(largest: Tensor) -> Tensor:
    """Return the scales of parcels, float32, by their largest magnitudes.

    An infinite or NaN magnitude gives a finite scale, so that the bad values travel on and stay in
    their own matrix.
    """
    # A float without its fraction is the power of two at or below it.
    bits = largest.to(torch.float32).view(torch.int32)
    power = bits.bitwise_and(_EXPONENT_BITS).view(torch.float32)
    return power.clamp_(_SMALLEST, _LARGEST).mul_(2.0**-_TOP)
