"""Summary figures of a trace: steals and transfers by pair of workers, utilization, and the critical path.

Computed from a `Trace`, measured or simulated, for the reports that draw them; nothing here imports Dask.  Times are
seconds from the trace's start, sizes are bytes.

Clocks are synchronized by heartbeats, so a task may seem to begin before the previous one of its thread ends.  Figures
and drawings are of the trace `in_turn`, so that a task has one start in all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from tlz import groupby

from dask_ferro.trace import Key, Span, Trace, check_times

# Points of the curve of busy threads: one per four pixels of a wide page.
_POINTS = 300
# The longest overlap of two tasks of a thread, in seconds, that is taken for an error of the clocks.  A longer one is
# real: coroutines share a thread.
_SLACK = 0.02


class Flow(NamedTuple):
    """The steals, or the transfers, from one worker to another; `times` is their number."""

    source: str
    worker: str
    times: int
    seconds: float
    nbytes: int


class BusyShare(NamedTuple):
    """One worker's figures: `busy` thread-seconds, their `share` of the run (0 to 1), bytes `fetched`, and steals."""

    worker: str
    threads: int
    tasks: int
    busy: float
    share: float
    fetched: int
    stolen_in: int
    stolen_out: int


class Family(NamedTuple):
    """All tasks of one prefix, or all ops of one type; `times` counts their runs."""

    name: str
    times: int
    seconds: float
    median: float
    longest: float
    nbytes: int


class PathStep(NamedTuple):
    """A task of the critical path as it ran; `waited` is the seconds from its last input to its start."""

    key: Key
    prefix: str
    worker: str
    start: float
    stop: float
    waited: float


class Account(NamedTuple):
    """The figures of a run.

    Attributes
    ----------
    steals, transfers : tuple of Flow
        The largest first.
    workers : tuple of BusyShare
    prefixes, ops : tuple of Family
        The longest total time first.
    path : tuple of PathStep
        The critical path: the chain of tasks with the most seconds.
    critical_path : float
        Seconds of that chain, each task counted once.
    work : float
        Seconds of all computations, repeated ones included.
    lower_bound : float
        Seconds that no schedule on these threads can beat: the larger of the critical path and work / threads.
    curve : tuple of (seconds, threads)
        The mean number of busy threads from each time to the next.
    """

    steals: tuple[Flow, ...]
    transfers: tuple[Flow, ...]
    workers: tuple[BusyShare, ...]
    prefixes: tuple[Family, ...]
    ops: tuple[Family, ...]
    path: tuple[PathStep, ...]
    critical_path: float
    work: float
    lower_bound: float
    curve: tuple[tuple[float, float], ...]


def account(trace: Trace) -> Account:
    """Return the figures of a trace.

    Raises
    ------
    ConfigError
        For a time that is NaN or infinite.
    """
    check_times(trace)
    trace = in_turn(trace)
    path = _path(trace)
    seconds = {task.key: task.seconds for task in trace.tasks}
    # By the tasks' own seconds: a task that ran twice counts once in a chain.
    longest = sum(seconds[step.key] for step in path)
    # Of all runs: a repeated computation occupied a thread as well.
    work = trace.busy_seconds
    threads = sum(trace.workers.values())
    steals = _flows(trace.of("steal"))
    return Account(
        steals=steals,
        transfers=_flows(trace.of("transfer")),
        workers=_shares(trace, steals),
        prefixes=_families(trace.of("compute")),
        ops=_families(trace.of("op")),
        path=path,
        critical_path=longest,
        work=work,
        lower_bound=max(longest, work / threads) if threads else longest,
        curve=_curve(trace),
    )


def in_turn(trace: Trace) -> Trace:
    """Return the trace with each task, and its ops, delayed to the end of its thread's previous one.

    Durations stay as they are.  Tasks that overlap by more than 20 ms share their thread, and are not delayed.
    """
    delays: dict[Span, float] = {}
    for spans in groupby(attrgetter("worker", "lane"), trace.of("compute")).values():
        delays.update((span, delay) for span, delay in _delays(spans) if delay)
    if not delays:
        return trace
    runs: dict[tuple[Key, str], list[Span]] = groupby(attrgetter("key", "worker"), delays)

    def delay_of(span: Span) -> float:
        if span.kind != "op":
            return delays.get(span, 0.0)
        around = (run for run in runs.get((span.key, span.worker), ()) if _lies_within(span, run))
        return next((delays[run] for run in around), 0.0)

    moved = [_delayed(span, delay_of(span)) for span in trace.spans]
    return replace(trace, spans=tuple(sorted(moved, key=lambda s: (s.start, -s.stop, s.worker))))


