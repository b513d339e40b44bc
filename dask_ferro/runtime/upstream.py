"""Access to Dask's scheduler by names that are no public interface: what is installed, asked, sent and read.

`upstream_names` lists the names, and a test finds any that another module uses.  Each function that sets something
has one that takes it back, and together those leave stock Dask.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import distributed.stealing
from dask.typing import Key
from distributed import Scheduler, Status
from distributed.comm.core import CommClosedError
from distributed.metrics import monotonic, time
from distributed.protocol import pickle
from distributed.scheduler import TaskGroup, TaskPrefix, TaskState, WorkerState
from distributed.stealing import WorkStealing

logger = logging.getLogger(__name__)

# Seconds for which a victim's answer is awaited when one stealing follows another.
_PATIENCE = 5.0

# What Dask sets itself, in seconds: the timer of messages from the scheduler to a worker, and from a client.
WORKER_SENDS = 0.005
CLIENT_SENDS = 0.010

# A worker's answers to a request by which it gives the task up, or keeps it; without them the plugin stays off.
CONFIRMS: Collection[str] = getattr(distributed.stealing, "_WORKER_STATE_CONFIRM", frozenset())
REJECTS: Collection[str] = getattr(distributed.stealing, "_WORKER_STATE_REJECT", frozenset())

_PLACING = "decide_worker_non_rootish"
_QUEUED_PLACING = "decide_worker_rootish_queuing_enabled"
_ROOTISH = "is_rootish"


def stealing_of(scheduler: Scheduler) -> WorkStealing | None:
    """Return the stealing extension, or None."""
    return scheduler.extensions.get("stealing")


async def quiet(stealing: WorkStealing | None, scheduler: Scheduler) -> None:
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


def put_stealing(
    scheduler: Scheduler, stealing: WorkStealing | None, previous: WorkStealing | None = None
) -> None:
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
    _put_answers(
        scheduler, _forwarding(own, previous) if previous is not None and previous.in_flight else own
    )


def _ignored(**answer: object) -> None:
    """An answer that comes after stealing was taken off."""


def _forwarding(own: Callable[..., None], left: WorkStealing) -> Callable[..., None]:
    """Return a handler that gives one's predecessor the answers that it still waits for."""

    def confirm(*, key: str, stimulus_id: str, **answer: Any) -> None:
        waits = any(info["stimulus_id"] == stimulus_id for info in left.in_flight.values())
        (left.move_task_confirm if waits else own)(key=key, stimulus_id=stimulus_id, **answer)

    return confirm


# Who asks tasks back beside stealing: the beginning of its stimuli, and what takes the answers.
_claims: WeakKeyDictionary[Scheduler, tuple[str, Callable[..., None]]] = WeakKeyDictionary()


def claim_answers(scheduler: Scheduler, prefix: str, own: Callable[..., None]) -> None:
    """Give `own` the answers to requests whose stimulus begins with `prefix`, whoever steals, now and later."""
    handler = scheduler.stream_handlers.get("steal-response", _ignored)
    _claims[scheduler] = (prefix, own)
    _put_answers(scheduler, getattr(handler, "unclaimed", handler))


def unclaim_answers(scheduler: Scheduler) -> None:
    """Give the one who steals all answers again."""
    handler = scheduler.stream_handlers.get("steal-response", _ignored)
    if _claims.pop(scheduler, None) is not None:
        _put_answers(scheduler, getattr(handler, "unclaimed", handler))


def _put_answers(scheduler: Scheduler, handler: Callable[..., None]) -> None:
    claim = _claims.get(scheduler)
    scheduler.stream_handlers["steal-response"] = handler if claim is None else _sorting(claim, handler)


def _sorting(claim: tuple[str, Callable[..., None]], unclaimed: Callable[..., None]) -> Callable[..., None]:
    prefix, own = claim

    def sort(*, stimulus_id: str, **answer: object) -> None:
        (own if stimulus_id.startswith(prefix) else unclaimed)(stimulus_id=stimulus_id, **answer)

    sort.unclaimed = unclaimed  # type: ignore[attr-defined]
    return sort


