"""The progress of a computation as a line for the terminal, drawn from counts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dask_ferro.runtime.local.progress import Progress
from dask_ferro.views.terminal import console
from dask_ferro.words import count, duration

_BAR_LEAST, _BAR_MOST = 8, 24


def words(seen: Progress) -> str:
    """Return the progress in words: bundles and ops if there are any, tasks otherwise.

    The time left is "-" until something has finished.
    """
    if seen.status == "waiting":
        return "waiting for the scheduler to have all of the graph"
    parts = []
    if seen.bundles[1]:
        parts += [f"bundles {_of(seen.bundles)}", f"ops {_of(seen.ops)}", f"{count(seen.ops_per_s)} ops/s"]
    else:
        parts += [f"tasks {_of(seen.tasks)}", f"{count(seen.tasks_per_s)} tasks/s"]
    if seen.failed:
        parts.append(f"{seen.failed} failed")
    if seen.status == "finished":
        parts.append(f"in {duration(seen.elapsed)}")
    else:
        parts.append("- left" if seen.remaining is None else f"{duration(seen.remaining)} left")
    return "  ".join(parts)


def _of(pair: tuple[int, int]) -> str:
    return f"{count(pair[0])}/{count(pair[1])}"


def line(seen: Progress, columns: int) -> Table:
    """Return a bar and the progress in words on one line of the given width in columns."""
    text = Text(words(seen))
    done, total = seen.tasks
    bar = ProgressBar(
        total=max(total, 1),
        completed=done,
        width=min(max(columns - len(text) - 3, _BAR_LEAST), _BAR_MOST),
        complete_style="red" if seen.failed else "bar.complete",
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="ellipsis", no_wrap=True)
    grid.add_row(bar, text)
    return grid


@contextmanager
def bar(stream: IO[str] | None = None) -> Iterator[Callable[[Progress], None] | None]:
    """Show a progress line on a stream (default: standard error) while the block runs.

    Yields a function to call with each new count, or None if the stream is no terminal.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        yield None
        return
    out = console(stream)
    # Transient: the caller prints a closing line of its own.  Refreshed only on new counts.
    with Live(console=out, transient=True, auto_refresh=False) as shown:
        yield lambda seen: shown.update(line(seen, out.width), refresh=True)
