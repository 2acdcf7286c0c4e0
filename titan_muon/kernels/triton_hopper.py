# pyrefly: ignore-errors
# Triton and Gluon are languages of their own: their values have no Python types.
"""Products for Hopper, symmetric or whole: copy engine, persistent programs, warp specialisation.

Importing this module imports triton. It is written in Gluon, Triton's dialect with explicit
layouts and barriers; :func:`titan_muon.kernels.hopper.hopper_fault` tries it once before
it is used. Tiles: see [Note: tiles of a triangle] in :mod:`titan_muon.kernels.triton_tiles`.

[Note: three partitions]
One program per multiprocessor walks over tiles. Its warps are split in three: one warp feeds the
copy engine, two warpgroups multiply, each one half of the tile's rows. ``full`` and ``empty``
barriers pass STAGES pairs of operand tiles round. Each multiplying warpgroup has a staging buffer
through which C enters, while the products run, and through which the tile and its mirror image
leave, while the next products run; the two never wait for each other.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from titan_muon.kernels.configurations import Configuration
from titan_muon.kernels.devices import device_facts
from titan_muon.kernels.launcher import Launch
from titan_muon.kernels.triton_tiles import rectangle_tile_of, tile_of

_triangle_tile_of = gluon.jit(tile_of)
_rectangle_tile_of = gluon.jit(rectangle_tile_of)


@gluon.jit
def _tile_of(
    index,
    tile_rows,
    tile_columns,
    SYMMETRIC: gl.constexpr,
    GROUP: gl.constexpr,
    RATIO: gl.constexpr,
):
    if SYMMETRIC:
        row, column = _triangle_tile_of(index, tile_rows, GROUP, RATIO)
    else:
        row, column = _rectangle_tile_of(index, tile_rows, tile_columns, GROUP)
    return row, column


# fmt: off
@gluon.jit
def _load_tiles(
    operands, buffers, barriers, counts, SYMMETRIC: gl.constexpr, A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):
    # fmt: on
    a_desc, b_desc = operands
    a_smem, b_smem = buffers
    full, empty = barriers
    tile_rows, tile_columns, k_tiles, tiles, total = counts
    count = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        batch = index // tiles
        i, j = _tile_of(index % tiles, tile_rows, tile_columns, SYMMETRIC, GROUP, BN // BM)
        for k in range(k_tiles):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            for half in gl.static_range(2):
                row = i * BM + half * (BM // 2)
                a = a_smem.index(stage * 2 + half)
                if A_TRANSPOSED:
                    tma.async_copy_global_to_shared(a_desc, [batch, k * BK, row], bar, a)
                else:
                    tma.async_copy_global_to_shared(a_desc, [batch, row, k * BK], bar, a)
            if B_TRANSPOSED:
                tma.async_copy_global_to_shared(
                    b_desc, [batch, j * BN, k * BK], bar, b_smem.index(stage)
                )
            else:
                tma.async_copy_global_to_shared(
                    b_desc, [batch, k * BK, j * BN], bar, b_smem.index(stage)
                )
            count += 1


# fmt: off
@gluon.jit
def _multiply_tiles(
    results, buffers, staging, barriers, c_bar, counts, alpha, beta, HALF: gl.constexpr,
    HAS_C: gl.constexpr, SYMMETRIC: gl.constexpr, A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):
    # fmt: on
    c_desc, out_desc, mirror_desc = results
    a_smem, b_smem = buffers
    full, empty = barriers
    tile_rows, tile_columns, k_tiles, tiles, total = counts
    dtype: gl.constexpr = out_desc.dtype
    ROWS: gl.constexpr = BM // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16]
    )
    tile_smem = staging.reshape((ROWS, BN))
    mirrored = staging._reinterpret(dtype, [1, BN, ROWS], mirror_desc.layout)
    count = 0
    phase = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        batch = index // tiles
        i, j = _tile_of(index % tiles, tile_rows, tile_columns, SYMMETRIC, GROUP, BN // BM)
        row = i * BM + HALF * ROWS
        tma.store_wait(0)
        if HAS_C:
            mbarrier.expect(c_bar, c_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(c_desc, [batch, row, j * BN], c_bar, staging)
        acc = warpgroup_mma_init(gl.zeros((ROWS, BN), gl.float32, layout))
        for k in range(k_tiles):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            if A_TRANSPOSED:
                a = a_smem.index(stage * 2 + HALF).reshape((BK, ROWS)).permute((1, 0))
            else:
                a = a_smem.index(stage * 2 + HALF).reshape((ROWS, BK))
            if B_TRANSPOSED:
                b = b_smem.index(stage).reshape((BN, BK)).permute((1, 0))
            else:
                b = b_smem.index(stage).reshape((BK, BN))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=k > 0)
            count += 1
        tile = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        tile = tile * alpha
        if HAS_C:
            mbarrier.wait(c_bar, phase)
            phase ^= 1
            tile += beta * tile_smem.load(layout).to(gl.float32)
        tile = tile.to(dtype)
        tile_smem.store(tile)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [batch, row, j * BN], staging)
        if SYMMETRIC and i * BM >= (j + 1) * BN:
            tma.store_wait(0)
            mirrored.reshape((BN, ROWS)).permute((1, 0)).store(tile)
            fence_async_shared()
            tma.async_copy_shared_to_global(mirror_desc, [batch, j * BN, row], mirrored)
    tma.store_wait(0)


# fmt: off
# Sizes are not specialised: one compilation serves every shape.
@gluon.jit(do_not_specialize=["M", "N", "K", "tiles", "total"])
def _hopper_kernel(
    a_desc, b_desc, c_desc, out_desc, mirror_desc, M, N, K, alpha, beta, tiles, total,
    HAS_C: gl.constexpr, SYMMETRIC: gl.constexpr, A_TRANSPOSED: gl.constexpr,
    B_TRANSPOSED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):
    # fmt: on
    dtype: gl.constexpr = out_desc.dtype
    a_smem = gl.allocate_shared_memory(dtype, [STAGES * 2] + a_desc.block_type.shape, a_desc.layout)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    staging = gl.allocate_shared_memory(dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    for half in gl.static_range(2):
        mbarrier.init(c_bars.index(half), count=1)
    fence_async_shared()
    counts = ((M + BM - 1) // BM, (N + BN - 1) // BN, (K + BK - 1) // BK, tiles, total)
    results = (c_desc, out_desc, mirror_desc)
    buffers = (a_smem, b_smem)
    barriers = (full, empty)
    # fmt: off
    gl.warp_specialize(
        [
            (_multiply_tiles, (results, buffers, staging.index(0), barriers, c_bars.index(0),
                               counts, alpha, beta, 0, HAS_C, SYMMETRIC, A_TRANSPOSED, B_TRANSPOSED,
                               BM, BN, BK, GROUP, STAGES)),
            (_multiply_tiles, (results, buffers, staging.index(1), barriers, c_bars.index(1),
                               counts, alpha, beta, 1, HAS_C, SYMMETRIC, A_TRANSPOSED, B_TRANSPOSED,
                               BM, BN, BK, GROUP, STAGES)),
            (_load_tiles, ((a_desc, b_desc), buffers, barriers, counts,
                           SYMMETRIC, A_TRANSPOSED, B_TRANSPOSED, BM, BN, BK, GROUP, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on


def multiply(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: float,
    beta: float,
    out: Tensor,
    shape: Configuration,
    *,
    symmetric: bool = True,
) -> Launch:
    """Run the Hopper kernel; see :func:`titan_muon.kernels.symmetric_matmul.symmetric_product`.

    Args:
        a: (B, M, K) float16 or bfloat16; rows or columns dense, other strides multiples of 16
            bytes.
        b: (B, K, N), likewise; N = M if the result is symmetric.
        c: (B, M, N), likewise, or None.
        alpha: Factor of the product.
        beta: Factor of ``c``.
        out: (B, M, N), rows dense.
        shape: Launch shape.
        symmetric: Compute one triangle and mirror it; otherwise everything.

    Returns:
        What repeats it; takes the addresses of a, b, c (any number for None) and out.
    """
    batch, rows, depth = a.shape
    columns = b.shape[2]
    a_transposed, b_transposed = a.stride(2) != 1, b.stride(2) != 1
    half = shape.bm // 2
    tiles = shape.tiles(rows) if symmetric else shape.all_tiles(rows, columns)
    total = batch * tiles
    out_desc = _describe(out, half, shape.bn)
    descriptors = (
        _describe(a.mT, shape.bk, half) if a_transposed else _describe(a, half, shape.bk),
        _describe(b.mT, shape.bn, shape.bk) if b_transposed else _describe(b, shape.bk, shape.bn),
        out_desc if c is None else _describe(c, half, shape.bn),
        out_desc,
        _describe(out, shape.bn, half),
    )
    rest = (
        rows, columns, depth, alpha, beta, tiles, total,
        c is not None, symmetric, a_transposed, b_transposed,
        shape.bm, shape.bn, shape.bk, shape.group, shape.stages,
    )  # fmt: skip
    grid = (min(total, device_facts(a.device)[1]),)
    compiled = _hopper_kernel[grid](*descriptors, *rest, num_warps=4)
    owners = (0, 1, 3 if c is None else 2, 3, 3)

    def moved(addresses: Sequence[int]) -> list[TensorDescriptor]:
        return [_moved(d, addresses[i]) for d, i in zip(descriptors, owners, strict=True)]

    return Launch(compiled, grid, moved, rest)


@lru_cache(maxsize=64)
def _layout(dtype: torch.dtype, rows: int, columns: int) -> gl.NVMMASharedLayout:
    kind = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for([1, rows, columns], kind)


def _describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout, block = _layout(x.dtype, rows, columns), [1, rows, columns]
    address = _Address(x.data_ptr(), x.dtype)
    return TensorDescriptor(address, list(x.shape), list(x.stride()), block, layout)


def _moved(descriptor: TensorDescriptor, address: int) -> TensorDescriptor:
    """Return a descriptor of the same tensor elsewhere."""
    # Past its constructor, which checks what the first one was checked for.
    moved = object.__new__(TensorDescriptor)
    moved.__dict__.update(descriptor.__dict__)
    moved.base = _Address(address, descriptor.base.dtype)
    return moved


class _Address:
    """What a descriptor asks of its tensor; a tensor that is kept would keep its memory."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address
