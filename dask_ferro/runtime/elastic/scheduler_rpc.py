"""The roster: what scaling asks a scheduler, and what it asks of it.

    ferro_roster()                 who is there, what each holds and does, and what is left to do
    ferro_leave(addresses, ...)    let workers go with nothing lost (`retirement`)
    ferro_stay(addresses)          take that back
    ferro_ends(ends, ...)          when workers' jobs end
    ferro_fail(why)                fail the tasks that no worker has
    ferro_exposed(jobs)            whose jobs may be preempted without warning (`copies`)
    ferro_unblame(names)           that workers died because their jobs were ended (`blame`)
    ferro_over()                   that the cluster ends: nobody has to leave in order any more

A plugin of the scheduler, with or without `FerroScheduler` beside it; it decides nothing.  What takes long to tell
(the remaining work, who holds what alone) is told again from memory while telling it anew would take more than 2 % of
the scheduler's time.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Generic, TypeVar

from dask.typing import Key
from distributed import Scheduler, Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.metrics import monotonic, time
from distributed.scheduler import WorkerState

from dask_ferro.errors import ConfigError
from dask_ferro.policy.events import EndTold
from dask_ferro.runtime import upstream
from dask_ferro.runtime.elastic.blame import Blame
from dask_ferro.runtime.elastic.lost import summed
from dask_ferro.runtime.elastic.remaining_work import Demands, names_a_gpu
from dask_ferro.runtime.elastic.retirement import Leaving
from dask_ferro.runtime.plugin.stealing import Stealing
from dask_ferro.runtime.replication.copies import Copies
from dask_ferro.runtime.scheduler_calls import DemandRow, LeaveAnswer, RosterAnswer, WorkerRow
from dask_ferro.runtime.upstream import metrics_of, nbytes_of
from dask_ferro.runtime.worker.plugin import METRIC
from dask_ferro.runtime.worker_memory import free_bytes

logger = logging.getLogger(__name__)

NAME = "ferro-roster"
# The methods that a client may call, each as "ferro_" and its name.
_CALLS = ("roster", "leave", "stay", "ends", "fail", "exposed", "unblame", "over")
# What it calls to take the plugin off.
REMOVE = "ferro_roster_remove"

# Of the scheduler's time that telling may take: 2 %.
_SHARE = 50

# Of a worker's time that is kept for moving what it holds: a tenth, at most 5 s.
_RESERVE, _MOST_RESERVE = 0.1, 5.0
# An end that comes so much later is another one, and no rounding.
_PUT_OFF = 5.0
# Names of workers that are gone or still to come whose ends are kept: some 4 MB at most.
_ABSENT = 10_000
# Bytes a second at which a worker's results leave it, taken low: Dask moves 0.2 to 1 GB/s between two processes.
_LEAVES_AT = 100e6

T = TypeVar("T")


class Roster(SchedulerPlugin):
    """Answers `ferro_roster`, `ferro_leave` and `ferro_ends`."""

    name = NAME
    idempotent = True

    # Made by `start`, which Dask awaits before it calls any of the hooks below.
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
        self._paused: dict[str, float] = {}  # since when workers pause, on the same clock
        # By name, and by who said it; of workers that are still to come as well.
        self._ends: dict[str, dict[str, float]] = {}
        self._names: dict[str, str] = {}  # of the workers that are there, by address
        self._look_at = 0  # so many ends: some may be of no use any more
        self._fresh = 0.0
        self._told: Stealing | None = None  # whose ledger knows the ends

    # -- from start to stop --------------------------------------------------------------------------------

    async def start(self, scheduler: Scheduler) -> None:
        """Answer from now on, in the place of another of our kind.  Idempotent."""
        if self._scheduler is not None:
            return
        other = scheduler.plugins.get(NAME)
        if isinstance(other, Roster) and other is not self:
            self._ends, self._fresh = other._ends, other._fresh
            await other.remove()
        self._scheduler = scheduler
        self.leaving = Leaving(scheduler)
        self.blame = Blame(scheduler)
        self.copies = Copies(scheduler)
        self._demands = Demands(scheduler)
        self._busy = dict.fromkeys(scheduler.workers, monotonic())
        self._paused = {a: monotonic() for a, ws in scheduler.workers.items() if ws.status == Status.paused}
        self._names = {address: str(ws.name) for address, ws in scheduler.workers.items()}
        scheduler.handlers.update(self._handlers())

    def _handlers(self) -> dict[str, Callable[..., object]]:
        return {f"ferro_{name}": getattr(self, name) for name in _CALLS} | {REMOVE: self.remove}

    async def remove(self, comm: object = None) -> None:
        """Answer no more; those that are leaving stay.  Idempotent."""
        if (scheduler := self._scheduler) is None:
            return
        self._ends, self._fresh, self._told = {}, 0.0, None
        self._tell(scheduler.workers.values())
        self._scheduler = None
        for name in self._handlers():
            scheduler.handlers.pop(name, None)
        if scheduler.plugins.get(NAME) is self:
            del scheduler.plugins[NAME]
        self.copies.stop()
        await self.leaving.stop()

    async def before_close(self) -> None:
        """Let nobody leave any more, and copy nothing: the scheduler is going."""
        await self.over()

    # -- what happens --------------------------------------------------------------------------------------

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Begin to count a worker's idle seconds, and pass on when its job ends."""
        self._busy[worker] = monotonic()
        self._names[worker] = str(scheduler.workers[worker].name)
        self.blame.came(self._names[worker])
        if scheduler.workers[worker].status == Status.paused:  # it came back
            self._paused[worker] = monotonic()
        self._tell([scheduler.workers[worker]])

    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str = "", **kwargs: object
    ) -> None:
        """Forget a worker; its end only if it left, for one that died is started again by its nanny, as it was."""
        self._busy.pop(worker, None)
        self._paused.pop(worker, None)
        name = self._names.pop(worker, "")
        self.leaving.forget(worker)
        if self.leaving.is_own(stimulus_id):
            self._ends.pop(name, None)

    def _forget_ends(self) -> None:
        """Drop the ends of workers that are not there where they have passed, or are too many: the oldest first."""
        if len(self._ends) <= self._look_at:
            return
        there, now = set(self._names.values()), time()
        absent = [name for name in self._ends if name not in there]
        over = max(len(absent) - _ABSENT, 0)
        for i, name in enumerate(absent):
            if i < over or min(self._ends[name].values()) < now:
                del self._ends[name]
        self._look_at = 2 * len(self._ends)  # each name is looked at twice

    def transition(self, key: Key, start: str, finish: str, *args: object, **kwargs: object) -> None:
        """Note that a worker had a task until now, and which results are gone."""
        if start == "memory":
            self.copies.forget(key)
        elif finish == "memory":
            self.copies.came(key)
        if start == "processing":
            worker = kwargs.get("worker")
            if worker in self._busy:
                self._busy[worker] = monotonic()
            if self.leaving.is_on:
                self.leaving.wake()

    def update_graph(self, scheduler: Scheduler, *, keys: Iterable[Key] = (), **kwargs: object) -> None:
        """Hold nothing that a client asks for: it is the client's to release."""
        self.copies.anchors.let_go_soon(keys)

    def log_event(self, topic: str, msg: object) -> None:
        """Notice what Dask has no other hook for: cancels, workers that pause and run again, what the dead had."""
        told = msg if isinstance(msg, dict) else {}
        action = told.get("action")
        if action == "cancel":
            # It is told before Dask looks who else wants the result: our own hold must be gone by then.
            self.copies.anchors.let_go_wanted()
        elif action == "remove-worker" and "worker" in told and not told["expected"]:
            self.blame.died(self._names.get(told["worker"], ""), told["processing-tasks"])
        elif action == "worker-status-change":
            ws = self._scheduler.workers.get(topic) if self._scheduler is not None else None
            if ws is not None and ws.status == Status.paused:
                self._paused.setdefault(topic, monotonic())
            else:
                self._paused.pop(topic, None)

    # -- what it answers -----------------------------------------------------------------------------------

    def roster(self, comm: object = None) -> RosterAnswer:
        """Return who is there and what is left to do."""
        scheduler, demands = self._here(), self._demands
        now = monotonic()
        unique = self._unique.get(self._held_alone)
        self._tell(scheduler.workers.values())
        return {
            "workers": {a: self._row(ws, unique.get(a, 0), now) for a, ws in scheduler.workers.items()},
            "demands": self._rows.get(demands.rows, demands.remaining()),
            "queue": demands.ready(),
            "copies": dict(self.copies.made),
        }

    async def leave(
        self,
        comm: object = None,
        addresses: Iterable[str] = (),
        seconds: float | None = None,
        must: bool = False,
        ordered: bool = False,
    ) -> LeaveAnswer:
        """Let workers go, together or not at all; return when they are gone, or may not go.

        They stay, and take tasks again, where a plugin of the scheduler needs them, they have an actor, their tasks
        may run nowhere else, or what they hold has no room elsewhere.

        Parameters
        ----------
        addresses : iterable of str
            One that is gone has left.
        seconds : float, optional
            For which running tasks may go on; then they start over elsewhere.  None: until they are done.
        must : bool
            Their job ends in any case (its walltime, a preemption, a drained node): nobody is asked whether they may
            leave, tasks that will not be done within `seconds` start over elsewhere at once, and as much of what they
            hold as fits is moved, others' spilling included.  Where that is not all, or there is an actor, they are not
            removed and take no tasks, until they are asked to leave again or `ferro_ends` puts their end off.
        ordered : bool
            As with `must`, but they are removed in any case, within `seconds`: what could not be moved by then is
            lost, and what still runs starts over.  Where nobody stays, that is at once.

        """
        self._here()
        asked = list(addresses)
        stayed, lost = dict.fromkeys(asked, "the cluster ends"), summed([])
        if not self._over:
            stayed, lost = await self.leaving.leave(asked, seconds, must, ordered)
        left = [a for a in asked if a not in stayed]
        return {"left": left, "stayed": stayed, "lost": lost, "over": self._over}

    async def over(self, comm: object = None) -> None:
        """Take note that the cluster ends: those that leave stay, and nobody else has to."""
        self._over = True
        self.copies.stop()
        await self.leaving.stop()

    def stay(self, comm: object = None, addresses: Iterable[str] = ()) -> None:
        """Take back a `leave`: workers that have not left stay, and take tasks again; for them it tells "recalled"."""
        self._here()
        self.leaving.recall(addresses)

    def ends(
        self,
        comm: object = None,
        ends: Mapping[str, float | None] | None = None,
        fresh: float | None = None,
        by: str = "site",
    ) -> None:
        """Take note of when workers end; nothing that takes longer will be placed on them.

        Parameters
        ----------
        ends : mapping of name to float or None
            Seconds since the epoch; None: no longer known.  Workers that are still to come may be named.
        fresh : float, optional
            Seconds that a worker would have that joined now; 0: nobody would come.
        by : str
            Who says so: a batch system knows of walltimes, a worker of its own lifetime.  The earliest end counts.
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
        """Take note of whose jobs may be preempted without warning: what only one of them holds is copied.

        Parameters
        ----------
        jobs : mapping of name to name
            Of workers, those still to come as well, to the job that they are of.  It replaces what was said before.
        """
        self._here()
        self.copies.expose(jobs or {})

    def _note(self, name: str, at: float | None, by: str) -> bool:
        """Keep a worker's end; return whether it comes later than was thought."""
        told = self._ends.pop(name, {})
        before = min(told.values(), default=inf)
        if at is None:
            told.pop(by, None)
        else:
            told[by] = float(at) - reserve(float(at) - time())
        if told:
            self._ends[name] = told  # at the end: the newest
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
        """Return the bytes of results that each worker holds and nobody else does."""
        scheduler = self._here()
        return {
            address: sum(nbytes_of(ts) for ts in ws.has_what if len(ts.who_has or ()) == 1 and not ts.actor)
            for address, ws in scheduler.workers.items()
        }

    def _end(self, ws: WorkerState) -> float | None:
        return min(self._ends.get(str(ws.name), {}).values(), default=None)

    def _tell(self, workers: Iterable[WorkerState]) -> None:
        """Pass the ends on to the ledger that placement looks at: all of them to a new one."""
        scheduler = self._here()
        stealing = stealing_of(scheduler)
        if stealing is None:
            return
        ledger = stealing.ledger
        if not (self._ends or self._fresh or ledger.ends or ledger.fresh):
            return  # nothing was told, and nothing is to be told
        if stealing is not self._told:
            self._told, workers = stealing, scheduler.workers.values()
            ledger.fresh = self._fresh
        for ws in workers:
            at = self._end(ws)
            if at != ledger.ends.get(ws.address):
                stealing.tell(EndTold(ws.address, at))

    def unblame(self, comm: object = None, names: Iterable[str] = ()) -> int:
        """Let tasks not be blamed for the death of workers of these names, whose jobs were ended; return how many."""
        return self.blame.take_back(names)

    def fail(self, comm: object = None, why: str = "", resources: Mapping[str, float] | None = None) -> int:
        """Fail tasks that wait for a worker, while there is none for them; return how many.

        Parameters
        ----------
        why : str
            The text of their error.
        resources : mapping, optional
            Those of exactly these needs that are tied to no worker or host; None: all.
        """
        scheduler = self._here()
        if scheduler.workers and resources is None:  # one has come since the caller looked
            return 0
        keys = upstream.fail_unplaced(scheduler, ConfigError(why), resources)
        if keys:
            logger.warning("dask_ferro: %d tasks failed that no worker can run: %s", len(keys), why)
        return len(keys)


