"""The worker plugin on all workers, and off them again, without waiting for one that hangs.

Dask's own registration waits for every worker: one that is stopped (SIGSTOP, a debugger, a lost disk) holds up
whoever installs.  Here each worker has so many seconds to answer.  After that its set-up goes on in the background,
one message after the other in the order of the calls, and is tried again while the worker is there: when it comes
back, it becomes what the others are.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Scheduler

logger = logging.getLogger(__name__)

# Between two tries with a worker that could not be reached, which takes Dask 30 s to find out.
_AGAIN = 1.0

# By scheduler and worker: the newest message that is on its way there.
_underway: WeakKeyDictionary[Scheduler, dict[str, asyncio.Task[str | None]]] = WeakKeyDictionary()


async def put_on(scheduler: Scheduler, name: str, plugin: bytes, seconds: float) -> list[str]:
    """Put a worker plugin on all workers, later ones included.

    Parameters
    ----------
    plugin : bytes
        Pickled.
    seconds : float
        For which each worker is waited for.

    Returns
    -------
    list of str
        Addresses of those that have not answered by now; they are set up when they do.

    Raises
    ------
    RuntimeError
        A worker could not read it, in its words; no worker that joins later is given it: it would not start.
    """
    scheduler.worker_plugins[name] = plugin
    message = {"op": "plugin-add", "plugin": plugin, "name": name}
    late, refusals = await _tell_all(scheduler, message, seconds)
    if refusals:
        scheduler.worker_plugins.pop(name, None)
        raise RuntimeError(refusals)
    return late


async def take_off(scheduler: Scheduler, name: str, seconds: float) -> list[str]:
    """Take a worker plugin off all workers; return those that have not answered within so many seconds."""
    if scheduler.worker_plugins.pop(name, None) is None:
        return []
    late, refusals = await _tell_all(scheduler, {"op": "plugin-remove", "name": name}, seconds)
    if refusals:
        logger.warning("dask_ferro: plugin %s stays on some workers: %s", name, refusals)
    return late


async def _tell_all(scheduler: Scheduler, message: dict[str, Any], seconds: float) -> tuple[list[str], str]:
    """Send all workers a message; return who has not answered in time, and what those said that cannot take it."""
    underway = _underway.setdefault(scheduler, {})
    told: dict[str, asyncio.Task[str | None]] = {}
    for address in scheduler.workers:
        told[address] = asyncio.create_task(_tell(scheduler, address, message, underway.get(address)))
    underway.update(told)
    for address, task in told.items():
        task.add_done_callback(partial(_forget, underway, address))
    if told:
        await asyncio.wait(told.values(), timeout=seconds)
    late = [address for address, task in told.items() if not task.done()]
    refusals = {a: task.result() for a, task in told.items() if task.done() and task.result()}
    if late:
        logger.warning(
            "dask_ferro: %s did not answer within %g s; whoever is late is set up when it answers",
            ", ".join(late),
            seconds,
        )
    return late, "; ".join(f"{address}: {why}" for address, why in refusals.items())


def _forget(
    underway: dict[str, asyncio.Task[str | None]], address: str, done: asyncio.Task[str | None]
) -> None:
    if underway.get(address) is done:
        del underway[address]


async def _tell(
    scheduler: Scheduler, address: str, message: dict[str, Any], before: asyncio.Task[str | None] | None
) -> str | None:
    """Send a worker a message until it has answered or is gone; return what it refused, or None."""
    worker = scheduler.workers[address]
    if before is not None:
        await asyncio.wait({before})
    while scheduler.workers.get(address) is worker:
        answer = (await scheduler.broadcast(msg=message, workers=[address], on_error="return"))[address]
        if not isinstance(answer, OSError | TimeoutError):  # the connection's; others are the worker's own
            return repr(answer) if isinstance(answer, Exception) else None
        await asyncio.sleep(_AGAIN)
    return None
