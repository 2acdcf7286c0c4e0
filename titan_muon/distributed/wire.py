"""From rectangles of a tensor to a parcel and back, with a power-of-two scale in 16-bit dtypes.

A 16-bit parcel is multiplied by the power of two that brings its largest element near the top of
the range, so that its precision does not depend on its scale; the exponent travels in the header.
Powers of two round nothing, so float32 parcels and the scaling itself are exact.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from titan_muon.distributed.geometry import Segment
from titan_muon.distributed.packets import HEADER

__all__ = ["body_views", "header_of", "pack", "power_of_two", "unit_views", "local_views"]

# float16 reaches 2**15; one power less leaves room for the sum of rounding errors.
_TOP = 14
_LOWEST, _HIGHEST = -100, 126


def header_of(buffer: Tensor, offset: int) -> Tensor:
    """Return the four float32 of a parcel's header as a view of the byte buffer."""
    return buffer[offset : offset + HEADER].view(torch.float32)


def body_views(
    buffer: Tensor, offset: int, dtype: torch.dtype, pieces: Sequence[Segment]
) -> Iterator[Tensor]:
    """Yield the rectangles of a parcel's body, as views of the byte buffer.

    Args:
        buffer: All packets of one end, uint8.
        offset: First byte of the body.
        dtype: Dtype of the body.
        pieces: The rectangles in packed order.
    """
    for piece in pieces:
        size = piece.rows * piece.columns * dtype.itemsize
        yield buffer[offset : offset + size].view(dtype).view(piece.rows, piece.columns)
        offset += size


def local_views(flat: Tensor, pieces: Sequence[Segment]) -> list[Tensor]:
    """Return the rectangles as views of a flat local tensor."""
    return [
        flat.as_strided(
            (p.rows, p.columns), (p.local_stride, 1), flat.storage_offset() + p.local_offset
        )
        for p in pieces
    ]


def unit_views(matrix: Tensor, pieces: Sequence[Segment]) -> list[Tensor]:
    """Return the rectangles as views of a contiguous (M, N) matrix."""
    columns = matrix.shape[-1]
    return [
        matrix.as_strided(
            (p.rows, p.columns), (columns, 1), matrix.storage_offset() + p.unit_offset
        )
        for p in pieces
    ]


def pack(
    views: Sequence[Tensor], bodies: Sequence[Tensor], header: Tensor, *, scaled: bool
) -> None:
    """Copy rectangles into a parcel and set the exponent in its header.

    Args:
        views: Source rectangles, any float dtype. Not modified.
        bodies: Target rectangles of the same shapes.
        header: Header of the parcel.
        scaled: Whether to scale; otherwise values are only cast.
    """
    if not scaled:
        header[0] = 0.0
        for body, view in zip(bodies, views, strict=True):
            body.copy_(view)
        return
    largest = [view.abs().amax() for view in views]
    top = largest[0] if len(largest) == 1 else torch.stack(largest).amax()
    exponent = _exponent(top.to(torch.float32)) - _TOP
    header[0] = exponent
    scale = power_of_two(-exponent)
    for body, view in zip(bodies, views, strict=True):
        body.copy_(view * scale)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2.0 ** exponent`` exactly, as float32, for integers within its normal range."""
    bits = (exponent.to(torch.int32).clamp(-126, 127) + 127) << 23
    return bits.view(torch.float32)


def _exponent(value: Tensor) -> Tensor:
    """Return floor(log2(value)) of non-negative float32; 0 for inf and NaN, which travel on."""
    exponent = (value.view(torch.int32) >> 23) - 127
    finite = exponent < 128
    return torch.where(finite, exponent.clamp(_LOWEST, _HIGHEST), torch.zeros_like(exponent))
