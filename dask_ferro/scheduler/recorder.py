"""Finished tasks as records of the log, and records as a `Trace`.

A record is a tuple, and spans are made from it on demand: 1.3 us a task on the scheduler's loop, 8 us for one that
fetched three inputs.

Times are the scheduler's clock.  Workers shift theirs by the delay measured at each heartbeat before they send a
duration, so nothing is corrected here again.  That delay is off by up to half of a heartbeat's round trip (100 ms on
an overloaded machine): a task that seems to end after the scheduler was told of it is shifted back by the difference,
and tasks of one thread may still seem to overlap a little.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dask.utils import key_split
from distributed.metrics import time
from distributed.scheduler import TaskState

from dask_ferro.policy.events import StealCompleted
from dask_ferro.scheduler.log import Fetch, TaskRun
from dask_ferro.trace import PART_ANNOTATION, Key, ModelPart, Span, Trace, TracedTask

# A part of a worker's activity for a task: "action", "start", "stop", and the "source" of a transfer.
_Entry = Mapping[str, Any]


def task_run(ts: TaskState, message: Mapping[str, Any], nthreads: int) -> TaskRun | None:
    """Return the record of a task that went from processing to memory; None if its worker measured no computation.

    Parameters
    ----------
    ts : TaskState
        Its state in a plugin's `transition`: with its dependencies, and their holders.
    message : mapping
        The worker's: "worker", "startstops", "nbytes" and "thread".
    nthreads : int
        Of the worker.
    """
    compute, fetched = _newest_run(message.get("startstops") or ())
    if compute is None:
        return None
    # The worker's estimate of our clock may be ahead: no task ends after the scheduler was told of it.
    late = max(0.0, compute["stop"] - time())
    return TaskRun(
        ts.key,
        ts.prefix.name,
        ts.group.name,
        message["worker"],
        nthreads,
        message.get("thread"),
        compute["start"] - late,
        compute["stop"] - late,
        message.get("nbytes") or 0,
        tuple([d.key for d in ts.dependencies]),
        _fetches(ts, fetched, late) if fetched else (),
        ts.priority or (),
        ts.annotations.get(PART_ANNOTATION) if ts.annotations else None,
    )


def _fetches(ts: TaskState, transfers: Iterable[_Entry], late: float) -> tuple[Fetch, ...]:
    """Return the transfers for a task, with their sizes.

    Workers do not send the size.  Each input counts once, at the first transfer from a worker that holds it; data
    sent along for other tasks is not included.
    """
    left = set(ts.dependencies)
    fetches = []
    for entry in transfers:
        source = entry["source"]
        sent = {dts for dts in left if any(ws.address == source for ws in dts.who_has or ())}
        left -= sent
        moved = sum(dts.get_nbytes() for dts in sent)
        fetches.append(Fetch(entry["start"] - late, entry["stop"] - late, moved, source))
    return tuple(fetches)


def _newest_run(startstops: Iterable[_Entry]) -> tuple[_Entry | None, list[_Entry]]:
    """Return the computation of a task, and the transfers before it."""
    compute: _Entry | None = None
    fetched: list[_Entry] = []
    coming: list[_Entry] = []
    for entry in startstops:
        if entry["action"] == "compute":
            # The last one counts: a worker that ran the task before sends that run too.
            compute, fetched, coming = entry, coming, []
        elif entry["action"] == "transfer":
            coming.append(entry)
    return compute, fetched


def trace_of(
    runs: Sequence[TaskRun], steals: Sequence[StealCompleted], workers: Mapping[str, int], since: float
) -> Trace:
    """Return a trace of what stopped after a time, in seconds from then.

    Parameters
    ----------
    runs, steals : sequence of TaskRun, of StealCompleted
    workers : mapping of str to int
        Threads of the present workers, whose idle threads count in its utilization; workers that have left are in it
        if they ran a task.
    since : float
        On the scheduler's clock.
    """
    runs = [run for run in runs if run.stop >= since]
    spans = [*_spans(runs), *(_steal_span(s) for s in steals if s.requested + s.delay >= since)]
    spans.sort(key=lambda s: (s.start, s.stop, s.worker))
    return Trace(
        spans=tuple(s._replace(start=s.start - since, stop=s.stop - since) for s in spans),
        tasks=_tasks(runs),
        workers={**{s.worker: 1 for s in spans}, **{run.worker: run.nthreads for run in runs}, **workers},
    )


def _spans(runs: Iterable[TaskRun]) -> Iterator[Span]:
    # A thread's lane is its rank among its worker's threads by their first finished task.
    lanes: defaultdict[str, dict[object, int]] = defaultdict(dict)
    for run in runs:
        lane = lanes[run.worker].setdefault(run.thread, len(lanes[run.worker]))
        yield Span("compute", run.key, run.prefix, run.worker, lane, run.start, run.stop, run.nbytes)
        for fetch in run.fetches:
            yield Span("transfer", run.key, run.prefix, run.worker, lane, *fetch)


def _steal_span(steal: StealCompleted) -> Span:
    started, prefix = steal.requested + steal.delay, key_split(steal.key)
    return Span("steal", steal.key, prefix, steal.thief, 0, steal.requested, started, 0, steal.victim)


def _tasks(runs: Iterable[TaskRun]) -> tuple[TracedTask, ...]:
    """Return each task once, by its first run; a run repeated after a loss of data comes after its dependents."""
    first: dict[Key, TaskRun] = {}
    for run in runs:
        first.setdefault(run.key, run)
    ordered = sorted(first.values(), key=lambda run: run.priority)
    places = {run.key: place for place, run in enumerate(ordered)}
    return tuple(
        TracedTask(
            run.key,
            run.prefix,
            run.group,
            run.stop - run.start,
            run.nbytes,
            # Sorted, since Dask has them in a set, so that two traces of a run are equal.
            tuple(sorted(run.dependencies, key=repr)),
            places[run.key],
            ModelPart(*run.about or ()),
        )
        for run in first.values()
    )
