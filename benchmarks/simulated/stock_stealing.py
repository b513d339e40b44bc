"""Stock Dask's work stealing on a virtual scheduler: once a second, by levels of transfer time over duration.

Where Dask iterates over a set, in arbitrary order, the order here is drawn from the seed.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from dask_ferro.policy.facts import Address
from dask_ferro.simulate.virtual_scheduler import Scheduler, WorkerRecord
from dask_ferro.simulate.virtual_tasks import VirtualTask
from dask_ferro.simulate.virtual_worker import WorkerTask
from simulated.stock import SMART, Page, Stock

INTERVAL = 1.0
LATENCY = 0.1
LEVELS = 15
# The victims that `balance` considers if no worker is saturated, and the seconds of work that make one.
_VICTIMS, _WORTH = 10, 0.2


class _Request(NamedTuple):
    number: int
    victim: Address
    thief: Address
    here: float  # projected seconds on the victim, and there: on the thief
    there: float


class StockStealing(Stock):
    """A decider that acts as stock Dask does."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        super().__init__(scheduler, seed)
        self._add = scheduler.world.add
        self._seed = seed
        self._in_flight: dict[int, _Request] = {}  # by task
        # Stealable tasks: a task asked for once is not asked for again.
        self._level_of: dict[int, int] = {}
        self._unknown: dict[
            str, set[int]
        ] = {}  # by prefix: those whose level was set without a measured duration
        self._asked = 0

    def begin(self) -> None:
        """Start the heartbeats and the periodic balance."""
        super().begin()
        self._clock.background(self._clock.now + INTERVAL, self._tick)

    def left(self, record: WorkerRecord) -> None:
        """Remove the worker; moves from it are cancelled."""
        for number, request in list(self._in_flight.items()):
            if request.victim == record.address:
                self._abort(number)
        super().left(record)

    def assigned(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Count the task, and make it stealable."""
        super().assigned(job, record)
        self._put(job)

    def finished(self, job: VirtualTask, record: WorkerRecord, held: WorkerTask) -> None:
        """Update the mean duration; a move of the task is cancelled."""
        self._abort(job.number)
        self._level_of.pop(job.number, None)
        super().finished(job, record, held)
        for number in self._unknown.pop(job.spec.prefix, ()):
            other = self._scheduler.jobs[number]
            if other.state == "processing" and number not in self._in_flight and number != job.number:
                self._put(other)

    def dropped(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Stop counting the task; a move of it is cancelled."""
        self._abort(job.number)
        self._level_of.pop(job.number, None)
        super().dropped(job, record)

    def _tick(self) -> None:
        # As a callback of the event loop: a busy scheduler balances late.
        self._scheduler.when_idle(self._balance)
        self._clock.background(self._clock.now + INTERVAL, self._tick)

    def _balance(self) -> None:
        self._add("steps")
        self._scheduler.think(self._scheduler.world.cluster.per_step)
        work = {address: self.occupancy(page) for address, page in self.pages.items()}
        thieves = dict.fromkeys(sorted(self._idle))
        # As in Dask: if all workers are idle, none has tasks that another could take.
        if not thieves or len(thieves) == len(self.pages):
            return
        victims = self._victims(thieves, work)
        levels = {address: self._levels(self.pages[address]) for address in victims}
        for level in range(LEVELS):
            for address in victims:
                page = self.pages[address]
                if not thieves:
                    return
                for job in levels[address].get(level, ()):
                    if thieves:
                        self._consider(job, page, thieves, work)
                # A negative time is taken for unknown, as in Dask.
                if level in levels[address]:
                    left = work[address] + page.coming_seconds
                    self._judge(page, left if left >= 0 else None)

    def _victims(self, thieves: dict[Address, None], work: dict[Address, float]) -> list[Address]:
        def combined(address: Address) -> tuple[float, Address]:
            return -(work[address] + self.pages[address].coming_seconds), address

        victims = list(self._saturated)
        if not victims:
            victims = [
                address
                for address in sorted(work, key=combined)[:_VICTIMS]
                if combined(address)[0] < -_WORTH
                and self._tasks(self.pages[address]) > self.pages[address].record.nthreads
                and address not in thieves
            ]
        return sorted(victims, key=combined) if len(victims) < SMART else victims

    def _tasks(self, page: Page) -> int:
        return len(page.record.processing) + page.coming

    def _levels(self, page: Page) -> dict[int, list[VirtualTask]]:
        """Return the worker's tasks by the ratio of moving to computing them, each level unordered."""
        levels: dict[int, list[VirtualTask]] = {}
        for number, job in page.record.processing.items():
            if number in self._level_of and not job.pinned:
                levels.setdefault(self._level_of[number], []).append(job)
        for jobs in levels.values():
            # Dask iterates over sets, by hashes: any reproducible order is as good.
            jobs.sort(key=lambda job: ((job.number + self._seed) * 0x9E3779B1) & 0xFFFFFFFF)
        return levels

    def _put(self, job: VirtualTask) -> None:
        """Record the current level of a task."""
        self._level_of.pop(job.number, None)
        level, prefix = self._level(job), job.spec.prefix
        if level < LEVELS:
            self._level_of[job.number] = level
            if self.durations.get(prefix, -1.0) < 0:
                self._unknown.setdefault(prefix, set()).add(job.number)

    def _level(self, job: VirtualTask) -> int:
        if not job.inputs:
            return 0
        seconds = self.seconds(job.spec.prefix)
        nbytes = sum(d.spec.nbytes for d in job.inputs)
        # Dask's own formula, so that levels hold the same tasks.
        ratio = (nbytes / self.bandwidth + LATENCY) / max(seconds, 1e-9)
        return max(round(log2(ratio) + 6), 1)

    def _consider(
        self, job: VirtualTask, victim: Page, thieves: dict[Address, None], work: dict[Address, float]
    ) -> None:
        def cost(address: Address) -> tuple[float, int, int]:
            page = self.pages[address]
            waits = (work[address] + page.coming_seconds) / page.record.nthreads + self._comm(job, page)
            return waits, page.nbytes, page.record.number

        thief = self.pages[min(thieves, key=cost)]
        seconds = self.seconds(job.spec.prefix)
        moving, staying = self._comm(job, thief), self._comm(job, victim)
        there = work[thief.record.address] + thief.coming_seconds
        here = work[victim.record.address] + victim.coming_seconds
        # Dask's rule: the thief would finish before the victim has done half of the task's cost.
        if there + moving + seconds > here - (staying + seconds) / 2:
            return
        self._ask(job, victim, thief, seconds + staying, seconds + moving)
        if not self._is_unoccupied(
            thief, work[thief.record.address] + thief.coming_seconds, self._tasks(thief)
        ):
            del thieves[thief.record.address]

    def _ask(self, job: VirtualTask, victim: Page, thief: Page, here: float, there: float) -> None:
        self._asked += 1
        del self._level_of[job.number]
        addresses = victim.record.address, thief.record.address
        self._in_flight[job.number] = _Request(self._asked, *addresses, here, there)
        # Counted as moved from now on, for the next task in this balance.
        victim.coming, victim.coming_seconds = victim.coming - 1, victim.coming_seconds - here
        thief.coming, thief.coming_seconds = thief.coming + 1, thief.coming_seconds + there
        self._add("requests")
        self._scheduler.think(self._scheduler.world.cluster.per_send)
        self._scheduler.send(victim.record, victim.record.live.asked, job, self._asked)

    def _landed(self, number: int) -> _Request | None:
        """Remove a move in flight, whatever its result."""
        found = self._in_flight.pop(number, None)
        if found is None:
            return None
        for address, sign, seconds in ((found.victim, 1, found.here), (found.thief, -1, -found.there)):
            page = self.pages.get(address)
            if page is not None:
                page.coming, page.coming_seconds = page.coming + sign, page.coming_seconds + seconds
                self._touched[address] = None
        if not self._in_flight:
            for page in self.pages.values():
                page.coming_seconds = 0.0
        return found

    def _abort(self, number: int) -> None:
        if self._landed(number) is not None:
            self._add("stale")

    def replied(self, address: Address, job: VirtualTask, request: int, state: str) -> None:
        """Assign the task to the thief, or leave it."""
        found = self._in_flight.get(job.number)
        # An answer to a request that was cancelled meanwhile.
        if found is None or found.number != request:
            return
        self._landed(job.number)
        scheduler = self._scheduler
        victim, thief = scheduler.records[address], scheduler.records.get(found.thief)
        if state == "running":
            self._add("refused")
        elif state == "gone" or thief is None:
            self._add("stale")
            scheduler.place_again(job, victim)
        else:
            self._add("confirmed")
            self._count(job, victim, -1)
            scheduler.move(job, victim, thief)
            self._count(job, thief, +1)
            self._put(job)
