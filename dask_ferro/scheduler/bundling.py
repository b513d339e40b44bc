"""`ff.bundle_tasks`: cheap tasks of a client's graphs run several at a time, in bundles or flows, in a block or
always.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakSet

from dask.typing import Key
from distributed import Client, Scheduler

from dask_ferro import config
from dask_ferro.errors import InputError
from dask_ferro.lower.bundling.expression import BundledGraph
from dask_ferro.lower.client import current_client
from dask_ferro.lower.upstream import Expr
from dask_ferro.scheduler import upstream_client
from dask_ferro.scheduler.bundle_costs import BundleCosts
from dask_ferro.scheduler.plugin import part_of, put_on, take_off

# The clients of the blocks around: what they submit now is bundled.
_BLOCKS: ContextVar[tuple[Client, ...]] = ContextVar("dask_ferro_bundled", default=())
# Clients whose graphs can be bundled.
_enabled_clients: WeakSet[Client] = WeakSet()


@contextmanager
def bundle_tasks(*, client: Client | None = None) -> Iterator[None]:
    """Run cheap tasks of a client's graphs in groups in a block: each group (a bundle) is one Dask task.

    A Dask task has an overhead of about 2 ms of CPU time, so that tasks of a millisecond take three times as long as
    necessary.  The scheduler chooses which tasks share a bundle according to the measured seconds of earlier tasks with
    the same name, or else to the seconds in a task's annotation (``dask.annotate(ferro={"seconds": 0.001})``).  A task
    of unknown cost runs on its own, and so does a task with retries.  Requested keys, annotations, priorities and
    persisted data do not change.  Two requested keys are never in one bundle, so `client.map` and `persist` of
    independent chunks gain little.

    A bundle is made only if the results in memory are projected to take at most 5 % more than the results of single
    tasks, or 1 % of the workers' memory, up to 32 MiB for each thread, if that is more.  A task that only extracts a
    result of a bundle has a slightly higher priority.  A graph whose results would take over a quarter of the workers'
    memory in total is not bundled.

    If a flow is projected to end earlier, all tasks of a graph run as a flow: one Dask task on each worker thread, and
    these tasks send each other results.  Its results arrive together, and an input from outside that fails ends the
    whole flow.

    The scheduler measures how long a graph takes each way.  A graph that ran faster without bundles is not bundled
    again, whatever its keys are.

    Graphs that threads started inside the block submit are not bundled.

    Parameters
    ----------
    client : distributed.Client, optional
        Default: the current client.  All graphs of a client are bundled after ``ff.install(client, bundles=True)``.

    Raises
    ------
    InputError
        If there is no client, if an asynchronous client is used before ``await ff.install(client, bundles=False)``, or
        if dask_ferro cannot be imported on the scheduler.

    Examples
    --------
    >>> x = da.random.random((4000, 4000), chunks=100)   # doctest: +SKIP
    >>> with ff.bundle_tasks():                                # doctest: +SKIP
    ...     (x + x.T).mean().compute()
    """
    client = current_client() if client is None else client
    if client is None:
        raise InputError(
            "ff.bundle_tasks: there is no client; create one first: client = distributed.Client()"
        )
    enable_if_new(client)
    token = _BLOCKS.set((*_BLOCKS.get(), client))
    try:
        yield
    finally:
        _BLOCKS.reset(token)


def enable_if_new(client: Client) -> None:
    """Let the graphs of a client be bundled where a block asks for it, if they are not yet."""
    if not isinstance(client, Client):
        raise InputError(f"ff.bundle_tasks: got client={client!r}, wanted a distributed.Client")
    if client in _enabled_clients:
        return
    if client.asynchronous:
        raise InputError(
            "ff.bundle_tasks: this client is asynchronous, and its scheduler does not know of bundles yet: call"
            " `await ff.install(client, bundles=False)` first"
        )
    client.sync(enable, client, always=False)


async def enable(client: Client, *, always: bool) -> None:
    """Let the graphs of a client be bundled: each one, or those of a block.

    Raises
    ------
    InputError
        If dask_ferro cannot be imported on the scheduler.
    """
    try:
        scheduler = await client.run_on_scheduler(
            _add_client, client=client.id, path=config.value("bundle.costs")
        )
    except ModuleNotFoundError as error:
        raise InputError(
            f"the scheduler cannot import dask_ferro ({error}): install it in the scheduler's environment too"
        ) from error
    _enabled_clients.add(client)
    upstream_client.put_submissions(client, _rewriting(client, scheduler, always))


async def disable(client: Client) -> None:
    """Let the graphs of a client be as they are; without such a client, the scheduler learns nothing.  Idempotent."""
    upstream_client.put_stock_submissions(client)
    _enabled_clients.discard(client)
    await client.run_on_scheduler(_remove_client, client=client.id)


async def _add_client(*, client: str, path: str | None, dask_scheduler: Scheduler) -> str:
    """Learn what tasks cost for a client; return the scheduler's identifier."""
    await put_on(BundleCosts(client, path), dask_scheduler=dask_scheduler)
    return str(dask_scheduler.id)


async def _remove_client(*, client: str, dask_scheduler: Scheduler) -> None:
    """Forget a client; nothing is learned any more without any."""
    if (costs := part_of(dask_scheduler, BundleCosts)) is not None:
        costs.clients.discard(client)
        await take_off(BundleCosts.name, dask_scheduler=dask_scheduler)


def _rewriting(client: Client, scheduler: str, always: bool) -> upstream_client.Wrapping:
    def rewritten(expr: Expr, keys: Collection[Key], common: Mapping[str, object]) -> BundledGraph:
        is_bundled = always or client in _BLOCKS.get()
        return BundledGraph(expr, keys, scheduler, is_bundled, common)

    return rewritten
