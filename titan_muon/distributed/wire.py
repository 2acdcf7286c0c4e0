"""Headers of parcels, and the power-of-two scale of 16-bit ones.

A 16-bit parcel is multiplied by the power of two that brings its largest element near the top of
the range, so that its precision does not depend on its scale; the exponent travels in the header.
Powers of two round nothing, so the scaling itself is exact.
"""

import torch
from torch import Tensor

__all__ = [
    "FIELDS_BACK",
    "FIELDS_THERE",
    "exponents",
    "power_of_two",
    "read_headers",
    "write_headers",
]

# float16 reaches 2**15; one power less leaves room for rounding.
_TOP = 14
_LOWEST, _HIGHEST = -100, 126
# Exponent, flag, sum of squares of the weights, and of the direction largest magnitude and sum of
# squares.
FIELDS_THERE = 5
# Exponent, flag, scale of the update.
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


def exponents(largest: Tensor) -> Tensor:
    """Return the exponents of parcels by their largest magnitudes, both float32.

    An infinite or NaN magnitude gives a finite exponent, so that the bad values travel on and stay
    in their own matrix.
    """
    exponent = (largest.to(torch.float32).view(torch.int32) >> 23) - 127
    finite = exponent < 128
    exponent = torch.where(finite, exponent.clamp(_LOWEST, _HIGHEST), _TOP)
    return (exponent - _TOP).to(torch.float32)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2.0 ** exponent`` exactly, as float32, for integers within its normal range."""
    bits = (exponent.to(torch.int32).clamp(-126, 127) + 127) << 23
    return bits.view(torch.float32)
