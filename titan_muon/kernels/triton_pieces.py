# pyrefly: ignore-errors
# Triton is a language of its own: its values have no Python types.
"""Triton kernels of the operations on pieces; see ``pieces_reference`` for what they compute.

All of them are bound by memory. One program handles one tile; which one, it reads from the table.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_muon.kernels.devices import on_device_of
from titan_muon.kernels.launcher import launch
from titan_muon.kernels.pieces import TILE, PieceTable, TensorList, TileClass

# Runs only where some ranks lack a gradient.
from titan_muon.kernels.pieces_reference import merge

__all__ = [
    "advance",
    "copy_to_flat",
    "copy_to_tensors",
    "emit",
    "measure",
    "merge",
    "statistics",
    "write",
]

# One pass less over every matrix; see ``pieces_reference``.
FUSES_NORM = True
_WARPS = 4


@triton.jit
def _tile(tiles, segments, COLUMNS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    entry = tiles + tl.program_id(0).to(tl.int64) * 4
    segment = segments + tl.load(entry).to(tl.int64) * 8
    first_row, first_column = tl.load(entry + 1), tl.load(entry + 2)
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    width = tl.load(segment + 2)
    tensor_rows = tl.load(segment + 3) + row * tl.load(segment + 4)
    flat_rows = tl.load(segment + 5) + row * tl.load(segment + 6)
    if ALIGNED:
        tensor_rows = tl.multiple_of(tensor_rows, [8])
        flat_rows = tl.multiple_of(flat_rows, [8])
        column = tl.max_contiguous(tl.multiple_of(column, [8]), [COLUMNS])
        # Else every element would have a mask of its own, and would be loaded on its own.
        width = tl.multiple_of(width, 8)
    inside = (row < tl.load(segment + 1))[:, None] & (column < width)[None, :]
    return (
        tl.load(segment),
        tl.load(segment + 7),
        tl.load(entry + 3),
        tensor_rows[:, None] + column[None, :],
        flat_rows[:, None] + column[None, :],
        inside,
    )


@triton.jit
def _pointer(pointers, index, like, ALIGNED: tl.constexpr):
    pointer = tl.load(pointers + index).to(like.dtype)
    # The compiler forgets what it knows of an integer that becomes a pointer.
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _store_statistics(partial, slot, value, inside):
    value = tl.where(inside, value, 0.0)
    tl.store(partial + slot * 2, tl.max(tl.max(tl.abs(value), 1), 0))
    tl.store(partial + slot * 2 + 1, tl.sum(tl.sum(value * value, 1), 0))


@triton.jit
def _advance_kernel(
    grads, momenta, grad_like, momentum_like, partial, keep, tiles, segments, momentum, sign,
    ADVANCE: tl.constexpr, NESTEROV: tl.constexpr, KEEP: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    tensor, _, slot, offset, _, inside = _tile(tiles, segments, COLUMNS, ROWS, ALIGNED)
    g = tl.load(_pointer(grads, tensor, grad_like, ALIGNED) + offset, mask=inside, other=0.0)
    pointer = _pointer(momenta, tensor, momentum_like, ALIGNED) + offset
    m = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    g = g.to(tl.float32) * sign
    if ADVANCE:
        # What later passes will read is the stored value, so measure that one.
        stored = (m + (1.0 - momentum) * (g - m)).to(momentum_like.dtype.element_ty)
        written = inside
        if KEEP:
            written = tl.where(tl.load(keep) > 0, inside, False)
        tl.store(pointer, stored, mask=written)
        m = stored.to(tl.float32)
    direction = g + momentum * (m - g) if NESTEROV else m
    _store_statistics(partial, slot, direction, inside)


@triton.jit
def _emit_kernel(
    grads, momenta, grad_like, momentum_like, flat, factors, tiles, segments, momentum, sign,
    NESTEROV: tl.constexpr, SCALED: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    tensor, piece, _, offset, target, inside = _tile(tiles, segments, COLUMNS, ROWS, ALIGNED)
    m = tl.load(_pointer(momenta, tensor, momentum_like, ALIGNED) + offset, mask=inside, other=0.0)
    m = m.to(tl.float32)
    if NESTEROV:
        g = tl.load(_pointer(grads, tensor, grad_like, ALIGNED) + offset, mask=inside, other=0.0)
        g = g.to(tl.float32) * sign
        m = g + momentum * (m - g)
    if SCALED:
        m = m * tl.load(factors + piece)
    tl.store(flat + target, m.to(flat.dtype.element_ty), mask=inside)


@triton.jit
def _statistics_kernel(
    tensors, like, partial, tiles, segments,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    tensor, _, slot, offset, _, inside = _tile(tiles, segments, COLUMNS, ROWS, ALIGNED)
    value = tl.load(_pointer(tensors, tensor, like, ALIGNED) + offset, mask=inside, other=0.0)
    _store_statistics(partial, slot, value.to(tl.float32), inside)


@triton.jit
def _reduce_kernel(partial, bounds, result, CHUNK: tl.constexpr):
    piece = tl.program_id(0)
    start, stop = tl.load(bounds + piece), tl.load(bounds + piece + 1)
    largest = tl.zeros((CHUNK,), tl.float32)
    squares = tl.zeros((CHUNK,), tl.float32)
    for first in range(start, stop, CHUNK):
        slot = first + tl.arange(0, CHUNK)
        inside = slot < stop
        value = tl.load(partial + slot * 2, mask=inside, other=0.0)
        largest = tl.maximum(largest, value)
        squares += tl.load(partial + slot * 2 + 1, mask=inside, other=0.0)
    tl.store(result + piece * 2, tl.max(largest, 0))
    tl.store(result + piece * 2 + 1, tl.sum(squares, 0))


@triton.jit
def _copy_kernel(
    tensors, like, flat, factors, keep, tiles, segments,
    TO_FLAT: tl.constexpr, SCALED: tl.constexpr, KEEP: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    tensor, piece, _, offset, target, inside = _tile(tiles, segments, COLUMNS, ROWS, ALIGNED)
    pointer = _pointer(tensors, tensor, like, ALIGNED) + offset
    value = tl.load(pointer if TO_FLAT else flat + target, mask=inside, other=0.0)
    if SCALED:
        value = value.to(tl.float32) * tl.load(factors + piece)
    if TO_FLAT:
        tl.store(flat + target, value.to(flat.dtype.element_ty), mask=inside)
    else:
        if KEEP:
            inside = tl.where(tl.load(keep + piece) > 0, inside, False)
        tl.store(pointer, value.to(like.dtype.element_ty), mask=inside)


@triton.jit
def _write_kernel(
    weights, like, flat, factors, keep, tiles, segments, lr, weight_decay,
    LR_TENSOR: tl.constexpr, CAUTIOUS: tl.constexpr, KEEP: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    tensor, piece, _, offset, source, inside = _tile(tiles, segments, COLUMNS, ROWS, ALIGNED)
    rate = tl.load(lr).to(tl.float32) if LR_TENSOR else lr
    pointer = _pointer(weights, tensor, like, ALIGNED) + offset
    p = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(flat + source, mask=inside, other=0.0).to(tl.float32) * tl.load(factors + piece)
    decay = p * (rate * weight_decay)
    if CAUTIOUS:
        decay = tl.where(u * p > 0, decay, 0.0)
    if KEEP:
        inside = tl.where(tl.load(keep + piece) > 0, inside, False)
    tl.store(pointer, (p - u * rate - decay).to(like.dtype.element_ty), mask=inside)


def advance(
    grads: Sequence[Tensor], momenta: Sequence[Tensor], table: PieceTable, *,
    momentum: float, nesterov: bool, sign: float, keep: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See ``pieces_reference.advance``; all gradients of one dtype, all momenta of one dtype."""
    return _advance(grads, momenta, table, keep, True, momentum, nesterov, sign)


