"""torchao's quantised tensors as state: their parts, and values read and written in batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

__all__ = [
    "allow_loading",
    "block_size",
    "clone_state",
    "decode",
    "dequantized",
    "encode",
    "is_quantized",
    "quantized_class",
    "section",
    "stored",
]


@dataclass(frozen=True)
class _Format:
    module: str
    name: str
    block: int


_FORMATS = {
    "int8": _Format("torchao.optim.subclass_8bit", "OptimState8bit", 256),
    "int4": _Format("torchao.optim.subclass_4bit", "OptimState4bit", 128),
    "float8": _Format("torchao.optim.subclass_fp8", "OptimStateFp8", 256),
}
# Below this a block counts as zero; far from where float32 loses precision.
_SMALLEST_SCALE = 1e-30


def block_size(chosen: str) -> int:
    """Return how many elements share a scale in a format."""
    return _FORMATS[chosen].block


@lru_cache(maxsize=8)
def quantized_class(chosen: str) -> Any:
    """Return torchao's class of a format, made copyable.

    Raises:
        ImportError: torchao is not installed.
    """
    from importlib import import_module

    spec = _FORMATS[chosen]
    try:
        kind = getattr(import_module(spec.module), spec.name)
    except ImportError as error:
        raise ImportError(
            f"state_dtype = {chosen!r} needs torchao: pip install torchao, or use 'bfloat16'"
        ) from error
    aten = torch.ops.aten

    @kind.implements(aten.clone.default)
    def _(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        return clone_state(args[0])

    @kind.implements(aten.zeros_like.default)
    def _(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        codes, scale = stored(args[0])
        return _rebuilt(args[0], codes.clone(), torch.zeros_like(scale), args[0].shape)

    # DCP's asynchronous saves fill the parts of such a tensor with copies.
    @kind.implements(aten.new_empty.default)
    def _(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        device = kwargs.get("device") or args[0].device
        codes, scale = (torch.empty_like(part, device=device) for part in stored(args[0]))
        return _rebuilt(args[0], codes, scale, torch.Size(args[1]))

    return kind


def is_quantized(tensor: Tensor) -> bool:
    """Whether a local tensor is one of torchao's."""
    kind = type(tensor)
    # Every step asks it of every state tensor, and hardly any is one.
    return kind is not Tensor and kind.__module__.startswith("torchao.optim.subclass_")


def dequantized(tensor: Tensor) -> Tensor:
    """Return the values of a local state tensor: itself, where it is not quantised."""
    return cast(Any, tensor).dequantize() if is_quantized(tensor) else tensor


def allow_loading() -> None:
    """Let torch.load read quantised state with ``weights_only``."""
    for chosen in _FORMATS:
        quantized_class(chosen)


def stored(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the plain tensors that a local state tensor consists of: codes and scales, or itself.

    They share its memory. Codes are bytes in every format.
    """
    if not is_quantized(tensor):
        return (tensor,)
    quantized = cast(Any, tensor)
    return quantized.codes.view(torch.uint8), quantized.scale


def section(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Return the elements from ``start`` to ``stop`` of a flat local tensor; shares its memory.

    Args:
        tensor: One dim; where it is quantised, the section is a whole number of blocks.
        start, stop: Half-open range.
    """
    if not is_quantized(tensor):
        return tensor[start:stop]
    codes, scale = stored(tensor)
    block, packed = cast(Any, tensor).block_size, 2 if _is_packed(tensor) else 1
    part = codes[start // packed : stop // packed]
    return _rebuilt(tensor, part, scale[start // block : stop // block], (stop - start,))


def clone_state(tensor: Tensor) -> Tensor:
    """Return a copy of a local state tensor."""
    if not is_quantized(tensor):
        return tensor.clone()
    codes, scale = stored(tensor)
    return _rebuilt(tensor, codes.clone(), scale.clone(), tensor.shape)


def decode(like: Sequence[Tensor], parts: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """Return the float32 values of quantised tensors, all of one format, as views of one tensor.

    Args:
        like: Local state tensors. Their values are not read.
        parts: What :func:`stored` returned of each, on any one device.
    """
    first = like[0]
    codes, scales = (_joined([part[i] for part in parts]) for i in (0, 1))
    count = codes.numel() * (2 if _is_packed(first) else 1)
    flat = cast(Any, _rebuilt(first, codes, scales, (count,))).dequantize().view(-1)
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def encode(like: Sequence[Tensor], values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise values by blocks.

    Args:
        like: Local state tensors, all of one format. Their values are not read.
        values: (elements of all of them,) float32. Not modified.

    Returns:
        Codes and scales of all of them, one after another.
    """
    first = cast(Any, like[0])
    blocks = values.view(-1, first.block_size)
    scale = blocks.abs().amax(dim=1).clamp_min_(_SMALLEST_SCALE)
    if not hasattr(first, "qmap"):
        dtype = torch.float8_e4m3fn
        scale /= torch.finfo(dtype).max
        return (blocks / scale.view(-1, 1)).to(dtype).view(torch.uint8).view(-1), scale
    middles = _middles(type(first).__name__, first.signed, values.device)
    # The nearest entry of the map: one search, where torchao's own way takes thirty passes.
    codes = torch.bucketize(blocks / scale.view(-1, 1), middles, out_int32=True, right=True)
    codes = codes.to(torch.uint8).view(-1)
    if _is_packed(like[0]):
        codes = (codes[::2] << 4) | codes[1::2]
    return codes, scale


def _rebuilt(like: Tensor, codes: Tensor, scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of the same format from other codes and scales."""
    kind, float32 = cast(Any, type(like)), torch.float32
    if not hasattr(like, "qmap"):
        return kind(codes.view(torch.float8_e4m3fn).view(*shape), scale, float32)
    quantized = cast(Any, like)
    qmap = _on(quantized.qmap, kind.__name__, quantized.signed, codes.device)
    if _is_packed(like):
        return kind(codes, scale, qmap, quantized.signed, tuple(shape), float32)
    return kind(codes.view(*shape), scale, qmap, quantized.signed, float32)


def _is_packed(tensor: Tensor) -> bool:
    """Whether two codes share a byte."""
    return type(tensor).__name__ == _FORMATS["int4"].name


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.view(-1) for tensor in tensors]
    return torch.cat(flat) if len(flat) > 1 else flat[0]


_MAPS: dict[tuple[str, bool, torch.device], Tensor] = {}


def _on(qmap: Tensor, name: str, signed: bool, device: torch.device) -> Tensor:
    """Return a map on a device; copied there once."""
    key = (name, signed, device)
    if key not in _MAPS:
        _MAPS[key] = qmap.to(device, copy=True)
    return _MAPS[key]


@lru_cache(maxsize=32)
def _middles(name: str, signed: bool, device: torch.device) -> Tensor:
    """Return where the map of a format turns from one entry to the next."""
    chosen = next(f for f, spec in _FORMATS.items() if spec.name == name)
    qmap = quantized_class(chosen).zeros((block_size(chosen),), signed=signed, device=device).qmap
    return (qmap[1:] + qmap[:-1]) / 2
