"""The part `ScalingRPC` of the scheduler plugin: the remote calls of scaling.

    ferro_roster(ends, ...)        take the site's facts; return the workers with their data, and the remaining work
    ferro_leave(addresses, ...)    retire workers without losing data (`retirement`)
    ferro_ends(ends)               set when workers end by themselves (their lifetime)
    ferro_unblame(names)           report that workers died because their jobs were ended (`blame`)
    ferro_over()                   report that the cluster ends: no worker has to retire in order any more

It works with or without `ff.install`, and makes no decisions.  Answers that are expensive (the remaining work,
unique data by worker) are cached while a new computation would take more than 2 % of the scheduler's time.  Durations
are seconds, sizes bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from distributed import Scheduler, Status
from distributed.core import clean_exception
from distributed.metrics import monotonic, time
from distributed.protocol.pickle import dumps
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.elastic.copies import Copies
from dask_ferro.elastic.evacuation import free_bytes
from dask_ferro.elastic.remaining_work import Demands, names_a_gpu
from dask_ferro.elastic.retirement import Retirements
from dask_ferro.elastic.suspicion import SuspicionReset
from dask_ferro.policy.events import EndAnnounced
from dask_ferro.scheduler.plugin import Part, put_on
from dask_ferro.scheduler.scheduler_calls import NO_LOSSES, DemandRow, LeaveAnswer, RosterAnswer, WorkerRow
from dask_ferro.scheduler.stealing import stealing_of
from dask_ferro.scheduler.upstream import metrics_of
from dask_ferro.scheduler.worker_plugin import METRIC

logger = logging.getLogger(__name__)

# The methods that a client may call, each under "ferro_" and its name.
_CALLS = ("roster", "leave", "ends", "unblame", "over")
# One over the share of the scheduler's time for expensive answers: 2 %.
_SHARE = 50

# The part of a worker's remaining time reserved for moving its data: a tenth, at most 5 s.
_RESERVE, _MOST_RESERVE = 0.1, 5.0
# An end that moves by no more than this is the same one, and one that moves by more than that was postponed.
_END_TOLERANCE, _POSTPONEMENT = 1.0, 5.0
# Bytes a second at which a worker's results leave it, a low estimate: Dask moves 0.2 to 1 GB/s between two processes.
_LEAVES_AT = 100e6


class _WorkerEnd(NamedTuple):
    """When a worker ends, as reported, and until when it may run tasks (epoch)."""

    at: float
    usable: float


@dataclass
class _WorkerActivity:
    """A worker's name, when it last had a task, and since when it was seen paused, on the monotonic clock."""

    name: str
    busy: float
    paused: float | None = None


