"""A stand-in for ``torch.cuda`` that answers what torchtitan asks of its device module."""

import os
import platform
import resource
import sys
import types
from typing import Any

import torch._utils

_DEVICE_TYPE = "cpu"
_MODULE_NAME = "titan_muon_cpu_device"


class _Properties:
    """The part of ``torch.cuda.get_device_properties`` that torchtitan reads."""

    def __init__(self, total_memory: int) -> None:
        self.name = _processor_name()
        self.total_memory = total_memory


def install_device_module() -> None:
    """Make ``torchtitan.tools.utils`` and all that copied from it name the CPU as the device."""
    device_module = _build_device_module()
    questions = {
        "_get_available_device_type": lambda: _DEVICE_TYPE,
        "_get_device_module": lambda device_type: device_module,
    }
    originals = {name: getattr(torch._utils, name) for name in questions}
    vars(torch._utils).update(questions)
    try:
        import torchtitan.tools.utils  # noqa: F401  (asks both questions when first imported)
    finally:
        vars(torch._utils).update(originals)
    # Modules imported before this call hold copies of what torchtitan.tools.utils found then.
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and "device_module" in vars(module):
            vars(module).update(device_type=_DEVICE_TYPE, device_module=device_module)


def _build_device_module() -> types.ModuleType:
    module = types.ModuleType(_MODULE_NAME, "torchtitan's device module on a CPU.")
    vars(module).update(
        set_device=lambda device: None,
        current_device=lambda: 0,
        # One device for every process: torchtitan then keeps device index 0 on all local ranks.
        device_count=lambda: 1,
        is_available=lambda: True,
        synchronize=lambda device=None: None,
        get_device_name=lambda device=None: _processor_name(),
        get_device_properties=lambda device=None: _Properties(_total_memory()),
        memory_stats=lambda device=None: _memory_stats(),
        reset_peak_memory_stats=lambda device=None: None,
        empty_cache=lambda: None,
    )
    return module


def _processor_name() -> str:
    return platform.processor() or platform.machine() or "CPU"


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_stats() -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024
    return {
        "active_bytes.all.peak": peak_bytes,
        "reserved_bytes.all.peak": peak_bytes,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }
