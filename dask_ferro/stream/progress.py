"""A progress bar of rows: on standard error in a terminal, as a line of text in the cell of a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from dask_ferro.notebook import LiveLine, is_notebook


class _RowRate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} rows/s")


@contextmanager
def bar(rows: int, done: int, is_shown: bool | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of `rows`, of which an earlier run has `done`; yield the function that adds rows to it."""
    in_cell = is_notebook()
    if not (in_cell or sys.stderr.isatty() if is_shown is None else is_shown):
        yield lambda more: None
        return
    if in_cell:
        yield _in_cell(rows, done)
        return
    counts = TextColumn("{task.completed:,.0f} / {task.total:,.0f} rows")
    columns = (TextColumn("rows"), BarColumn(), counts, _RowRate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr, markup=False)) as shown:
        task = shown.add_task("rows", total=rows, completed=done)
        yield lambda more: shown.advance(task, more)


def _in_cell(rows: int, done: int) -> Callable[[int], None]:
    """Show a line in the current cell; return the function that adds rows to it.

    Rich has a display for notebooks, but only with ipywidgets; its lines would be an output each.
    """
    line, began, before = LiveLine(), monotonic(), done

    def advance(more: int) -> None:
        nonlocal done
        done += more
        seconds = monotonic() - began
        rate = (done - before) / seconds if seconds else 0.0
        left = f"{(rows - done) / rate:,.0f} s left" if rate else "- left"
        end = f"in {seconds:,.1f} s" if done >= rows else left
        line.show(f"rows {done:,} / {rows:,} rows  {rate:,.0f} rows/s  {end}", last=done >= rows)

    advance(0)
    return advance
