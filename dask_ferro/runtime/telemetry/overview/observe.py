"""The facts of the overview, read from a scheduler.

It walks workers and prefixes, a few of the tasks without a worker, and one running task of each worker; never all
tasks.  It works with or without the plugin: waits, jobs, pools and moved tasks need it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from math import inf
from typing import cast

import dask
from dask.typing import Key
from distributed import Scheduler, Status
from distributed.metrics import monotonic
from distributed.scheduler import TaskPrefix, TaskState, WorkerState

from dask_ferro.lower.stand_in import LACKS
from dask_ferro.policy.waits import WaitingTask
from dask_ferro.runtime import upstream
from dask_ferro.runtime.plugin.annotations import wish_of
from dask_ferro.runtime.plugin.stealing import Stealing
from dask_ferro.runtime.telemetry.dashboard_state import label
from dask_ferro.runtime.telemetry.events import ScaleEvent
from dask_ferro.runtime.telemetry.overview.facts import (
    FailedTask,
    IdleWait,
    MemoryShares,
    Moved,
    OverviewFacts,
    RunningTask,
    Unplaced,
    WorkerSight,
)
from dask_ferro.runtime.telemetry.overview.summary import Overview, overview
from dask_ferro.runtime.worker.plugin import METRIC
from dask_ferro.words import short

# The most tasks without a worker, and the most waits, that are described: each takes about 10 us.
SOME = 32
# The most characters of an error, and names of a list of workers that a task is restricted to.
_ERROR, _NAMES = 120, 8
# The share of a worker's memory limit from which on its memory is looked at more closely.
_DETAILS = 0.5
# Seconds after which a decision is no longer the controller's view: it publishes one every 10 s, or at its interval.
_STOPPED = 120.0
# A task without a worker is told of from these seconds on: until then it may be about to be placed.
_PATIENCE = 1.0


def overview_of(
    scheduler: Scheduler, stealing: Stealing | None, elastic: ScaleEvent | None, now: float
) -> Overview:
    """Return the overview of a scheduler.

    Parameters
    ----------
    stealing : Stealing, optional
        None: the plugin is not installed.
    elastic : ScaleEvent, optional
        The newest decision of the elastic controller.
    now : float
        Epoch.
    """
    return overview(observed(scheduler, stealing, elastic, now))


def observed(
    scheduler: Scheduler, stealing: Stealing | None, elastic: ScaleEvent | None, now: float
) -> OverviewFacts:
    """Return the facts of this moment; parameters as of `overview_of`."""
    tasks, failed, work, unmeasured = _counts(scheduler)
    workers = scheduler.workers
    # A loop that was blocked has unread heartbeats, which are no workers' silence.
    awake = max(now - stealing.waits.awake, 0.0) if stealing is not None else inf
    rows = stealing.ledger.rows if stealing is not None else {}
    running = sum(len(row.running) for row in rows.values())
    return OverviewFacts(
        now=now,
        stealing=stealing.settings.stealing if stealing is not None else "",
        workers=tuple(_sight(ws, stealing, now, awake) for ws in workers.values()),
        threads=sum(ws.nthreads for ws in workers.values()),
        tasks=tasks,
        running=running if stealing is not None else tasks.get("processing", 0),
        failed=failed,
        failure=_failure(scheduler) if failed else None,
        work=work,
        unmeasured=unmeasured,
        first_end=_first_end(scheduler, stealing, now),
        shares=_shares(),
        waits=tuple(_waits(scheduler, stealing, now)),
        unplaced=tuple(_unplaced(scheduler, stealing)),
        unplaced_count=len(scheduler.unrunnable),
        resources=_most(ws.resources for ws in workers.values()),
        devices=tuple(sorted(stealing.ledger.devices)) if stealing is not None else (),
        lacking=_lacking(scheduler) if stealing is not None else {},
        unserved=_unserved(scheduler, stealing, now),
        decision=_recent(elastic, now),
        moved=_moved(stealing),
    )


def _counts(scheduler: Scheduler) -> tuple[Mapping[str, int], Mapping[str, int], float, str]:
    """Return tasks by state, failed ones by prefix, the seconds of the rest, and a prefix that was never measured."""
    states: Counter[str] = Counter()
    failed, work, unmeasured = {}, 0.0, ""
    for prefix in upstream.prefixes(scheduler):
        counts = prefix.states
        states.update({state: count for state, count in counts.items() if count})
        if erred := counts.get("erred", 0):
            failed[short(prefix.name)] = erred
        remaining = sum(counts.get(state, 0) for state in ("waiting", "queued", "no-worker", "processing"))
        mean = _mean(prefix) if remaining else None
        if remaining and mean is None:
            unmeasured = unmeasured or short(prefix.name)
        elif mean is not None:
            work += remaining * mean
    return states, failed, work, unmeasured


def _failure(scheduler: Scheduler) -> FailedTask | None:
    """Return the newest of the tasks that failed by themselves; Dask keeps the last hundred, the newest first."""
    for failed in scheduler.erred_tasks:
        ts = scheduler.tasks.get(failed.key)
        if ts is not None and ts.state == "erred":
            names = tuple(label(a, scheduler.workers.get(a)) for a in sorted(failed.erred_on))
            return FailedTask(short(failed.key), short(failed.exception_text, _ERROR), names)
    return None


def _lacking(scheduler: Scheduler) -> Mapping[str, str]:
    """Return what workers said that they have in place of this dask_ferro, by name."""
    return {label(a, ws): ws.metrics[LACKS] for a, ws in scheduler.workers.items() if LACKS in ws.metrics}


def _mean(prefix: TaskPrefix) -> float | None:
    """Return the mean seconds of a prefix's tasks; None: none has ended."""
    if prefix.duration_average >= 0:
        return float(prefix.duration_average)
    # Dask forgets the average while a task runs for more than twice as long.
    ended = _ended(prefix)
    return prefix.all_durations["compute"] / ended if ended else None


