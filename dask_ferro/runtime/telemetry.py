"""What the scheduler saw, as a `Trace`: bounded, cheap to write, built only when somebody asks.

The scheduler plugin tells of every finished task and of every stolen one; nothing here listens on its own, sends
a message, or draws.  A record is a tuple in a ring buffer, and spans are made of it on demand: 1.3 us a task on
the scheduler's loop, 8 us for one that fetched three inputs.  A length of 0 records nothing.

Times are the scheduler's clock.  Workers shift theirs by the delay that they measure at each heartbeat, before
they send a duration: nothing is corrected here a second time.  That delay is off by up to half of a heartbeat's
round trip (100 ms on an overloaded machine): a task that seems to end after the scheduler heard of it is put back
by the difference, and tasks of one thread may still seem to overlap a little.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from distributed.metrics import time
from distributed.scheduler import TaskState

from dask_ferro.trace import Key, Span, Trace, TracedTask

# About 0.5 kB a task: 25 MB on the scheduler when it is full.
LENGTH = 50_000
# Workers that left, remembered for the traces that they are in: more than any elastic run of a day has.
_DEPARTED = 4096


class _Fetch(NamedTuple):
    source: str
    start: float
    stop: float
    nbytes: int


class _Run(NamedTuple):
    """A task that ran; times are the scheduler's."""

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


class _Steal(NamedTuple):
    key: Key
    prefix: str
    victim: str
    thief: str
    requested: float
    started: float


class Telemetry:
    """The newest tasks and steals of a scheduler.

    Parameters
    ----------
    length : int
        Tasks, and as many steals, that are kept; 0 keeps and counts nothing.

    Attributes
    ----------
    counts : Counter of str
        Of decisions, since `started`; the scheduler plugin adds to it.
    """

    def __init__(self, length: int = LENGTH) -> None:
        self._length = length
        self._threads: dict[str, int] = {}
        self.started(0.0)

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded: a caller may save itself the arguments."""
        return self._length > 0

    def started(self, now: float) -> None:
        """Forget what was recorded; what finishes before `now` is not of this recording.

        Parameters
        ----------
        now : float
            The scheduler's clock.
        """
        self._since = now
        self._runs: deque[_Run] = deque(maxlen=self._length)
        self._steals: deque[_Steal] = deque(maxlen=self._length)
        self._departed: dict[str, int] = {}
        self.counts: Counter[str] = Counter()

    def joined(self, worker_address: str, nthreads: int) -> None:
        """Note a worker: its idle threads count in a trace's utilization."""
        self._threads[worker_address] = nthreads

    def left(self, worker_address: str) -> None:
        """Note that a worker is gone: it is in the traces of what it ran, and in no later ones."""
        nthreads = self._threads.pop(worker_address, None)
        if nthreads is None or not self._length:
            return
        self._departed[worker_address] = nthreads
        if len(self._departed) > _DEPARTED:
            del self._departed[next(iter(self._departed))]

    def finished(
        self,
        ts: TaskState,
        worker_address: str,
        startstops: Iterable[Mapping[str, Any]],
        nbytes: int | None,
        thread: object = None,
    ) -> None:
        """Record a task that went from processing to memory, and what was fetched for it.

        Parameters
        ----------
        ts : TaskState
            As it is in a plugin's `transition`: with its dependencies, and their holders.
        worker_address : str
        startstops : list of dict
            As the worker sent them: "action", "start", "stop", and the "source" of a transfer.
        nbytes : int or None
            Size of the result.
        thread : hashable
            Identity of the thread that ran it.
        """
        if not self._length:
            return
        compute: Mapping[str, Any] | None = None
        fetched: list[Mapping[str, Any]] = []
        coming: list[Mapping[str, Any]] = []
        for entry in startstops:
            action = entry["action"]
            if (
                action == "compute"
            ):  # the last one counts: a worker that ran the task before sends that run too
                compute, fetched, coming = entry, coming, []
            elif action == "transfer":
                coming.append(entry)
        if compute is None or compute["stop"] < self._since:
            return
        late = max(0.0, compute["stop"] - time())
        self._runs.append(
            _Run(
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
            )
        )

    def stolen(
        self, key: Key, victim: str, thief: str, requested: float, started: float, prefix: str = ""
    ) -> None:
        """Record a move that was confirmed.

        Parameters
        ----------
        key : key
        victim, thief : str
            Addresses.
        requested, started : float
            When the victim was asked, and when the task began on the thief; the scheduler's clock.
        prefix : str
            Of the task; looked up in what it ran as when it is not given.
        """
        if self._length and started >= self._since:
            self._steals.append(_Steal(key, prefix, victim, thief, requested, started))

    def copy(self) -> Telemetry:
        """Return what is recorded by now; its `trace` may be built in a thread, beside the scheduler's loop.

        A copy of 50,000 tasks takes 1 ms, their trace 0.4 s.
        """
        other = Telemetry(self._length)
        other._since, other.counts = self._since, self.counts.copy()
        other._runs, other._steals = self._runs.copy(), self._steals.copy()
        other._threads, other._departed = dict(self._threads), dict(self._departed)
        return other

    def trace(self, since: float | None = None) -> Trace:
        """Return what is recorded, as a trace that starts with its first span.

        Parameters
        ----------
        since : float, optional
            The scheduler's clock: only what stopped later, in a trace that starts then.
        """
        least = self._since if since is None else since
        runs = [r for r in self._runs if r.stop >= least]
        steals = [s for s in self._steals if s.started >= least]
        spans = sorted((*_spans(runs), *_stolen(steals, runs)), key=lambda s: (s.start, s.stop, s.worker))
        zero = min((s.start for s in spans), default=0.0) if since is None else since
        return Trace(
            spans=tuple(s._replace(start=s.start - zero, stop=s.stop - zero) for s in spans),
            tasks=_tasks(runs),
            workers=self._present(spans),
            counts=dict(self.counts),
        )

    def _present(self, spans: Iterable[Span]) -> dict[str, int]:
        """Threads of the workers of now, and of those that ran something; of an unknown one, the lanes seen."""
        seen: dict[str, int] = {}
        for span in spans:
            seen[span.worker] = max(seen.get(span.worker, 1), span.lane + 1)
        return {**seen, **{w: n for w, n in self._departed.items() if w in seen}, **self._threads}