class ScalingRPC(Part):
    """A part of the scheduler plugin that answers the calls listed above."""

    name = "elastic"

    # Set by `start`, before any of the hooks below is called.
    leaving: Retirements
    blame: SuspicionReset
    copies: Copies
    _demands: Demands

    def __init__(self) -> None:
        self._over = False
        self._scheduler: Scheduler | None = None
        self._workers: dict[str, _WorkerActivity] = {}  # by address
        # By worker name, from the site and from the workers; also for workers that have not joined yet.
        self._site_ends: dict[str, _WorkerEnd] = {}
        self._own_ends: dict[str, _WorkerEnd] = {}
        self._fresh = 0.0
        # Expensive answers, the number of unfinished tasks that they are for, and the time until which they hold.
        self._unique: dict[str, int] = {}
        self._rows: list[DemandRow] = []
        self._size, self._until = 0, 0.0

    # -- from start to stop --------------------------------------------------------------------------------

    def start(self, scheduler: Scheduler) -> None:
        """Read the workers that are there."""
        self._scheduler = scheduler
        self.leaving = Retirements(scheduler)
        self.blame = SuspicionReset(scheduler)
        self.copies = Copies(scheduler)
        self._demands = Demands(scheduler)
        self._workers = {a: _WorkerActivity(str(ws.name), monotonic()) for a, ws in scheduler.workers.items()}

    def calls(self) -> Mapping[str, Callable[..., object]]:
        """Return the calls listed above."""
        return {f"ferro_{name}": getattr(self, name) for name in _CALLS}

    async def stop(self) -> None:
        """Take the ends of workers back from placement, and end retirements; retiring workers stay."""
        if (scheduler := self._scheduler) is not None:
            self._site_ends, self._own_ends, self._fresh = {}, {}, 0.0
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
        seen = self._workers[worker] = _WorkerActivity(str(scheduler.workers[worker].name), monotonic())
        self.blame.came(seen.name)
        self._tell([scheduler.workers[worker]])

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: object) -> None:
        """Forget a worker, and its own end: one that a nanny starts again has another."""
        if (seen := self._workers.pop(worker, None)) is not None:
            self._own_ends.pop(seen.name, None)
        self.leaving.forget(worker)

    def task_left(
        self, ts: TaskState, finish: str, seconds: float | None, message: Mapping[str, object]
    ) -> None:
        """Record that a worker had a task until now."""
        seen = self._workers.get(str(message.get("worker")))
        if seen is not None:
            seen.busy = monotonic()
        if self.leaving.is_on:
            self.leaving.wake()

    def logged(self, topic: str, msg: object) -> None:
        """Notice the tasks of a dead worker, for which Dask has no hook."""
        event = msg if isinstance(msg, dict) else {}
        if event.get("action") == "remove-worker" and "worker" in event and not event["expected"]:
            seen = self._workers.get(event["worker"])
            self.blame.died(seen.name if seen is not None else "", event["processing-tasks"])

    # -- what it answers -----------------------------------------------------------------------------------

    def roster(
        self,
        comm: object = None,
        ends: Mapping[str, float | None] | None = None,
        fresh: float | None = None,
        exposed: Mapping[str, str] | None = None,
    ) -> RosterAnswer:
        """Take the site's facts, and return the workers and the remaining work.

        Parameters
        ----------
        ends : mapping of name to float or None, optional
            When workers' jobs end, in seconds since the epoch; None: no longer known.  Tasks that would take longer are
            not placed on them.  Workers that have not joined yet may be named.
        fresh : float, optional
            Seconds that a worker started now would have; 0: none would be started.
        exposed : mapping of name to name, optional
            Workers whose jobs may be preempted without warning, and the names of the jobs: results that only they
            hold are copied.
        """
        scheduler, now, size = self._here(), monotonic(), self._demands.remaining()
        self._set_ends(self._updated(self._site_ends, ends or {}), self._own_ends)
        if fresh is not None:
            self._fresh = fresh - reserve(fresh)
        if exposed is not None:
            self.copies.expose(exposed)
        self._tell(scheduler.workers.values())
        if now >= self._until or not self._size / 2 <= size <= self._size * 2:
            self._unique, self._rows, self._size = self._held_alone(), self._demands.rows(), size
            self._until = now + _SHARE * (monotonic() - now)
        return {
            "workers": {a: self._row(ws, now) for a, ws in scheduler.workers.items()},
            "demands": self._rows,
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
        stayed, lost = dict.fromkeys(asked, "the cluster ends"), NO_LOSSES
        if not self._over:
            stayed, lost = await self.leaving.leave(asked, seconds, must, ordered)
        left = [a for a in asked if a not in stayed]
        return {"left": left, "stayed": stayed, "lost": lost, "over": self._over}

    async def over(self, comm: object = None) -> None:
        """Record that the cluster ends: retiring workers stay, and no other has to retire."""
        self._over = True
        self.copies.stop()
        await self.leaving.stop()

    def ends(self, comm: object = None, ends: Mapping[str, float] | None = None) -> None:
        """Set when workers end by themselves; of several ends of a worker the earliest counts.

        Parameters
        ----------
        ends : mapping of name to float
            Seconds since the epoch; workers that have not joined yet may be named.
        """
        self._set_ends(self._site_ends, self._updated(self._own_ends, ends or {}))
        self._tell(self._here().workers.values())

    def _updated(
        self, known: Mapping[str, _WorkerEnd], ends: Mapping[str, float | None]
    ) -> dict[str, _WorkerEnd]:
        """Return ends with changes, and without those of absent workers that have passed."""
        now, there = time(), {seen.name for seen in self._workers.values()}
        updated = {n: end for n, end in known.items() if n not in ends and (n in there or end.at > now)}
        for name, at in ends.items():
            if at is not None:
                end = known.get(name)
                # What is reserved does not shrink with the seconds that are left.
                is_same = end is not None and abs(end.at - at) <= _END_TOLERANCE
                updated[name] = end if end is not None and is_same else _WorkerEnd(at, at - reserve(at - now))
        return updated

    def _set_ends(self, site: dict[str, _WorkerEnd], own: dict[str, _WorkerEnd]) -> None:
        """Store the ends, and let workers take tasks again whose end was postponed."""
        workers = self._here().workers.items()
        before = {address: self._end(ws) for address, ws in workers}
        self._site_ends, self._own_ends = site, own
        put_off = [a for a, ws in workers if self._end(ws) > before[a] + _POSTPONEMENT]
        self.leaving.take_again(put_off)

    # -- parts of the answers ------------------------------------------------------------------------------

    def _here(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("dask_ferro's roster was taken off this scheduler")
        return self._scheduler

    def _row(self, ws: WorkerState, now: float) -> WorkerRow:
        seen, unique, at = self._workers[ws.address], self._unique.get(ws.address, 0), self._end(ws)
        if ws.processing:
            seen.busy = now
        if ws.status != Status.paused:
            seen.paused = None
        elif seen.paused is None:
            seen.paused = now
        metrics = metrics_of(ws).get(METRIC) or {}
        return {
            "name": ws.name,
            "threads": ws.nthreads,
            "status": ws.status.name,
            "idle_for": now - seen.busy,
            "paused_for": now - seen.paused if seen.paused is not None else 0.0,
            "nbytes": ws.nbytes,
            "unique": unique,
            "free": free_bytes(ws),
            "ends_in": None if at == inf else at - unique / _LEAVES_AT - time(),
            "resources": dict(ws.resources),
            "device": metrics.get("device") or ("gpu" if names_a_gpu(ws.resources) else "cpu"),
        }

    def _held_alone(self) -> dict[str, int]:
        """Return the bytes of the results that each worker alone holds."""
        nbytes: dict[str, int] = {}
        for address, ws in self._here().workers.items():
            alone = (ts for ts in ws.has_what if len(ts.who_has or ()) == 1 and not ts.actor)
            nbytes[address] = sum(ts.get_nbytes() for ts in alone)
        return nbytes

    def _end(self, ws: WorkerState) -> float:
        """Return until when a worker may run tasks; infinite where no end is known."""
        ends = (known.get(str(ws.name)) for known in (self._site_ends, self._own_ends))
        return min((end.usable for end in ends if end is not None), default=inf)

    def _tell(self, workers: Iterable[WorkerState]) -> None:
        """Pass the ends to the ledger that placement uses."""
        if (stealing := stealing_of(self._here())) is None:
            return
        stealing.ledger.fresh = self._fresh
        for ws in workers:
            at = self._end(ws)
            if at != stealing.ledger.ends.get(ws.address, inf):
                stealing.tell(EndAnnounced(ws.address, None if at == inf else at))

    def unblame(self, comm: object = None, names: Iterable[str] = ()) -> int:
        """Take back the blame of tasks for the death of workers whose jobs were ended; return the number of tasks."""
        return self.blame.take_back(names)


def reserve(seconds: float) -> float:
    """Return the part of a worker's last seconds reserved for moving its data; until then it may run tasks."""
    return min(max(_RESERVE * seconds, 0.0), _MOST_RESERVE)


async def register(calls: Any) -> None:
    """Put the roster on the scheduler of a connection, if it has none."""
    answer = await calls.run_function(function=dumps(put_on), kwargs=dumps({"part": ScalingRPC()}))
    if answer["status"] != "OK":
        _, error, _ = clean_exception(**answer)
        assert error is not None
        raise error