def _ended(prefix: TaskPrefix) -> int:
    # Results that were needed and are no longer count as finished too.
    return int(prefix.states["memory"] + prefix.states["released"] + prefix.states["forgotten"])


def _sight(ws: WorkerState, stealing: Stealing | None, now: float, awake: float) -> WorkerSight:
    silent = min(max(now - ws.last_seen, 0.0), awake)
    name, tasks, limit = label(ws.address, ws), len(ws.processing), ws.memory_limit or 0
    longest = _longest(ws, stealing, now)
    metrics = upstream.metrics_of(ws)
    process, disk = metrics.get("memory", 0), metrics.get("spilled_bytes", {}).get("disk", 0)
    # The details take as long as all the rest, and matter to few; before the first heartbeat there are none.
    if not process or (ws.status == Status.running and process < _DETAILS * limit and not disk):
        return WorkerSight(name, ws.status.name, silent, tasks, process, 0, disk, limit, longest)
    memory, device = ws.memory, (metrics.get(METRIC) or {}).get("gpu") or {}
    # Results on a device, which Dask counts as managed, are not part of the process.
    results = min(max(memory.managed - int(device.get("own", 0)), 0), memory.process)
    return WorkerSight(
        name, ws.status.name, silent, tasks, memory.process, results, memory.spilled, limit, longest
    )


def _longest(ws: WorkerState, stealing: Stealing | None, now: float) -> RunningTask | None:
    """Return the task that a worker has been running for longest; without the plugin, as its heartbeat said."""
    if stealing is None:
        if not ws.executing:
            return None
        ts, seconds = max(ws.executing.items(), key=lambda item: item[1])
        return _running(ts, seconds)
    row = stealing.ledger.rows.get(ws.address)
    # In the order in which they started.
    entry = next(iter(row.running.values()), None) if row is not None else None
    if entry is None or entry.started is None or entry.started == inf:
        return None
    seconds, found = max(now - entry.started, 0.0), stealing.shown.task(entry.key)
    return _running(found, seconds) if found is not None else None


def _running(ts: TaskState, seconds: float) -> RunningTask:
    prefix = ts.prefix
    return RunningTask(short(ts.key), seconds, short(prefix.name), _mean(prefix) or 0.0, _ended(prefix))


def _first_end(scheduler: Scheduler, stealing: Stealing | None, now: float) -> tuple[str, float] | None:
    rows = stealing.ledger.rows.values() if stealing is not None else ()
    first = min(rows, key=lambda row: row.ends_at, default=None)
    if first is None or first.ends_at == inf:
        return None
    return label(first.address, scheduler.workers.get(first.address)), first.ends_at - now


