# pyrefly: ignore-errors
# Triton is a language of its own: its values have no Python types.
"""Triton kernel of the row scaling; see ``rows`` for what it computes."""

import triton
import triton.language as tl
from torch import Tensor

from titan_muon.kernels.launcher import launch

__all__ = ["scale_rows_"]

_TILE = 4096


@triton.jit
def _scale_kernel(x, factors, rows, columns, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    pointer = x + row[:, None] * columns + column[None, :]
    factor = tl.load(factors + row, mask=row < rows, other=0.0)
    value = tl.load(pointer, mask=inside, other=0.0).to(tl.float32) * factor[:, None]
    tl.store(pointer, value.to(x.dtype.element_ty), mask=inside)


def scale_rows_(x: Tensor, factors: Tensor) -> None:
    """See ``rows.scale_rows_``; ``x`` is contiguous."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    width = min(_TILE, triton.next_power_of_2(columns))
    height = _TILE // width
    grid = (triton.cdiv(rows, height), triton.cdiv(columns, width))
    shape = {"COLUMNS": width, "ROWS": height}
    launch(_scale_kernel, grid, (x, factors, rows, columns), shape, num_warps=8)