async def put_stock_stealing(scheduler: Scheduler, previous: WorkStealing | None = None) -> None:
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
    queued: Callable[[TaskState], WorkerState | None],
    is_tied: Callable[[TaskState], bool] = lambda task: False,
) -> None:
    """Let `ready` choose the worker of a ready task, and `queued` that of one that looks like a root.

    One that `is_tied` to certain workers looks like none, as with Dask's own restrictions: it would hold up the queue.
    """
    asked: TaskState | None = None

    def is_rootish(task: TaskState) -> bool:
        """Note the task: Dask asks this first, and then for a worker, without saying of which task."""
        nonlocal asked
        found: bool = type(scheduler).is_rootish(scheduler, task) and not is_tied(task)
        asked = task if found else None
        return found

    def root() -> WorkerState | None:
        nonlocal asked
        task, asked = asked, None
        # From the queue Dask asks for no task by name, and means the first.
        if task is None or task.state != "waiting":
            task = scheduler.queued.peek()
        return queued(task)

    setattr(scheduler, _ROOTISH, is_rootish)
    setattr(scheduler, _PLACING, ready)
    setattr(scheduler, _QUEUED_PLACING, root)


def put_stock_placement(scheduler: Scheduler) -> None:
    """Let Dask's own methods choose again, and place what waited for a worker that they do not wait for."""
    # An attribute of the instance hides the class's own method, which is there again when it is gone.
    had = _PLACING in vars(scheduler)
    for name in (_ROOTISH, _PLACING, _QUEUED_PLACING):
        vars(scheduler).pop(name, None)
    if had:
        place_again(scheduler, list(scheduler.unrunnable))


def place_again(scheduler: Scheduler, tasks: Iterable[TaskState]) -> None:
    """Look once more for workers: for these of the tasks that have none, and for what is queued."""
    stimulus_id = f"ferro-place-again-{time()}"
    without = sorted((ts for ts in tasks if ts in scheduler.unrunnable), key=_priority, reverse=True)
    # `transitions` takes the last of a dictionary first: so the most urgent task comes last.
    if without:
        scheduler.transitions({ts.key: "processing" for ts in without}, stimulus_id)
    scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)


def keep_waiting(scheduler: Scheduler, tasks: Iterable[TaskState]) -> None:
    """Let tasks without a worker wait on: Dask fails those that have waited for `no-workers-timeout`, by its own book.

    Dask reads that book in the order of time, so that who waits on has begun last.
    """
    if scheduler.no_workers_timeout is not None:
        now = monotonic()
        for ts in tasks:
            if scheduler.unrunnable.pop(ts, None) is not None:
                scheduler.unrunnable[ts] = now


def _priority(task: TaskState) -> tuple[float, ...]:
    return task.priority or ()


def stock_placement(scheduler: Scheduler, task: TaskState) -> WorkerState | None:
    """Return what Dask itself would choose for a ready task."""
    return type(scheduler).decide_worker_non_rootish(scheduler, task)


def is_restricted(task: TaskState) -> bool:
    """Whether a task may not, or would rather not, run on every worker."""
    return bool(task.worker_restrictions or task.host_restrictions or task.resource_restrictions)


def fail_unplaced(
    scheduler: Scheduler, error: Exception, resources: Mapping[str, float] | None = None
) -> list[Key]:
    """Fail the tasks that no worker has, as Dask does after `no-workers-timeout`; return their keys.

    Parameters
    ----------
    resources : mapping, optional
        Only those of exactly these needs, and of no others.
    """
    stimulus_id = f"ferro-fail-{time()}"
    tasks = [ts for ts in (*scheduler.unrunnable, *scheduler.queued) if not ts.actor]
    if resources is not None:
        free = [ts for ts in tasks if not ts.worker_restrictions and not ts.host_restrictions]
        tasks = [ts for ts in free if ts.resource_restrictions == resources]
    exception, recommendations = pickle.dumps(error), {}
    for ts in tasks:
        told = {"exception": exception, "exception_text": str(error), "cause": ts.key}
        recommendations.update(scheduler.transition(ts.key, "erred", stimulus_id=stimulus_id, **told))
    scheduler.transitions(recommendations, stimulus_id)
    return [ts.key for ts in tasks]