def measure(
    grads: Sequence[Tensor], momenta: Sequence[Tensor], table: PieceTable, *,
    momentum: float, nesterov: bool, sign: float,
) -> Tensor:  # fmt: skip
    """See ``pieces_reference.measure``; all gradients of one dtype, all momenta of one dtype."""
    return _advance(grads, momenta, table, None, False, momentum, nesterov, sign)


def emit(
    grads: Sequence[Tensor], momenta: Sequence[Tensor], flat: Tensor, table: PieceTable,
    factors: Tensor | None, *, momentum: float, nesterov: bool, sign: float,
) -> None:  # fmt: skip
    """See ``pieces_reference.emit``; all gradients of one dtype, all momenta of one dtype."""
    on = table.on(flat.device)
    g, m = _pointers(grads, table), _pointers(momenta, table)
    with on_device_of(flat):
        for tiles in on.classes:
            arguments = (
                g.table, m.table, g.like, m.like, flat, factors, tiles.tiles, on.segments,
                momentum, sign,
            )  # fmt: skip
            flags = {"NESTEROV": nesterov, "SCALED": factors is not None}
            _launch(_emit_kernel, arguments, flags, tiles, g, m)


def statistics(tensors: Sequence[Tensor], table: PieceTable) -> Tensor:
    """See ``pieces_reference.statistics``; all tensors of one dtype."""
    device = tensors[table.tensors[0]].device
    on, partial, x = table.on(device), _partials(table, device), _pointers(tensors, table)
    with on_device_of(partial):
        for tiles in on.classes:
            arguments = (x.table, x.like, partial, tiles.tiles, on.segments)
            _launch(_statistics_kernel, arguments, {}, tiles, x)
        return _reduce(partial, table, device)


