"""Access to private or undocumented names of Dask's scheduler.

Each function that sets something has a counterpart that undoes it; together those restore stock Dask.
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
from distributed.scheduler import TaskState, WorkerState
from distributed.stealing import WorkStealing

logger = logging.getLogger(__name__)

# Seconds for which victims' answers are awaited when one stealing extension replaces another, and between two looks.
_PATIENCE, _POLL_INTERVAL = 5.0, 0.002

# Dask's own intervals in seconds, for messages from the scheduler to a worker, and from a client.
WORKER_SENDS = 0.005
CLIENT_SENDS = 0.010

# A worker's answers with which it gives a task up, or keeps it; without them the plugin stays off.
CONFIRMS: Collection[str] = getattr(distributed.stealing, "_WORKER_STATE_CONFIRM", frozenset())
REJECTS: Collection[str] = getattr(distributed.stealing, "_WORKER_STATE_REJECT", frozenset())

# The private or undocumented names without which the scheduler plugin stays off, by owner.
_PRIVATE_NAMES: Mapping[type, str] = {
    Scheduler: """
        _reschedule acquire_resources bandwidth check_idle_saturated decide_worker_non_rootish
        decide_worker_rootish_queuing_enabled handle_worker_status_change is_rootish no_workers_timeout
        release_resources request_acquire_replicas send_task_to_worker stimulus_queue_slots_maybe_opened
        stream_comms task_prefixes transition transitions valid_workers worker_plugins worker_send
    """,
    WorkerState: "add_to_processing metrics remove_from_processing",
    TaskState: "get_nbytes",
    WorkStealing: """
        balance count in_flight log metrics move_task_confirm move_task_request put_key_in_stealable
        remove_key_from_stealable
    """,
}

_PLACING = "decide_worker_non_rootish"
_QUEUED_PLACING = "decide_worker_rootish_queuing_enabled"
_ROOTISH = "is_rootish"
_SLOTS_OPENED = "stimulus_queue_slots_maybe_opened"


def missing() -> list[str]:
    """Return the names that the installed version of Dask lacks."""
    lacks = (
        [] if CONFIRMS and REJECTS else ["stealing._WORKER_STATE_CONFIRM", "stealing._WORKER_STATE_REJECT"]
    )
    for owner, names in _PRIVATE_NAMES.items():
        # An annotation is an attribute of the instances.
        there = {*dir(owner)}.union(*(vars(kind).get("__annotations__", ()) for kind in owner.__mro__))
        lacks += [f"{owner.__name__}.{name}" for name in names.split() if name not in there]
    return lacks


async def quiesce(stealing: WorkStealing | None, scheduler: Scheduler) -> None:
    """Stop a stealing extension's ticks, and wait until it has no pending request.

    A victim that does not answer within some seconds hangs; its tasks stay where they are.
    """
    stop_ticks(scheduler)
    until = time() + _PATIENCE
    while stealing is not None and stealing.in_flight:
        if time() > until:
            logger.warning("dask_ferro: %d steal requests are not answered", len(stealing.in_flight))
            break
        await asyncio.sleep(_POLL_INTERVAL)


def stop_ticks(scheduler: Scheduler) -> None:
    """Stop the periodic callback of the installed stealing extension."""
    callback = scheduler.periodic_callbacks.pop("stealing", None)
    if callback is not None:
        callback.stop()


def put_stealing(
    scheduler: Scheduler, stealing: WorkStealing | None, previous: WorkStealing | None = None
) -> None:
    """Make `stealing`, just built, the scheduler's extension; None removes it.

    Parameters
    ----------
    previous : WorkStealing or None
        Its predecessor, which gets the answers to its pending requests.
    """
    stop_ticks(scheduler)
    for name, plugin in list(scheduler.plugins.items()):
        if isinstance(plugin, WorkStealing) and plugin is not stealing:
            del scheduler.plugins[name]
    if stealing is None:
        scheduler.extensions.pop("stealing", None)
    else:
        scheduler.extensions["stealing"] = stealing
    # An answer may still arrive: without a handler it would close the worker's connection.
    own = stealing.move_task_confirm if stealing is not None else _ignore
    scheduler.stream_handlers["steal-response"] = own
    earlier = previous.move_task_confirm if previous is not None and previous.in_flight else None
    stocks = type(previous) is WorkStealing
    route_answers(scheduler, _STOCK_PREFIX, earlier if stocks else None)
    route_answers(scheduler, _FERRO_PREFIX, None if stocks else earlier)


def _ignore(**answer: object) -> None:
    """Ignore an answer that arrives after stealing was removed."""


# The prefixes of stealing's stimuli, and the handlers of answers to other requests by the prefix of their stimuli.
_STOCK_PREFIX, _FERRO_PREFIX = "steal-", "ferro-steal-"
_routes: WeakKeyDictionary[Scheduler, dict[str, Callable[..., None]]] = WeakKeyDictionary()


def route_answers(scheduler: Scheduler, prefix: str, own: Callable[..., None] | None) -> None:
    """Pass answers to requests whose stimulus begins with `prefix` to `own`; None: to the stealing extension."""
    routes = _routes.setdefault(scheduler, {})
    routes.pop(prefix, None)
    if own is not None:
        routes[prefix] = own
    present = scheduler.stream_handlers.get("steal-response", _ignore)
    rest = getattr(present, "rest", present)

    def sort(*, stimulus_id: str, **answer: Any) -> None:
        to = next((handler for start, handler in routes.items() if stimulus_id.startswith(start)), rest)
        to(stimulus_id=stimulus_id, **answer)

    sort.rest = rest  # type: ignore[attr-defined]
    scheduler.stream_handlers["steal-response"] = sort if routes else rest


async def put_stock_stealing(scheduler: Scheduler, previous: WorkStealing | None) -> None:
    """Install Dask's own stealing, with all tasks that it would know had it been active from the start."""
    stock = WorkStealing(scheduler)
    put_stealing(scheduler, stock, previous)
    for worker in scheduler.workers.values():
        for task in worker.processing:
            if task not in worker.long_running:
                stock.put_key_in_stealable(task)
    await stock.start()


