"""Tables as text, by rich: without lines, for logs, files and terminals."""

import io
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["table"]

# Where the output is a file or a pipe, lines are not broken.
_WIDE = 400


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    left: Sequence[str] = (),
    folds: Sequence[str] = (),
) -> str:
    """Return a table whose lines have no space at their ends.

    Args:
        headings: Of the columns.
        rows: Cells; anything that ``str`` takes.
        left: Columns that are flush left; the others are flush right.
        folds: Columns that may be broken to fit the terminal; the others never are.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False)
    for heading in headings:
        drawn.add_column(
            Text(heading),
            justify="left" if heading in {*left, *folds} else "right",
            no_wrap=heading not in folds,
            overflow="fold" if heading in folds else "crop",
        )
    for row in rows:
        # Text: cells hold square brackets, which rich would take for markup.
        drawn.add_row(*(Text(str(cell)) for cell in row))
    width = shutil.get_terminal_size().columns if folds and sys.stdout.isatty() else _WIDE
    buffer = io.StringIO()
    Console(file=buffer, width=max(width, 80), force_terminal=False).print(drawn)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
