"""The placement of ready tasks on a Dask scheduler: the policy's choice among the few workers that can be best.

These are the holders of its inputs and the workers on which a task would start first; for a restricted task, all that
the restriction admits.  Tasks that Dask queues at the scheduler (many similar ones without large inputs) go to a
worker with a free slot as before, a fast one first, and short ones several at a time.  Narrow graphs run their longest
chains first.

Where devices differ, the first workers of each class are weighed, and queued tasks go to a slow worker only if the
fast ones would not finish all of them earlier.  A task for which no device has room now waits as well, as does one
that requires a class without workers; both are tried again as soon as bytes are freed.

Where workers end at a known time (`Ledger.ends`), a task of known seconds goes where it finishes in time.  If no
worker has the time and a fresh one would, it waits: in Dask's state "no-worker", or at the head of Dask's queue.
Tasks that we hold back do not count towards `no-workers-timeout`; tasks that require a missing device class do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping
from heapq import nsmallest
from itertools import islice
from math import inf
from typing import NamedTuple

from dask.typing import Key
from distributed import Scheduler
from distributed.metrics import monotonic, time
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.policy.candidates import Candidates
from dask_ferro.policy.facts import TaskFacts, Worker
from dask_ferro.policy.placement import Placement, Wait, WorkerChoice
from dask_ferro.policy.ranking import is_narrow, order_by_rank, upward_ranks
from dask_ferro.policy.waits import WaitingTask, waits_at_scheduler
from dask_ferro.scheduler import upstream
from dask_ferro.scheduler.annotations import estimate_of, wish_of
from dask_ferro.scheduler.settings import Settings
from dask_ferro.scheduler.stealing import Stealing

logger = logging.getLogger(__name__)

# The most tasks waiting for a fresh worker that are tried again in one tick: 256 take about 10 ms.
_MAX_RETRIES = 256
# The most waiting tasks diagnosed in one tick.
_MAX_DIAGNOSES = 32
# The most tasks tried when a device may have room again; one freed result rarely makes room for more.
_RETRIED_AT_ONCE = 16
# Larger graphs keep Dask's order: ranks would occupy the scheduler's loop for more than 0.1 s.
_MAX_RANKED = 20_000


class _WaitingTask(NamedTuple):
    """A task that waits: since when, which Dask's own record does not keep, and what for."""

    since: float
    reason: str


