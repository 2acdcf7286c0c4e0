# pyrefly: ignore-errors
# Triton is a language of its own: its values have no Python types.
"""Triton kernels of decoding and encoding; see ``quantize`` for what they compute.

Both are one pass over memory. One program handles one tile of whole blocks; which one, it reads
from a table, and where the codes and scales of its tensor lie, from another. float8 is converted
by integer arithmetic: not every GPU of the package has instructions for it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_muon.kernels.coding import FLOAT8_MAX, SMALLEST_SCALE, Coding
from titan_muon.kernels.launcher import launch

__all__ = ["decode", "encode"]

# Elements; as in ``pieces``.
_TILE = 2048
_WARPS = 4


@triton.jit
def _tile(tiles, pointers, BLOCK: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """Return where a tile's codes, scales and values begin, and which of its rows exist."""
    entry = tiles + tl.program_id(0).to(tl.int64) * 4
    first = tl.load(entry + 1).to(tl.int64)
    tensor = pointers + tl.load(entry).to(tl.int64) * 2
    codes = tl.load(tensor).to(tl.pointer_type(tl.uint8))
    # The compiler forgets what it knows of an integer that becomes a pointer.
    codes = tl.multiple_of(codes, 16) if ALIGNED else codes
    scales = tl.load(tensor + 1).to(tl.pointer_type(tl.float32)) + first
    row = tl.arange(0, ROWS)
    inside = row < tl.load(entry + 3)
    return codes, first, scales + row, tl.load(entry + 2).to(tl.int64) * BLOCK, inside


