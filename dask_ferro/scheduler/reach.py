"""Installation of worker plugins on all workers, and removal, without waiting for a worker that hangs.

Dask's own registration waits for every worker: one that is stopped (SIGSTOP, a debugger, a lost disk) blocks the
caller.  Here each worker has a limited time to answer.  After that its set-up goes on in the background, messages in
the order of the calls, and is retried while the worker exists: when it comes back, it becomes like the others.

A lost connection is an `OSError` raised here; an exception of the worker's own code comes as an answer, whatever its
type.  Only the first is retried.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Collection, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from distributed import Scheduler
from distributed.core import clean_exception
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialize, Serialized, deserialize

from dask_ferro.lower.portable import PortablePlugin

logger = logging.getLogger(__name__)

# Seconds between attempts with a worker that could not be reached, which takes Dask 30 s to find out.
_RETRY_INTERVAL = 1.0

# Messages go to a worker one by one, in the order of the calls, as an `asyncio.Lock` is fair.  Only pending messages
# keep it, since an elastic cluster has new addresses all day.
_locks: WeakKeyDictionary[Scheduler, WeakValueDictionary[str, asyncio.Lock]] = WeakKeyDictionary()
# The event loop itself keeps no references to tasks.
_underway: set[asyncio.Task[Exception | None]] = set()


async def put_on(name: str, plugin: bytes, seconds: float, *, dask_scheduler: Scheduler) -> list[str]:
    """Install a worker plugin on all workers, later ones included.

    Parameters
    ----------
    plugin : bytes
        The pickled plugin.
    seconds : float
        For which each worker is waited for.

    Returns
    -------
    list of str
        Addresses of workers that have not answered yet; they are set up when they do.

    Raises
    ------
    RuntimeError
        If its set-up raised an error on a worker, with the worker's message and chained to its exception; then no
        worker has the plugin, nor does one that joins later.  A worker without dask_ferro gets a stand-in instead.
    """
    plugins = dask_scheduler.worker_plugins
    # A worker that joins and cannot load it would not start, and its name would stay taken.
    plugins[name] = plugin = dumps(PortablePlugin(plugin))
    message = {"op": "plugin-add", "plugin": plugin, "name": name}
    late, refusals = await _tell_all(dask_scheduler, message, seconds)
    if refusals:
        await take_off(name, seconds, dask_scheduler=dask_scheduler)
        raise RuntimeError(_words(refusals)) from next(iter(refusals.values()))
    return late


async def take_off(
    name: str, seconds: float, hung: Collection[str] = (), *, dask_scheduler: Scheduler
) -> list[str]:
    """Remove a worker plugin from all workers; return those that have not answered within `seconds`.

    Parameters
    ----------
    hung : collection of str
        Addresses of workers that are told, but not waited for.
    """
    if dask_scheduler.worker_plugins.pop(name, None) is None:
        return []
    late, refusals = await _tell_all(dask_scheduler, {"op": "plugin-remove", "name": name}, seconds, hung)
    if refusals:
        logger.warning("dask_ferro: plugin %s stays on some workers: %s", name, _words(refusals))
    return late


def warn(call: str, late: Collection[str], seconds: float, what: str) -> None:
    """Warn a client of workers that did not answer `call` in time, and of the consequence."""
    if late:
        warnings.warn(
            f"{call}: {', '.join(late)} did not answer within {seconds:g} s (ferro.scheduler.timeout){what}",
            RuntimeWarning,
            stacklevel=3,
        )


async def _tell_all(
    scheduler: Scheduler, message: Mapping[str, object], seconds: float, hung: Collection[str] = ()
) -> tuple[list[str], dict[str, Exception]]:
    """Send all workers a message; return the workers that have not answered in time, and the exceptions by worker."""
    locks, calls = _locks.setdefault(scheduler, WeakValueDictionary()), {}
    for address in scheduler.workers:
        lock = locks.setdefault(address, asyncio.Lock())
        calls[address] = asyncio.create_task(_tell(scheduler, address, message, lock))
        _underway.add(calls[address])
        calls[address].add_done_callback(_underway.discard)
    if awaited := [task for address, task in calls.items() if address not in hung]:
        await asyncio.wait(awaited, timeout=seconds)
    late = [address for address, task in calls.items() if not task.done()]
    refusals = {a: error for a, task in calls.items() if task.done() and (error := task.result())}
    if late:
        logger.warning(
            "dask_ferro: %s did not answer within %g s; each is set up when it answers",
            ", ".join(late),
            seconds,
        )
    return late, refusals


def _words(refusals: dict[str, Exception]) -> str:
    return "; ".join(f"{address}: {error!r}" for address, error in refusals.items())


async def _tell(
    scheduler: Scheduler, address: str, message: Mapping[str, object], turns: asyncio.Lock
) -> Exception | None:
    """Send a worker a message until it has answered or is gone; return its exception, or None."""
    worker = scheduler.workers[address]
    async with turns:
        while scheduler.workers.get(address) is worker:
            answers = await scheduler.broadcast(msg=dict(message), workers=[address], on_error="return")
            answer = answers[address]
            if not isinstance(answer, OSError | TimeoutError):
                return answer if isinstance(answer, Exception) else _exception_of(answer)
            await asyncio.sleep(_RETRY_INTERVAL)
    return None


def _exception_of(answer: dict[str, object]) -> Exception | None:
    """Return the exception of a plugin's own `setup` or `teardown` on a worker."""
    if answer.get("status") != "error":
        return None
    # The worker serialises it so that a scheduler can pass it on without unpickling.
    exception: Any = answer["exception"]
    if isinstance(exception, Serialized):
        exception = deserialize(exception.header, exception.frames)
    elif isinstance(exception, Serialize):
        exception = exception.data
    _, error, _ = clean_exception(exception)
    return error if isinstance(error, Exception) else RuntimeError(answer.get("exception_text", "no reason"))
