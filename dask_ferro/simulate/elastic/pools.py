"""A virtual batch system: jobs wait, boot, run and are ended at their walltime, whatever anybody wants.

Jobs of a pool start in the order of their submission, each after a wait that chance draws from the seed, and only
while the pool has a slot.  What a job is used for is not known here.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from dask_ferro.policy.facts import Address
from dask_ferro.policy.scaling.facts import BOOTING, LEAVING, PENDING, RUNNING, Name, Pool
from dask_ferro.simulate.clock import Clock
from dask_ferro.simulate.cluster import VirtualWorker

# The state of a job that is over.
GONE = "gone"
# Weight of the newest wait in the estimate that a controller is shown.
_NEWEST = 0.3


class VirtualPool(NamedTuple):
    """A kind of job, as it is in truth.

    Attributes
    ----------
    threads, memory : int
        Of each of a job's `processes`; the memory in bytes.
    queue_wait, sigma : float
        Mean seconds from submission to start, and how much they spread: lognormal; 0: all wait the same.
    start_up : float
        Seconds from the start until the workers are connected.
    walltime : float
    slots : float
        Jobs that run at a time, at most.
    """

    name: Name = "default"
    threads: int = 1
    processes: int = 1
    memory: int = 4 * 2**30
    queue_wait: float = 1.0
    sigma: float = 0.0
    start_up: float = 2.5
    walltime: float = inf
    slots: float = inf
    device: str = "cpu"
    speed: float = 1.0
    cost: float = 1.0

    def as_seen(self, queue_wait: float) -> Pool:
        """Return the pool as a controller sees it."""
        return Pool(
            self.name, self.threads * self.processes, self.processes, self.memory * self.processes,
            queue_wait, self.start_up, lifetime=self.walltime, cost=self.cost,
        )  # fmt: skip


@dataclass(eq=False)
class VirtualJob:
    """One job.  States: pending, booting, running, leaving, gone."""

    order: int
    pool: VirtualPool
    since: float
    due: float
    state: str = PENDING
    started: float = inf
    stopped: float = inf
    ends_at: float = inf

    def __post_init__(self) -> None:
        pool, self.name = self.pool, f"{self.pool.name}-{self.order}"
        host = f"host-{self.name}"
        rest = pool.threads, host, pool.device, pool.speed
        self.workers = tuple(VirtualWorker(f"{host}-{i:02d}", *rest) for i in range(pool.processes))

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Of its workers."""
        return tuple(worker.address for worker in self.workers)

    def node_seconds(self, now: float) -> float:
        """Return the seconds for which it has had its node."""
        return max(min(self.stopped, now) - self.started, 0.0) if self.started < inf else 0.0


@dataclass
class BatchSystem:
    """Starts and ends jobs.

    Parameters
    ----------
    connected, expired : callable (VirtualJob)
        Called when a job's workers are there, and when its walltime is over.

    Attributes
    ----------
    jobs : dict of VirtualJob
        Those that are not over, by name.
    over : list of VirtualJob
    waits : dict of pool to float
        A running estimate of the queue wait in seconds.
    """

    pools: Iterable[VirtualPool]
    clock: Clock
    seed: int
    connected: Callable[[VirtualJob], None]
    expired: Callable[[VirtualJob], None]
    jobs: dict[Name, VirtualJob] = field(default_factory=dict)
    over: list[VirtualJob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pools = {pool.name: pool for pool in self.pools}
        self.waits = {name: pool.queue_wait for name, pool in self._pools.items()}
        self._chance = random.Random(self.seed)
        self._busy = dict.fromkeys(self._pools, 0)
        self._order = 0

    def submit(self, pool: Name, count: int) -> None:
        """Queue jobs."""
        for _ in range(count):
            job = self._new(self._pools[pool], self._wait(self._pools[pool]))
            self.clock.at(job.due, self._start_next, job.pool)

    def start(self, pool: Name, count: int) -> None:
        """Have jobs run at once: those that were there before anything happened."""
        for _ in range(count):
            job = self._new(self._pools[pool], 0.0)
            self._started(job)
            self._boots(job)

    def end(self, job: VirtualJob) -> None:
        """End a job, or take it out of the queue.  Idempotent."""
        if self.jobs.pop(job.name, None) is None:
            return
        if job.started < inf:
            self._busy[job.pool.name] -= 1
        job.state, job.stopped = GONE, self.clock.now
        self.over.append(job)
        self._start_next(job.pool)

    def node_seconds(self) -> float:
        """Return the seconds of all nodes so far."""
        now = self.clock.now
        return sum(job.node_seconds(now) for job in (*self.over, *self.jobs.values()))

    def _wait(self, pool: VirtualPool) -> float:
        if not pool.sigma:
            return pool.queue_wait
        # Its mean is the queue wait, whatever its spread.
        return pool.queue_wait * self._chance.lognormvariate(-0.5 * pool.sigma**2, pool.sigma)

    def _new(self, pool: VirtualPool, wait: float) -> VirtualJob:
        now = self.clock.now
        job = VirtualJob(self._order, pool, now, now + wait)
        self._order += 1
        self.jobs[job.name] = job
        return job

    def _start_next(self, pool: VirtualPool) -> None:
        now = self.clock.now
        # First come, first served: a job whose wait is over starts when there is a slot for it.
        for job in list(self.jobs.values()):
            if self._busy[pool.name] >= pool.slots:
                return
            if job.pool is pool and job.state == PENDING and job.due <= now:
                waited = now - job.since
                # A controller sees what was measured, not what is drawn next.
                self.waits[pool.name] += _NEWEST * (waited - self.waits[pool.name])
                self._started(job)
                self.clock.at(now + pool.start_up, self._boots, job)

    def _started(self, job: VirtualJob) -> None:
        now = self.clock.now
        self._busy[job.pool.name] += 1
        job.state, job.since, job.started = BOOTING, now, now
        job.ends_at = now + job.pool.walltime
        if job.ends_at < inf:
            # In the background: a simulation does not go on for the end of a walltime alone.
            self.clock.background(job.ends_at, self._is_over, job)

    def _boots(self, job: VirtualJob) -> None:
        if job.state == BOOTING:
            job.state, job.since = RUNNING, self.clock.now
            self.connected(job)

    def _is_over(self, job: VirtualJob) -> None:
        if job.name in self.jobs:
            was = job.state
            self.end(job)
            # Its workers were there only then.
            if was in (RUNNING, LEAVING):
                self.expired(job)
