"""A progress bar of rows or batches: on standard error in a terminal, as a line of text in the cell of a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from dask_ferro.notebook import LiveLine, is_notebook


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} {task.fields['unit']}/s")


@contextmanager
def bar(unit: str, total: int | None, done: int, is_shown: bool | None) -> Iterator[Callable[..., None]]:
    """Show a progress bar of `total` rows or batches, of which an earlier run has `done`.

    Yields the function that adds finished ones; its `head` and `said` are the words before the bar and after the
    numbers.
    """
    of = "" if total is None else f" / {total:,}"
    in_cell = is_notebook()
    if not (in_cell or sys.stderr.isatty() if is_shown is None else is_shown):
        yield lambda more, head="", said="": None
        return
    if in_cell:
        yield _show_in_cell(unit, of, inf if total is None else total, done)
        return
    counts = TextColumn(f"{{task.completed:,.0f}}{of} {unit}{{task.fields[said]}}")
    columns = (TextColumn("{task.description}"), BarColumn(), counts, _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr, markup=False)) as shown:
        task = shown.add_task(unit, total=total, completed=done, unit=unit, said="")
        yield lambda more, head=unit, said="": shown.update(task, advance=more, description=head, said=said)


def _show_in_cell(unit: str, of: str, total: float, done: int) -> Callable[..., None]:
    """Show a line in the current cell; return the function that adds finished rows or batches to it.

    Rich has a display for notebooks, but only with ipywidgets; its lines would be an output each.
    """
    line, began, before = LiveLine(), monotonic(), done

    def advance(more: int, head: str = unit, said: str = "") -> None:
        nonlocal done
        done += more
        seconds = monotonic() - began
        rate = (done - before) / seconds if seconds else 0.0
        left = f"{(total - done) / rate:,.0f} s left" if rate and total < inf else "- left"
        end = f"in {seconds:,.1f} s" if done >= total else left
        line.show(f"{head} {done:,}{of} {unit}{said}  {rate:,.0f} {unit}/s  {end}", last=done >= total)

    advance(0)
    return advance
