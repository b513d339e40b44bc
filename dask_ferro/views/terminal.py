"""Tables and formatted numbers for the terminal.

Reports go to standard output, progress and remarks to standard error, so that a pipe gets only the report.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO

from dask.utils import format_bytes
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

# A pipe has no width: these columns hold every table without shortening a cell.
_PIPE_COLUMNS = 140
# The same for tables whose cells are sentences.
_WIDE_COLUMNS = 1000
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def console(stream: IO[str] | None = None) -> Console:
    """Return a console on a stream (default: standard output); a pipe gets neither colours nor line breaks."""
    stream = stream or sys.stdout
    # Names come from users: rich must not interpret markup, emoji or numbers in them.
    return Console(
        file=stream,
        width=None if stream.isatty() else _PIPE_COLUMNS,
        highlight=False,
        emoji=False,
        markup=False,
    )


def show_wide(show: Callable[[Console], object]) -> None:
    """Let a function draw on standard output; in a pipe each row is one line without trailing blanks."""
    out = console()
    if sys.stdout.isatty():
        show(out)
        return
    out.width = _WIDE_COLUMNS
    with out.capture() as drawn:
        show(out)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines()))


def count(number: float) -> str:
    """Return a number in three digits with an SI prefix.

    >>> count(1281), count(2.5e9), count(17)
    ('1.28 k', '2.5 G', '17')
    """
    for scale, prefix in _PREFIXES:
        if abs(number) >= scale:
            return f"{number / scale:.3g} {prefix}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Return seconds in the unit that keeps the number readable.

    >>> duration(83.0), duration(0.0123), duration(4.2e-6)
    ('83 s', '12.3 ms', '4.2 us')
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def size(nbytes: float) -> str:
    """Return bytes as Dask prints them."""
    return format_bytes(round(nbytes))


def share(part: float, whole: float) -> str:
    """Return a percentage, or a dash if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def many(number: int, what: str) -> str:
    """Return a count with its noun, in the plural unless it is 1.

    >>> many(1, "worker"), many(1200, "task")
    ('1 worker', '1,200 tasks')
    """
    return f"{number:,} {what}{'s' if number != 1 else ''}"


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
    """Print a table below its title: the first `left` columns are left-aligned, the others right-aligned."""
    grid = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for i, column in enumerate(columns):
        grid.add_column(column, justify="left" if i < left else "right", overflow="fold", no_wrap=i >= left)
    for row in rows:
        grid.add_row(*row)
    out.print()
    out.print(title, style="bold")
    out.print(Padding(grid, (0, 0, 0, 2)))
