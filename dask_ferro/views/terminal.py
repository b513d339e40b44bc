"""Tables for the terminal.

Reports go to standard output, progress and remarks to standard error, so that a pipe gets only the report.  A table
has the width of the terminal, or of COLUMNS where that is set: cells wrap between words, and where that is not enough,
each row is written below the other as lines of a name and a value.  A word is cut only where it alone is too long, and
then ends in an ellipsis.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

# A pipe has no width, unless COLUMNS is set: these columns hold every table without shortening a cell.
_PIPE_COLUMNS = 140
# The same for tables whose cells are sentences.
_WIDE_COLUMNS = 1000
# Blank columns between two cells, and before a row.
_GAP, _INDENT = 2, 2
# A word in a cell may take this much of a table's width; a longer one ends in an ellipsis.
_LONGEST_WORD = 0.5
# A cell of more lines than these is read more easily below the others.
_LINES = 4


def console(stream: IO[str] | None = None, columns: int | None = None) -> Console:
    """Return a console on a stream (default: standard output); a pipe gets neither colours nor line breaks."""
    stream = stream or sys.stdout
    # Names come from users: rich must not interpret markup, emoji or numbers in them.  In a notebook, rich would show
    # what is written as an output of the cell, and write nothing to the stream.
    return Console(
        file=stream,
        width=columns or (None if stream.isatty() else _asked_columns() or _PIPE_COLUMNS),
        highlight=False,
        emoji=False,
        markup=False,
        force_jupyter=False,
    )


def _asked_columns() -> int | None:
    """Return the width in COLUMNS, which a shell sets for itself and does not export; None without one."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and int(text) else None


def show_wide(show: Callable[[Console], object]) -> None:
    """Let a function draw on standard output; in a pipe each row is one line without trailing blanks."""
    out = console()
    if sys.stdout.isatty():
        show(out)
        return
    out.width = _asked_columns() or _WIDE_COLUMNS
    with out.capture() as drawn:
        show(out)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines()))


def facts(out: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print lines of a name and its value."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    out.print(table)


def table(
    out: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> None:
    """Print a table below its title: the first `left` columns are left-aligned, the others right-aligned.

    Where the console is too narrow for the table, each row is printed as lines of a column's name and the cell.
    """
    out.print()
    out.print(title, style="bold")
    room = out.width - _INDENT
    cells = [columns, *rows]
    natural = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    least = [_least(column, room, wraps=i < left) for i, column in enumerate(zip(*cells, strict=True))]
    widths = fitted(natural, least, room - _GAP * (len(columns) - 1))
    if widths is None or any(whole > _LINES * width for whole, width in zip(natural, widths, strict=True)):
        _one_below_the_other(out, columns, rows)
        return
    grid = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    for i, (column, width) in enumerate(zip(columns, widths, strict=True)):
        grid.add_column(column, justify="left" if i < left else "right", overflow="ellipsis", width=width)
    for row in rows:
        grid.add_row(*row)
    out.print(Padding(grid, (0, 0, 0, _INDENT), expand=False))


def _least(cells: Sequence[str], room: int, *, wraps: bool) -> int:
    """Return the least width of a column: of its longest word, or of its longest cell where cells do not wrap."""
    head, *others = cells
    parts = [*head.split(), *(" ".join(others).split() if wraps else others)]
    return min(max(map(cell_len, parts), default=1), max(1, int(_LONGEST_WORD * room)))


def fitted(natural: Sequence[int], least: Sequence[int], room: int) -> list[int] | None:
    """Return widths of columns that take at most `room` together, or None where the least widths take more.

    >>> fitted([4, 30, 10], [4, 8, 10], 30), fitted([4, 6], [4, 6], 30), fitted([20, 20], [20, 20], 30)
    ([4, 16, 10], [4, 6], None)
    """
    if sum(least) > room:
        return None
    widths = list(natural)
    # The widest columns give first, one blank at a time, as a cell of many words loses least by it.
    while sum(widths) > room:
        widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])
        widths[widest] -= 1
    return widths


def _one_below_the_other(out: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for row in rows:
        grid = Table.grid(padding=(0, _GAP, 0, 0))
        grid.add_column(style="dim", max_width=out.width // 2)
        grid.add_column(overflow="fold")
        for column, cell in zip(columns[1:], row[1:], strict=True):
            grid.add_row(column, cell)
        out.print(Padding(row[0], (0, 0, 0, _INDENT), expand=False), overflow="fold")
        out.print(Padding(grid, (0, 0, 0, 2 * _INDENT), expand=False))
