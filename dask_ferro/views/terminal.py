"""Tables for the terminal.

Reports go to standard output, progress and remarks to standard error, so that a pipe gets only the report.  A table
has the width of the terminal, or of COLUMNS where that is set.  Cells wrap; where not even their words fit, each row is
written below the other as lines of a name and a value.  Nothing is cut.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dask_ferro.observe.findings import ClusterFinding
from dask_ferro.words import printable

# A pipe has no width, unless COLUMNS is set: these columns hold every table without shortening a cell.
_PIPE_COLUMNS = 140
# The same for tables whose cells are sentences.
_WIDE_COLUMNS = 1000
# Blank columns between two cells, and before a row.
_GAP, _INDENT = 2, 2
_STYLES = {"error": "bold red", "warning": "bold yellow", "slow": "bold cyan"}


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
    # A shell sets COLUMNS for itself and does not export it.
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


def print_facts(out: Console, rows: Mapping[str, str]) -> None:
    """Print lines of a name and its value."""
    out.print(lines(rows.items()))


def lines(rows: Iterable[tuple[str | Text, str]]) -> Table:
    """Return lines of a name and its value; the values wrap."""
    grid = Table.grid(padding=(0, _GAP))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, text)
    return grid


def findings(found: Iterable[ClusterFinding]) -> Table:
    """Return lines of a severity, what is wrong, and what to do."""
    return lines((Text(one.severity, style=_STYLES[one.severity]), printable(str(one))) for one in found)


def grid(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> Table:
    """Return a table: the first `left` columns are left-aligned, the others right-aligned."""
    made = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def table(
    out: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> None:
    """Print a table below its title, or its rows one below the other where the console is too narrow."""
    out.print()
    out.print(title, style="bold")
    made = grid(columns, rows, left)
    if Measurement.get(out, out.options, made).minimum + _INDENT <= out.width:
        out.print(Padding(made, (0, 0, 0, _INDENT), expand=False))
        return
    for row in rows:
        out.print(Padding(row[0], (0, 0, 0, _INDENT), expand=False))
        for column, cell in zip(columns[1:], row[1:], strict=True):
            out.print(Padding(f"{column}: {cell}", (0, 0, 0, 2 * _INDENT), expand=False))
