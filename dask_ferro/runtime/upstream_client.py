"""Access to private names of Dask's client: what each graph passes on its way to the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from distributed import Client

# Takes an expression and its keys, and returns the expression to send.
Wrapping = Callable[[Any, Collection[Any]], Any]

_SUBMIT = "_graph_to_futures"


def put_submissions(client: Client, wrapped: Wrapping) -> None:
    """Let a client send what `wrapped` makes of each graph.  Graphs of actors are sent as they are."""
    stock = getattr(type(client), _SUBMIT)

    def submit(expr: Any, keys: Collection[Any], *args: Any, actors: Any = None, **kwargs: Any) -> Any:
        sent = expr if actors else wrapped(expr, keys)
        return stock(client, sent, keys, *args, actors=actors, **kwargs)

    # An attribute of this one object, so that it is gone with it, and other clients have none.
    setattr(client, _SUBMIT, submit)


def put_stock_submissions(client: Client) -> None:
    """Let a client send graphs as they are.  Idempotent."""
    client.__dict__.pop(_SUBMIT, None)
