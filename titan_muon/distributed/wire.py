"""Headers of parcels, and the power-of-two scale of 16-bit ones.

A 16-bit parcel is multiplied by the power of two that brings its largest element near the top of
the range, so that its precision does not depend on its scale; the exponent travels in the header.
Powers of two round nothing, so the scaling itself is exact.
"""

import torch
from torch import Tensor

__all__ = ["exponents", "power_of_two", "read_headers", "write_headers"]

# float16 reaches 2**15; one power less leaves room for rounding.
_TOP = 14
_LOWEST, _HIGHEST = -100, 126
_FIELDS = 3


def write_headers(packets: Tensor, index: Tensor, *fields: Tensor) -> None:
    """Write the headers of many parcels.

    Args:
        packets: All packets of one end, uint8; modified.
        index: (P,) int64, position of each header in float32 elements.
        fields: Up to three (P,) float32: exponent, flag, and sum of squares or scale.
    """
    values = packets.view(torch.float32)
    for number, field in enumerate(fields):
        values[index + number] = field


def read_headers(packets: Tensor, index: Tensor) -> Tensor:
    """Return (3, P) float32: exponents, flags, and sums of squares or scales."""
    values = packets.view(torch.float32)
    return torch.stack([values[index + number] for number in range(_FIELDS)])


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
