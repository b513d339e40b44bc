"""The retirement of workers: no result lost, no task run twice, and no task blamed.

    asked to leave -> may it? -> takes no tasks, gives back those that wait, ends those that run
                              -> what only it holds is copied to those that stay -> verified -> gone

Workers of one request retire together or not at all (a batch job ends as a whole), and requests of the same moment
are planned together, so that no worker receives data just before it retires itself.  Their data is spread in
proportion to free memory; receivers fetch a limited amount at a time.  Removal follows the check without an await in
between: a worker whose data is not held elsewhere at that moment is not removed.  A worker that cannot retire takes
tasks again. A worker that must leave, since its job ends in any case, gives back its tasks and as much of its data as
fits; if some data remains, only its removal is refused.  If no worker would stay, one of those that must leave
continues while it has time: workers that join meanwhile take over when it asks again.  A worker that is ordered to
leave does the same but is removed in any case, when its time is over or nothing more can be done; the loss is
reported.  Which workers should retire is decided elsewhere. Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from uuid import uuid4

from dask.typing import Key
from distributed import Scheduler, Status
from distributed.metrics import monotonic
from distributed.scheduler import WorkerState

from dask_ferro.elastic.evacuation import PendingTransfers, free_bytes, is_clear, sole_results
from dask_ferro.scheduler import upstream
from dask_ferro.scheduler.events import TOPIC
from dask_ferro.scheduler.scheduler_calls import NO_LOSSES
from dask_ferro.words import list_names

logger = logging.getLogger(__name__)


# For workers that must leave, as long as they have time.
_NO_RECEIVER = "no worker would remain to take over their results"

# Requests within this time are planned together.
_MOMENT = 0.02
# Seconds between two rounds, and while only a long task is pending.
_ROUND_INTERVAL, _LONG_TASK_INTERVAL = 0.01, 0.25
# A round over 100,000 results takes 20 ms; rounds may take a twentieth of the scheduler's time.
_SHARE = 20
# Seconds before the end of its job at which a worker takes no more tasks, even if no other worker does.
_END_MARGIN = 5.0
# The states of a worker that takes tasks and results, or will again.
_STAY = (Status.init, Status.running, Status.paused)


@dataclass(eq=False)
class RetirementRequest:
    """A request to retire some workers."""

    workers: dict[str, WorkerState]
    until: float
    outcome: asyncio.Future[str]  # the reason why they stay; empty: they are gone
    must: bool = False  # their job ends in any case
    ordered: bool = False  # they are removed in any case, with their data; this outweighs `must`
    lost: Counter[str] = field(default_factory=Counter)  # the loss; empty while they are not given up
    # their statuses before; empty until they are admitted
    before: dict[str, Status] = field(default_factory=dict)
    asked: dict[Key, int | None] = field(default_factory=dict)  # run ids of the tasks requested back
    began: float = field(default_factory=monotonic)

    @property
    def is_forced(self) -> bool:
        """Whether these workers leave without a check whether they may."""
        return self.must or self.ordered


class Retirements:
    """The retirements of a scheduler's workers.

    Parameters
    ----------
    scheduler : Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._departures: list[RetirementRequest] = []
        self.moving = PendingTransfers(scheduler)
        # Unanswered requests, by stimulus and key: the worker and the task's run id.
        self._asked: dict[tuple[str, Key], tuple[str, int | None]] = {}
        self._stimulus = f"ferro-leave-{uuid4().hex[:8]}"
        self._count = 0
        # Workers that had to leave, could not be removed, and take no tasks.
        self._doomed: dict[str, WorkerState] = {}
        self._runs: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    @property
    def is_on(self) -> bool:
        """Whether any worker is retiring."""
        return bool(self._departures)

    async def leave(
        self,
        addresses: Iterable[str],
        seconds: float | None = None,
        must: bool = False,
        ordered: bool = False,
    ) -> tuple[dict[str, str], Counter[str]]:
        """Retire workers; return those that stay with the reason, and the loss, once the others are gone.

        Parameters are those of `ScalingRPC.leave`.
        """
        until = inf if seconds is None else monotonic() + max(seconds, 0.0)
        found = {a: ws for a in addresses if (ws := self.scheduler.workers.get(a)) is not None}
        joined = [d for d in self._departures if not d.workers.keys().isdisjoint(found)]
        for departure in joined:
            departure.until = min(departure.until, until)
            departure.must, departure.ordered = departure.must or must, departure.ordered or ordered
        known = frozenset(chain.from_iterable(d.workers for d in joined))
        new = {a: ws for a, ws in found.items() if a not in known}
        if new:
            departure = RetirementRequest(
                new, until, asyncio.get_running_loop().create_future(), must, ordered
            )
            joined.append(departure)
            self._departures.append(departure)
        lost = Counter(NO_LOSSES)
        if not joined:
            return {}, lost
        self._start()
        members = [(d, set(d.workers) & found.keys()) for d in joined]
        await asyncio.wait([d.outcome for d in joined])
        stayed: dict[str, str] = {}
        for d, own in members:
            lost.update(d.lost)
            if why := d.outcome.result():
                stayed |= dict.fromkeys(sorted(own), why)
        return stayed, lost

    async def stop(self) -> None:
        """Let retiring workers stay.  Idempotent."""
        if self._runs is not None:
            self._runs.cancel()
            await asyncio.wait([self._runs])
        for departure in list(self._departures):
            self._stay(departure, "leaving was stopped")
        self.take_again(list(self._doomed))
        self._end()

    def take_again(self, addresses: Iterable[str]) -> None:
        """Let workers take tasks again that had to leave and could not, since their end was postponed."""
        leavers = self._leavers()
        for address in addresses:
            ws = self._doomed.pop(address, None)
            if ws is not None and self.scheduler.workers.get(address) is ws and ws not in leavers:
                upstream.set_status(self.scheduler, ws, Status.running, self._next())

    def forget(self, address: str) -> None:
        """Record that a worker is gone."""
        self._doomed.pop(address, None)
        self.wake()

    def wake(self) -> None:
        """Start the next round soon, as a task has ended."""
        self._wake.set()

    # -- rounds --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._wake.set()
        if self._runs is None or self._runs.done():
            self._runs = asyncio.create_task(self._run())

    async def _run(self) -> None:
        upstream.route_answers(self.scheduler, self._stimulus, self._answered)
        try:
            while self._departures:
                await asyncio.sleep(_MOMENT if any(not d.before for d in self._departures) else 0)
                started = monotonic()
                self._look()
                for departure in list(self._departures):
                    await self._see_off(departure)
                await self._rest(monotonic() - started)
        except Exception as error:
            logger.exception("dask_ferro: workers could not leave")
            for departure in list(self._departures):
                self._stay(departure, f"leaving failed: {error!r}")
        self._end()

    def _end(self) -> None:
        """Release the handler of answers once all of ours have arrived."""
        # Transfers in progress still arrive, as additional copies.
        self.moving.moves.clear()
        if not self._asked:
            upstream.route_answers(self.scheduler, self._stimulus, None)

    async def _rest(self, cost: float) -> None:
        """Wait until there may be a change, at least as long as the rounds' share of time demands."""
        if not self._departures:
            return
        self._wake.clear()
        await asyncio.sleep(min(max(_ROUND_INTERVAL, _SHARE * cost), 1.0))
        left = min((d.until for d in self._departures), default=0.0) - monotonic()
        if left > 0 and not self.moving.moves and not self._asked:
            # In Python 3.11 `wait_for` swallows a cancellation that arrives together with the result.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, _LONG_TASK_INTERVAL)):
                    await self._wake.wait()

    def _look(self) -> None:
        """Take one round over all retiring workers."""
        for departure in list(self._departures):
            self._drop_gone(departure)
        self._refuse()
        self._place()
        self._admit()
        for departure in list(self._departures):
            self._hand_back(departure)
        self.moving.fetch(self._next())
        for departure in list(self._departures):
            if departure.ordered:
                if monotonic() >= departure.until or self._rest_of(departure):
                    self._give_up(departure)
            elif departure.must and (why := self._rest_of(departure)):
                self._stay(departure, why)

    def _drop_gone(self, departure: RetirementRequest) -> None:
        """Forget workers that have gone by themselves."""
        for address, ws in list(departure.workers.items()):
            if self.scheduler.workers.get(address) is not ws:
                del departure.workers[address]
                self._asked = {request: who for request, who in self._asked.items() if who[0] != address}
        if not departure.workers:
            self._conclude(departure, "")

    # -- may they? -----------------------------------------------------------------------------------------

    def _new(self) -> list[RetirementRequest]:
        """Return the requests that are not admitted yet."""
        return [d for d in self._departures if not d.before]

    def _refuse(self) -> None:
        """Refuse new requests that are not allowed whatever data the workers hold."""
        if last := self._last_of(self._new()):
            self._stay(last, _NO_RECEIVER)
        for departure in self._new():
            if not departure.is_forced and (why := self._obstacle(departure)):
                self._stay(departure, why)

    def _place(self) -> None:
        """Find room for the data of all retiring workers, or refuse the heaviest requests, new ones first."""
        while True:
            free = [d for d in self._departures if not d.is_forced]
            if self.moving.place(self._leavers(), any(d.until < inf for d in self._departures), not free):
                return
            left = self._leavers()
            heaviest = max(
                [d for d in free if not d.before] or free,
                key=lambda d: sum(ts.get_nbytes() for ts in sole_results(d.workers.values(), left)),
            )
            self._stay(heaviest, self._no_room())

    def _admit(self) -> None:
        """Admit new requests."""
        for departure in self._new():
            for address, ws in departure.workers.items():
                left = ws.status == Status.closing_gracefully  # begun by another party
                departure.before[address] = Status.running if left else ws.status
                upstream.set_status(self.scheduler, ws, Status.closing_gracefully, self._next())
            moves = {
                ts.key: ts.get_nbytes() for ts in sole_results(departure.workers.values(), self._leavers())
            }
            self._tell("retiring", departure, keys=len(moves), nbytes=sum(moves.values()))

    def _last_of(self, new: list[RetirementRequest]) -> RetirementRequest | None:
        """Return a request that must wait, since no worker would be left for data and tasks."""
        able = [d for d in new if d.must and not d.ordered and d.until - monotonic() > _END_MARGIN]
        if not able or self.scheduler.running - self._leavers():
            return None
        left = self._leavers()
        if not any(ws.processing for ws in left) and not any(True for _ in sole_results(left, left)):
            return None
        return max(able, key=lambda departure: departure.until)

    def _obstacle(self, departure: RetirementRequest) -> str:
        """Return the reason why workers may not leave whatever data they hold; empty: they may."""
        workers = departure.workers.values()
        tasks = list(chain.from_iterable(ws.processing for ws in workers))
        if actors := [*_actors_of(workers), *(ts.key for ts in tasks if ts.actor)]:
            return f"actors cannot move: {list_names(sorted(map(str, actors)))}"
        allowed = list(workers)
        for plugin in list(self.scheduler.plugins.values()):
            allowed = list(plugin.valid_workers_downscaling(self.scheduler, allowed))
        if refused := departure.workers.keys() - {ws.address for ws in allowed}:
            return f"a scheduler plugin needs {list_names(sorted(map(str, refused)))}"
        stay = self.scheduler.running - self._leavers()
        if tasks and not stay:
            return "no worker would remain to run their tasks"
        restricted = (ts for ts in tasks if upstream.is_restricted(ts) and not ts.loose_restrictions)
        bound = [ts.key for ts in restricted if stay.isdisjoint(self.scheduler.valid_workers(ts) or ())]
        return f"tasks may run nowhere else: {list_names(sorted(map(str, bound)))}" if bound else ""

    def _rest_of(self, departure: RetirementRequest) -> str:
        """Return why workers that must leave are not removed, once nothing more can be done; else empty."""
        workers = departure.workers.values()
        alone = list(sole_results(workers, self._leavers()))
        if any(ws.processing for ws in workers) or any(ts.key in self.moving.moves for ts in alone):
            return ""
        if actors := _actors_of(workers):
            return f"actors cannot move: {list_names(sorted(map(str, actors)))}"
        return self._no_room() if alone else ""

    def _no_room(self) -> str:
        stay = self.scheduler.running - self._leavers()
        free = sum(free_bytes(ws) for ws in stay)
        if not stay:
            return _NO_RECEIVER
        others = f"{len(stay)} other workers"
        return f"what only they hold does not fit in the {free} bytes that are free on {others}"

    # -- tasks ---------------------------------------------------------------------------------------------

    def _hand_back(self, departure: RetirementRequest) -> None:
        """Request the queued tasks back; take all tasks when the time is over."""
        if departure.ordered and not self._somebody_stays():
            departure.until = -inf  # results still computed would be lost with them
        over = monotonic() >= departure.until
        for address, ws in departure.workers.items():
            stimulus = self._next()
            tasks = [ts for ts in ws.processing if over or departure.asked.get(ts.key) != ts.run_id]
            for ts in tasks:
                departure.asked[ts.key] = ts.run_id
                if over:
                    upstream.take_back(self.scheduler, ts.key, address, stimulus)
                else:
                    self._asked[stimulus, ts.key] = (address, ts.run_id)
            if tasks and not over:
                upstream.ask_back(self.scheduler, address, [ts.key for ts in tasks], stimulus)

    def _answered(self, *, key: Key, state: str | None, stimulus_id: str, worker: str | None = None) -> None:
        """Process a worker's answer: a task that it had not started is placed again, a running one may finish there."""
        address, run = self._asked.pop((stimulus_id, key), ("", None))
        ts = self.scheduler.tasks.get(key)
        if ts is not None and ts.run_id == run and state not in upstream.REJECTS:
            upstream.take_back(self.scheduler, key, address, stimulus_id)  # if it is still there
        self._wake.set()
        if not self._departures:
            self._end()

    def _leavers(self) -> set[WorkerState]:
        return _workers_of(self._departures)

    def _somebody_stays(self) -> bool:
        left = self._leavers()
        return any(ws not in left and ws.status in _STAY for ws in self.scheduler.workers.values())

    # -- the end -------------------------------------------------------------------------------------------

    def _give_up(self, departure: RetirementRequest) -> None:
        """Record that workers ordered to leave go in this round, with all data that only they hold."""
        before = _workers_of(d for d in self._departures if d.lost)
        going = before.union(departure.workers.values())
        held = set(chain.from_iterable((*ws.has_what, *ws.actors) for ws in departure.workers.values()))
        alone = {ts for ts in held if going.issuperset(ts.who_has or ())}
        for_good = sum(ts.run_spec is None or bool(ts.actor) for ts in alone)
        departure.lost = Counter(
            results=len(alone), nbytes=sum(ts.get_nbytes() for ts in alone), for_good=for_good
        )

    async def _see_off(self, departure: RetirementRequest) -> None:
        """Remove the workers of a request, if none has tasks or unique data, or if the request is given up."""
        left = self._leavers()
        workers = departure.workers
        if not departure.lost and not all(is_clear(ws, left) for ws in workers.values()):
            return
        for address, ws in list(workers.items()):
            if self.scheduler.workers.get(address) is ws and (departure.lost or is_clear(ws, left)):
                # No await separates the check above from the removal, which happens before its own first await.
                await self.scheduler.remove_worker(address, expected=True, stimulus_id=self._next())
        # A worker that is not clear any more stays on the list until it is.
        self._drop_gone(departure)

    def _stay(self, departure: RetirementRequest, why: str) -> None:
        # The workers ask again in a moment.
        goes_on = why == _NO_RECEIVER and departure.until - monotonic() > _END_MARGIN
        for address, before in departure.before.items():
            ws = departure.workers.get(address)
            if ws is None or self.scheduler.workers.get(address) is not ws:
                continue
            if departure.must and not goes_on:  # a task that runs there when the job ends would be blamed
                self._doomed[address] = ws
            else:
                upstream.set_status(self.scheduler, ws, before, self._next())
        level = logging.INFO if goes_on else logging.WARNING
        logger.log(level, "dask_ferro: %s cannot leave: %s", list_names(sorted(departure.workers)), why)
        self._conclude(departure, why)

    def _conclude(self, departure: RetirementRequest, why: str) -> None:
        self._departures.remove(departure)
        departure.outcome.set_result(why)
        seconds = monotonic() - departure.began
        self._tell(
            "retire_failed" if why else "retired", departure, seconds=seconds, why=why, **departure.lost
        )

    def _tell(self, action: str, departure: RetirementRequest, **more: object) -> None:
        workers = sorted(departure.before or departure.workers)
        self.scheduler.log_event(TOPIC, {"action": action, "workers": workers, **more})

    def _next(self) -> str:
        self._count += 1
        return f"{self._stimulus}-{self._count}"


def _actors_of(workers: Iterable[WorkerState]) -> list[object]:
    actors = chain.from_iterable(ws.actors for ws in workers)
    return [ts.key for ts in actors]


def _workers_of(departures: Iterable[RetirementRequest]) -> set[WorkerState]:
    return set(chain.from_iterable(departure.workers.values() for departure in departures))