class Placing:
    """The placement of a scheduler's tasks by a `policy.candidates.Candidates`."""

    def __init__(self, scheduler: Scheduler, stealing: Stealing, settings: Settings) -> None:
        self.scheduler = scheduler
        self.stealing = stealing
        self.settings = settings
        self._placed = stealing.records.counts["place"]
        self.candidates = Candidates(stealing.ledger, stealing.links, settings.placing, self._is_open)
        # The tasks that wait for a device, for room on one, or for a fresh worker; the latest asked comes last.
        self._waiting: dict[TaskState, _WaitingTask] = {}
        self._is_due = False
        # The task that no worker may help with, and the event as of which that holds.
        self._declined: tuple[TaskState, int] | None = None
        stealing.after_tick = self.retry
        stealing.after_freeing = self._freed
        stealing.waits.elsewhere = self._idle_waits

    def ready(self, ts: TaskState) -> WorkerState | None:
        """Return the worker for a ready task, or None where no worker may have it; counting takes 0.1 us an input."""
        chosen = self._ready(ts)
        if chosen is None:
            place = "held_back"
        elif not ts.dependencies:
            place = "no_inputs"
        else:
            place = "local" if all(dts in chosen.has_what for dts in ts.dependencies) else "remote"
        self._placed[place] += 1
        return chosen

    def _ready(self, ts: TaskState) -> WorkerState | None:
        if not ts.actor and self.scheduler.running:
            try:
                answer = self._choose(ts)
            # An error of ours costs a task its best place, but it still runs.
            except Exception:
                logger.exception("dask_ferro could not place %r; Dask does", ts.key)
                return upstream.stock_placement(self.scheduler, ts)
            held = self._waiting.pop(ts, None) if self._waiting else None
            if isinstance(answer, WorkerChoice):
                return self.scheduler.workers[answer.worker]
            if isinstance(answer, Wait):
                since = held.since if held is not None else self.scheduler.unrunnable.get(ts, monotonic())
                self._waiting[ts] = _WaitingTask(since, answer.reason)
                return None
        return upstream.stock_placement(self.scheduler, ts)

    def is_tied(self, ts: TaskState) -> bool:
        """Return whether a task requires or prefers a device class."""
        if not ts.annotations:
            return False
        wish = wish_of(ts.annotations)
        return bool(wish.must or wish.likes)

    def _choose(self, ts: TaskState) -> Placement:
        now, candidates = time(), self.candidates
        if candidates.are_alike and not self.is_tied(ts):
            holder = self._only_holder(ts)
            if holder is not None and self._stays(ts, holder, now):
                return WorkerChoice(holder.address)
        task = self._task(ts)
        held, nbytes = self._held(ts)
        workers = candidates.candidates(task, held, nbytes, ts.priority, now)
        task = task._replace(inputs=tuple(self.stealing.shown.inputs(ts, [w.address for w in workers])))
        return candidates.choose(task, workers, self._fresh(ts) if self.stealing.ledger.ends else 0.0)

    def _task(self, ts: TaskState) -> TaskFacts:
        """Return the facts of an unassigned task, without its inputs."""
        stealing, wish = self.stealing, wish_of(ts.annotations)
        allowed, preferred = stealing.shown.restrictions(ts)
        takes, headroom = stealing.devices.takes(ts), stealing.devices.headroom(ts)
        device, seconds, known, others = self.candidates.seconds_by_class(
            ts.prefix.name, estimate_of(ts.annotations)
        )
        return TaskFacts(
            ts.key, seconds, known, (), allowed, preferred, (), device, others, takes, headroom, wish.must, wish.likes,
            self._waited(ts),
        )  # fmt: skip

    def _held(self, ts: TaskState) -> tuple[dict[str, int], int]:
        """Return the bytes of a task's inputs on each of their holders, and their total."""
        held: dict[str, int] = {}
        total = 0
        for dts in ts.dependencies:
            nbytes = dts.get_nbytes()
            total += nbytes
            for ws in dts.who_has or ():
                held[ws.address] = held.get(ws.address, 0) + nbytes
        return held, total

    def _waited(self, ts: TaskState) -> float:
        """Return the seconds for which a task has been ready and unassigned."""
        held = self._waiting.get(ts)
        since = held.since if held is not None else self.scheduler.unrunnable.get(ts)
        return 0.0 if since is None else monotonic() - since

    def _fresh(self, ts: TaskState) -> float:
        """Return the seconds that a fresh worker would have for a task; 0 if it is restricted to present workers."""
        tied = bool(ts.worker_restrictions or ts.host_restrictions) and not ts.loose_restrictions
        # The pool with the longest walltime may have other resources.
        tied = tied or bool(ts.resource_restrictions)
        return 0.0 if tied else self.stealing.ledger.fresh

    def retry(self) -> None:
        """Try waiting tasks again: running tasks may end early, and a fresh worker may not come after all."""
        tried = [*islice(self._waiting, _MAX_RETRIES), *self._preferring()]
        ledger = self.stealing.ledger
        if tried or (self.scheduler.queued and (ledger.ends or not self.candidates.are_alike)):
            self._try(tried)
        # Tasks that wait for a missing class count towards `no-workers-timeout`.
        others = (ts for ts, held in self._waiting.items() if held.reason != "wrong_device")
        upstream.keep_waiting(self.scheduler, others)

    def _try(self, tasks: list[TaskState]) -> None:
        self._declined = None
        upstream.place_again(self.scheduler, tasks)
        # What was released or cancelled meanwhile waits no more.
        for ts in tasks:
            if ts not in self.scheduler.unrunnable:
                self._waiting.pop(ts, None)

    def _preferring(self) -> list[TaskState]:
        """Return tasks whose preferred workers are gone: Dask would try them again only when those come back."""
        without = self.scheduler.unrunnable if self.scheduler.running else ()
        return list(
            islice((ts for ts in without if ts.loose_restrictions and ts not in self._waiting), _MAX_RETRIES)
        )

    def _idle_waits(self, idle: list[Worker]) -> list[WaitingTask]:
        """Return the tasks that wait at the scheduler although a worker is idle."""
        patience, now = self.settings.parameters.patience, monotonic()
        waits = []
        for ts, since in islice(self.scheduler.unrunnable.items(), _MAX_DIAGNOSES):
            held = self._waiting.get(ts, _WaitingTask(since, "no_eligible_worker"))
            # A member of a flow waits for the others of its flow.
            if now - held.since >= patience and not upstream.is_held(ts):
                waits.append(waits_at_scheduler(ts.key, now - held.since, idle, held.reason))
        return waits

    def _freed(self) -> None:
        """Try tasks that wait again soon, outside the transition that frees bytes."""
        if not self._is_due and (self._waiting or self.scheduler.queued):
            self._is_due = True
            self.scheduler.loop.call_later(self.settings.coalesce, self._retry_some)

    def _retry_some(self) -> None:
        self._is_due = False
        # Unless this plugin was removed meanwhile.
        if self.scheduler.extensions.get("stealing") is self.stealing:
            self._try(nsmallest(_RETRIED_AT_ONCE, self._waiting, key=lambda ts: ts.priority or ()))

    def _only_holder(self, ts: TaskState) -> WorkerState | None:
        """Return the only holder of all inputs of an unrestricted task, or None."""
        if upstream.is_restricted(ts):
            return None
        holder: WorkerState | None = None
        for dts in ts.dependencies:
            who = dts.who_has
            if not who or len(who) > 1:
                return None
            (ws,) = who
            if holder is not None and ws is not holder:
                return None
            holder = ws
        return holder

    def _stays(self, ts: TaskState, holder: WorkerState, now: float) -> bool:
        largest = max(dts.get_nbytes() for dts in ts.dependencies)
        return self.candidates.stays(holder.address, *self._seconds(ts), ts.priority, largest, now)

    def queued(self, first: Callable[[], TaskState], filled: WorkerState | None) -> WorkerState | None:
        """Return the worker for a root-like task; None while all are busy, or none has the time.

        Parameters
        ----------
        first : callable () -> TaskState
            Finds the task.
        filled : WorkerState or None
            The worker that is being sent several, by `ahead`.
        """
        chosen = filled or self._queued(first)
        self._placed["root"] += chosen is not None  # None is not counted, as Dask may try often
        return chosen

    def _queued(self, first: Callable[[], TaskState]) -> WorkerState | None:
        free: Collection[WorkerState] = self.scheduler.idle_task_count
        waits = self.stealing.waits
        if waits.silent:
            free = [ws for ws in free if waits.is_open(ws)]
        ledger = self.stealing.ledger
        if not self.candidates.are_alike:
            ts = first()
            event = ts, ledger.version
            # Dask asks once for each free slot in a row, and nothing happens between these calls.
            if event == self._declined:
                return None
            free = self._helping(ts, free)
            self._declined = None if free else event
        return self._least_busy(self._in_time(first(), free) if ledger.ends else free)

    def ahead(self, ws: WorkerState, first: TaskState) -> int:
        """Return how many more queued tasks a worker is sent that was just given one; `first` is the next."""
        nbytes = self.stealing.devices.sizes.of(first.prefix.name)
        try:
            return self.candidates.ahead(ws.address, self._seconds(first), nbytes, time())
        # Dask would close the connection of the worker whose message this follows.
        except Exception:
            logger.exception("dask_ferro sends no task ahead of %r", first.key)
            return 0

    def _helping(self, ts: TaskState, free: Collection[WorkerState]) -> Collection[WorkerState]:
        """Return the worker that would finish a task first, among those with room whose help pays."""
        task = self._task(ts)._replace(inputs=tuple(self.stealing.shown.inputs(ts, ())), waited=inf)
        queued = max(len(self.scheduler.queued), 1)
        address = self.candidates.helping(task, (ws.address for ws in free), queued, time())
        return () if address is None else (self.scheduler.workers[address],)

    def _in_time(self, ts: TaskState, free: Collection[WorkerState]) -> Collection[WorkerState]:
        """Return the workers that have time for a task; where none has, the one to use, if any."""
        addresses, fresh = (ws.address for ws in free), self._fresh(ts)
        having = self.candidates.in_time(*self._seconds(ts), addresses, fresh, time())
        return [self.scheduler.workers[address] for address in having]

    def _least_busy(self, free: Collection[WorkerState]) -> WorkerState | None:
        if len(free) == 1:
            return next(iter(free))
        ledger = self.stealing.ledger

        def busy(ws: WorkerState) -> tuple[float | int | str, ...]:
            load = len(ws.processing) / ws.nthreads
            if ws.address not in ledger.rows:
                return load, 1.0, 0, 0, ws.address
            row = ledger.rows[ws.address]
            return load, row.slowness, ws.nbytes, row.turn, ws.address

        return min(free, key=busy, default=None)

    def _is_open(self, address: str) -> bool:
        ws = self.scheduler.workers.get(address)
        return ws is not None and self.stealing.waits.is_open(ws)

    def _seconds(self, ts: TaskState) -> tuple[float, bool]:
        """Return a task's projected seconds on the first device class, and whether they are more than a guess."""
        return self.candidates.seconds(ts.prefix.name, estimate_of(ts.annotations))

    def rank(self, keys: list[Key]) -> None:
        """Order the new tasks of a narrow graph by upward rank."""
        tasks = [self.scheduler.tasks[key] for key in keys] if len(keys) <= _MAX_RANKED else []
        new: Mapping[Hashable, TaskState] = {
            ts.key: ts for ts in tasks if ts.state == "released" and ts.priority
        }
        if not any(ts.dependents for ts in new.values()):
            return
        dependents = {key: [d.key for d in ts.dependents if d.key in new] for key, ts in new.items()}
        seconds = {key: self._seconds(ts)[0] for key, ts in new.items()}
        ranks = upward_ranks(dependents, seconds)
        if not is_narrow(
            dependents, ranks, seconds, self.scheduler.total_nthreads, self.settings.placing.wide
        ):
            return
        orders = {key: ts.priority or (0,) for key, ts in new.items()}
        places = order_by_rank(ranks, {key: order[-1] for key, order in orders.items()})
        for key, ts in new.items():
            ts.priority = (*orders[key][:-1], places[key])
