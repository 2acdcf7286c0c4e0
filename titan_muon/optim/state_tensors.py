"""State tensors of every state dtype: which are quantised, made and copied.

[Note: quantised state]
``int8``, ``int4`` and ``float8`` state lies in torchao's tensor classes: codes, and one float32
scale a block of consecutive elements of the local shard. A parameter is quantised if it has two
dims or more and at least 4096 elements, whatever its layout; then every rank's shard must be a
whole number of blocks, so that all ranks agree and no block crosses a shard. What is stored is what
is used: a step reads values back after it has rounded them.
"""

from typing import Any, cast

import torch
from torch import Tensor

from titan_muon.distributed.layout import is_dtensor, layout_of, shard_sizes
from titan_muon.distributed.tensors import compute_device, local_of, with_local
from titan_muon.kernels.quantize import encode
from titan_muon.optim.options import QUANTIZED, resolve_state_dtype
from titan_muon.optim.quantized import (
    Quantized,
    block_size,
    dequantized,
    is_quantized,
    quantized_class,
    stored,
    unwrapped,
)

__all__ = [
    "arithmetic_dtype",
    "check_state_fits",
    "copy_state",
    "element_bytes",
    "new_state",
    "quantized_as",
]


_FEWEST_ELEMENTS = 4096


def quantized_as(param: Tensor, state_dtype: str) -> str | None:
    """Return the format in which a parameter's state is quantised, None where it is not.

    Args:
        param: Plain tensor or DTensor. Not read.
        state_dtype: The option.
    """
    small = param.ndim < 2 or param.numel() < _FEWEST_ELEMENTS
    return None if small or state_dtype not in QUANTIZED else state_dtype


def check_state_fits(param: Tensor, state_dtype: str, label: str) -> None:
    """Refuse a parameter whose shards are no whole number of blocks; the same on every rank.

    Args:
        param: Plain tensor or DTensor. Not read.
        state_dtype: The option.
        label: Start of the message.

    Raises:
        ValueError: Names the shard's size and the block's.
        ImportError: torchao is not installed.
    """
    chosen = quantized_as(param, state_dtype)
    if chosen is None:
        return
    block = block_size(chosen)
    odd = [size for size in shard_sizes(layout_of(param, label)) if size % block]
    if odd:
        raise ValueError(
            f"{label}: shape {tuple(param.shape)} leaves {min(odd)} elements on a rank, and "
            f"state_dtype = {chosen!r} needs whole blocks of {block}; give this parameter a param "
            "group with state_dtype = 'bfloat16' or 'float32'."
        )
    quantized_class(chosen)


def new_state(
    param: Tensor, state_dtype: str, *, signed: bool = True, dense: bool = True
) -> Tensor:
    """Return a zero state tensor of a parameter's shape, placed like it.

    Args:
        param: Plain tensor or DTensor. Not read.
        state_dtype: The option.
        signed: Whether values may be negative.
        dense: Row-major whatever the parameter's strides, as rectangles are cut out of flat shards;
            otherwise with its strides, unless it is quantised.
    """
    dtype, chosen = resolve_state_dtype(state_dtype, param.dtype), quantized_as(param, state_dtype)
    local = local_of(param)
    # An empty shard has no block; a plain empty tensor holds its place.
    if chosen is None or not local.numel():
        return _plain_zeros(param, dtype, dense=dense)
    kind = quantized_class(chosen)
    options: dict[str, Any] = {} if chosen == "float8" else {"signed": signed}
    options["block_size"] = block_size(chosen)
    zeros = kind.zeros(local.shape, device=local.device, dtype=torch.float32, **options)
    # A DTensor puts its shard on the mesh's device, wherever the parameter's lies.
    return with_local(param, zeros).to(param.device) if is_dtensor(param) else zeros


def _plain_zeros(param: Tensor, dtype: torch.dtype, *, dense: bool) -> Tensor:
    strides = torch.contiguous_format if dense else torch.preserve_format
    zeros = torch.zeros_like(param, dtype=dtype, memory_format=strides).detach()
    if param.device.type == "cpu" and compute_device(param).type == "cuda":
        with torch.no_grad():
            local = local_of(zeros)
            # Pinned, so that it can travel beside the arithmetic.
            local.set_(cast(Any, local.pin_memory()))
    return zeros


def arithmetic_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a local state tensor is read and written."""
    return torch.float32 if is_quantized(tensor) else tensor.dtype


def element_bytes(tensor: Tensor) -> float:
    """Return the memory of one element of a state tensor, its share of the scales included."""
    local = local_of(tensor)
    if not is_quantized(local):
        return local.dtype.itemsize
    return sum(part.numel() * part.itemsize for part in stored(local)) / local.numel()


def copy_state(target: Tensor, source: Tensor) -> None:
    """Copy into a live state tensor, quantised in any way or not; the same format keeps all bits.

    Args:
        target: Plain tensor or DTensor; modified.
        source: Of its shape and placements. Not modified.
    """
    into, out_of = local_of(target), local_of(source)
    if type(into) is type(out_of) and is_quantized(into):
        parts = list(zip(stored(into), stored(out_of), strict=True))
        if all(a.shape == b.shape for a, b in parts):
            for a, b in parts:
                a.copy_(b)
            return
    out_of, parts = dequantized(out_of), unwrapped(into)
    if isinstance(parts, Quantized):
        values = out_of.to(into.device, torch.float32).reshape(-1)
        encode(values, [parts.codes, parts.scale], parts.coding(into.device))
    else:
        into.copy_(out_of)