def _shares() -> MemoryShares:
    """Return the shares of memory by the scheduler's configuration, which the workers' may differ from."""
    found = (dask.config.get(f"distributed.worker.memory.{name}", None) for name in MemoryShares._fields)
    return MemoryShares(*(float(share) if share else inf for share in found))


def _most(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    most: dict[str, float] = {}
    for resources in each:
        for name, amount in resources.items():
            most[name] = max(most.get(name, 0.0), amount)
    return most


def _moved(stealing: Stealing | None) -> Moved:
    counts = stealing.counts if stealing is not None else {}
    worked, moving = counts.get("seconds_worked", 0.0), counts.get("seconds_moving", 0.0)
    return Moved(int(counts.get("confirmed", 0)), worked, moving)


# ---- tasks that wait ---------------------------------------------------------------------------------------


def _waits(scheduler: Scheduler, stealing: Stealing | None, now: float) -> Iterable[IdleWait]:
    """Yield some of the waits of the newest sweep that have not ended since."""
    if stealing is not None:
        for wait in islice(stealing.waits.now, SOME):
            if _still_waits(scheduler, wait, stealing):
                yield _idle_wait(scheduler, wait, stealing, now)


def _still_waits(scheduler: Scheduler, wait: WaitingTask, stealing: Stealing) -> bool:
    if not wait.worker:
        return scheduler.tasks.get(cast(Key, wait.key)) in scheduler.unrunnable
    entry = stealing.ledger.entries.get(wait.key)
    # Stolen since, it waits at another worker; with a start, it runs.
    return entry is not None and entry.state != "running" and entry.worker.address == wait.worker


def _idle_wait(scheduler: Scheduler, wait: WaitingTask, stealing: Stealing | None, now: float) -> IdleWait:
    workers = scheduler.workers
    at = workers.get(wait.worker)
    some = tuple(label(address, workers.get(address)) for address in wait.some)
    name = label(wait.worker, at) if wait.worker else ""
    behind = _longest(at, stealing, now) if at is not None else None
    return IdleWait(short(wait.key), name, wait.seconds, wait.idle, some, wait.reason, behind)


def _unplaced(scheduler: Scheduler, stealing: Stealing | None) -> Iterable[Unplaced]:
    """Yield some of the ready tasks on no worker; the plugin knows those that it holds back, and why."""
    known = {wait.key: wait for wait in stealing.waits.elsewhere([])} if stealing is not None else {}
    now = monotonic()
    for ts, since in islice(scheduler.unrunnable.items(), SOME):
        # The plugin refreshes Dask's times of the tasks that it holds back, and has its own.
        wait = known.get(ts.key)
        seconds, reason = (now - since, "nobody") if wait is None else (wait.seconds, wait.reason)
        if seconds >= _PATIENCE:
            yield _described(scheduler, ts, seconds, reason)


def _unserved(scheduler: Scheduler, stealing: Stealing | None, now: float) -> float:
    """Return the seconds for which there have been ready tasks and no worker; without the plugin, a lower bound."""
    if scheduler.workers or not (scheduler.unrunnable or scheduler.queued):
        return 0.0
    if stealing is not None:
        since = stealing.waits.unserved
        return max(now - since, 0.0) if since is not None else 0.0
    # Dask has no time of a queued task, but nothing has happened to any since the newest transition.
    log = scheduler.transition_log
    return max(now - log[-1].timestamp, 0.0) if log else 0.0


def _described(scheduler: Scheduler, ts: TaskState, seconds: float, reason: str) -> Unplaced:
    workers = scheduler.workers
    names = tuple(label(a, workers.get(a)) for a in islice(sorted(ts.worker_restrictions or ()), _NAMES))
    return Unplaced(
        short(ts.key),
        seconds,
        reason,
        names,
        tuple(islice(sorted(ts.host_restrictions or ()), _NAMES)),
        dict(ts.resource_restrictions or {}),
        wish_of(ts.annotations).must,
    )


# ---- jobs --------------------------------------------------------------------------------------------------


def _recent(elastic: ScaleEvent | None, now: float) -> ScaleEvent:
    """Return the controller's newest decision; empty if there is none, or the controller has stopped since."""
    return elastic if elastic and now - elastic.get("time", 0.0) < _STOPPED else {}
