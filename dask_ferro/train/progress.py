"""The progress line of a training on standard error: epoch, batches, loss, batches a second, remaining time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(batches: int | None, done: int, wanted: bool | None) -> Iterator[Callable[[int, int, float], None]]:
    """Show a progress line while the block runs; yield the function that takes epoch, finished batches and loss.

    Parameters
    ----------
    batches : int or None
        All batches of all epochs; None if their number is not known.
    done : int
        Batches of an earlier run.
    wanted : bool or None
        Whether to show it; None: if standard error is a terminal.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda epoch, done, loss: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
    )
    of = "" if batches is None else f" / {batches:,}"
    with Progress(*columns, console=Console(file=sys.stderr, markup=False)) as shown:
        task = shown.add_task("epoch 1", total=batches, completed=done, told="")

        def show(epoch: int, done: int, loss: float) -> None:
            told = f"{done:,}{of} batches  loss {loss:.4g}"
            shown.update(task, description=f"epoch {epoch + 1}", completed=done, told=told)

        yield show