def reserve(seconds: float) -> float:
    """Return how much of a worker's last seconds is for moving what it holds; until then it may run tasks."""
    return min(max(_RESERVE * seconds, 0.0), _MOST_RESERVE)


class RateLimitedValue(Generic[T]):
    """What was worked out, until working it out anew takes less than 2 % of the time since."""

    def __init__(self) -> None:
        self._value: T | None = None
        self._size = 0
        self._until = 0.0

    def get(self, work: Callable[[], T], size: int = 1) -> T:
        """Return what `work` returns, or returned.

        Parameters
        ----------
        size : int
            Of what it works on: when that halved or doubled it is worked out in any case.
        """
        now = monotonic()
        if self._value is None or now >= self._until or not self._size / 2 <= size <= self._size * 2:
            self._value, self._size = work(), size
            self._until = now + _SHARE * (monotonic() - now)
        return self._value


def stealing_of(scheduler: Scheduler) -> Stealing | None:
    """Return the extension of `FerroScheduler`, or None where there is none."""
    stealing = scheduler.extensions.get("stealing")
    return stealing if isinstance(stealing, Stealing) else None


async def dask_setup(scheduler: Scheduler) -> None:
    """Put the roster on a scheduler: `dask scheduler --preload dask_ferro.runtime.elastic.scheduler_rpc`."""
    plugin = Roster()
    await plugin.start(scheduler)
    scheduler.add_plugin(plugin, name=NAME, idempotent=True)