def nbytes_of(task: TaskState) -> int:
    """Return the bytes of a task's result, or Dask's guess where they are not known."""
    return task.get_nbytes()


def metrics_of(worker: WorkerState) -> Mapping[str, Any]:
    """Return what a worker's newest heartbeat told; nothing before the first."""
    return worker.metrics or {}


def prefixes(scheduler: Scheduler) -> Collection[TaskPrefix]:
    """Return the scheduler's `TaskPrefix` objects."""
    return scheduler.task_prefixes.values()


def groups(scheduler: Scheduler) -> Mapping[str, TaskGroup]:
    """Return the scheduler's `TaskGroup` objects by name."""
    return scheduler.task_groups


def allowed_workers(scheduler: Scheduler, task: TaskState) -> set[WorkerState] | None:
    """Return the workers that meet a task's restrictions; None: it has none."""
    return scheduler.valid_workers(task)


def worker_plugins(scheduler: Scheduler) -> dict[str, bytes]:
    """Return the pickled plugins, by name, that a worker is given when it joins."""
    return scheduler.worker_plugins


def put_sends(scheduler: Scheduler, addresses: Iterable[str], seconds: float) -> None:
    """Set how long messages to workers are gathered before they are sent."""
    for address in addresses:
        stream = scheduler.stream_comms.get(address)
        if stream is not None:
            stream.interval = seconds


def put_client_sends(client: object, seconds: float) -> None:
    """Set how long a client gathers messages to the scheduler."""
    stream = getattr(client, "scheduler_comm", None)
    if stream is not None:
        stream.interval = seconds


def ask_back(scheduler: Scheduler, address: str, keys: Iterable[Key], stimulus_id: str) -> None:
    """Ask a worker for tasks that it has not started; each is answered on its own, as a steal request is."""
    for key in keys:
        scheduler.worker_send(address, {"op": "steal-request", "key": key, "stimulus_id": stimulus_id})


def take_back(scheduler: Scheduler, key: Key, address: str, stimulus_id: str) -> None:
    """Place a task that a worker has anew; should it have started it, what comes of that is dropped."""
    scheduler._reschedule(key, address, stimulus_id=stimulus_id)


def copy_to(scheduler: Scheduler, address: str, keys: Iterable[Key], stimulus_id: str) -> None:
    """Let a worker fetch copies of results; nothing is said when it has them, but they show up as held."""
    # The receiver is dying, and will be removed: the copies go to somebody else at the next look.
    with suppress(CommClosedError):
        scheduler.request_acquire_replicas(address, keys, stimulus_id=stimulus_id)


def set_status(scheduler: Scheduler, worker: WorkerState, status: Status, stimulus_id: str) -> None:
    """Set a worker's status.

    That a worker runs again is its own to say, when it has heard of it; that it takes no tasks holds at once.
    """
    if status != Status.running:
        scheduler.handle_worker_status_change(status, worker, stimulus_id)
    message = {"op": "worker-status-change", "status": status.name, "stimulus_id": stimulus_id}
    scheduler.worker_send(worker.address, message)


def hand_over(scheduler: Scheduler, task: TaskState, victim: WorkerState, thief: WorkerState) -> None:
    """Make a processing task the thief's, resources included, and send it there."""
    scheduler.release_resources(task, victim)
    task.processing_on = thief
    victim.remove_from_processing(task)
    thief.add_to_processing(task)
    scheduler.acquire_resources(task, thief)
    scheduler.send_task_to_worker(thief.address, task)


def scraped_scheduler() -> Scheduler | None:
    """Return the scheduler of this process whose `/metrics` was asked last; None: of none yet.

    Needs prometheus_client.  Dask, too, has one set of collectors a process, and lends them to who is asked.
    """
    from distributed.http.scheduler.prometheus.core import PrometheusHandler

    collectors = getattr(PrometheusHandler, "_collectors", None)
    return collectors[0].server if collectors else None