class _QueueFilling:
    """The worker that is being sent queued tasks beyond Dask's slots; None: Dask fills these."""

    def __init__(self, scheduler: Scheduler, ahead: Callable[[WorkerState, TaskState], int]) -> None:
        self.worker: WorkerState | None = None
        self._scheduler, self._ahead = scheduler, ahead

    def slots_opened(self, *, stimulus_id: str) -> None:
        """Let Dask fill the open slots, and send more tasks of the queue to the workers that had one."""
        queued = self._scheduler.queued
        if not queued:
            return
        open_before = tuple(self._scheduler.idle_task_count)
        type(self._scheduler).stimulus_queue_slots_maybe_opened(self._scheduler, stimulus_id=stimulus_id)
        for worker in open_before:
            if queued and not queued.peek().suspicious and (count := self._ahead(worker, queued.peek())):
                self._fill(worker, count, stimulus_id)

    def _fill(self, worker: WorkerState, count: int, stimulus_id: str) -> None:
        """Send a worker tasks from the head of the queue, as long as they are of one prefix."""
        queued, self.worker = self._scheduler.queued, worker
        prefix = queued.peek().prefix
        try:
            # A task that was on a worker that died goes alone: if it ends the next one, Dask blames all that are there.
            while count and queued and (task := queued.peek()).prefix is prefix and not task.suspicious:
                self._scheduler.transitions({task.key: "processing"}, stimulus_id)
                count -= 1
        finally:
            self.worker = None


def put_placement(
    scheduler: Scheduler,
    ready: Callable[[TaskState], WorkerState | None],
    queued: Callable[[Callable[[], TaskState], WorkerState | None], WorkerState | None],
    is_tied: Callable[[TaskState], bool],
    ahead: Callable[[WorkerState, TaskState], int],
) -> None:
    """Let `ready` choose the worker of a ready task, and `queued` that of a root-like task.

    `queued` gets a function that finds the task, as few choices depend on it and a look into Dask's queue takes 1 us;
    and the worker that is being sent several.
    Tasks that are bound to certain workers do not count as root-like, as for Dask's restrictions: they would block
    the queue.  A worker that is given queued tasks is given `ahead` more; the next in the queue is passed, too.
    """
    asked: TaskState | None = None
    stock, filled = type(scheduler).is_rootish, _QueueFilling(scheduler, ahead)

    def is_rootish(task: TaskState) -> bool:
        """Remember the task, since Dask then asks for a worker without naming the task."""
        nonlocal asked
        found: bool = stock(scheduler, task) and not is_tied(task)
        asked = task if found else None
        return found

    def root() -> WorkerState | None:
        nonlocal asked
        task, asked = asked, None

        def first() -> TaskState:
            # For the first task of its queue, Dask asks without calling `is_rootish`.
            return scheduler.queued.peek() if task is None or task.state != "waiting" else task

        # While all workers are busy the task stays in the queue, whichever it is, as with Dask's own placement.
        return queued(first, filled.worker) if scheduler.idle_task_count or filled.worker else None

    setattr(scheduler, _ROOTISH, is_rootish)
    setattr(scheduler, _PLACING, ready)
    setattr(scheduler, _QUEUED_PLACING, root)
    setattr(scheduler, _SLOTS_OPENED, filled.slots_opened)


