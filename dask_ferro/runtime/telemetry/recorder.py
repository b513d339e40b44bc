"""The scheduler's records of tasks and steals, as a `Trace`: bounded, cheap to write, built on demand.

The scheduler plugin reports every finished task and every stolen one; this module neither listens by itself, nor
sends messages, nor draws.  A record is a tuple in a ring buffer, and spans are made from it on demand: 1.3 us a task
on the scheduler's loop, 8 us for one that fetched three inputs.  With a length of 0 nothing is recorded, unless a
trace requests a length.

Times are the scheduler's clock.  Workers shift theirs by the delay measured at each heartbeat before they send a
duration, so nothing is corrected here again.  That delay is off by up to half of a heartbeat's round trip (100 ms on
an overloaded machine): a task that seems to end after the scheduler was told of it is shifted back by the difference,
and tasks of one thread may still seem to overlap a little.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from math import inf
from typing import Any, NamedTuple

from dask.utils import key_split
from distributed.metrics import time
from distributed.scheduler import TaskState

from dask_ferro.policy.events import Arrived, Settled
from dask_ferro.runtime.upstream import nbytes_of
from dask_ferro.trace import ABOUT, About, Key, Span, Trace, TracedTask

# About 0.5 kB a task: 25 MB on the scheduler when it is full.
LENGTH = 50_000
# The most former workers kept for the traces that they appear in: more than an elastic run has in a day.
_DEPARTED = 4096
# A part of a worker's activity for a task: "action", "start", "stop", and the "source" of a transfer.
_Entry = Mapping[str, Any]


class _Fetch(NamedTuple):
    start: float
    stop: float
    nbytes: int
    source: str


class _TaskRun(NamedTuple):
    """A finished task; times are the scheduler's."""

    key: Key
    prefix: str
    group: str
    worker: str
    thread: object
    start: float
    stop: float
    nbytes: int
    dependencies: tuple[Key, ...]
    fetches: tuple[_Fetch, ...]
    priority: tuple[float, ...] = ()
    about: tuple[Any, ...] | None = None


class Mark(NamedTuple):
    """A position in the records: the numbers of tasks and of steals recorded before it."""

    runs: int
    steals: int


