"""Stock Dask's placement on a virtual scheduler, to compare with: distributed 2026.8, rule by rule.

What it sums up of each worker (occupancy, who is idle, who saturated) is what its stealing goes by too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from itertools import chain

from dask_ferro.policy.facts import Address
from dask_ferro.simulate.virtual_scheduler import Scheduler
from dask_ferro.simulate.virtual_tasks import VirtualTask
from dask_ferro.simulate.virtual_worker import WorkerTask
from dask_ferro.simulate.worker_record import WorkerRecord

BANDWIDTH = 100e6
UNKNOWN = 0.5
# Beyond so many workers a root without inputs goes to one by number, not to the least occupied.
SMART = 20
# Bytes from which a transfer tells a worker its bandwidth.
_TELLING = 1e6


class Page:
    """What the scheduler sums up of a worker."""

    __slots__ = ("bandwidth", "coming", "coming_seconds", "nbytes", "network", "prefixes", "record")

    def __init__(self, record: WorkerRecord) -> None:
        self.record = record
        self.prefixes: dict[str, int] = {}
        self.network = 0  # bytes that its tasks lack
        self.nbytes = 0
        self.bandwidth = BANDWIDTH
        self.coming = 0  # tasks by moves that are in flight
        self.coming_seconds = 0.0


class Stock:
    """A decider as stock Dask is one with `distributed.scheduler.work-stealing` off."""

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        self.durations: dict[str, float] = {}
        self.longest: dict[str, float] = {}
        self.bandwidth = BANDWIDTH
        self.pages: dict[Address, Page] = {}
        self._given = seed  # tasks that it gave to workers; a scheduler has seen others before these
        self._scheduler = scheduler
        self._clock = scheduler.clock
        self._total: dict[str, int] = {}
        self._network = 0
        self._idle: list[Address] = []
        self._saturated: dict[Address, None] = {}
        self._touched: dict[Address, None] = {}

    def begin(self) -> None:
        """Start the heartbeats."""
        self._clock.background(self._clock.now + 0.5, self._heartbeat)

    # ---- what it hears -------------------------------------------------------------------------------------

    def learn(self, seconds: Mapping[str, float]) -> None:
        """Take what was measured before."""
        self.durations.update(seconds)

    def joined(self, record: WorkerRecord) -> None:
        """Open the worker's page."""
        self.pages[record.address] = Page(record)
        self._touched[record.address] = None

    def left(self, record: WorkerRecord) -> None:
        """Close the worker's page."""
        del self.pages[record.address]
        self._forget_idle(record.address)
        self._saturated.pop(record.address, None)
        self._touched.pop(record.address, None)

    def changed(self, record: WorkerRecord) -> None:
        """See whether the worker is idle."""
        self._touched[record.address] = None

    def busy(self, record: WorkerRecord) -> tuple[float, float]:
        """Return the worker's tasks by thread."""
        return len(record.processing) / record.nthreads, 1.0

    def assigned(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Count the task's prefix, and the bytes that it lacks."""
        # Who ended a task before is judged by what there was then, not by what follows from its end.
        self.settled()
        self._given += 1
        self._count(job, record, +1)
        self.settled()  # as of now: what is placed next changes what the average worker has

    def finished(self, job: VirtualTask, record: WorkerRecord, held: WorkerTask) -> None:
        """Average the duration: the newest counts for half."""
        self._count(job, record, -1)
        prefix, seconds = job.spec.prefix, held.stop - held.start
        old = self.durations.get(prefix, -1.0)
        self.durations[prefix] = seconds if old < 0 else 0.5 * (seconds + old)
        self.pages[record.address].nbytes += job.spec.nbytes

    def dropped(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Count the task no longer."""
        self._count(job, record, -1)

    def arrived(self, address: Address, job: VirtualTask, kind: str, seconds: float) -> None:
        """Take the bytes off what the worker lacks; learn the bandwidth from large ones."""
        page = self.pages.get(address)
        if page is None:
            return
        nbytes = job.spec.nbytes
        page.nbytes += nbytes
        if job.number in page.record.needs:
            page.network -= nbytes
            self._network -= nbytes
        if nbytes > _TELLING:
            page.bandwidth = 0.95 * page.bandwidth + 0.05 * nbytes / seconds

    def released(self, job: VirtualTask) -> None:
        """Take the bytes off their holders."""
        for address in job.holders:
            if address in self.pages:
                self.pages[address].nbytes -= job.spec.nbytes

    def settled(self) -> None:
        """Judge who is idle or saturated, among those that something happened to."""
        for address in self._touched:
            self._judge(self.pages[address])
        self._touched.clear()

    def _count(self, job: VirtualTask, record: WorkerRecord, sign: int) -> None:
        """After a task joined the worker's, or before it leaves them."""
        page, prefix = self.pages[record.address], job.spec.prefix
        for counts in (page.prefixes, self._total):
            counts[prefix] = counts.get(prefix, 0) + sign
            if not counts[prefix]:
                del counts[prefix]
        for dependency in job.inputs:
            if record.needs[dependency.number] == 1 and record.address not in dependency.holders:
                page.network += sign * dependency.spec.nbytes
                self._network += sign * dependency.spec.nbytes
        self._touched[record.address] = None

    def _heartbeat(self) -> None:
        """Workers report bandwidths, and what they run: a task twice as long as the average unsettles it."""
        count = max(len(self.pages), 1)
        for page in self.pages.values():
            self.bandwidth += (page.bandwidth - self.bandwidth) / count
        now = self._clock.now
        for live in self._scheduler.world.workers.values():
            for held in live.held.values():
                if held.state == "running":
                    prefix, elapsed = held.job.spec.prefix, now - held.start
                    self.longest[prefix] = max(self.longest.get(prefix, 0.0), elapsed)
                    if elapsed > 2 * self.durations.get(prefix, -1.0):
                        self.durations[prefix] = -1.0
        pause = 0.5 if count <= 10 else 1.0 if count < 50 else 2.0 if count < 200 else count / 200 + 1
        self._clock.background(now + pause, self._heartbeat)

    # ---- what it sums up -----------------------------------------------------------------------------------

    def seconds(self, prefix: str) -> float:
        """Return the projected seconds of a prefix's tasks."""
        average = self.durations.get(prefix, -1.0)
        if average >= 0:
            return average
        return 2 * self.longest[prefix] if self.longest.get(prefix, 0.0) > 0 else UNKNOWN

    def _occupancy(self, prefixes: dict[str, int], network: int) -> float:
        return sum(self.seconds(p) * n for p, n in prefixes.items()) + network / self.bandwidth

    def occupancy(self, page: Page) -> float:
        """Return the projected seconds of a worker's tasks and of fetching their inputs."""
        return self._occupancy(page.prefixes, page.network)

    def total_occupancy(self) -> float:
        """Return that of all workers."""
        return self._occupancy(self._total, self._network)

    def _comm(self, job: VirtualTask, page: Page) -> float:
        address = page.record.address
        return sum(d.spec.nbytes for d in job.inputs if address not in d.holders) / self.bandwidth

    def _average(self) -> float:
        return self.total_occupancy() / max(self._scheduler.threads, 1)

    def _is_unoccupied(self, page: Page, occupancy: float, processing: int) -> bool:
        threads = page.record.nthreads
        return processing < threads or occupancy < threads * self._average() / 2

    def _judge(self, page: Page, occupancy: float | None = None) -> None:
        record = page.record
        if occupancy is None:
            occupancy = self.occupancy(page)
        self._saturated.pop(record.address, None)
        if not record.accepts:
            self._forget_idle(record.address)
            return
        tasks, threads = len(record.processing), record.nthreads
        if self._is_unoccupied(page, occupancy, tasks):
            index = bisect_left(self._idle, record.address)
            if index == len(self._idle) or self._idle[index] != record.address:
                insort(self._idle, record.address)
            return
        self._forget_idle(record.address)
        if tasks > threads:
            pending = occupancy * (tasks - threads) / (tasks * threads)
            if 0.4 < pending > 1.9 * self._average():
                self._saturated[record.address] = None

    def _forget_idle(self, address: Address) -> None:
        index = bisect_left(self._idle, address)
        if index < len(self._idle) and self._idle[index] == address:
            del self._idle[index]

    # ---- placement -----------------------------------------------------------------------------------------

    def where(self, job: VirtualTask) -> Address | None:
        """Return the holder of an input that starts the task first; any worker where there is no input."""
        self.settled()
        held = dict.fromkeys(chain.from_iterable(d.holders for d in job.inputs))
        pages = [self.pages[a] for a in held if a in self.pages and self.pages[a].record.accepts]
        if not pages and not job.inputs:
            return self._for_root(self._given)
        if not pages:
            pages = [page for page in self.pages.values() if page.record.accepts]
        if len(pages) < 2:
            return pages[0].record.address if pages else None
        best = min(pages, key=lambda page: (*self._starts(job, page), page.record.number))
        return best.record.address

    def _starts(self, job: VirtualTask, page: Page) -> tuple[float, int]:
        return self.occupancy(page) / page.record.nthreads + self._comm(job, page), page.nbytes

    def _for_root(self, turn: int) -> Address | None:
        pool = self._idle or [address for address, page in self.pages.items() if page.record.accepts]
        if not pool:
            return None
        if len(pool) >= SMART:
            return pool[turn % len(pool)]
        work = [self.occupancy(self.pages[address]) for address in pool]
        least = min(range(len(pool)), key=work.__getitem__)
        if work[least] == 0:
            least = next(i for k in range(len(pool)) if work[i := (k + turn) % len(pool)] == 0)
        return pool[least]

    def projected(self, job: VirtualTask) -> float:
        """Return the prefix's average."""
        return self.seconds(job.spec.prefix)

    def set_end(self, address: Address, at: float) -> None:
        """Stock Dask does not ask."""

    def set_fresh(self, seconds: float) -> None:
        """Nor this."""

    def suits(self, job: VirtualTask, record: WorkerRecord) -> bool:
        """Any worker is as good as another."""
        return True

    def replied(self, address: Address, job: VirtualTask, request: int, state: str) -> None:
        """Nobody was asked."""
