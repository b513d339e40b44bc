"""Copies of results that a preemption without warning would lose: a policy of Dask's active memory manager.

Batch systems may end preemptible jobs at once, without time to save anything.  While the controller reports such jobs,
a memory manager with this policy alone runs each second.  A result that only workers of such jobs hold, and that takes
twice as long to compute again as to copy, is replicated: on a safe worker, or, while a single job holds it, on a worker
of another job, if possible on another host.  Dask's manager chooses the emptiest of these.  Results that save most
seconds per byte come first.  A result is considered at the run after the one that first sees it: most intermediate
results are gone by then.

Dask's own manager would drop second replicas.  While there are such jobs, it keeps two that insure each other, and
drops replicas of preemptible workers before others: `KeepCopies` takes the place of Dask's policy `ReduceReplicas`.
Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dask.typing import Key
from distributed import Scheduler, Status
from distributed.active_memory_manager import (
    ActiveMemoryManagerExtension,
    ActiveMemoryManagerPolicy,
    ReduceReplicas,
    Suggestion,
)
from distributed.metrics import monotonic
from distributed.scheduler import TaskState, WorkerState

from dask_ferro import config
from dask_ferro.elastic.evacuation import free_bytes
from dask_ferro.elastic.recompute import Recompute

if TYPE_CHECKING:
    from distributed.active_memory_manager import SuggestionGenerator

W = TypeVar("W")

# Seconds between runs.
_INTERVAL = 1.0
# The bandwidth assumed for a copy, and its fixed cost: two messages, and the threads that they interrupt.
_BANDWIDTH, _MESSAGE = 100e6, 5e-3
# A result is worth a copy from this factor on the seconds of the copy.
_MIN_GAIN = 2.0
# Results considered in a run, in turn: some 10 ms.
_MAX_RESULTS = 1000
# Seconds after which a copy that has not come is requested again.
_TIMEOUT = 30.0
# Seconds without a report of preemptible jobs after which nothing is copied any more: no controller is active.
_REPORT_LIFETIME = 300.0
# For a worker without a memory limit.
_ENDLESS = 2**50


class _CopyRequest(NamedTuple):
    """A copy that is to come: the receiver, its bytes, and the time of the request."""

    to: WorkerState
    nbytes: int
    at: float


class WorkerPlace(NamedTuple):
    """The preemptible job of a worker (empty: the worker is safe) and its host."""

    job: str
    host: str = ""


class Copies(ActiveMemoryManagerPolicy):
    """The copies of a scheduler's results.

    Parameters
    ----------
    scheduler : Scheduler

    Attributes
    ----------
    totals : Counter of str
        "results" and "bytes" copied so far.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.share: float = config.value("elastic.copy-share")
        self.totals: Counter[str] = Counter()
        self._runs: ActiveMemoryManagerExtension | None = None
        self._kept = KeepCopies(self._job_of)
        self._jobs: dict[str, str] = {}  # by name of the workers that may be preempted
        self._reported = 0.0
        self._coming: dict[Key, _CopyRequest] = {}
        self._due: list[Key] = []  # results that were seen and are to be considered

    def expose(self, jobs: Mapping[str, str]) -> None:
        """Set the jobs of the workers that may be preempted, by worker name; an empty mapping stops copying."""
        if not jobs or not self.share:
            self.stop()
            return
        self._jobs, self._reported = dict(jobs), monotonic()
        if self._runs is None:
            self._runs = ActiveMemoryManagerExtension(
                self.scheduler, {self}, register=False, start=True, interval=_INTERVAL
            )
            self._kept.start(self.scheduler)

    def stop(self) -> None:
        """Stop copying, and restore the policy of Dask's memory manager.  Idempotent."""
        if self._runs is not None:
            self._runs.stop()
            self._runs = None
        for state in (self._jobs, self._coming, self._due):
            state.clear()
        self._kept.stop()

    # -- what is copied --------------------------------------------------------------------------------------

    def run(self) -> SuggestionGenerator:
        """Suggest to replicate the results that are worth it, and for which a worker has room."""
        again, now = Recompute(self.scheduler), monotonic()
        if now - self._reported > _REPORT_LIFETIME:
            self.stop()
            return
        self._arrived()
        worthy = [
            ts
            for ts in self._next()
            if ts.key not in self._coming and self._is_exposed(ts) and _is_worth(ts, again)
        ]
        if not worthy:
            return
        rooms = self._rooms()
        seats = {ws: self._seat(ws) for ws in rooms}
        for ts in sorted(worthy, key=again.rank):
            able = {ws: seats[ws] for ws, room in rooms.items() if room >= ts.get_nbytes()}
            if candidates := receivers(able, map(self._seat, filter(_is_staying, ts.who_has or ()))):
                to = yield Suggestion("replicate", ts, candidates)
                if to is not None:
                    self._coming[ts.key] = _CopyRequest(to, ts.get_nbytes(), now)
                    rooms[to] -= ts.get_nbytes()

    def _next(self) -> list[TaskState]:
        """Return the results of exposed workers to consider in this run."""
        tasks, turn = self.scheduler.tasks, self._due[:_MAX_RESULTS]
        del self._due[:_MAX_RESULTS]
        if not self._due:
            workers = (ws for ws in self.scheduler.workers.values() if self._job_of(ws) and _is_staying(ws))
            held = chain.from_iterable(ws.has_what for ws in workers)
            self._due = list(dict.fromkeys(ts.key for ts in held))
        return [tasks[key] for key in turn if key in tasks]

    def _is_exposed(self, ts: TaskState) -> bool:
        """Return whether only preemptible jobs hold a result, and another worker could."""
        jobs = {self._job_of(ws) for ws in ts.who_has or () if _is_staying(ws)}
        # Of a result that two jobs hold, only a copy on a safe worker helps, as the two insure each other.
        is_helped = len(jobs) == 1 or any(not self._job_of(ws) for ws in self.scheduler.running)
        return is_helped and bool(jobs) and "" not in jobs and not ts.actor

    def _rooms(self) -> dict[WorkerState, int]:
        """Return the bytes that each running worker may receive."""
        used = self.manager.workers_memory
        rooms = {
            ws: int(self.share * ws.memory_limit) - used[ws] if ws.memory_limit else _ENDLESS
            for ws in self.scheduler.running
        }
        for request in self._coming.values():
            if request.to in rooms:
                rooms[request.to] -= request.nbytes
        return rooms

    def _arrived(self) -> None:
        """Count the copies that came, and forget those that are late, or whose result or receiver is gone."""
        for key, request in list(self._coming.items()):
            ts = self.scheduler.tasks.get(key)
            holders = (ts.who_has if ts is not None else None) or ()
            if request.to in holders:
                self.totals.update(results=1, bytes=request.nbytes)
            elif holders and request.to in self.scheduler.running and monotonic() - request.at < _TIMEOUT:
                continue
            del self._coming[key]

    def _seat(self, ws: WorkerState) -> WorkerPlace:
        return WorkerPlace(self._job_of(ws), ws.host)

    def _job_of(self, ws: WorkerState) -> str:
        """Return the job with which a worker may be preempted; empty: it is safe."""
        return self._jobs.get(str(ws.name), "")


