"""The part `Roster` of the scheduler plugin: the remote calls of scaling.

    ferro_roster()                 return the workers with their data and tasks, and the remaining work
    ferro_leave(addresses, ...)    retire workers without losing data (`retirement`)
    ferro_stay(addresses)          take that back
    ferro_ends(ends, ...)          set when workers' jobs end
    ferro_fail(why)                fail the tasks that are assigned to no worker
    ferro_exposed(jobs)            set the jobs that may be preempted without warning (`copies`)
    ferro_unblame(names)           report that workers died because their jobs were ended (`blame`)
    ferro_over()                   report that the cluster ends: no worker has to retire in order any more

It works with or without `ff.install`, and makes no decisions.  Answers that are expensive (the remaining work,
unique data by worker) are cached while a new computation would take more than 2 % of the scheduler's time.  Durations
are seconds, sizes bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any, Generic, TypeVar

from distributed import Scheduler, Status
from distributed.core import clean_exception
from distributed.metrics import monotonic, time
from distributed.protocol.pickle import dumps
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.errors import ConfigError
from dask_ferro.policy.events import EndTold
from dask_ferro.runtime import upstream
from dask_ferro.runtime.elastic.blame import Blame
from dask_ferro.runtime.elastic.copies import Copies
from dask_ferro.runtime.elastic.lost import summed
from dask_ferro.runtime.elastic.remaining_work import Demands, names_a_gpu
from dask_ferro.runtime.elastic.retirement import Leaving
from dask_ferro.runtime.plugin.stealing import Stealing
from dask_ferro.runtime.scheduler_calls import DemandRow, LeaveAnswer, RosterAnswer, WorkerRow
from dask_ferro.runtime.scheduler_plugin import Part, put_on
from dask_ferro.runtime.upstream import metrics_of, nbytes_of
from dask_ferro.runtime.worker.plugin import METRIC
from dask_ferro.runtime.worker_memory import free_bytes

logger = logging.getLogger(__name__)

# The methods that a client may call, each under "ferro_" and its name.
_CALLS = ("roster", "leave", "stay", "ends", "fail", "exposed", "unblame", "over")
# One over the share of the scheduler's time for expensive answers: 2 %.
_SHARE = 50

# The part of a worker's remaining time reserved for moving its data: a tenth, at most 5 s.
_RESERVE, _MOST_RESERVE = 0.1, 5.0
# An end that moves by more than this has been postponed; less is rounding.
_PUT_OFF = 5.0
# The most ends kept for workers that are gone or have not joined yet: some 4 MB.
_ABSENT = 10_000
# Bytes a second at which a worker's results leave it, a low estimate: Dask moves 0.2 to 1 GB/s between two processes.
_LEAVES_AT = 100e6

T = TypeVar("T")


class Roster(Part):
    """A part of the scheduler plugin that answers the calls listed above."""

    name = "elastic"

    # Set by `start`, before any of the hooks below is called.
    leaving: Leaving
    blame: Blame
    copies: Copies
    _demands: Demands

    def __init__(self) -> None:
        self._over = False
        self._scheduler: Scheduler | None = None
        self._rows: RateLimitedValue[list[DemandRow]] = RateLimitedValue()
        self._unique: RateLimitedValue[dict[str, int]] = RateLimitedValue()
        self._busy: dict[str, float] = {}  # when each worker last had a task, on the monotonic clock
        self._paused: dict[str, float] = {}  # since when workers are paused, on the same clock
        # By worker name and source; also for workers that have not joined yet.
        self._ends: dict[str, dict[str, float]] = {}
        self._names: dict[str, str] = {}  # of the present workers, by address
        self._look_at = 0  # the number of ends at which outdated ones are dropped
        self._fresh = 0.0
        self._told: Stealing | None = None  # the extension whose ledger has the ends

    # -- from start to stop --------------------------------------------------------------------------------

    def start(self, scheduler: Scheduler) -> None:
        """Read the workers that are there."""
        self._scheduler = scheduler
        self.leaving = Leaving(scheduler)
        self.blame = Blame(scheduler)
        self.copies = Copies(scheduler)
        self._demands = Demands(scheduler)
        self._busy = dict.fromkeys(scheduler.workers, monotonic())
        self._paused = {a: monotonic() for a, ws in scheduler.workers.items() if ws.status == Status.paused}
        self._names = {address: str(ws.name) for address, ws in scheduler.workers.items()}

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """Return the calls listed above."""
        return {f"ferro_{name}": getattr(self, name) for name in _CALLS}

    async def stop(self) -> None:
        """Take the ends of workers back from placement, and end retirements; retiring workers stay."""
        if (scheduler := self._scheduler) is not None:
            self._ends, self._fresh, self._told = {}, 0.0, None
            self._tell(scheduler.workers.values())
            self._scheduler = None
            self.copies.stop()
            await self.leaving.stop()

    async def close(self) -> None:
        """Stop retirements and copies."""
        await self.over()

    # -- what happens --------------------------------------------------------------------------------------

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Begin to count a worker's idle seconds, and pass its end to the ledger."""
        self._busy[worker] = monotonic()
        self._names[worker] = str(scheduler.workers[worker].name)
        self.blame.came(self._names[worker])
        if scheduler.workers[worker].status == Status.paused:  # it reconnected
            self._paused[worker] = monotonic()
        self._tell([scheduler.workers[worker]])

    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str = "", **kwargs: object
    ) -> None:
        """Forget a worker; its end only if it retired, since a nanny restarts a worker that died."""
        self._busy.pop(worker, None)
        self._paused.pop(worker, None)
        name = self._names.pop(worker, "")
        self.leaving.forget(worker)
        if self.leaving.is_own(stimulus_id):
            self._ends.pop(name, None)

    def _forget_ends(self) -> None:
        """Drop ends of absent workers that have passed, or are too many, the oldest first."""
        if len(self._ends) <= self._look_at:
            return
        there, now = set(self._names.values()), time()
        absent = [name for name in self._ends if name not in there]
        over = max(len(absent) - _ABSENT, 0)
        for i, name in enumerate(absent):
            if i < over or min(self._ends[name].values()) < now:
                del self._ends[name]
        self._look_at = 2 * len(self._ends)  # so that each name is checked about twice

    def task_left(
        self, ts: TaskState, finish: str, seconds: float | None, message: Mapping[str, object]
    ) -> None:
        """Record that a worker had a task until now."""
        worker = message.get("worker")
        if worker in self._busy:
            self._busy[worker] = monotonic()  # type: ignore[index]
        if self.leaving.is_on:
            self.leaving.wake()

    def worker_changed(self, ws: WorkerState) -> None:
        """Record since when a worker is paused."""
        if ws.status == Status.paused:
            self._paused.setdefault(ws.address, monotonic())
        else:
            self._paused.pop(ws.address, None)

    def logged(self, topic: str, msg: object) -> None:
        """Notice the tasks of a dead worker, for which Dask has no hook."""
        told = msg if isinstance(msg, dict) else {}
        if told.get("action") == "remove-worker" and "worker" in told and not told["expected"]:
            self.blame.died(self._names.get(told["worker"], ""), told["processing-tasks"])

    # -- what it answers -----------------------------------------------------------------------------------

    def roster(self, comm: object = None) -> RosterAnswer:
        """Return the workers and the remaining work."""
        scheduler, demands = self._here(), self._demands
        now = monotonic()
        unique = self._unique.get(self._held_alone)
        self._tell(scheduler.workers.values())
        return {
            "workers": {a: self._row(ws, unique.get(a, 0), now) for a, ws in scheduler.workers.items()},
            "demands": self._rows.get(demands.rows, demands.remaining()),
            "queue": demands.ready(),
        }

    async def leave(
        self,
        comm: object = None,
        addresses: Iterable[str] = (),
        seconds: float | None = None,
        must: bool = False,
        ordered: bool = False,
    ) -> LeaveAnswer:
        """Retire workers, together or not at all; return when they are gone, or may not go.

        They stay, and take tasks again, if a scheduler plugin needs them, they have an actor, their tasks may run
        nowhere else, or there is no room for their data.

        Parameters
        ----------
        addresses : iterable of str
            A worker that is already gone counts as left.
        seconds : float, optional
            Seconds for which running tasks may continue; then they start over elsewhere.  None: until they are done.
        must : bool
            Whether their job ends in any case (its walltime, a preemption, a drained node): then they leave without a
            check, tasks that will not finish within `seconds` start over elsewhere at once, and as much of their data
            as fits is moved, even if receivers spill.  If data remains, or there is an actor, they are not removed
            and take no tasks, until they are asked to leave again or `ferro_ends` postpones their end.
        ordered : bool
            Like `must`, but they are removed in any case, within `seconds`: data that could not move by then is lost,
            and running tasks start over.  If no worker stays, this happens at once.

        """
        self._here()
        asked = list(addresses)
        stayed, lost = dict.fromkeys(asked, "the cluster ends"), summed([])
        if not self._over:
            stayed, lost = await self.leaving.leave(asked, seconds, must, ordered)
        left = [a for a in asked if a not in stayed]
        return {"left": left, "stayed": stayed, "lost": lost, "over": self._over}

    async def over(self, comm: object = None) -> None:
        """Record that the cluster ends: retiring workers stay, and no other has to retire."""
        self._over = True
        self.copies.stop()
        await self.leaving.stop()

    def stay(self, comm: object = None, addresses: Iterable[str] = ()) -> None:
        """Take back a `leave`: workers that have not left stay and take tasks again; their reason is "recalled"."""
        self._here()
        self.leaving.recall(addresses)

    def ends(
        self,
        comm: object = None,
        ends: Mapping[str, float | None] | None = None,
        fresh: float | None = None,
        by: str = "site",
    ) -> None:
        """Set when workers end; tasks that would take longer are not placed on them.

        Parameters
        ----------
        ends : mapping of name to float or None
            Seconds since the epoch; None: no longer known.  Workers that have not joined yet may be named.
        fresh : float, optional
            Seconds that a worker started now would have; 0: none would be started.
        by : str
            The source: a batch system knows walltimes, a worker its own lifetime.  The earliest end counts.
        """
        scheduler = self._here()
        put_off = {str(name) for name, at in (ends or {}).items() if self._note(str(name), at, by)}
        self._forget_ends()
        if put_off:
            self.leaving.take_again([a for a, name in self._names.items() if name in put_off])
        self._fresh = self._fresh if fresh is None else fresh - reserve(fresh)
        self._told = None
        self._tell(scheduler.workers.values())

    def exposed(self, comm: object = None, jobs: Mapping[str, str] | None = None) -> None:
        """Set the jobs that may be preempted without warning: results that only they hold are copied.

        Parameters
        ----------
        jobs : mapping of name to name
            Worker names, possibly of workers that have not joined yet, to the names of their jobs.  It replaces
            earlier calls.
        """
        self._here()
        self.copies.expose(jobs or {})

    def _note(self, name: str, at: float | None, by: str) -> bool:
        """Store a worker's end; return whether it was postponed."""
        told = self._ends.pop(name, {})
        before = min(told.values(), default=inf)
        if at is None:
            told.pop(by, None)
        else:
            told[by] = float(at) - reserve(float(at) - time())
        if told:
            self._ends[name] = told  # the newest comes last
        return min(told.values(), default=inf) > before + _PUT_OFF

    # -- parts of the answers ------------------------------------------------------------------------------

    def _here(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("dask_ferro's roster was taken off this scheduler")
        return self._scheduler

    def _row(self, ws: WorkerState, unique: int, now: float) -> WorkerRow:
        if ws.processing:
            self._busy[ws.address] = now
        at = self._end(ws)
        told = metrics_of(ws).get(METRIC) or {}
        return {
            "name": ws.name,
            "threads": ws.nthreads,
            "status": ws.status.name,
            "idle_for": now - self._busy.get(ws.address, now),
            "paused_for": max(now - self._paused[ws.address], 0.0) if ws.address in self._paused else 0.0,
            "processing": len(ws.processing),
            "nbytes": ws.nbytes,
            "unique": unique,
            "free": free_bytes(ws),
            "ends_in": None if at is None else at - unique / _LEAVES_AT - time(),
            "resources": dict(ws.resources),
            "device": told.get("device") or ("gpu" if names_a_gpu(ws.resources) else "cpu"),
        }

    def _held_alone(self) -> dict[str, int]:
        """Return the bytes of the results that each worker alone holds."""
        found: dict[str, int] = {}
        for address, ws in self._here().workers.items():
            alone = (ts for ts in ws.has_what if len(ts.who_has or ()) == 1 and not ts.actor)
            found[address] = sum(map(nbytes_of, alone))
        return found

    def _end(self, ws: WorkerState) -> float | None:
        return min(self._ends.get(str(ws.name), {}).values(), default=None)

    def _tell(self, workers: Iterable[WorkerState]) -> None:
        """Pass the ends to the ledger that placement uses: all of them to a new one."""
        scheduler = self._here()
        stealing = stealing_of(scheduler)
        if stealing is None:
            return
        ledger = stealing.ledger
        if not (self._ends or self._fresh or ledger.ends or ledger.fresh):
            return  # there is nothing to tell or to take back
        if stealing is not self._told:
            self._told, workers = stealing, scheduler.workers.values()
            ledger.fresh = self._fresh
        for ws in workers:
            at = self._end(ws)
            if at != ledger.ends.get(ws.address):
                stealing.tell(EndTold(ws.address, at))

    def unblame(self, comm: object = None, names: Iterable[str] = ()) -> int:
        """Take back the blame of tasks for the death of workers whose jobs were ended; return the number of tasks."""
        return self.blame.take_back(names)

    def fail(self, comm: object = None, why: str = "", resources: Mapping[str, float] | None = None) -> int:
        """Fail tasks that wait for a worker although none can run them; return the number of tasks.

        Parameters
        ----------
        why : str
            The message of their error.
        resources : mapping, optional
            Restricts this to tasks with exactly these resources and no restriction to workers or hosts; None: all
            tasks.
        """
        scheduler = self._here()
        if scheduler.workers and resources is None:  # one has joined since the caller looked
            return 0
        keys = upstream.fail_unplaced(scheduler, ConfigError(why), resources)
        if keys:
            logger.warning("dask_ferro: %d tasks failed that no worker can run: %s", len(keys), why)
        return len(keys)


def reserve(seconds: float) -> float:
    """Return the part of a worker's last seconds reserved for moving its data; until then it may run tasks."""
    return min(max(_RESERVE * seconds, 0.0), _MOST_RESERVE)


class RateLimitedValue(Generic[T]):
    """A cached value that is recomputed only when that takes less than 2 % of the time since."""

    def __init__(self) -> None:
        self._value: T | None = None
        self._size = 0
        self._until = 0.0

    def get(self, work: Callable[[], T], size: int = 1) -> T:
        """Return the value of `work`, fresh or cached.

        Parameters
        ----------
        size : int
            Size of the problem: if it halved or doubled, the value is recomputed in any case.
        """
        now = monotonic()
        if self._value is None or now >= self._until or not self._size / 2 <= size <= self._size * 2:
            self._value, self._size = work(), size
            self._until = now + _SHARE * (monotonic() - now)
        return self._value


def stealing_of(scheduler: Scheduler) -> Stealing | None:
    """Return our stealing extension, or None if it is not installed."""
    stealing = scheduler.extensions.get("stealing")
    return stealing if isinstance(stealing, Stealing) else None


async def register(calls: Any) -> None:
    """Put the roster on the scheduler of a connection, if it has none."""
    answer = await calls.run_function(function=dumps(put_on), kwargs=dumps({"part": Roster()}))
    if answer["status"] != "OK":
        _, error, _ = clean_exception(**answer)
        assert error is not None
        raise error
