"""Whether the Hopper kernel can run: on a device, and on a tensor."""

import warnings

import torch
from torch import Tensor

from titan_muon.kernels.configurations import HOPPER_SMALL
from titan_muon.kernels.devices import on_device_of

__all__ = ["fits_copy_engine", "hopper_fault"]


def fits_copy_engine(x: Tensor) -> bool:
    """Whether the copy engine can address (B, M, N): rows or columns dense, 16-byte steps."""
    batch, rows, columns = x.stride()
    dense, row = (columns, rows) if columns == 1 else (rows, columns)
    step = 16 // x.element_size()
    return (
        dense == 1
        and row > 0
        and row % step == 0
        and batch % step == 0
        and (batch > 0 or x.shape[0] == 1)
        and x.data_ptr() % 16 == 0
    )


def hopper_fault(device: torch.device) -> str | None:
    """Return why the Hopper kernel cannot run, or None after one small product came out right.

    It is written in Triton's Gluon dialect, which is experimental: a later Triton may change it.
    Blocks the host once per process and device; while a CUDA graph is captured it cannot be tried.
    """
    if device not in _FAULTS:
        if torch.cuda.is_current_stream_capturing():
            return "it was not tried before a CUDA graph was captured"
        _FAULTS[device] = _try(device)
        if _FAULTS[device] is not None:
            message = f"titan_muon: slower kernels on {device}, because {_FAULTS[device]}"
            warnings.warn(message, stacklevel=2)
    return _FAULTS[device]


_FAULTS: dict[torch.device, str | None] = {}


def _try(device: torch.device) -> str | None:
    # Whatever a new Triton raises, there is another kernel; the warning above says what it was.
    try:
        from titan_muon.kernels import triton_hopper

        x = torch.ones(1, 128, 64, dtype=torch.float16, device=device)
        out = x.new_empty(1, 128, 128)
        with on_device_of(x):
            triton_hopper.multiply(x, x.mT, None, 1.0, 0.0, out, HOPPER_SMALL)
        return None if bool((out == 64).all()) else "a test product came out wrong"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