def copy_to_flat(
    tensors: Sequence[Tensor], flat: Tensor, table: PieceTable, factors: Tensor | None = None
) -> None:
    """See ``pieces_reference.copy_to_flat``; all tensors of one dtype."""
    _copy(tensors, flat, table, factors, None, to_flat=True)


def copy_to_tensors(
    flat: Tensor, tensors: Sequence[Tensor], table: PieceTable,
    factors: Tensor | None = None, keep: Tensor | None = None,
) -> None:  # fmt: skip
    """See ``pieces_reference.copy_to_tensors``; all tensors of one dtype."""
    _copy(tensors, flat, table, factors, keep, to_flat=False)


def write(
    params: Sequence[Tensor], flat: Tensor, table: PieceTable, factors: Tensor, *,
    lr: float | Tensor, weight_decay: float, cautious: bool, keep: Tensor | None = None,
) -> None:  # fmt: skip
    """See ``pieces_reference.write``; all weights of one dtype, a tensor lr on their device."""
    on, p = table.on(flat.device), _pointers(params, table)
    with on_device_of(flat):
        for tiles in on.classes:
            arguments = (
                p.table, p.like, flat, factors, keep, tiles.tiles, on.segments, lr, weight_decay,
            )  # fmt: skip
            flags = {"LR_TENSOR": isinstance(lr, Tensor), "CAUTIOUS": cautious}
            _launch(_write_kernel, arguments, {**flags, "KEEP": keep is not None}, tiles, p)


def _advance(
    grads: Sequence[Tensor], momenta: Sequence[Tensor], table: PieceTable, keep: Tensor | None,
    advance: bool, momentum: float, nesterov: bool, sign: float,
) -> Tensor:  # fmt: skip
    device = momenta[table.tensors[0]].device
    on, partial = table.on(device), _partials(table, device)
    g, m = _pointers(grads, table), _pointers(momenta, table)
    with on_device_of(partial):
        for tiles in on.classes:
            arguments = (
                g.table, m.table, g.like, m.like, partial, keep, tiles.tiles, on.segments,
                momentum, sign,
            )  # fmt: skip
            flags = {"ADVANCE": advance, "NESTEROV": nesterov, "KEEP": keep is not None}
            _launch(_advance_kernel, arguments, flags, tiles, g, m)
        return _reduce(partial, table, device)


