"""The facts that a scheduler has of its cluster.

It walks workers and prefixes, and a few of the tasks without a worker; never all tasks.  It works with or without the
plugin: waits, jobs, pools and moved tasks need it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from math import inf
from typing import cast

import dask
from dask.typing import Key
from distributed import Scheduler
from distributed.metrics import monotonic, time
from distributed.scheduler import TaskState, WorkerState
from tlz import merge_with

from dask_ferro.lower.stand_in import LACKS
from dask_ferro.observe.dashboard_state import label
from dask_ferro.observe.facts import (
    ClusterFacts,
    FailedTask,
    RunningTask,
    UnplacedTask,
    WorkerView,
)
from dask_ferro.policy.waits import WaitingTask
from dask_ferro.scheduler import upstream
from dask_ferro.scheduler.annotations import wish_of
from dask_ferro.scheduler.bundle_costs import BundleCosts
from dask_ferro.scheduler.events import ScaleEvent
from dask_ferro.scheduler.flow_log import FlowRow
from dask_ferro.scheduler.plugin import part_of
from dask_ferro.scheduler.stealing import Stealing, stealing_of
from dask_ferro.words import shorten

# The most tasks without a worker, and the most waits, that are described: each takes about 10 us.
MAX_WAITS = 32
# The most characters of an error, and names of a list of workers that a task is restricted to.
_ERROR, _NAMES = 120, 8
# Seconds after which a decision is no longer the controller's view: it publishes one every 10 s, or at its interval.
_DECISION_LIFETIME = 120.0
# A task without a worker is told of from these seconds on: until then it may be about to be placed.
_PATIENCE = 1.0


def snapshot(dask_scheduler: Scheduler) -> ClusterFacts:
    """Return the facts of this moment, with or without the plugin."""
    stealing = stealing_of(dask_scheduler)
    elastic = cast(ScaleEvent, stealing.records.decisions.newest or {}) if stealing is not None else None
    return cluster_facts(dask_scheduler, stealing, elastic, time())


def cluster_facts(
    scheduler: Scheduler, stealing: Stealing | None, elastic: ScaleEvent | None, now: float
) -> ClusterFacts:
    """Return the facts of a moment.

    Parameters
    ----------
    stealing : Stealing, optional
        None: the plugin is not installed.
    elastic : ScaleEvent, optional
        The newest decision of the elastic controller.
    now : float
        Epoch.
    """
    tasks, failed, work, unmeasured = _counts(scheduler)
    workers = scheduler.workers
    # A loop that was blocked has unread heartbeats, which are no workers' silence.
    awake = max(now - stealing.waits.awake, 0.0) if stealing is not None else inf
    return ClusterFacts(
        now=now,
        stealing=stealing.settings.stealing if stealing is not None else "",
        workers=tuple(_worker_view(ws, now, awake) for ws in workers.values()),
        threads=sum(ws.nthreads for ws in workers.values()),
        tasks=tasks,
        running=sum(len(ws.executing) for ws in workers.values()),
        failed=failed,
        failure=_failure(scheduler) if failed else None,
        work=work,
        unmeasured=unmeasured,
        # By the scheduler's configuration, which the workers' may differ from.
        shares=dask.config.get("distributed.worker.memory"),
        waits=tuple(_waits(scheduler, stealing)) if stealing is not None else (),
        unplaced=tuple(_unplaced_tasks(scheduler, stealing)),
        unplaced_count=len(scheduler.unrunnable),
        resources=merge_with(max, *(ws.resources for ws in workers.values())),
        devices=tuple(sorted(stealing.ledger.devices)) if stealing is not None else (),
        # What workers said that they have in place of this dask_ferro.
        lacking={label(a, ws): ws.metrics[LACKS] for a, ws in workers.items() if LACKS in ws.metrics},
        unserved=_unserved_seconds(stealing, now),
        # Not that of a controller that has stopped since.
        decision=elastic if elastic and now - elastic.get("time", 0.0) < _DECISION_LIFETIME else {},
        counts=dict(stealing.counts) if stealing is not None else {},
        flows=tuple(_flows(scheduler, now)),
    )


def _counts(scheduler: Scheduler) -> tuple[Mapping[str, int], Mapping[str, int], float, str]:
    """Return tasks by state, failed ones by prefix, the seconds of the rest, and a prefix that is not measured."""
    states: Counter[str] = Counter()
    failed, work, unmeasured = {}, 0.0, ""
    for prefix in scheduler.task_prefixes.values():
        counts = prefix.states
        states.update({state: count for state, count in counts.items() if count})
        if erred := counts.get("erred", 0):
            failed[shorten(prefix.name)] = erred
        remaining = sum(counts.get(state, 0) for state in ("waiting", "queued", "no-worker", "processing"))
        if remaining and prefix.duration_average < 0:
            unmeasured = unmeasured or shorten(prefix.name)
        elif remaining:
            work += remaining * prefix.duration_average
    return states, failed, work, unmeasured


def _failure(scheduler: Scheduler) -> FailedTask | None:
    """Return the newest of the tasks that failed by themselves; Dask keeps the last hundred, the newest first."""
    for failed in scheduler.erred_tasks:
        ts = scheduler.tasks.get(failed.key)
        if ts is not None and ts.state == "erred":
            names = tuple(label(a, scheduler.workers.get(a)) for a in sorted(failed.erred_on))
            return FailedTask(shorten(failed.key), shorten(failed.exception_text, _ERROR), names)
    return None


def _worker_view(ws: WorkerState, now: float, awake: float) -> WorkerView:
    unheard = max(now - ws.last_seen, 0.0)
    # As of the newest heartbeat.
    ts, seconds = max(ws.executing.items(), key=lambda item: item[1], default=(None, 0.0))
    longest = RunningTask(shorten(ts.key), seconds + unheard) if ts is not None else None
    memory, limit = upstream.metrics_of(ws).get("memory", 0), ws.memory_limit or 0
    return WorkerView(
        label(ws.address, ws), ws.status.name, min(unheard, awake), len(ws.processing), memory, limit, longest
    )


def _unserved_seconds(stealing: Stealing | None, now: float) -> float:
    """Return the seconds for which there have been ready tasks and no worker."""
    since = stealing.waits.unserved if stealing is not None else None
    return max(now - since, 0.0) if since is not None else 0.0


def _flows(scheduler: Scheduler, now: float) -> Iterator[FlowRow]:
    """Yield the newest flows, the newest first."""
    part = part_of(scheduler, BundleCosts)
    for row in reversed(part.flow_rows.since()[0] if part is not None else ()):
        yield row.at(now, tuple(label(a, scheduler.workers.get(a)) for a in row.workers))


# ---- tasks that wait ---------------------------------------------------------------------------------------


def _waits(scheduler: Scheduler, stealing: Stealing) -> Iterator[WaitingTask]:
    """Yield some of the waits of the newest tick that have not ended since, with names."""
    names = {address: label(address, ws) for address, ws in scheduler.workers.items()}
    for wait in islice(stealing.waits.now, MAX_WAITS):
        if _still_waits(scheduler, wait, stealing):
            some = tuple(names.get(address, address) for address in wait.some)
            yield wait._replace(key=shorten(wait.key), worker=names.get(wait.worker, wait.worker), some=some)


def _still_waits(scheduler: Scheduler, wait: WaitingTask, stealing: Stealing) -> bool:
    if not wait.worker:
        return scheduler.tasks.get(cast(Key, wait.key)) in scheduler.unrunnable
    entry = stealing.ledger.entries.get(wait.key)
    # Stolen since, it waits at another worker; with a start, it runs.
    return entry is not None and entry.state != "running" and entry.worker.address == wait.worker


def _unplaced_tasks(scheduler: Scheduler, stealing: Stealing | None) -> Iterator[UnplacedTask]:
    """Yield some of the ready tasks on no worker; the plugin knows those that it holds back, and why."""
    known = {wait.key: wait for wait in stealing.waits.elsewhere([])} if stealing is not None else {}
    now = monotonic()
    for ts, since in islice(scheduler.unrunnable.items(), MAX_WAITS):
        # The plugin refreshes Dask's times of the tasks that it holds back, and has its own.
        wait = known.get(ts.key)
        seconds, reason = (now - since, "no_eligible_worker") if wait is None else (wait.seconds, wait.reason)
        # A flow that waits for threads is not told of as tasks that no worker may run.
        if seconds >= _PATIENCE and not upstream.is_held(ts):
            yield _describe(scheduler, ts, seconds, reason)


def _describe(scheduler: Scheduler, ts: TaskState, seconds: float, reason: str) -> UnplacedTask:
    workers = scheduler.workers
    names = tuple(label(a, workers.get(a)) for a in islice(sorted(ts.worker_restrictions or ()), _NAMES))
    return UnplacedTask(
        shorten(ts.key),
        seconds,
        reason,
        names,
        tuple(islice(sorted(ts.host_restrictions or ()), _NAMES)),
        dict(ts.resource_restrictions or {}),
        wish_of(ts.annotations).must,
    )