def _fetches(ts: TaskState, transfers: Iterable[Mapping[str, Any]], late: float) -> tuple[_Fetch, ...]:
    """The transfers for a task, and how much each moved.

    Workers do not send the size.  Each input counts once, at the first transfer from a worker that holds it; what
    came along for other tasks is not seen.
    """
    left = list(ts.dependencies)
    fetches = []
    for entry in transfers:
        source = entry["source"]
        moved, rest = 0, []
        for dependency in left:
            if any(ws.address == source for ws in dependency.who_has or ()):
                moved += dependency.get_nbytes()
            else:
                rest.append(dependency)
        left = rest
        fetches.append(_Fetch(source, entry["start"] - late, entry["stop"] - late, moved))
    return tuple(fetches)


def _spans(runs: Iterable[_Run]) -> Iterator[Span]:
    lanes: dict[tuple[str, object], int] = {}
    used: Counter[str] = Counter()
    for run in runs:
        lane = lanes.get((run.worker, run.thread))
        if lane is None:
            lane = lanes[run.worker, run.thread] = used[run.worker]
            used[run.worker] += 1
        yield Span("compute", run.key, run.prefix, run.worker, lane, run.start, run.stop, run.nbytes)
        for fetch in run.fetches:
            yield Span(
                "transfer",
                run.key,
                run.prefix,
                run.worker,
                lane,
                fetch.start,
                fetch.stop,
                fetch.nbytes,
                fetch.source,
            )


def _stolen(steals: Iterable[_Steal], runs: Iterable[_Run]) -> Iterator[Span]:
    prefixes = {run.key: run.prefix for run in runs}
    for steal in steals:
        prefix = steal.prefix or prefixes.get(steal.key, "")
        yield Span(
            "steal", steal.key, prefix, steal.thief, 0, steal.requested, steal.started, 0, steal.victim
        )


def _tasks(runs: Iterable[_Run]) -> tuple[TracedTask, ...]:
    """Each task once, by its first run: one that ran again, on data that was lost, came after its dependents."""
    tasks: dict[Key, TracedTask] = {}
    for run in runs:
        if run.key not in tasks:
            after = tuple(sorted(run.dependencies, key=repr))  # Dask has them in a set
            tasks[run.key] = TracedTask(
                run.key, run.prefix, run.group, run.stop - run.start, run.nbytes, after
            )
    return tuple(tasks.values())
