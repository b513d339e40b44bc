"""`ff.progress`: a progress line for futures, with the counts of `runtime.local.progress` and the bar of `views`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

from distributed import Client, default_client
from distributed.client import futures_of

from dask_ferro.errors import ConfigError
from dask_ferro.notebook import LiveLine, is_notebook
from dask_ferro.runtime.local.progress import Following, Progress
from dask_ferro.views.progress import bar, words


def progress(*running: Any, notebook: bool | None = None) -> Any:
    """Show the progress of futures: bundles and ops done, ops per second, and the projected seconds left.

    In a terminal it returns when all futures have finished or failed; in a notebook it returns at once, and the line
    keeps updating.  If standard error is no terminal, it writes one line at the end.

    Parameters
    ----------
    *running : Future, collection of futures, persisted collection
    notebook : bool, optional
        Whether to show it in a notebook cell; default: detect whether it is called in one.

    Returns
    -------
    None
        With an asynchronous client in a terminal, an awaitable.

    Raises
    ------
    ConfigError
        If none of the arguments has a future.

    Examples
    --------
    >>> future = client.compute(model(x))    # doctest: +SKIP
    >>> ff.progress(future)                  # doctest: +SKIP
    """
    futures = futures_of(list(running))
    if not futures:
        raise ConfigError(
            "ff.progress: got no futures, wanted a computation that was started:"
            " ff.progress(client.compute(y)), or y.persist()"
        )
    client = futures[0].client or default_client()
    following = Following(client, futures)
    # A cell that waited would block all later cells.
    if is_notebook() if notebook is None else notebook:
        return _in_notebook(client, following)
    return _shown(following) if client.asynchronous else _in_terminal(client, following)


def _in_terminal(client: Client, following: Following) -> None:
    """Read one count at a time, so that Ctrl-C ends the display and not the computation."""
    newest = None
    with bar() as show:
        try:
            while newest is None or newest.status != "finished":
                newest = client.sync(following.read)
                if newest is None:
                    break
                if show is not None:
                    show(newest)
        finally:
            client.sync(following.close)
    _tell_end(newest)


async def _shown(following: Following) -> None:
    newest = None
    with bar() as show:
        try:
            async for newest in _looks(following):
                if show is not None:
                    show(newest)
        finally:
            await following.close()
    _tell_end(newest)


async def _looks(following: Following) -> AsyncIterator[Progress]:
    while (seen := await following.read()) is not None:
        yield seen
        if seen.status == "finished":
            return


def _tell_end(newest: Progress | None) -> None:
    if newest is None or newest.status != "finished":
        print("ff.progress: the connection to the scheduler was lost", file=sys.stderr)
    else:
        print(words(newest), file=sys.stderr)


def _in_notebook(client: Client, following: Following) -> None:
    line = LiveLine()
    line.show(words(Progress("waiting", 0.0, (0, 0), (0, 0), (0, 0))))

    async def update() -> None:
        async for seen in _looks(following):
            line.show(words(seen), last=seen.status == "finished")

    # The client's own event loop goes on after the cell has returned.
    loop: Any = client.loop
    loop.add_callback(update)
