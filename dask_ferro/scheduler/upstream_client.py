"""Access to private names of Dask's client: what each graph passes on its way to the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from dask.base import get_annotations
from dask.typing import Key
from distributed import Client

from dask_ferro.lower.upstream import Expr

# Takes an expression, its keys, and the annotations of tasks without their own; returns the expression to send.
Wrapping = Callable[[Expr, Collection[Key], Mapping[str, object]], object]

_SUBMIT = "_graph_to_futures"
# What a call says of all of its tasks.
_CALL_OPTIONS = ("retries", "workers", "resources", "allow_other_workers")


def put_submissions(client: Client, wrapped: Wrapping) -> None:
    """Let a client send what `wrapped` makes of each graph.

    Graphs of actors are sent as they are, and the dictionary that `recreate_error_locally` sends.
    """
    stock = getattr(type(client), _SUBMIT)

    def submit(
        expr: Expr, keys: Collection[Key], *args: object, actors: object = None, **kwargs: object
    ) -> object:
        # The actors may be collections of Dask, which have no truth.
        if (actors is not None and actors is not False) or not isinstance(expr, Expr):
            return stock(client, expr, keys, *args, actors=actors, **kwargs)
        # As Dask's client merges them: what the call says comes before what the block around it does.
        common = get_annotations()
        said = {name: kwargs.get(name) for name in _CALL_OPTIONS} | {"priority": kwargs.get("user_priority")}
        common = {**common, **{name: value for name, value in said.items() if value}}
        sent = wrapped(expr, keys, common)
        return stock(client, sent, keys, *args, actors=actors, **kwargs)

    # An attribute of this one object, so that it is gone with it, and other clients have none.
    setattr(client, _SUBMIT, submit)


def put_stock_submissions(client: Client) -> None:
    """Let a client send graphs as they are.  Idempotent."""
    client.__dict__.pop(_SUBMIT, None)
