"""`ff.progress`: where the counts of `runtime.local.progress` meet the drawing of `views.progress`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

from distributed import Client, default_client
from distributed.client import futures_of
from distributed.utils import is_kernel

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.local.progress import Following, Progress
from dask_ferro.views.progress import bar, html, words


def progress(*running: Any, notebook: bool | None = None) -> Any:
    """Show how far futures are: bundles and ops done, ops a second, the seconds that remain.

    In a terminal it returns when all is done or has failed; in a notebook at once, and the line goes on by itself.
    Where standard error is no terminal it writes one line, at the end.

    Parameters
    ----------
    *running : Future, collection of futures, persisted collection
    notebook : bool, optional
        Whether to show it in a notebook's cell; default: where it is called in one.

    Returns
    -------
    None
        With an asynchronous client in a terminal, something to await.

    Raises
    ------
    ConfigError
        Where nothing of what is given runs.

    Examples
    --------
    >>> future = client.compute(model(x))    # doctest: +SKIP
    >>> ff.progress(future)                  # doctest: +SKIP
    """
    futures = futures_of(list(running))
    if not futures:
        raise ConfigError(
            "ff.progress: nothing of this runs; start it first: ff.progress(client.compute(y)), or y.persist()"
        )
    client = futures[0].client or default_client()
    following = Following(client, futures)
    # A cell that waited would keep all cells behind it waiting.
    if is_kernel() if notebook is None else notebook:
        return _in_notebook(client, following)
    return _shown(following) if client.asynchronous else _in_terminal(client, following)


def _in_terminal(client: Client, following: Following) -> None:
    """Wait for one look at a time, so that Ctrl-C ends the line, and not the work."""
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
        print("the scheduler is gone", file=sys.stderr)
    else:
        print(words(newest), file=sys.stderr)


def _in_notebook(client: Client, following: Following) -> None:
    from IPython.display import HTML, display

    nothing = Progress("waiting", 0.0, (0, 0), (0, 0), (0, 0))
    handle = display(HTML(html(nothing)), display_id=True)

    async def update() -> None:
        async for seen in _looks(following):
            handle.update(HTML(html(seen)))

    # The client's own loop goes on when the cell is over.
    loop: Any = client.loop
    loop.add_callback(update)
