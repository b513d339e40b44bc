"""`ff.bundled`: cheap tasks of a client's graphs run several at a time, in a block, for one collection, or always."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import NamedTuple, overload
from weakref import WeakKeyDictionary

from dask.base import DaskMethodsMixin, is_dask_collection
from dask.typing import DaskCollection, Key
from distributed import Client, Scheduler

from dask_ferro.errors import ConfigError
from dask_ferro.lower.bundled.expression import BundledGraph, bundled_expr
from dask_ferro.lower.client import current_client
from dask_ferro.lower.upstream import Expr, OpaqueExpr
from dask_ferro.runtime import upstream_client
from dask_ferro.runtime.bundling.plugin import NAME, BundlingPlugin

# Whether graphs that are submitted now are bundled; None: as the client was told.
_IN_BLOCK: ContextVar[bool] = ContextVar("dask_ferro_bundled", default=False)


class _Put(NamedTuple):
    """What a client was told: its scheduler's identifier, and whether each of its graphs is bundled."""

    scheduler: str
    always: bool


_put: WeakKeyDictionary[Client, _Put] = WeakKeyDictionary()


@overload
def bundled(*, client: Client | None = None) -> AbstractContextManager[None]: ...


@overload
def bundled(collection: DaskCollection, *, client: Client | None = None) -> Bundled: ...


def bundled(
    collection: DaskCollection | None = None, *, client: Client | None = None
) -> AbstractContextManager[None] | Bundled:
    """Run cheap tasks of a graph several at a time, as one task of Dask's: a bundle.

    A task costs some 2 ms of CPU beside its own work, so that tasks of a millisecond take three times as long as they
    need.  Which tasks share a bundle is chosen on the scheduler, by what their likes took before; a task whose like was
    never seen runs by itself.  Requested keys, annotations, priorities and persisted data stay what they are.

    Parameters
    ----------
    collection : Dask collection, optional
        Return it as a collection that is bundled when it is computed or persisted.  Without one, return a context
        manager: graphs that are submitted inside are bundled.
    client : distributed.Client, optional
        Default: the current client.  All graphs of a client are bundled with ``ff.install(client, bundles=True)``.

    Raises
    ------
    ConfigError
        If `collection` is no Dask collection; if a block has no client, or one that is asynchronous and was not told
        before, by ``await ff.install(client, bundles=True)``; if dask_ferro cannot be imported on the scheduler.

    Examples
    --------
    >>> x = da.random.random((4000, 4000), chunks=100)   # doctest: +SKIP
    >>> ff.bundled(x.sum()).compute()                     # doctest: +SKIP
    >>> with ff.bundled():                                # doctest: +SKIP
    ...     (x + x.T).mean().compute()
    """
    if collection is None:
        return _block(client)
    if not is_dask_collection(collection):
        raise ConfigError(
            f"ff.bundled: got {type(collection).__name__}, wanted a Dask collection (an array, a dataframe, a bag, a"
            " delayed value), or nothing, for a block: with ff.bundled(): ..."
        )
    client = current_client() if client is None else client
    # Without a cluster, tasks cost nearly nothing: the collection is computed as it is.
    return Bundled(collection, "" if client is None else _told(client).scheduler)


@contextmanager
def _block(client: Client | None) -> Iterator[None]:
    client = current_client() if client is None else client
    if client is None:
        raise ConfigError("ff.bundled: there is no client; create one first: client = distributed.Client()")
    _told(client)
    token = _IN_BLOCK.set(True)
    try:
        yield
    finally:
        _IN_BLOCK.reset(token)


def _told(client: Client) -> _Put:
    """Return what a client was told; tell it that its graphs may be bundled, if nobody has."""
    told = _put.get(client)
    if told is not None:
        return told
    if client.asynchronous:
        raise ConfigError(
            "ff.bundled: this client is asynchronous, and its scheduler was not told yet: call"
            " `await ff.install(client, bundles=True)` first"
        )
    client.sync(put_on, client, always=False)
    return _put[client]


async def put_on(client: Client, *, always: bool) -> None:
    """Let the graphs of a client be bundled: each one, or those of a block or a collection.

    Raises
    ------
    ConfigError
        If dask_ferro cannot be imported on the scheduler.
    """
    try:
        await client.register_plugin(BundlingPlugin.configured())
        scheduler = await client.run_on_scheduler(_identifier)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the scheduler cannot import dask_ferro ({error}): install it in the scheduler's environment too"
        ) from error
    _put[client] = _Put(scheduler, always)
    upstream_client.put_submissions(client, _wrapping(scheduler, always))


async def take_off(client: Client) -> None:
    """Undo `put_on` for a client, and the scheduler's plugin.  Idempotent."""
    upstream_client.put_stock_submissions(client)
    if _put.pop(client, None) is not None and await client.run_on_scheduler(_identifier):
        await client.unregister_scheduler_plugin(NAME)


def _identifier(*, dask_scheduler: Scheduler) -> str:
    """Return the scheduler's identifier if it has the plugin, or ""."""
    return str(dask_scheduler.id) if NAME in dask_scheduler.plugins else ""


def _wrapping(scheduler: str, always: bool) -> upstream_client.Wrapping:
    def wrapped(expr: Expr, keys: Collection[Key]) -> BundledGraph:
        return BundledGraph(expr, keys, scheduler, is_bundled=always or _IN_BLOCK.get())

    return wrapped


class Bundled(DaskMethodsMixin):  # type: ignore[misc]
    """A Dask collection whose graph is bundled when it is computed; see `bundled`.

    Parameters
    ----------
    collection : Dask collection
    scheduler : str
        The identifier of the scheduler that bundles it; "" where there is none.
    """

    def __init__(self, collection: DaskCollection, scheduler: str) -> None:
        self.collection = collection
        self._scheduler = scheduler

    def __repr__(self) -> str:
        return f"ff.bundled({self.collection!r})"

    @property
    def expr(self) -> OpaqueExpr:
        """The expression that Dask computes."""
        return bundled_expr(self.collection, self._scheduler)

    def __dask_graph__(self) -> object:
        return self.collection.__dask_graph__()

    def __dask_keys__(self) -> object:
        return self.collection.__dask_keys__()

    def __dask_postcompute__(self) -> object:
        return self.collection.__dask_postcompute__()

    def __dask_postpersist__(self) -> object:
        return self.collection.__dask_postpersist__()

    def __dask_tokenize__(self) -> object:
        return self.collection

    @property
    def __dask_scheduler__(self) -> object:
        return self.collection.__dask_scheduler__
