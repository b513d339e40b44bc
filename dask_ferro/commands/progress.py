"""`ff.progress`: a progress line for futures, with the counts of `runtime.local.progress` and the bar of `views`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from distributed import Client, Future, default_client
from distributed.client import futures_of

from dask_ferro.errors import ConfigError
from dask_ferro.notebook import LiveLine, is_notebook
from dask_ferro.runtime.local.progress import Progress, followed
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
    # A cell that waited would block all later cells.
    if is_notebook() if notebook is None else notebook:
        line = LiveLine()
        line.show(words(Progress("waiting", 0.0)))
        # The client's own event loop goes on after the cell has returned.
        client.loop.add_callback(_in_notebook, client, futures, line)
        return None
    # Ctrl-C ends the display and not the computation.
    return client.sync(_in_terminal, client, futures)


async def _in_terminal(client: Client, futures: Sequence[Future]) -> None:
    seen = None
    with bar() as show:
        async for seen in followed(client, futures):
            if show is not None:
                show(seen)
    if seen is None or seen.status != "finished":
        print("ff.progress: the connection to the scheduler was lost", file=sys.stderr)
    else:
        print(words(seen), file=sys.stderr)


async def _in_notebook(client: Client, futures: Sequence[Future], line: LiveLine) -> None:
    async for seen in followed(client, futures):
        line.show(words(seen), last=seen.status == "finished")