@triton.jit
def _places(BLOCK: tl.constexpr, ROWS: tl.constexpr):
    return tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _read(codes, inside, qmap, BLOCK: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Return what the codes of a tile stand for, before scaling."""
    BYTES: tl.constexpr = BLOCK // 2 if LEVELS == 4 else BLOCK
    code = tl.load(codes + _places(BYTES, ROWS), mask=inside[:, None], other=0).to(tl.int32)
    if LEVELS == 4:
        code = tl.reshape(tl.join(code >> 4, code & 15), (ROWS, BLOCK))
    if LEVELS > 0:
        return tl.load(qmap + code)
    # The exponent's bias is 7 there, 127 here; the product is exact, of denormal numbers too.
    value = ((code & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    value = tl.where((code & 127) == 127, float("nan"), value)
    return (value.to(tl.int32, bitcast=True) | ((code & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _float8(x):
    """Return the bits of the nearest float8_e4m3fn, even on a tie; nothing exceeds 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Rounds half to even where 20 bits of the fraction are cut off, and changes the bias.
    normal = (size + (0x7FFFF - (120 << 23)) + ((size >> 20) & 1)) >> 20
    # Below 2**-6 the distance between neighbours is 2**-9, which is that of float32 from 2**14 on.
    shifted = size.to(tl.float32, bitcast=True) + 16384.0
    code = tl.where(size < (121 << 23), shifted.to(tl.int32, bitcast=True) - (141 << 23), normal)
    return tl.where(size > 0x7F800000, 127, code) | ((bits >> 24) & 128)


@triton.jit
def _nearest(
    x, starts, middles, shift, lowest, buckets, STEPS: tl.constexpr, LAST: tl.constexpr
):  # fmt: skip
    """Return how many of the middles are at most x, all of them for NaN; see ``Search``."""
    bits = x.to(tl.int32, bitcast=True)
    bucket = ((bits & 0x7FFFFFFF) >> shift) - lowest
    bucket = tl.minimum(tl.maximum(bucket, 0), buckets - 1) + ((bits >> 31) & buckets)
    code = tl.load(starts + bucket).to(tl.int32)
    for _ in tl.static_range(STEPS):
        code += (x >= tl.load(middles + code)).to(tl.int32)
    return tl.where(x == x, code, LAST)


@triton.jit
def _decode_kernel(
    tiles, pointers, values, qmap,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = BLOCK // 2 if LEVELS == 4 else BLOCK
    codes, first, scales, place, inside = _tile(tiles, pointers, BLOCK, ROWS, ALIGNED)
    scale = tl.load(scales, mask=inside, other=0.0)
    value = _read(codes + first * BYTES, inside, qmap, BLOCK, ROWS, LEVELS) * scale[:, None]
    tl.store(values + place + _places(BLOCK, ROWS), value, mask=inside[:, None])


@triton.jit(do_not_specialize=["shift", "lowest", "buckets"])
def _encode_kernel(
    tiles, pointers, values, qmap, starts, middles, shift, lowest, buckets, smallest, largest,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr, ALIGNED: tl.constexpr,
    STEPS: tl.constexpr, ONLY_CHANGED: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = BLOCK // 2 if LEVELS == 4 else BLOCK
    codes, first, scales, place, inside = _tile(tiles, pointers, BLOCK, ROWS, ALIGNED)
    codes += first * BYTES
    value = tl.load(values + place + _places(BLOCK, ROWS), mask=inside[:, None], other=0.0)
    # As integers, for which a NaN is the largest of all.
    size = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = tl.where(size < smallest, smallest, size)
    if LEVELS == 0:
        scale = tl.div_rn(scale, tl.zeros_like(scale) + largest)
    if ONLY_CHANGED:
        before = _read(codes, inside, qmap, BLOCK, ROWS, LEVELS)
        before *= tl.load(scales, mask=inside, other=0.0)[:, None]
        inside = tl.where(tl.max((value != before).to(tl.int32), 1) > 0, inside, False)
    quotient = tl.div_rn(value, tl.broadcast_to(scale[:, None], (ROWS, BLOCK)))
    if LEVELS > 0:
        LAST: tl.constexpr = (1 << LEVELS) - 1
        code = _nearest(quotient, starts, middles, shift, lowest, buckets, STEPS, LAST)
    else:
        code = _float8(quotient)
    if LEVELS == 4:
        upper, lower = tl.split(tl.reshape(code, (ROWS, BLOCK // 2, 2)))
        code = (upper << 4) | lower
    tl.store(codes + _places(BYTES, ROWS), code.to(tl.uint8), mask=inside[:, None])
    tl.store(scales, scale, mask=inside)


class _Tables(NamedTuple):
    """What every launch for the same tensors has in common.

    Args:
        tiles, pointers: See :func:`_tile`.
        grid: As many programs as there are tiles.
        elements: Of all tensors.
        shape: The constants that both kernels have.
    """

    tiles: Tensor
    pointers: Tensor
    grid: tuple[int]
    elements: int
    shape: dict[str, object]


def decode(parts: Sequence[Tensor], coding: Coding) -> Tensor:
    """See ``quantize.decode``."""
    tiles, pointers, grid, elements, shape = _tables(parts, coding)
    values = torch.empty(elements, dtype=torch.float32, device=parts[0].device)
    arguments = (tiles, pointers, values, coding.qmap)
    launch(_decode_kernel, grid, arguments, shape, num_warps=_WARPS)
    return values


def encode(values: Tensor, parts: Sequence[Tensor], coding: Coding, only_changed: bool) -> None:
    """See ``quantize.encode``."""
    tiles, pointers, grid, _, shape = _tables(parts, coding)
    starts, middles, shift, lowest, steps = coding.search or (None, None, 0, 0, 0)
    buckets = 0 if starts is None else starts.numel() // 2
    arguments = (
        tiles, pointers, values, coding.qmap, starts, middles, shift, lowest, buckets,
        SMALLEST_SCALE, FLOAT8_MAX,
    )  # fmt: skip
    constants = {**shape, "STEPS": steps, "ONLY_CHANGED": only_changed}
    launch(_encode_kernel, grid, arguments, constants, num_warps=_WARPS)


def _tables(parts: Sequence[Tensor], coding: Coding) -> _Tables:
    addresses, blocks = [part.data_ptr() for part in parts], [p.numel() for p in parts[1::2]]
    return _cached_tables(tuple(addresses), tuple(blocks), coding, parts[0].device)


# State keeps its addresses; what was fetched from elsewhere mostly gets the same ones again.
@lru_cache(maxsize=4096)
def _cached_tables(
    addresses: tuple[int, ...], blocks: tuple[int, ...], coding: Coding, device: torch.device
) -> _Tables:
    rows = _TILE // coding.block
    pointers = torch.tensor(addresses, dtype=torch.int64).to(device, non_blocking=True)
    tiles = _tiles(blocks, rows, device)
    shape = {
        "BLOCK": coding.block,
        "ROWS": rows,
        "LEVELS": 0 if coding.qmap is None else len(coding.qmap).bit_length() - 1,
        "ALIGNED": all(address % 16 == 0 for address in addresses[::2]),
    }
    return _Tables(tiles, pointers, (len(tiles),), sum(blocks) * coding.block, shape)


@lru_cache(maxsize=256)
def _tiles(blocks: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """Return (tiles, 4) int32: tensor, first block of it, first of all, number of blocks left."""
    count = torch.tensor(blocks, dtype=torch.int64)
    tiles = -(-count // rows)
    tensor = torch.arange(len(blocks)).repeat_interleave(tiles)
    first = (torch.arange(len(tensor)) - (tiles.cumsum(0) - tiles)[tensor]) * rows
    place = (count.cumsum(0) - count)[tensor] + first
    table = torch.stack([tensor, first, place, count[tensor] - first], 1)
    return table.to(device, torch.int32, non_blocking=True)
