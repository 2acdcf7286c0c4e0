# pyrefly: ignore-errors
# Triton and Gluon are languages of their own: their values have no Python types.
"""Symmetric products in Triton for any strides: one triangle is computed, the other mirrored.

Importing this module imports triton.

Tiles: see [Note: tiles of a triangle] in :mod:`titan_muon.kernels.triton_tiles`.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from titan_muon.kernels.configurations import Configuration
from titan_muon.kernels.launcher import Launch, launch
from titan_muon.kernels.triton_tiles import tile_of

_tile_of = triton.jit(tile_of)


@triton.jit
def _finish(
    acc,
    c_ptr,
    out_ptr,
    first_row,
    first_column,
    M,
    stride_cm,
    stride_cn,
    stride_om,
    stride_on,
    alpha,
    beta,
    HAS_C: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Scale one tile, add C, store it and, off the diagonal, its mirror image."""
    rows = (first_row + tl.arange(0, BM))[:, None]
    columns = (first_column + tl.arange(0, BN))[None, :]
    down, right = rows.to(tl.int64), columns.to(tl.int64)
    inside = (rows < M) & (columns < M)
    acc = acc * alpha
    if HAS_C:
        c = tl.load(c_ptr + down * stride_cm + right * stride_cn, mask=inside, other=0.0)
        acc += beta * c.to(tl.float32)
    tile = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + down * stride_om + right * stride_on, tile, mask=inside)
    if first_row >= first_column + BN:
        tl.store(out_ptr + right * stride_om + down * stride_on, tile, mask=inside)


@triton.jit(do_not_specialize=["tiles"])
def _pointer_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    out_ptr,
    M,
    K,
    stride_ab,
    stride_am,
    stride_ak,
    stride_bb,
    stride_bk,
    stride_bn,
    stride_cb,
    stride_cm,
    stride_cn,
    stride_ob,
    stride_om,
    stride_on,
    alpha,
    beta,
    tiles,
    HAS_C: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of alpha*A@B + beta*C for any strides."""
    index = tl.program_id(0)
    batch = (index // tiles).to(tl.int64)
    i, j = _tile_of(index % tiles, tl.cdiv(M, BM), GROUP, BN // BM)
    # Rows and columns past the end read valid memory, and their results are never stored.
    rows = ((i * BM + tl.arange(0, BM)) % M).to(tl.int64)
    columns = ((j * BN + tl.arange(0, BN)) % M).to(tl.int64)
    inner = tl.arange(0, BK)
    step = inner.to(tl.int64)
    a = a_ptr + batch * stride_ab + rows[:, None] * stride_am + step[None, :] * stride_ak
    b = b_ptr + batch * stride_bb + step[:, None] * stride_bk + columns[None, :] * stride_bn
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        if EVEN_K:
            a_tile = tl.load(a)
            b_tile = tl.load(b)
        else:
            left = K - k * BK
            a_tile = tl.load(a, mask=inner[None, :] < left, other=0.0)
            b_tile = tl.load(b, mask=inner[:, None] < left, other=0.0)
        if UPCAST:
            a_tile = a_tile.to(tl.float32)
            b_tile = b_tile.to(tl.float32)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
        a += BK * stride_ak
        b += BK * stride_bk
    c_ptr += batch * stride_cb
    out_ptr += batch * stride_ob
    _finish(
        acc, c_ptr, out_ptr, i * BM, j * BN, M, stride_cm, stride_cn, stride_om, stride_on,
        alpha, beta, HAS_C, BM, BN,
    )  # fmt: skip


def multiply(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: float,
    beta: float,
    out: Tensor,
    shape: Configuration,
) -> Launch | None:
    """Run the pointer kernel; see :func:`titan_muon.kernels.symmetric_matmul.symmetric_product`.

    Returns:
        What repeats it, as of the Hopper kernel; None in Triton's interpreter.
    """
    batch, rows, depth = a.shape
    tiles, has_c = shape.tiles(rows), c is not None
    addend = out if c is None else c
    rest = (
        rows, depth, *a.stride(), *b.stride(), *addend.stride(), *out.stride(), alpha, beta, tiles,
    )  # fmt: skip
    constants = {
        "HAS_C": has_c,
        "EVEN_K": depth % shape.bk == 0,
        # The interpreter multiplies 16-bit operands in their own dtype.
        "UPCAST": triton.knobs.runtime.interpret,
        "PRECISION": "ieee",
        **{"BM": shape.bm, "BN": shape.bn, "BK": shape.bk, "GROUP": shape.group},
    }
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    grid, arguments = (batch * tiles,), (a, b, addend, out, *rest)
    compiled = launch(_pointer_kernel, grid, arguments, constants, **options)
    if compiled is None:
        return None

    # Remembered with the launch: it must not hold an operand.
    def moved(addresses: Sequence[int]) -> tuple[int, int, int, int]:
        left, right, third, target = addresses
        return left, right, third if has_c else target, target

    return Launch(compiled, grid, moved, (*rest, *constants.values()))
