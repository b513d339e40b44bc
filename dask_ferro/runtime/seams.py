"""The places where the scheduler plugin holds on to Dask, private ones included: all of them, and no others.

`PRIVATE` names every attribute of `distributed` that is no public interface; a contract test fails with the name
when one of them moves.  Each function here has one that takes it back, and together those leave stock Dask.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from distributed import Scheduler
from distributed.scheduler import TaskState, WorkerState
from distributed.stealing import WorkStealing

PRIVATE: dict[str, tuple[str, ...]] = {
    "distributed.scheduler.Scheduler": (
        "_reschedule", "acquire_resources", "check_idle_saturated", "decide_worker_non_rootish",
        "decide_worker_rootish_queuing_enabled", "idle_task_count", "release_resources", "send_task_to_worker",
        "register_worker_plugin", "running",
        "stream_comms", "task_prefixes", "unregister_worker_plugin", "valid_workers",
        "worker_plugins",
    ),
    "distributed.scheduler.WorkerState": (
        "add_to_processing", "has_what", "long_running", "needs_what", "processing", "remove_from_processing",
        "used_resources",
    ),
    "distributed.scheduler.TaskState": (
        "actor", "annotations", "dependencies", "dependents", "get_nbytes", "host_restrictions",
        "loose_restrictions", "prefix", "priority", "processing_on", "resource_restrictions", "state", "waiting_on",
        "who_has", "worker_restrictions",
    ),
    "distributed.stealing.WorkStealing": (
        "_add_to_in_flight", "_in_flight_event", "_remove_from_in_flight", "balance", "in_flight", "metrics",
        "move_task_confirm", "put_key_in_stealable", "remove_key_from_stealable", "restart", "stealable",
    ),
    "distributed.batched.BatchedSend": ("interval",),
    "distributed.worker.Worker": ("batched_stream", "contact_address", "metrics", "transfer_incoming_log"),
}  # fmt: skip

logger = logging.getLogger(__name__)

# Seconds for which a victim's answer is awaited when one stealing follows another.
_PATIENCE = 5.0

# What Dask sets itself, in seconds: the timer of messages from the scheduler to a worker, and from a client.
WORKER_SENDS = 0.005
CLIENT_SENDS = 0.010

_PLACING = "decide_worker_non_rootish"
_QUEUED_PLACING = "decide_worker_rootish_queuing_enabled"


def stealing_of(scheduler: Scheduler) -> Any:
    """Return the stealing extension, or None."""
    return scheduler.extensions.get("stealing")


async def quiet(stealing: Any, scheduler: Scheduler) -> None:
    """Stop a stealing extension's ticks, and wait until no request of its is on the way.

    Its own `stop` waits for an event that is only set once it was started: in a preload, for ever.  A victim that
    does not answer within some seconds hangs; its tasks stay where they are.
    """
    stop_ticks(scheduler)
    if stealing is not None and stealing.in_flight:
        try:
            await asyncio.wait_for(stealing._in_flight_event.wait(), _PATIENCE)
        except TimeoutError:
            logger.warning("dask_ferro: %d steal requests are not answered", len(stealing.in_flight))


def stop_ticks(scheduler: Scheduler) -> None:
    """Stop the periodic callback of whichever stealing has one."""
    callback = scheduler.periodic_callbacks.pop("stealing", None)
    if callback is not None:
        callback.stop()


def put_stealing(scheduler: Scheduler, stealing: Any, previous: Any = None) -> None:
    """Make `stealing`, built a moment ago, the scheduler's one; None: have none.

    Parameters
    ----------
    previous : WorkStealing or None
        Which it follows: it is given the answers that it still waits for.
    """
    stop_ticks(scheduler)
    for name, plugin in list(scheduler.plugins.items()):
        if isinstance(plugin, WorkStealing) and plugin is not stealing:
            del scheduler.plugins[name]
    if stealing is None:
        scheduler.extensions.pop("stealing", None)
    else:
        scheduler.extensions["stealing"] = stealing
    # An answer may still be on its way: without a handler it would cost the worker its connection.
    own = stealing.move_task_confirm if stealing is not None else _ignored
    waits = previous is not None and bool(previous.in_flight)
    scheduler.stream_handlers["steal-response"] = _forwarding(own, previous) if waits else own


def _ignored(**answer: Any) -> None:
    """An answer that comes after stealing was taken off."""


def _forwarding(own: Callable[..., None], left: Any) -> Callable[..., None]:
    """Return a handler that gives one's predecessor the answers that it still waits for."""

    def confirm(*, key: Any, stimulus_id: str, **answer: Any) -> None:
        waits = any(info["stimulus_id"] == stimulus_id for info in left.in_flight.values())
        (left.move_task_confirm if waits else own)(key=key, stimulus_id=stimulus_id, **answer)

    return confirm


async def put_stock_stealing(scheduler: Scheduler, previous: Any = None) -> None:
    """Give the scheduler Dask's own stealing, aware of all tasks that it would know of had it always been there."""
    stock = WorkStealing(scheduler)
    put_stealing(scheduler, stock, previous)
    for worker in scheduler.workers.values():
        for task in worker.processing:
            if task not in worker.long_running:
                stock.put_key_in_stealable(task)
    await stock.start()


def put_placement(
    scheduler: Scheduler,
    ready: Callable[[TaskState], WorkerState | None],
    queued: Callable[[], WorkerState | None],
) -> None:
    """Let `ready` choose the worker of a ready task, and `queued` that of a task from the scheduler's queue."""
    setattr(scheduler, _PLACING, ready)
    setattr(scheduler, _QUEUED_PLACING, queued)


def put_stock_placement(scheduler: Scheduler) -> None:
    """Let Dask's own methods choose again."""
    for name in (_PLACING, _QUEUED_PLACING):
        vars(scheduler).pop(name, None)


def stock_placement(scheduler: Scheduler, task: TaskState) -> WorkerState | None:
    """Return what Dask itself would choose for a ready task."""
    return type(scheduler).decide_worker_non_rootish(scheduler, task)


def is_restricted(task: TaskState) -> bool:
    """Whether a task may not, or would rather not, run on every worker."""
    return bool(task.worker_restrictions or task.host_restrictions or task.resource_restrictions)


def put_sends(scheduler: Scheduler, addresses: Iterable[str], seconds: float) -> None:
    """Set how long messages to workers are gathered before they are sent."""
    for address in addresses:
        stream = scheduler.stream_comms.get(address)
        if stream is not None:
            stream.interval = seconds


def put_client_sends(client: Any, seconds: float) -> None:
    """Set how long a client gathers messages to the scheduler."""
    stream = getattr(client, "scheduler_comm", None)
    if stream is not None:
        stream.interval = seconds


def hand_over(scheduler: Scheduler, task: TaskState, victim: WorkerState, thief: WorkerState) -> None:
    """Make a processing task the thief's, resources included, and send it there."""
    scheduler.release_resources(task, victim)
    task.processing_on = thief
    victim.remove_from_processing(task)
    thief.add_to_processing(task)
    scheduler.acquire_resources(task, thief)
    scheduler.send_task_to_worker(thief.address, task)