def put_stock_placement(scheduler: Scheduler) -> None:
    """Restore Dask's own methods, and place tasks that waited for reasons of ours."""
    # The instance's attribute hides the class's method, which is effective again once the attribute is gone.
    had = _PLACING in vars(scheduler)
    for name in (_ROOTISH, _PLACING, _QUEUED_PLACING, _SLOTS_OPENED):
        vars(scheduler).pop(name, None)
    if had:
        place_again(scheduler, list(scheduler.unrunnable))


def place_again(scheduler: Scheduler, tasks: Iterable[TaskState]) -> None:
    """Try again to place those of the tasks that have no worker, and the queued tasks."""
    stimulus_id = f"ferro-place-again-{time()}"
    without = sorted((ts for ts in tasks if ts in scheduler.unrunnable), key=_priority, reverse=True)
    # `transitions` takes the last entry of a dictionary first, so the most urgent task comes last.
    if without:
        scheduler.transitions({ts.key: "processing" for ts in without}, stimulus_id)
    scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus_id)


def keep_waiting(scheduler: Scheduler, tasks: Iterable[TaskState]) -> None:
    """Keep tasks without a worker waiting beyond `no-workers-timeout`, after which Dask would fail them.

    Their times in Dask's record are refreshed; it is read in chronological order, so they go to its end.
    """
    if scheduler.no_workers_timeout is not None:
        now = monotonic()
        for ts in tasks:
            if scheduler.unrunnable.pop(ts, None) is not None:
                scheduler.unrunnable[ts] = now


def _priority(task: TaskState) -> tuple[float, ...]:
    return task.priority or ()


def stock_placement(scheduler: Scheduler, task: TaskState) -> WorkerState | None:
    """Return Dask's own choice for a ready task."""
    return type(scheduler).decide_worker_non_rootish(scheduler, task)


def is_restricted(task: TaskState) -> bool:
    """Return whether a task has restrictions, strict or loose."""
    return bool(task.worker_restrictions or task.host_restrictions or task.resource_restrictions)


def prefer_worker(task: TaskState, address: str) -> None:
    """Let a task that no user restricts run on a worker, if it is there."""
    if not _is_restricted_by_user(task):
        task.worker_restrictions, task.loose_restrictions = {address}, True


# No worker has this address.
_HOLD_ADDRESS = "ferro-held"


def bind(task: TaskState, address: str) -> None:
    """Let a task run on one worker alone."""
    task.worker_restrictions, task.loose_restrictions = {address}, False


def hold(task: TaskState) -> None:
    """Let a task run on no worker, until it is bound to one."""
    bind(task, _HOLD_ADDRESS)


def is_held(task: TaskState) -> bool:
    """Return whether a task is held."""
    return task.worker_restrictions == {_HOLD_ADDRESS}


def prefer_no_worker(task: TaskState) -> None:
    """Drop loose restrictions: without a worker, a task is tried again only where even these hold."""
    if task.loose_restrictions:
        task.worker_restrictions, task.host_restrictions, task.loose_restrictions = None, None, False


def _is_restricted_by_user(task: TaskState) -> bool:
    if not {"workers", "restrictions"}.isdisjoint(task.annotations or ()):
        return True
    is_strict = bool(task.worker_restrictions) and not task.loose_restrictions
    return bool(is_strict or task.host_restrictions or task.resource_restrictions)


