"""A virtual batch system: jobs wait, boot, run, and are ended at their walltime at the latest.

Jobs of a pool start in the order of submission, each after a random wait drawn from the seed, and only while the pool
has a slot.  This module knows nothing of a job's tasks.  Durations are seconds, sizes bytes.
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

# The state of a job that has ended.
GONE = "gone"
# The weight of the newest wait in the running estimate that a controller is given.
_NEWEST = 0.3


class VirtualPool(NamedTuple):
    """A kind of job with its true properties.

    Attributes
    ----------
    threads, memory : int
        Per process of a job; the memory in bytes.
    queue_wait, sigma : float
        Mean seconds from submission to start, and the sigma of their lognormal distribution; 0: all waits are equal.
    start_up : float
        Seconds from the start until the workers are connected.
    walltime : float
    slots : float
        The largest number of jobs that run at one time.
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
        """Return the pool's facts as a controller knows them."""
        return Pool(
            self.name, self.threads * self.processes, self.processes, self.memory * self.processes,
            queue_wait, self.start_up, lifetime=self.walltime, cost=self.cost,
        )  # fmt: skip


@dataclass(eq=False)
class VirtualJob:
    """A job of a pool.  States: pending, booting, running, leaving, gone."""

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
        """The addresses of its workers."""
        return tuple(worker.address for worker in self.workers)

    def node_seconds(self, now: float) -> float:
        """Return the seconds for which it has held its node."""
        return max(min(self.stopped, now) - self.started, 0.0) if self.started < inf else 0.0


@dataclass
class BatchSystem:
    """Starts and ends virtual jobs.

    Parameters
    ----------
    connected, expired : callable (VirtualJob)
        Called when a job's workers are connected, and when its walltime is over.

    Attributes
    ----------
    jobs : dict of VirtualJob
        Jobs that have not ended, by name.
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
        """Queue that many jobs."""
        for _ in range(count):
            job = self._new(self._pools[pool], self._wait(self._pools[pool]))
            self.clock.at(job.due, self._start_next, job.pool)

    def start(self, pool: Name, count: int) -> None:
        """Start jobs without a wait: those that run before the simulation begins."""
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
        """Return the node seconds of all jobs so far."""
        now = self.clock.now
        return sum(job.node_seconds(now) for job in (*self.over, *self.jobs.values()))

    def _wait(self, pool: VirtualPool) -> float:
        if not pool.sigma:
            return pool.queue_wait
        # The mean is the queue wait for any spread.
        return pool.queue_wait * self._chance.lognormvariate(-0.5 * pool.sigma**2, pool.sigma)

    def _new(self, pool: VirtualPool, wait: float) -> VirtualJob:
        now = self.clock.now
        job = VirtualJob(self._order, pool, now, now + wait)
        self._order += 1
        self.jobs[job.name] = job
        return job

    def _start_next(self, pool: VirtualPool) -> None:
        now = self.clock.now
        # First come, first served: a job whose wait is over starts when a slot is free.
        for job in list(self.jobs.values()):
            if self._busy[pool.name] >= pool.slots:
                return
            if job.pool is pool and job.state == PENDING and job.due <= now:
                waited = now - job.since
                # A controller is given the measured wait, not the next one to be drawn.
                self.waits[pool.name] += _NEWEST * (waited - self.waits[pool.name])
                self._started(job)
                self.clock.at(now + pool.start_up, self._boots, job)

    def _started(self, job: VirtualJob) -> None:
        now = self.clock.now
        self._busy[job.pool.name] += 1
        job.state, job.since, job.started = BOOTING, now, now
        job.ends_at = now + job.pool.walltime
        if job.ends_at < inf:
            # In the background: a simulation does not continue just for the end of a walltime.
            self.clock.background(job.ends_at, self._is_over, job)

    def _boots(self, job: VirtualJob) -> None:
        if job.state == BOOTING:
            job.state, job.since = RUNNING, self.clock.now
            self.connected(job)

    def _is_over(self, job: VirtualJob) -> None:
        if job.name in self.jobs:
            was = job.state
            self.end(job)
            # Only then did the job's workers connect.
            if was in (RUNNING, LEAVING):
                self.expired(job)