def _copy(
    tensors: Sequence[Tensor], flat: Tensor, table: PieceTable,
    factors: Tensor | None, keep: Tensor | None, *, to_flat: bool,
) -> None:  # fmt: skip
    on, x = table.on(flat.device), _pointers(tensors, table)
    with on_device_of(flat):
        for tiles in on.classes:
            arguments = (x.table, x.like, flat, factors, keep, tiles.tiles, on.segments)
            flags = {"TO_FLAT": to_flat, "SCALED": factors is not None, "KEEP": keep is not None}
            _launch(_copy_kernel, arguments, flags, tiles, x)


class _Pointers:
    """Addresses of a list of tensors on their device, and an empty tensor of their dtype.

    While a CUDA graph is captured the addresses become constants of the graph: a copy from here
    would read host memory again at every replay.
    """

    def __init__(
        self, addresses: tuple[int, ...], dtype: torch.dtype, device: torch.device, captured: bool
    ) -> None:
        self.like = torch.empty(0, dtype=dtype, device=device)
        self.aligned = all(address % 16 == 0 for address in addresses)
        if captured:
            self.table = torch.empty(len(addresses), dtype=torch.int64, device=device)
            for place, address in zip(self.table, addresses, strict=True):
                place.fill_(address)
        else:
            self.table = torch.tensor(addresses, dtype=torch.int64).to(device, non_blocking=True)


# Parameters and states keep their addresses, gradients mostly do; entries leave oldest first.
_POINTERS: dict[tuple[object, ...], _Pointers] = {}
_MOST_POINTERS = 128
# Graphs read these at every replay.
_CAPTURED: dict[tuple[object, ...], _Pointers] = {}


def _pointers(tensors: Sequence[Tensor], table: PieceTable) -> _Pointers:
    first = tensors[table.tensors[0]]
    addresses = tensors.addresses if isinstance(tensors, TensorList) else None
    addresses = addresses or tuple(t.data_ptr() for t in tensors)
    key = (addresses, first.dtype, first.device)
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        if key not in _POINTERS and key not in _CAPTURED:
            # Lives in the memory of the graph, which alone fills it.
            return _Pointers(*key, captured=True)
        return _CAPTURED.setdefault(key, _POINTERS.get(key))
    found = _POINTERS.pop(key, None) or _Pointers(*key, captured=False)
    _POINTERS[key] = found
    if len(_POINTERS) > _MOST_POINTERS:
        del _POINTERS[next(iter(_POINTERS))]
    return found


def _launch(
    kernel: Any, arguments: Sequence[Any], flags: Mapping[str, bool], tiles: TileClass,
    *pointers: _Pointers,
) -> None:  # fmt: skip
    aligned = tiles.aligned and all(p.aligned for p in pointers)
    shape = {"COLUMNS": tiles.columns, "ROWS": TILE // tiles.columns, "ALIGNED": aligned}
    launch(kernel, (len(tiles.tiles),), arguments, {**flags, **shape}, num_warps=_WARPS)


def _partials(table: PieceTable, device: torch.device) -> Tensor:
    return torch.empty((table.on(device).slots, 2), dtype=torch.float32, device=device)


def _reduce(partial: Tensor, table: PieceTable, device: torch.device) -> Tensor:
    result = torch.empty((table.pieces, 2), dtype=torch.float32, device=device)
    if table.pieces:
        arguments = (partial, table.on(device).bounds, result)
        launch(_reduce_kernel, (table.pieces,), arguments, {"CHUNK": 1024})
    return result
