"""A progress bar on standard error: rows done, rows per second, remaining time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _RowRate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} rows/s")


@contextmanager
def bar(title: str, rows: int, done: int, wanted: bool | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar while the block runs; yield the function that adds rows to it.

    Parameters
    ----------
    rows, done : int
        All rows, and those of an earlier run.
    wanted : bool or None
        Whether to show it; None: if standard error is a terminal.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda more: None
        return
    counts = TextColumn("{task.completed:,.0f} / {task.total:,.0f} rows")
    columns = (TextColumn("{task.description}"), BarColumn(), counts, _RowRate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr, markup=False)) as shown:
        task = shown.add_task(title, total=rows, completed=done)
        yield lambda more: shown.advance(task, more)