class KeepCopies(ReduceReplicas):
    """Dask's policy, which spares replicas that insure each other against a preemption.

    Parameters
    ----------
    job_of : callable
        Returns the job with which a worker may be preempted; empty: it is safe.
    """

    def __init__(self, job_of: Callable[[WorkerState], str]) -> None:
        self._job_of = job_of
        self._replaced: set[ActiveMemoryManagerPolicy] = set()

    def start(self, scheduler: Scheduler) -> None:
        """Take the place of Dask's policy; where that is off, nothing changes."""
        manager = scheduler.extensions.get("amm")
        if not isinstance(manager, ActiveMemoryManagerExtension):
            return
        self._replaced = {policy for policy in manager.policies if type(policy) is ReduceReplicas}
        if self._replaced:
            manager.policies -= self._replaced
            manager.add_policy(self)

    def stop(self) -> None:
        """Restore Dask's policy.  Idempotent."""
        if self._replaced:
            self.manager.policies.discard(self)
            self.manager.policies |= self._replaced
            self._replaced = set()

    def run(self) -> SuggestionGenerator:
        """Yield Dask's suggestions for the holders that may drop a result; none while one of them is being retired."""
        again = Recompute(self.manager.scheduler)
        for found in super().run():
            ts = Suggestion(*found).ts
            holders = set(ts.who_has or ()) - self.manager.pending.get(ts, (set(), set()))[1]
            # A worker's retirement copies what it holds, and ends when all of it is elsewhere.
            if any(ws.status == Status.closing_gracefully for ws in holders):
                continue
            jobs = {ws: self._job_of(ws) for ws in holders}
            if able := droppable_replicas(jobs, partial(_is_worth, ts, again), lambda ws: not free_bytes(ws)):
                yield Suggestion("drop", ts, able)


def receivers(able: Mapping[W, WorkerPlace], holders: Iterable[WorkerPlace]) -> set[W]:
    """Return the best receivers of a copy: safe workers, else those of other jobs, if possible on other hosts.

    A failure of one job often takes the other jobs of its node, too.  Two jobs insure each other already.

    >>> able = {"near": WorkerPlace("b", "x"), "far": WorkerPlace("c", "y"), "own": WorkerPlace("a")}
    >>> sorted(receivers(able, [WorkerPlace("a", "x")]))
    ['far']
    """
    jobs, hosts = (set(each) for each in zip(*holders, strict=True))
    safe = {worker for worker, seat in able.items() if not seat.job}
    if safe or len(jobs) > 1:
        return safe
    apart = {worker for worker, seat in able.items() if seat.job not in jobs}
    return {worker for worker in apart if able[worker].host not in hosts} or apart


def droppable_replicas(
    jobs: Mapping[W, str], is_worth: Callable[[], bool], is_short: Callable[[W], bool]
) -> set[W]:
    """Return the workers that may drop a replica that Dask's own rule would drop.

    Parameters
    ----------
    jobs : mapping of worker to str
        The preemptible jobs of the holders; empty: the holder is safe.
    is_worth : callable
        Whether the result would be copied if one job alone held it.
    is_short : callable
        Whether a holder has no memory left.

    Examples
    --------
    >>> droppable_replicas({"safe": "", "spot": "job-1"}, lambda: False, lambda worker: False)
    {'spot'}
    """
    counts = Counter(jobs.values())
    if len(counts) == 1:  # to a preemption, their number makes no difference
        return set(jobs)
    # Each insures the other; only a worker without memory may drop its own.
    if len(counts) == 2 and counts[""] < 2 and is_worth():
        return {worker for worker, job in jobs.items() if counts[job] > 1 or is_short(worker)}
    exposed = {worker for worker, job in jobs.items() if job}
    return exposed if counts[""] else set(jobs)


def _is_worth(ts: TaskState, again: Recompute) -> bool:
    """Return whether a result costs enough more to compute again than to copy."""
    return again.seconds(ts) > _MIN_GAIN * (_MESSAGE + ts.get_nbytes() / _BANDWIDTH)


def _is_staying(ws: WorkerState) -> bool:
    """Return whether a worker is not about to close."""
    return ws.status in (Status.running, Status.paused)
