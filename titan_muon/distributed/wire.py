"""Headers of parcels, and the power-of-two scale of 16-bit ones.

A 16-bit parcel is multiplied by the power of two that brings its largest element near the top of
the range, so that its precision does not depend on its scale; the exponent travels in the header.
Powers of two round nothing, so the scaling itself is exact.
"""

import torch
from torch import Tensor

__all__ = ["FIELDS", "exponents", "power_of_two", "read_headers", "write_headers"]

# float16 reaches 2**15; one power less leaves room for rounding.
_TOP = 14
_LOWEST, _HIGHEST = -100, 126
FIELDS = 3


def write_headers(packets: Tensor, index: Tensor, headers: Tensor) -> None:
    """Write the headers of many parcels.

    Args:
        packets: All packets of one end, uint8; modified.
        index: (P, fields) int64, float32 elements of each header.
        headers: (P, fields) float32: exponent, flag, and sum of squares or scale.
    """
    packets.view(torch.float32)[index] = headers


def read_headers(packets: Tensor, index: Tensor) -> Tensor:
    """Return (P, fields) float32: exponents, flags, and sums of squares or scales."""
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