class Telemetry:
    """The newest tasks and steals of a scheduler.

    Parameters
    ----------
    length : int
        The most tasks, and the most steals, kept; 0 keeps and counts nothing.

    Attributes
    ----------
    recorded : int
        Total number of recorded tasks; those that a trace lacks were dropped.
    """

    def __init__(self, length: int = LENGTH) -> None:
        self._own = self._length = length
        self._runs: deque[_TaskRun] = deque(maxlen=length)
        self._steals: deque[Arrived] = deque(maxlen=length)
        self._wanted: dict[Hashable, int] = {}
        self.recorded = 0
        self._moves = 0  # total number of recorded steals
        self._threads: dict[str, int] = {}
        self._departed: dict[str, int] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded, so that callers can skip preparing the arguments."""
        return self._length > 0

    def record_for(self, who: Hashable, length: int = LENGTH) -> None:
        """Keep at least this many tasks until `stop_for` with the same key; existing records stay."""
        self._wanted[who] = length
        self._resize()

    def stop_for(self, who: Hashable) -> None:
        """Remove a request for a length.  Idempotent."""
        if self._wanted.pop(who, None) is not None:
            self._resize()

    @property
    def wanted(self) -> tuple[Hashable, ...]:
        """The keys with a request for a length."""
        return tuple(self._wanted)

    def _resize(self) -> None:
        length = max(self._own, *self._wanted.values(), 0)
        if length != self._length:
            self._length = length
            self._runs, self._steals = deque(self._runs, length), deque(self._steals, length)

    def joined(self, worker_address: str, nthreads: int) -> None:
        """Add a worker, whose idle threads count in a trace's utilization."""
        self._threads[worker_address] = nthreads

    def left(self, worker_address: str) -> None:
        """Remove a worker: it appears only in traces with tasks that it ran."""
        nthreads = self._threads.pop(worker_address, None)
        if nthreads is None or not self._length:
            return
        self._departed[worker_address] = nthreads
        # The oldest is dropped, as a dictionary keeps the order of insertion.
        if len(self._departed) > _DEPARTED:
            del self._departed[next(iter(self._departed))]

    def finished(
        self,
        ts: TaskState,
        worker_address: str,
        startstops: Iterable[_Entry],
        nbytes: int | None,
        thread: object = None,
    ) -> None:
        """Record a task that went from processing to memory, and the transfers for it.

        Parameters
        ----------
        ts : TaskState
            Its state in a plugin's `transition`: with its dependencies, and their holders.
        worker_address : str
        startstops : list of dict
            As sent by the worker: "action", "start", "stop", and the "source" of a transfer.
        nbytes : int or None
            Size of the result.
        thread : hashable
            Identity of the thread that ran it.
        """
        if not self._length:
            return
        compute, fetched = _newest_run(startstops)
        if compute is None:
            return
        # The worker's estimate of our clock may be ahead: no task ends after the scheduler was told of it.
        late = max(0.0, compute["stop"] - time())
        self.recorded += 1
        self._runs.append(
            _TaskRun(
                ts.key,
                ts.prefix.name,
                ts.group.name,
                worker_address,
                thread,
                compute["start"] - late,
                compute["stop"] - late,
                nbytes or 0,
                tuple([d.key for d in ts.dependencies]),
                _fetches(ts, fetched, late) if fetched else (),
                ts.priority or (),
                ts.annotations.get(ABOUT) if ts.annotations else None,
            )
        )

    def moved(self, record: Settled | Arrived) -> None:
        """Record a stolen task once it is done."""
        if self._length and isinstance(record, Arrived):
            self._moves += 1
            self._steals.append(record)

    def copy(self, who: Hashable = None) -> Telemetry:
        """Return a copy of the records, whose `trace` may be built in a thread, outside the scheduler's loop.

        It has no more than was requested by `who`, however many are kept for others.
        """
        other = Telemetry(self._wanted.get(who, self._length))
        other._runs, other._steals = deque(self._runs, other._length), deque(self._steals, other._length)
        other._threads, other._departed = dict(self._threads), dict(self._departed)
        return other

    def trace(self, since: float | None = None) -> Trace:
        """Return the records as a trace that starts with its first span.

        Parameters
        ----------
        since : float, optional
            On the scheduler's clock: only spans that stopped later, in a trace that starts at that time.
        """
        least = -inf if since is None else since
        runs = [r for r in self._runs if r.stop >= least]
        steals = [s for s in self._steals if s.requested + s.delay >= least]
        # A thread's lane is its rank among its worker's threads by their first finished task.
        lanes: defaultdict[str, dict[object, int]] = defaultdict(dict)
        for run in runs:
            lanes[run.worker].setdefault(run.thread, len(lanes[run.worker]))
        spans = sorted((*_spans(runs, lanes), *_stolen(steals)), key=lambda s: (s.start, s.stop, s.worker))
        zero = min((s.start for s in spans), default=0.0) if since is None else since
        return Trace(
            spans=tuple(s._replace(start=s.start - zero, stop=s.stop - zero) for s in spans),
            tasks=_tasks(runs),
            workers=self._present(spans),
        )

    def mark(self) -> Mark:
        """Return a mark at the present position."""
        return Mark(self.recorded, self._moves)

    def lost(self, mark: Mark, who: Hashable = None) -> tuple[int, int]:
        """Return the numbers of tasks and of steals recorded since the mark that `copy` does not have any more."""
        runs, steals = self.recorded - mark.runs, self._moves - mark.steals
        most = self._wanted.get(who, self._length)
        return max(runs - min(len(self._runs), most), 0), max(steals - min(len(self._steals), most), 0)

    def _present(self, spans: Iterable[Span]) -> dict[str, int]:
        """Return the threads of present workers and of those with spans; for unknown ones, the number of lanes seen."""
        seen: dict[str, int] = {}
        for span in spans:
            seen[span.worker] = max(seen.get(span.worker, 1), span.lane + 1)
        return {**seen, **{w: n for w, n in self._departed.items() if w in seen}, **self._threads}


def _fetches(ts: TaskState, transfers: Iterable[_Entry], late: float) -> tuple[_Fetch, ...]:
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
        moved = sum(map(nbytes_of, sent))
        fetches.append(_Fetch(entry["start"] - late, entry["stop"] - late, moved, source))
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


def _spans(runs: Iterable[_TaskRun], lanes: Mapping[str, Mapping[object, int]]) -> Iterator[Span]:
    for run in runs:
        lane = lanes[run.worker][run.thread]
        yield Span("compute", run.key, run.prefix, run.worker, lane, run.start, run.stop, run.nbytes)
        for fetch in run.fetches:
            yield Span("transfer", run.key, run.prefix, run.worker, lane, *fetch)


def _stolen(steals: Iterable[Arrived]) -> Iterator[Span]:
    for told in steals:
        started, prefix = told.requested + told.delay, key_split(told.key)
        yield Span("steal", told.key, prefix, told.thief, 0, told.requested, started, 0, told.victim)


def _tasks(runs: Iterable[_TaskRun]) -> tuple[TracedTask, ...]:
    """Return each task once, by its first run; a run repeated after a loss of data comes after its dependents."""
    first: dict[Key, _TaskRun] = {}
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
            About(*run.about or ()),
        )
        for run in first.values()
    )
