"""Stock Dask's placement on a virtual scheduler, as a baseline: distributed 2026.8, rule by rule.

Stock stealing also uses the load of each worker that is computed here: occupancy, idle, saturated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from dask_ferro.policy.facts import Address
from dask_ferro.simulate.virtual_scheduler import Decider, Scheduler, WorkerRecord
from dask_ferro.simulate.virtual_tasks import VirtualTask
from dask_ferro.simulate.virtual_worker import WorkerTask

BANDWIDTH = 100e6
UNKNOWN = 0.5
# With more workers than this, a root without inputs goes to one by number, not to the least occupied.
SMART = 20
# From this many bytes on, Dask takes a transfer into account for a worker's bandwidth.
_TELLING = 1e6


@dataclass(slots=True, eq=False, repr=False)
class Page:
    """The load of a worker as the scheduler counts it."""

    record: WorkerRecord
    prefixes: dict[str, int] = field(default_factory=dict)
    network: int = 0  # bytes of inputs that its tasks lack
    nbytes: int = 0
    bandwidth: float = BANDWIDTH
    coming: int = 0  # tasks of moves in flight
    coming_seconds: float = 0.0


class Stock(Decider):
    """A decider that acts as stock Dask with `distributed.scheduler.work-stealing` off."""

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        self.durations: dict[str, float] = {}
        self.longest: dict[str, float] = {}
        self.bandwidth = BANDWIDTH
        self.pages: dict[Address, Page] = {}
        # Tasks that it assigned so far; a real scheduler has assigned others before.
        self._given = seed
        self._scheduler = scheduler
        self._clock = scheduler.clock
        self._total: dict[str, int] = {}
        self._network = 0
        self._idle: set[Address] = set()
        self._saturated: dict[Address, None] = {}
        self._touched: dict[Address, None] = {}

    def begin(self) -> None:
        """Start the heartbeats."""
        self._clock.background(self._clock.now + 0.5, self._heartbeat)

    # ---- what it hears -------------------------------------------------------------------------------------

    def learn(self, seconds: Mapping[str, float]) -> None:
        """Load durations measured earlier."""
        self.durations.update(seconds)

    def joined(self, record: WorkerRecord) -> None:
        """Add the worker."""
        self.pages[record.address] = Page(record)
        self._touched[record.address] = None

    def left(self, record: WorkerRecord) -> None:
        """Remove the worker."""
        del self.pages[record.address]
        self._idle.discard(record.address)
        self._saturated.pop(record.address, None)
        self._touched.pop(record.address, None)

    def changed(self, record: WorkerRecord) -> None:
        """Update whether the worker is idle."""
        self._touched[record.address] = None

    def busy(self, record: WorkerRecord) -> tuple[float, float]:
        """Return the worker's tasks per thread."""
        return len(record.processing) / record.nthreads, 1.0

    def assigned(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Count the task by prefix, and the bytes of inputs that it lacks."""
        # A worker that ended a task is classified by its load at that time, not by later consequences.
        self.settled()
        self._given += 1
        self._count(job, record, +1)
        # Computed now, since the next placement changes the mean occupancy.
        self.settled()

    def finished(self, job: VirtualTask, record: WorkerRecord, held: WorkerTask) -> None:
        """Update the mean duration: the newest counts for half."""
        self._count(job, record, -1)
        prefix, seconds = job.spec.prefix, held.stop - held.start
        old = self.durations.get(prefix, -1.0)
        self.durations[prefix] = seconds if old < 0 else 0.5 * (seconds + old)
        self.pages[record.address].nbytes += job.spec.nbytes

    def dropped(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Stop counting the task."""
        self._count(job, record, -1)

    def arrived(self, address: Address, job: VirtualTask, kind: str, seconds: float) -> None:
        """Subtract the bytes from those that the worker lacks; learn the bandwidth from large transfers."""
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
        """Subtract the result's bytes from its holders."""
        for address in job.holders:
            if address in self.pages:
                self.pages[address].nbytes -= job.spec.nbytes

    def settled(self) -> None:
        """Update which of the changed workers are idle or saturated."""
        for address in self._touched:
            self._judge(self.pages[address])
        self._touched.clear()

    def _count(self, job: VirtualTask, record: WorkerRecord, sign: int) -> None:
        """Update a worker's counts, after a task was assigned to it or before it is removed."""
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
        """Process heartbeats: bandwidths, and tasks that have run for twice their mean duration."""
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
        """Return the occupancy of all workers."""
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
        self._idle.discard(record.address)
        tasks, threads = len(record.processing), record.nthreads
        if record.accepts and self._is_unoccupied(page, occupancy, tasks):
            self._idle.add(record.address)
        elif record.accepts and tasks > threads:
            pending = occupancy * (tasks - threads) / (tasks * threads)
            if 0.4 < pending > 1.9 * self._average():
                self._saturated[record.address] = None

    # ---- placement -----------------------------------------------------------------------------------------

    def where(self, job: VirtualTask) -> Address | None:
        """Return the holder of an input that starts the task first; any worker for a task without inputs."""
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
        pool = sorted(self._idle) or [address for address, page in self.pages.items() if page.record.accepts]
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
        """Return the prefix's mean duration."""
        return self.seconds(job.spec.prefix)