def fail_like(scheduler: Scheduler, tasks: Iterable[TaskState], other: TaskState) -> None:
    """Fail tasks that are on no worker with the error of another one."""
    blame = other.exception_blame or other
    failure = {"exception": blame.exception, "exception_text": blame.exception_text, "cause": blame.key}
    _fail(scheduler, [(ts, failure) for ts in tasks])


def fail(scheduler: Scheduler, tasks: Iterable[TaskState], error: Exception) -> None:
    """Fail tasks that are on no worker."""
    failure = {"exception": pickle.dumps(error), "exception_text": str(error)}
    _fail(scheduler, [(ts, {**failure, "cause": ts.key}) for ts in tasks])


def lose(scheduler: Scheduler, tasks: Collection[TaskState]) -> None:
    """Forget tasks as Dask does if an input of theirs is lost for good; clients that want them are told."""
    for ts in tasks:
        ts.has_lost_dependencies = True
    scheduler.transitions({ts.key: "forgotten" for ts in tasks}, f"ferro-lose-{time()}")


def _fail(scheduler: Scheduler, failures: Iterable[tuple[TaskState, Mapping[str, Any]]]) -> None:
    stimulus_id, recommendations = f"ferro-fail-{time()}", {}
    for ts, failure in failures:
        recommendations.update(scheduler.transition(ts.key, "erred", stimulus_id=stimulus_id, **failure))
    scheduler.transitions(recommendations, stimulus_id)


def metrics_of(worker: WorkerState) -> Mapping[str, Any]:
    """Return the metrics of a worker's newest heartbeat; empty before the first."""
    return worker.metrics or {}


def put_sends(scheduler: Scheduler, addresses: Iterable[str], seconds: float) -> None:
    """Set the interval at which messages to workers are sent."""
    for address in addresses:
        stream = scheduler.stream_comms.get(address)
        if stream is not None:
            stream.interval = seconds


def put_client_sends(client: object, seconds: float) -> None:
    """Set the interval at which a client sends messages to the scheduler."""
    stream = getattr(client, "scheduler_comm", None)
    if stream is not None:
        stream.interval = seconds


def ask_back(scheduler: Scheduler, address: str, keys: Iterable[Key], stimulus_id: str) -> None:
    """Request tasks that a worker has not started; it answers for each one, as for a steal request."""
    for key in keys:
        scheduler.worker_send(address, {"op": "steal-request", "key": key, "stimulus_id": stimulus_id})


def take_back(scheduler: Scheduler, key: Key, address: str, stimulus_id: str) -> None:
    """Place a task again that is on a worker; a result that the worker still sends is ignored."""
    scheduler._reschedule(key, address, stimulus_id=stimulus_id)


def copy_to(scheduler: Scheduler, address: str, keys: Iterable[Key], stimulus_id: str) -> None:
    """Let a worker fetch copies of results; their arrival shows only in the results' holders."""
    # The receiver is closing, and will be removed: the copies go to another worker in the next round.
    with suppress(CommClosedError):
        scheduler.request_acquire_replicas(address, keys, stimulus_id=stimulus_id)


def set_status(scheduler: Scheduler, worker: WorkerState, status: Status, stimulus_id: str) -> None:
    """Set a worker's status.

    A worker itself reports that it runs again, once it has been told; any other status takes effect at once.
    """
    if status != Status.running:
        scheduler.handle_worker_status_change(status, worker, stimulus_id)
    message = {"op": "worker-status-change", "status": status.name, "stimulus_id": stimulus_id}
    scheduler.worker_send(worker.address, message)


def hand_over(scheduler: Scheduler, task: TaskState, victim: WorkerState, thief: WorkerState) -> None:
    """Assign a processing task to the thief, resources included, and send it there."""
    scheduler.release_resources(task, victim)
    task.processing_on = thief
    victim.remove_from_processing(task)
    thief.add_to_processing(task)
    scheduler.acquire_resources(task, thief)
    scheduler.send_task_to_worker(thief.address, task)


def scraped_scheduler() -> Scheduler | None:
    """Return the scheduler of this process whose `/metrics` was read last; None: none so far.

    Needs prometheus_client.  Dask has one set of collectors per process, too, and binds it to the last caller.
    """
    from distributed.http.scheduler.prometheus.core import PrometheusHandler

    collectors = getattr(PrometheusHandler, "_collectors", None)
    return collectors[0].server if collectors else None
