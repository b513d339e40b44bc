"""A progress bar of rows: on standard error in a terminal, as one output of the cell in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from dask_ferro.drawings.live import LiveOutput, is_notebook
from dask_ferro.drawings.registry import in_notebook


class RowsDone(NamedTuple):
    """The progress of a run: rows done and all rows, rows a second and seconds of this run."""

    title: str
    done: int
    total: int
    rate: float
    seconds: float


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
        Whether to show it; None: if standard error is a terminal, or this is a notebook.
    """
    in_cell = is_notebook()
    if not (in_cell or sys.stderr.isatty() if wanted is None else wanted):
        yield lambda more: None
        return
    if in_cell:
        yield _in_cell(title, rows, done)
        return
    counts = TextColumn("{task.completed:,.0f} / {task.total:,.0f} rows")
    columns = (TextColumn("{task.description}"), BarColumn(), counts, _RowRate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr, markup=False)) as shown:
        task = shown.add_task(title, total=rows, completed=done)
        yield lambda more: shown.advance(task, more)


def _in_cell(title: str, rows: int, done: int) -> Callable[[int], None]:
    """Show a bar in the current cell; return the function that adds rows to it.

    Rich has a display for notebooks, but only with ipywidgets; its lines would be an output each.
    """
    output, began, before = LiveOutput(), monotonic(), done

    def advance(more: int) -> None:
        nonlocal done
        done += more
        seconds = monotonic() - began
        rate = (done - before) / seconds if seconds else 0.0
        output.show(in_notebook("rows", RowsDone(title, done, rows, rate, seconds)), last=done >= rows)

    advance(0)
    return advance
