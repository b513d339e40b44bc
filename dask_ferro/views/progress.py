"""`ff.progress`: the progress of a computation as a line in the terminal, or in the cell of a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from distributed import Client, Future, default_client
from distributed.client import futures_of
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from dask_ferro.errors import InputError
from dask_ferro.local.progress import Progress, follow
from dask_ferro.notebook import LiveLine, is_notebook
from dask_ferro.views.terminal import console
from dask_ferro.words import count, duration

# Columns of the bar.
_WIDE = 24


def progress(*running: Any, notebook: bool | None = None) -> Any:
    """Show the progress of futures: bundles and ops done, ops per second, and the projected seconds left.

    In a terminal it returns when all futures have finished or failed, and Ctrl-C ends only the display.  In a notebook
    it returns immediately, and the line keeps updating.  If standard error is not a terminal, it writes one line at the
    end.

    Parameters
    ----------
    *running : Future, collection of futures, persisted collection
    notebook : bool, optional
        Whether to show it in a notebook cell; default: detect whether it is called in one.

    Returns
    -------
    None
        An awaitable for an asynchronous client in a terminal.

    Raises
    ------
    InputError
        If none of the arguments has a future.

    Examples
    --------
    >>> future = client.compute(model(x))    # doctest: +SKIP
    >>> ff.progress(future)                  # doctest: +SKIP
    """
    futures = futures_of(list(running))
    if not futures:
        raise InputError(
            "ff.progress: got no futures, wanted a computation that was started:"
            " ff.progress(client.compute(y)), or y.persist()"
        )
    client: Client = futures[0].client or default_client()
    # A cell that waited would block all later cells.
    if is_notebook() if notebook is None else notebook:
        shown = LiveLine()
        shown.show(words(Progress("waiting", 0.0)))
        # The client's own event loop goes on after the cell has returned.
        loop: Any = client.loop
        loop.add_callback(_show_in_cell, client, futures, shown)
        return None
    # Ctrl-C ends the display and not the computation.
    return client.sync(_show_in_terminal, client, futures)


async def _show_in_cell(client: Client, futures: Sequence[Future], shown: LiveLine) -> None:
    async for seen in follow(client, futures):
        shown.show(words(seen), last=seen.status == "finished")


async def _show_in_terminal(client: Client, futures: Sequence[Future]) -> None:
    newest = None
    with bar() as show:
        async for newest in follow(client, futures):
            if show is not None:
                show(newest)
    if newest is None or newest.status != "finished":
        print("ff.progress: the connection to the scheduler was lost", file=sys.stderr)
    else:
        print(words(newest), file=sys.stderr)


def words(seen: Progress) -> str:
    """Return the progress in words: bundles and ops if there are any, tasks otherwise.

    The time left is "-" until something has finished.
    """
    if seen.status == "waiting":
        return "waiting for the scheduler to have all of the graph"
    parts = []
    if seen.bundles[1]:
        parts += [
            f"bundles {_fraction(seen.bundles)}",
            f"ops {_fraction(seen.ops)}",
            f"{count(seen.ops_per_s)} ops/s",
        ]
    else:
        parts += [f"tasks {_fraction(seen.tasks)}", f"{count(seen.tasks_per_s)} tasks/s"]
    if seen.failed:
        parts.append(f"{seen.failed} failed")
    if seen.status == "finished":
        parts.append(f"in {duration(seen.elapsed)}")
    else:
        parts.append("- left" if seen.remaining is None else f"{duration(seen.remaining)} left")
    return "  ".join(parts)


def _fraction(pair: tuple[int, int]) -> str:
    return f"{count(pair[0])}/{count(pair[1])}"


@contextmanager
def bar(stream: IO[str] | None = None) -> Iterator[Callable[[Progress], None] | None]:
    """Show a progress line on a stream (default: standard error) while the block runs.

    Yields a function to call with each new count, or None if the stream is no terminal.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        yield None
        return
    told = TextColumn(
        "{task.description}", markup=False, table_column=Column(overflow="ellipsis", no_wrap=True)
    )
    # Transient: the caller prints a closing line of its own.  Refreshed only on new counts.
    with Bar(BarColumn(_WIDE), told, console=console(stream), transient=True, auto_refresh=False) as shown:
        task = shown.add_task("")

        def show(seen: Progress) -> None:
            done, total = seen.tasks
            shown.update(task, description=words(seen), completed=done, total=max(total, 1), refresh=True)

        yield show
