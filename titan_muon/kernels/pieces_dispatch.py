"""Which implementation of the operations on pieces runs for which tensors."""

from collections.abc import Iterable
from typing import cast

import torch

from titan_muon.kernels import pieces_reference
from titan_muon.kernels.devices import device_fault

__all__ = ["PieceOperations", "select_piece_operations"]

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class PieceOperations:
    """The functions of ``pieces_reference``, as the type of any module that has them."""

    FUSES_NORM: bool
    advance = staticmethod(pieces_reference.advance)
    emit = staticmethod(pieces_reference.emit)
    measure = staticmethod(pieces_reference.measure)
    merge = staticmethod(pieces_reference.merge)
    statistics = staticmethod(pieces_reference.statistics)
    copy_to_flat = staticmethod(pieces_reference.copy_to_flat)
    copy_to_tensors = staticmethod(pieces_reference.copy_to_tensors)
    write = staticmethod(pieces_reference.write)


def select_piece_operations(device: torch.device, dtypes: Iterable[torch.dtype]) -> PieceOperations:
    """Return the Triton kernels where they can run, else the torch functions.

    Args:
        device: Where the matrices are computed.
        dtypes: Dtypes of all tensors involved, and device types other than ``device`` excluded by
            the caller.
    """
    if (
        device.type == "cuda"
        and all(d in _KERNEL_DTYPES for d in dtypes)
        and device_fault(device) is None
    ):
        from titan_muon.kernels import triton_pieces

        return cast(PieceOperations, triton_pieces)
    return cast(PieceOperations, pieces_reference)
