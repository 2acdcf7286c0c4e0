"""Launches of Triton kernels past Triton's binder, for where the host is what a step waits for.

The binder takes longer to find what a kernel compiled to than many of these kernels run (beside an
H200, the Hopper kernel: 52 to 80 microseconds through it, 20 past it), and a step on many ranks
launches dozens of them for a few milliseconds of work.

Kernels are told apart by all that Triton may have specialised on: numbers enter whole and addresses
by their last bits, so that no rule of Triton's has to be known here but that floats are not
specialised on. Its switches for debugging and instrumentation count at a kernel's first launch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Launch", "described", "launch", "remember", "repeat"]

_COMPILED: dict[tuple[object, ...], Any] = {}
_KNOWN: dict[tuple[object, ...], "Launch"] = {}
_MOST = 4096
_ALIGNMENT = 256


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    **options: int,
) -> Any:
    """Launch a kernel on the current device and stream.

    Args:
        kernel: Triton's.
        grid: One to three numbers of programs.
        arguments: All that are no constants, in its order: tensors, numbers, None. Floats are not
            specialised on.
        constants: Its constants, in its order.
        **options: ``num_warps`` and such.

    Returns:
        What Triton compiled; None in its interpreter, which compiles nothing.
    """
    kinds, values = described(*arguments)
    key = (id(kernel), *kinds, *constants.values(), *options.items())
    compiled = _COMPILED.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*values, *constants.values())
        return compiled
    if kernel.arg_names[len(arguments) :] != list(constants):
        raise AssertionError(f"constants {list(constants)} of {kernel.arg_names}")
    compiled = kernel[grid](*arguments, **constants, **options)
    if compiled is not None:
        _keep(_COMPILED, key, compiled)
    return compiled


class Launch:
    """A launch of what was compiled already, on the current stream, with operands anywhere.

    Args:
        compiled: What Triton returned when it launched the kernel.
        grid: One to three numbers of programs.
        operands: From their addresses, the arguments that depend on these: the first ones.
        rest: All other arguments, constants too.
    """

    __slots__ = ("_operands", "_rest", "_run")

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        operands: Callable[[Sequence[int]], Sequence[Any]],
        rest: Sequence[Any],
    ) -> None:
        self._run = compiled[(*grid, 1, 1)[:3]]
        self._operands, self._rest = operands, rest

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch.

        Args:
            addresses: Of the operands, aligned as those of the first launch.
        """
        self._run(*self._operands(addresses), *self._rest)


def described(*arguments: Any) -> tuple[list[object], list[Any]]:
    """Return what a compilation depends on, one entry an argument, and tensors as addresses."""
    kinds: list[object] = []
    values: list[Any] = []
    for x in arguments:
        if isinstance(x, Tensor):
            address = x.data_ptr()
            kinds.append((x.dtype, x.get_device(), address % _ALIGNMENT))
            values.append(address)
        else:
            kinds.append(float if isinstance(x, float) else x)
            values.append(x)
    return kinds, values


def repeat(key: tuple[object, ...], addresses: Sequence[int]) -> bool:
    """Repeat the launch that was remembered, and return whether there was one.

    Args:
        key: All that it depends on beside the places of operands; these as :func:`described` has
            them, with shapes and strides.
        addresses: Of the operands.
    """
    known = _KNOWN.get(key)
    if known is None:
        return False
    known(addresses)
    return True


def remember(key: tuple[object, ...], known: Launch | None) -> None:
    """Remember a launch; None changes nothing."""
    # While a CUDA graph is captured nothing can be tried or timed: that choice may be a makeshift.
    if known is not None and not torch.cuda.is_current_stream_capturing():
        _keep(_KNOWN, key, known)


def _keep(table: dict[tuple[object, ...], Any], key: tuple[object, ...], value: Any) -> None:
    if len(table) >= _MOST:
        table.clear()
    table[key] = value