def _delays(spans: Iterable[Span]) -> Iterator[tuple[Span, float]]:
    """Yield each task of a thread and its delay; tasks that share the thread are in rows, as their threads would be."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda s: (s.start, s.stop)):
        row = next((i for i, end in enumerate(ends) if span.start >= end - _SLACK), len(ends))
        if row == len(ends):
            ends.append(span.start)
        delay = max(ends[row] - span.start, 0.0)
        ends[row] = span.stop + delay
        yield span, delay


def _lies_within(op: Span, run: Span) -> bool:
    return run.start <= op.start and op.stop <= run.stop


def _delayed(span: Span, delay: float) -> Span:
    return span._replace(start=span.start + delay, stop=span.stop + delay) if delay else span


def _flows(spans: Iterable[Span]) -> tuple[Flow, ...]:
    flows = []
    for (source, worker), of in groupby(attrgetter("source", "worker"), spans).items():
        flows.append(Flow(source, worker, len(of), sum(s.seconds for s in of), sum(s.nbytes for s in of)))
    return tuple(sorted(flows, key=lambda f: (-f.times, f.source, f.worker)))


def _shares(trace: Trace, steals: Iterable[Flow]) -> tuple[BusyShare, ...]:
    tasks = Counter(span.worker for span in trace.of("compute"))
    fetched: Counter[str] = Counter()
    for span in trace.of("transfer"):
        fetched[span.worker] += span.nbytes
    into: Counter[str] = Counter()
    out: Counter[str] = Counter()
    for flow in steals:
        into[flow.worker] += flow.times
        out[flow.source] += flow.times
    span_of_run = trace.makespan
    shares = []
    for worker, busy in trace.busy.items():
        threads = trace.workers.get(worker, 1)
        # The share is of the whole run, so a worker that was connected for a part of it has a small one.
        share = busy / (span_of_run * threads) if span_of_run and threads else 0.0
        shares.append(
            BusyShare(worker, threads, tasks[worker], busy, share, fetched[worker], into[worker], out[worker])
        )
    return tuple(shares)


def _families(spans: Iterable[Span]) -> tuple[Family, ...]:
    families = []
    for name, of in groupby(attrgetter("prefix"), spans).items():
        each = [s.seconds for s in of]
        families.append(Family(name, len(of), sum(each), median(each), max(each), sum(s.nbytes for s in of)))
    return tuple(sorted(families, key=lambda f: (-f.seconds, f.name)))


def _path(trace: Trace) -> tuple[PathStep, ...]:
    """Return the longest chain by seconds; the trace lists each task after its dependencies."""
    ends: dict[Key, float] = {}
    before: dict[Key, Key | None] = {}
    for task in trace.tasks:
        # Inputs that were computed before the recording began are not in the trace.
        known = [key for key in task.dependencies if key in ends]
        last = max(known, key=ends.__getitem__, default=None)
        before[task.key] = last
        ends[task.key] = task.seconds + (ends[last] if last is not None else 0.0)
    key = max(ends, key=ends.__getitem__, default=None)
    chain = []
    while key is not None:
        chain.append(key)
        key = before[key]
    return _as_it_ran(trace, chain[::-1])


def _as_it_ran(trace: Trace, chain: list[Key]) -> tuple[PathStep, ...]:
    runs: dict[Key, Span] = {}
    for span in trace.of("compute"):
        runs.setdefault(span.key, span)
    inputs = {task.key: task.dependencies for task in trace.tasks}
    begin = min((span.start for span in trace.spans), default=0.0)
    steps = []
    # A file may list tasks without the spans of their runs.
    for key in (key for key in chain if key in runs):
        run = runs[key]
        ready = max((runs[d].stop for d in inputs[key] if d in runs), default=begin)
        waited = max(run.start - ready, 0.0)
        steps.append(PathStep(key, run.prefix, run.worker, run.start, run.stop, waited))
    return tuple(steps)


def _curve(trace: Trace) -> tuple[tuple[float, float], ...]:
    width = trace.makespan / _POINTS
    if not width:
        return ()
    begin = min(span.start for span in trace.spans)
    filled = [0.0] * _POINTS
    for span in trace.of("compute"):
        first, last = (min(int((t - begin) / width), _POINTS - 1) for t in (span.start, span.stop))
        for i in range(first, last + 1):
            left, right = begin + i * width, begin + (i + 1) * width
            filled[i] += max(min(span.stop, right) - max(span.start, left), 0.0)
    return tuple((begin + i * width, seconds / width) for i, seconds in enumerate(filled))
