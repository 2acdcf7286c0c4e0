# pyrefly: ignore-errors
# Triton and Gluon are languages of their own: their values have no Python types.
"""Which tiles of a symmetric result are computed, and in which order.

Importing this module imports triton.

[Note: tiles of a triangle]
The (M, M) result is cut into BM x BN tiles, BN = BM or 2*BM, and only tiles that touch the lower
triangle are computed: tile row i needs tile columns 0 .. i // RATIO, RATIO = BN // BM. A tile that
touches the diagonal is stored whole, every other one also as its mirror image, so that each
element is written exactly once. A single index runs over the tiles, in groups of GROUP tile rows
walked column by column, so that programs that run at the same time share their operands in the L2
cache.
"""

import triton.language as tl


def tile_of(index, tile_rows, GROUP: tl.constexpr, RATIO: tl.constexpr):  # noqa: ANN001, ANN201
    """Return tile row and tile column of one index; see [Note: tiles of a triangle].

    Plain control flow only: triton_symmetric compiles it as Triton, triton_hopper as Gluon.
    """
    wide = GROUP // RATIO
    group = 0
    start = 0
    count = RATIO * wide * (wide + 1) // 2
    while index >= start + count:
        start += count
        count += GROUP * wide
        group += 1
    rest = index - start
    rows = min(GROUP, tile_rows - group * GROUP)
    left = rows * group * wide
    row = rest % rows
    column = rest // rows
    if rest >= left:
        # Inside the diagonal block each column starts RATIO rows further down.
        row = rest - left
        column = group * wide
        height = rows
        first = 0
        while row >= height:
            row -= height
            height -= RATIO
            first += RATIO
            column += 1
        row += first
    return group * GROUP + row, column


def rectangle_tile_of(index, tile_rows, tile_columns, GROUP: tl.constexpr):  # noqa: ANN001, ANN201
    """Return tile row and tile column of one index where all tiles are computed."""
    group = index // (GROUP * tile_columns)
    rest = index % (GROUP * tile_columns)
    rows = min(GROUP, tile_rows - group * GROUP)
    return group * GROUP + rest % rows, rest // rows
