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
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf

from dask.typing import Key
from distributed import Scheduler
from distributed.metrics import monotonic, time
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.policy.candidates import QUEUED, Candidates, queued_seconds
from dask_ferro.policy.facts import TaskFacts, Worker, kind_of
from dask_ferro.policy.placement import is_freed_by_others, share
from dask_ferro.policy.ranking import is_narrow, order_by_rank, upward_ranks
from dask_ferro.policy.waits import Wait, waits_at_scheduler
from dask_ferro.runtime import upstream
from dask_ferro.runtime.plugin.annotations import estimate_of, wish_of
from dask_ferro.runtime.plugin.settings import Settings
from dask_ferro.runtime.plugin.stealing import Stealing
from dask_ferro.runtime.upstream import nbytes_of

logger = logging.getLogger(__name__)

# The most tasks waiting for a fresh worker that are tried again in one tick: 256 take about 10 ms.
_RETRIED = 256
# The most waiting tasks diagnosed in one tick.
_TOLD = 32
# The most tasks tried when a device may have room again; one freed result rarely makes room for more.
_RETRIED_AT_ONCE = 16
# The most results of a full device scanned once per event: they take about 0.2 ms.
_HELD = 1_000
# Larger graphs keep Dask's order: ranks would occupy the scheduler's loop for more than 0.1 s.
_RANKED = 20_000


# Kinds of placement of a ready task: on a worker that holds all its inputs, on one that has to fetch some, anywhere
# (it has no inputs), by Dask's rule for root-like tasks (many similar ones without large inputs), or nowhere yet.
PLACES = ("holder", "fetches", "free", "root", "waits")


