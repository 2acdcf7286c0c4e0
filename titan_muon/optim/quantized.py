"""torchao's quantised tensors as state, and the plain tensors that they consist of."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from titan_muon.kernels.coding import Coding

__all__ = [
    "Quantized",
    "allow_loading",
    "block_size",
    "clone_state",
    "dequantized",
    "is_quantized",
    "pieces",
    "quantized_class",
    "stored",
    "unwrapped",
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
_BY_NAME = {spec.name: chosen for chosen, spec in _FORMATS.items()}


class Quantized(NamedTuple):
    """A quantised tensor, or consecutive blocks of one, without torchao's class around it.

    Every call of a tensor class takes microseconds of the host, even for a shape.

    Args:
        codes: uint8. Shares the tensor's memory.
        scale: (blocks,) float32. Shares the tensor's memory.
        shape: Of the values.
        format: Key of a format.
        signed: Whether values may be negative.
    """

    codes: Tensor
    scale: Tensor
    shape: tuple[int, ...]
    format: str
    signed: bool

    def coding(self, device: torch.device) -> Coding:
        """Return what its codes stand for, for kernels on a device."""
        return _coding(self.format, self.signed, device)


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
    codes, scale = cast(Any, tensor).codes, cast(Any, tensor).scale
    return codes if codes.dtype == torch.uint8 else codes.view(torch.uint8), scale


def unwrapped(tensor: Tensor) -> Tensor | Quantized:
    """Return what a local state tensor consists of if it is quantised, else itself."""
    if not is_quantized(tensor):
        return tensor
    chosen, quantized = _BY_NAME[type(tensor).__name__], cast(Any, tensor)
    codes, scale = stored(tensor)
    shape = quantized._shape if chosen == "int4" else codes.shape
    return Quantized(codes, scale, shape, chosen, getattr(quantized, "signed", True))


def pieces(tensor: Tensor | Quantized, size: int) -> Sequence[Tensor | Quantized]:
    """Return consecutive elements of a local tensor, flat; they share its memory.

    Args:
        tensor: One dim, or quantised.
        size: Elements of each piece but the last; where quantised, a whole number of blocks.
    """
    if isinstance(tensor, Tensor):
        return [tensor] if tensor.numel() <= size else tensor.split(size)
    codes, scale, count = tensor.codes, tensor.scale, math.prod(tensor.shape)
    parts: Iterable[tuple[Tensor, Tensor]] = [(codes, scale)]
    if count > size:
        packed, block = count // codes.numel(), count // scale.numel()
        parts = zip(codes.view(-1).split(size // packed), scale.split(size // block), strict=True)
    starts = range(0, max(count, 1), size)
    return [
        Quantized(*part, (min(size, count - start),), tensor.format, tensor.signed)
        for part, start in zip(parts, starts, strict=True)
    ]


def clone_state(tensor: Tensor) -> Tensor:
    """Return a copy of a local state tensor."""
    if not is_quantized(tensor):
        return tensor.clone()
    codes, scale = stored(tensor)
    return _rebuilt(tensor, codes.clone(), scale.clone(), tensor.shape)


def _rebuilt(like: Tensor, codes: Tensor, scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of the same format from other codes and scales."""
    kind, float32 = cast(Any, type(like)), torch.float32
    chosen = _BY_NAME[kind.__name__]
    if chosen == "float8":
        return kind(codes.view(torch.float8_e4m3fn).view(*shape), scale, float32)
    signed = cast(Any, like).signed
    qmap = _coding(chosen, signed, codes.device).qmap
    if chosen == "int4":
        return kind(codes, scale, qmap, signed, tuple(shape), float32)
    return kind(codes.view(*shape), scale, qmap, signed, float32)


@lru_cache(maxsize=64)
def _coding(chosen: str, signed: bool, device: torch.device) -> Coding:
    """Return what the codes of a format stand for, its tensors on a device."""
    block = block_size(chosen)
    if chosen == "float8":
        return Coding(block)
    qmap = quantized_class(chosen).zeros((block,), signed, block, device).qmap
    return Coding(block, qmap, (qmap[1:] + qmap[:-1]) / 2)
