"""What the kernels ask of a device."""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

__all__ = ["device_facts", "device_fault", "on_device_of"]


@lru_cache(maxsize=64)
def device_fault(device: torch.device) -> str | None:
    """Return why no Triton kernel of the package runs on a CUDA device, or None."""
    if torch.version.hip is not None:
        return "the Triton kernels are tested on NVIDIA GPUs only, and this is ROCm"
    if not torch.cuda.is_available():
        return "no CUDA device here"
    if find_spec("triton") is None:
        return "triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the Triton kernels need compute capability 8.0, and this GPU has {capability}"
    return None


@lru_cache(maxsize=16)
def device_facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """Return compute capability and number of multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


_HERE = nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Make a tensor's GPU the current one: Triton launches there, wherever its arguments are.

    Args:
        x: Any tensor; one on a CPU changes nothing.
    """
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device_of(x)