class Placing:
    """The placement of a scheduler's tasks by a `policy.placement.PlacementParameters`.

    Attributes
    ----------
    placed : dict of str to int
        Numbers of ready tasks by kind of placement, in `PLACES`.
    """

    def __init__(self, scheduler: Scheduler, stealing: Stealing, settings: Settings) -> None:
        self.scheduler = scheduler
        self.stealing = stealing
        self.settings = settings
        self.placed = dict.fromkeys(PLACES, 0)
        self.candidates = Candidates(
            stealing.ledger, stealing.links, settings.placing, self._current, self._frees_soon
        )
        # Tasks that wait for a fresh worker or for bytes of a device, with the number of the wait; the time at which
        # each began to wait, since Dask's own record is kept young; and a heap of waits for bytes, in which ended
        # waits are skipped.
        self._waiting: dict[TaskState, int] = {}
        self._since: dict[TaskState, float] = {}
        self._for_room: list[tuple[bool, tuple[float, ...], int, TaskState]] = []
        self._waits_begun = 0
        self._is_due = False
        # For a full device, whether bytes are about to be freed, and the event as of which that holds.
        self._freeing: dict[str, tuple[int, bool]] = {}
        # the task that no worker may help with, and the event as of which that holds
        self._declined: tuple[TaskState, int] | None = None
        stealing.after_tick = self.retry
        stealing.after_freeing = self._freed
        stealing.waits.elsewhere = self._idle_waits

    def ready(self, ts: TaskState) -> WorkerState | None:
        """Return the worker for a ready task, or None where no worker may have it; counting takes 0.1 us an input."""
        chosen = self._ready(ts)
        if chosen is None:
            place = "waits"
        elif not ts.dependencies:
            place = "free"
        else:
            place = "holder" if all(dts in chosen.has_what for dts in ts.dependencies) else "fetches"
        self.placed[place] += 1
        return chosen

    def _ready(self, ts: TaskState) -> WorkerState | None:
        chosen = None
        if not ts.actor and self.scheduler.running:
            try:
                chosen, waits = self._choose(ts)
                if chosen is None and (waits or self._waits(ts)):
                    self._wait(ts)
                    return None
                if self._since:
                    self._since.pop(ts, None)
            # An error of ours costs a task its best place, but it still runs.
            except Exception:
                logger.exception("dask_ferro could not place %r; Dask does", ts.key)
        return chosen if chosen in self.scheduler.running else upstream.stock_placement(self.scheduler, ts)

    def is_tied(self, ts: TaskState) -> bool:
        """Return whether a task requires or prefers a device class."""
        if not ts.annotations:
            return False
        wish = wish_of(ts.annotations)
        return bool(wish.must or wish.likes)

    def _choose(self, ts: TaskState) -> tuple[WorkerState | None, bool]:
        """Return the worker, or None and whether the task waits for a device."""
        now, candidates = time(), self.candidates
        if candidates.are_alike and not self.is_tied(ts):
            holder = self._only_holder(ts)
            if holder is not None and self._stays(ts, holder, now):
                return holder, False
        task = self._task(ts)
        held, nbytes = self._held(ts)
        workers = candidates.candidates(task, held, nbytes, ts.priority, now)
        task = task._replace(inputs=tuple(self.stealing.shown.inputs(ts, [w.address for w in workers])))
        address = candidates.choose(task, workers, self._fresh(ts) if self.stealing.ledger.ends else 0.0)
        if address is not None:
            return self.scheduler.workers.get(address), False
        return None, bool(task.must) or self.settings.placing.waits_for_room(task, workers)

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
            nbytes = nbytes_of(dts)
            total += nbytes
            for ws in dts.who_has or ():
                held[ws.address] = held.get(ws.address, 0) + nbytes
        return held, total

    def _waited(self, ts: TaskState) -> float:
        """Return the seconds for which a task has been ready and unassigned."""
        without = self.scheduler.unrunnable
        since = self._since.get(ts, without.get(ts)) if without else None
        return 0.0 if since is None else monotonic() - since

    def _fresh(self, ts: TaskState) -> float:
        """Return the seconds that a fresh worker would have for a task; 0 if it is restricted to present workers."""
        tied = bool(ts.worker_restrictions or ts.host_restrictions) and not ts.loose_restrictions
        # The pool with the longest walltime may have other resources.
        tied = tied or bool(ts.resource_restrictions)
        return 0.0 if tied else self.stealing.ledger.fresh

    def _waits(self, ts: TaskState) -> bool:
        """Return whether an unassigned task waits for a fresh worker, so that Dask must not place it."""
        return self.candidates.waits(*self._seconds(ts), self._fresh(ts))

    def retry(self) -> None:
        """Try waiting tasks again: running tasks may end early, and a fresh worker may not come after all."""
        self._declined = None
        tried = list(islice(self._waiting, _RETRIED))
        for ts in tried:
            del self._waiting[ts]
        tried += self._preferring()
        ledger = self.stealing.ledger
        if tried or (self.scheduler.queued and (ledger.ends or not self.candidates.are_alike)):
            self._try(tried)
        if len(self._since) > len(self._waiting):
            self._since = {ts: since for ts, since in self._since.items() if ts in self._waiting}
        classes = self._present_classes()
        upstream.keep_waiting(
            self.scheduler, (ts for ts in self._waiting if wish_of(ts.annotations).must in classes)
        )

    def _preferring(self) -> list[TaskState]:
        """Return tasks whose preferred workers are gone: Dask would try them again only when those come back."""
        without = self.scheduler.unrunnable if self.scheduler.running else ()
        return list(
            islice((ts for ts in without if ts.loose_restrictions and ts not in self._waiting), _RETRIED)
        )

    def _idle_waits(self, idle: list[Worker]) -> list[Wait]:
        """Return the tasks that wait at the scheduler although a worker is idle."""
        patience, now = self.settings.parameters.patience, monotonic()
        waits = []
        for ts, since in islice(self.scheduler.unrunnable.items(), _TOLD):
            waited = now - self._since.get(ts, since)
            if waited >= patience:
                waits.append(waits_at_scheduler(ts.key, waited, idle, self._why(ts)))
        return waits

    def _why(self, ts: TaskState) -> str:
        """Return the reason why a task is assigned to no worker."""
        must = wish_of(ts.annotations).must
        if must and must not in self._present_classes():
            return "class"
        if ts in self._waiting:
            return "fresh" if self._waits(ts) else "room"
        return "nobody"

    def _try(self, tasks: list[TaskState]) -> None:
        """Place tasks that waited: those that free device bytes first, whatever their priorities."""
        grows = self.stealing.devices.grows
        growing = [ts for ts in tasks if self.stealing.ledger.counts_bytes and grows(ts)]
        if growing:
            taken = set(growing)
            upstream.place_again(self.scheduler, [ts for ts in tasks if ts not in taken])
            tasks = growing
        upstream.place_again(self.scheduler, tasks)

    def _wait(self, ts: TaskState) -> None:
        """Record that a task waits; tasks that free bytes are tried before those that take more."""
        self._waits_begun += 1
        self._waiting[ts] = self._waits_begun
        self._since.setdefault(ts, self.scheduler.unrunnable.get(ts, monotonic()))
        ledger = self.stealing.ledger
        if ledger.counts_bytes and wish_of(ts.annotations).must in self._present_classes():
            grows = self.stealing.devices.grows(ts)
            heappush(self._for_room, (grows, ts.priority or (), self._waits_begun, ts))
            if len(self._for_room) > 2 * len(self._waiting) + _RETRIED:
                self._for_room = [item for item in self._for_room if self._waiting.get(item[3]) == item[2]]
                heapify(self._for_room)

    def _present_classes(self) -> set[str]:
        """Return the kinds of device present; "" stands for no requirement."""
        return {"", *map(kind_of, self.stealing.ledger.devices)}

    def _freed(self) -> None:
        """Try tasks that wait for bytes again soon, outside the transition that frees them."""
        if not self._is_due and (self._waiting or self.scheduler.queued):
            self._is_due = True
            self.scheduler.loop.call_later(self.settings.coalesce, self._retry_some)

    def _retry_some(self) -> None:
        self._is_due = False
        if self.scheduler.extensions.get("stealing") is not self.stealing:
            return  # this plugin was removed meanwhile
        self._declined = None
        tried: list[TaskState] = []
        while self._for_room and len(tried) < _RETRIED_AT_ONCE:
            *_, number, ts = heappop(self._for_room)
            if self._waiting.get(ts) == number:
                del self._waiting[ts]
                tried.append(ts)
        self._try(tried)

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
        if not self.stealing.waits.is_open(holder):
            return False
        largest = max(nbytes_of(dts) for dts in ts.dependencies)
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
        self.placed["root"] += chosen is not None  # None is not counted, as Dask may try often
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
        if not self.stealing.waits.is_open(ws):
            return 0
        nbytes, queued = self.stealing.devices.sizes.of(first.prefix.name), first.prefix.states["queued"]
        try:
            return self.candidates.ahead(ws.address, self._seconds(first), nbytes, queued, time())
        # Dask would close the connection of the worker whose message this follows.
        except Exception:
            logger.exception("dask_ferro sends no task ahead of %r", first.key)
            return 0

    def _helping(self, ts: TaskState, free: Collection[WorkerState]) -> Collection[WorkerState]:
        """Return the worker that would finish a task first, among those with room whose help pays."""
        task = self._task(ts)._replace(inputs=tuple(self.stealing.shown.inputs(ts, ())), waited=inf)
        # An arbitrary sample: Dask's queue is a heap, and a sorted one would cost more.
        some = list(islice(self.scheduler.queued, QUEUED)) or [ts]
        takes = [
            self.candidates.seconds_by_class(one.prefix.name, estimate_of(one.annotations)) for one in some
        ]
        queued = queued_seconds(takes, max(len(self.scheduler.queued), 1))
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
        ledger, now, alike = self.stealing.ledger, time(), self.settings.placing.alike

        def busy(ws: WorkerState) -> tuple[float | int | str, ...]:
            load = len(ws.processing) / ws.nthreads
            if ws.address not in ledger.rows:
                return load, 1.0, 0, 0, ws.address
            return load, ledger.rows[ws.address].slowness, *share(ledger.worker(ws.address, now), alike)

        return min(free, key=busy, default=None)

    def _current(self, worker: Worker) -> Worker:
        """Return the worker's facts with its current status."""
        # A worker that is being removed is still in the ledger.
        ws = self.scheduler.workers.get(worker.address)
        accepts = ws is not None and self.stealing.waits.is_open(ws)
        return worker if worker.accepts == accepts else worker._replace(accepts=accepts)

    def _frees_soon(self, address: str) -> bool:
        """Return whether a result of a worker is needed only by tasks assigned to other workers."""
        ws, version = self.scheduler.workers.get(address), self.stealing.ledger.version
        if ws is None:  # the worker is being removed
            self._freeing.pop(address, None)
            return False
        seen, found = self._freeing.get(address, (-1, False))
        if seen != version:
            found = any(
                is_freed_by_others(bool(held.who_wants), _readers(held), address)
                for held in islice(ws.has_what, _HELD)
            )
            self._freeing[address] = version, found
        return found

    def _seconds(self, ts: TaskState) -> tuple[float, bool]:
        """Return a task's projected seconds on the first device class, and whether they are more than a guess."""
        return self.candidates.seconds(ts.prefix.name, estimate_of(ts.annotations))

    def rank(self, keys: list[Key]) -> None:
        """Order the new tasks of a narrow graph by upward rank."""
        tasks = [self.scheduler.tasks[key] for key in keys] if len(keys) <= _RANKED else []
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


def _readers(held: TaskState) -> Iterator[str]:
    """Yield the worker of each task that has yet to read a result; "": unassigned."""
    for reader in held.waiters or ():
        yield "" if reader.processing_on is None else reader.processing_on.address
