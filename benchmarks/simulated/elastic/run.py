"""Simulation of a graph on an elastic cluster: jobs start and end while it runs, and the costs are counted.

Once per virtual second a controller is given the facts and decides.  A job that has to leave hands back its unstarted
tasks, finishes its running ones, and closes once every result has another holder.  A job whose walltime is over is
lost with its results.  Equal arguments give equal runs.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import NamedTuple

from dask_ferro.policy.facts import Address, Key
from dask_ferro.policy.scaling import facts
from dask_ferro.policy.scaling.evacuation import spread
from dask_ferro.policy.scaling.facts import Job, Name, ScalingFacts
from dask_ferro.policy.scheduling_core import SchedulingSettings
from dask_ferro.simulate import virtual_tasks as tasks
from dask_ferro.simulate.cluster import VirtualCluster
from dask_ferro.simulate.engine import StuckError, VirtualSite
from dask_ferro.simulate.graphs.taskgraph import TaskGraph
from dask_ferro.simulate.virtual_scheduler import WorkerRecord
from dask_ferro.trace import Trace
from simulated.contenders import simulate
from simulated.elastic.controllers import Controller, Scaling
from simulated.elastic.pools import BatchSystem, VirtualJob, VirtualPool
from simulated.elastic.remaining_work import Remaining

TICK = 1.0
# One day, after which a run is given up.
LIMIT = 86_400.0
# Seconds between two checks of whether a leaving job may close.
LOOK = 0.05
# The share of its memory up to which a worker accepts results of leaving ones: above it Dask begins to spill.
ROOM = 0.6


class ElasticRun(NamedTuple):
    """The result of an elastic run.

    Attributes
    ----------
    phases : tuple of float
        Seconds of each phase: from its submission to that of the next.
    node_seconds : float
        Of all jobs, from start to end, or to the end of the graph.
    submitted, cancelled, drained, expired : int
        Numbers of jobs: cancelled ones were pending, expired ones reached their walltime.
    peak : int
        The largest number of jobs that had a node at one time.
    recomputed : int
        Runs of tasks beyond the first one of each.
    """

    trace: Trace
    phases: tuple[float, ...]
    node_seconds: float
    submitted: int
    cancelled: int
    drained: int
    expired: int
    peak: int
    recomputed: int

    @property
    def makespan(self) -> float:
        """Seconds from the graph's submission to its last result."""
        return float(self.trace.counts["elapsed"])


@dataclass
class ElasticDriver:
    """Passes facts to the controller, and its decisions to the batch system and the scheduler.

    Its parameters are those of `simulate_elastic`.
    """

    pools: tuple[VirtualPool, ...]
    controller: Controller
    at_start: Mapping[Name, int]
    seed: int
    limit: float

    def __post_init__(self) -> None:
        self._idle_since: dict[Name, float] = {}
        self._memory: dict[Address, int] = {}
        self._looks = False
        self.counts = {"cancelled": 0, "drained": 0, "expired": 0, "peak": 0}

    def attach(self, site: VirtualSite) -> None:
        """Start the initial jobs and the periodic decisions."""
        self.site = site
        self.scheduler = site.scheduler
        self._clock = site.world.clock
        self._work = Remaining(site.scheduler)
        self.batch = BatchSystem(self.pools, self._clock, self.seed, self._connected, self._expired)
        for pool, count in self.at_start.items():
            self.batch.start(pool, count)
        self.scheduler.decider.set_fresh(
            max((pool.walltime - pool.start_up for pool in self.pools), default=0.0)
        )
        self._clock.background(TICK, self._tick)

    # ---- what the batch system does ------------------------------------------------------------------------

    def _connected(self, job: VirtualJob) -> None:
        for worker in job.workers:
            self._memory[worker.address] = job.pool.memory
            if job.ends_at < inf:
                self.scheduler.decider.set_end(worker.address, job.ends_at)
            self.site.join(worker)
        there = sum(other.state in (facts.RUNNING, facts.LEAVING) for other in self.batch.jobs.values())
        self.counts["peak"] = max(self.counts["peak"], there)

    def _expired(self, job: VirtualJob) -> None:
        self.counts["expired"] += 1
        for address in job.addresses:
            self.site.kill(address)

    # ---- what the controller is shown ----------------------------------------------------------------------

    def _tick(self) -> None:
        scheduler = self.scheduler
        if self._clock.now > self.limit:
            raise StuckError(f"{scheduler.remaining} tasks are left after {self.limit:.0f} s")
        scheduler.retry()
        acts = {facts.Cancel: self._cancel, facts.Drain: self._drain}
        for action in self.controller.decide(self.staff(), scheduler):
            if isinstance(action, facts.Submit):
                self.batch.submit(action.pool, action.count)
            if isinstance(action, facts.Submit | facts.Keep):
                continue
            for name in action.jobs:
                if name in self.batch.jobs:
                    acts[type(action)](self.batch.jobs[name])
            if isinstance(action, facts.Drain) and not self._looks:
                self._look()
        self._clock.background(self._clock.now + TICK, self._tick)

    def staff(self) -> ScalingFacts:
        """Return the current facts."""
        pools = tuple(pool.as_seen(self.batch.waits[pool.name]) for pool in self.pools)
        jobs = tuple(self._fact(job) for job in self.batch.jobs.values())
        return ScalingFacts(self._clock.now, pools, jobs, self._work.demands())

    def _fact(self, job: VirtualJob) -> Job:
        now = self._clock.now
        records = self._seats(job)
        has = chain.from_iterable(record.live.has for record in records)
        known = [self.scheduler.jobs[number] for number in has]
        held = sum(task.spec.nbytes for task in known)
        unique = sum(task.spec.nbytes for task in known if len(task.holders) == 1)
        idle = bool(records) and not any(record.processing for record in records)
        since = self._idle_since.setdefault(job.name, now) if idle else now
        if not idle:
            self._idle_since.pop(job.name, None)
        free = int(ROOM * job.pool.memory * len(records)) - held
        threads = sum(record.nthreads for record in records)
        return Job(
            job.name, job.pool.name, job.state, now - job.since, job.order, now - since, job.ends_at - now,
            held, unique, max(free, 0), threads,
        )  # fmt: skip

    def _seats(self, job: VirtualJob) -> list[WorkerRecord]:
        return [record for address in job.addresses if (record := self.scheduler.records.get(address))]

    # ---- what it decides -----------------------------------------------------------------------------------

    def _cancel(self, job: VirtualJob) -> None:
        if job.state in (facts.PENDING, facts.BOOTING):
            self.counts["cancelled"] += job.state == facts.PENDING
            self.batch.end(job)

    def _drain(self, job: VirtualJob) -> None:
        if job.state == facts.BOOTING:
            self.batch.end(job)
        elif job.state == facts.RUNNING:
            job.state, job.since = facts.LEAVING, self._clock.now
            self.counts["drained"] += 1
            for record in self._seats(job):
                self.scheduler.receive(self.scheduler.leaving, record.address)

    def _look(self) -> None:
        """Move results that only leaving workers hold, and close jobs without needed tasks or results."""
        leaving = [job for job in self.batch.jobs.values() if job.state == facts.LEAVING]
        self._looks = bool(leaving)
        going = set(chain.from_iterable(job.addresses for job in leaving))
        alone = {job.name: self._alone(job, going) for job in leaving}
        self._move(list(chain.from_iterable(alone.values())), going)
        for job in leaving:
            if not alone[job.name] and not any(record.processing for record in self._seats(job)):
                self._close(job)
        if leaving:
            self._clock.background(self._clock.now + LOOK, self._look)

    def _alone(self, job: VirtualJob, going: set[Address]) -> list[tasks.VirtualTask]:
        """Return the results of a job that no staying worker holds."""
        jobs = self.scheduler.jobs
        has = chain.from_iterable(sorted(record.live.has) for record in self._seats(job))
        return [
            task for task in map(jobs.__getitem__, has) if task.holders and going.issuperset(task.holders)
        ]

    def _move(self, alone: list[tasks.VirtualTask], going: set[Address]) -> None:
        """Let a staying worker fetch each of these results, unless one does already."""
        if not alone:
            return
        staying = [record for address, record in self.scheduler.records.items() if address not in going]
        coming = set(chain.from_iterable(record.live.coming() for record in staying))
        items: dict[Key, tasks.VirtualTask] = {t.number: t for t in alone if t.number not in coming}
        if not items:
            return
        free = {record.address: self._room(record) for record in staying if record.accepts}
        largest = sorted(items, key=lambda number: (-items[number].spec.nbytes, number))
        found = spread([(number, items[number].spec.nbytes) for number in largest], free)
        for number, address in found.items():
            record = self.scheduler.records[address]
            self.scheduler.world.add("bytes_spread", items[number].spec.nbytes)
            self._clock.at(self._clock.now, record.live.replicate, items[number])

    def _room(self, record: WorkerRecord) -> int:
        """Return the bytes that a worker accepts from leaving ones."""
        memory = self._memory.get(record.address, 0)
        return max(int(ROOM * memory) - sum(self.scheduler.jobs[n].spec.nbytes for n in record.live.has), 0)

    def _close(self, job: VirtualJob) -> None:
        for address in job.addresses:
            self.scheduler.receive(self.scheduler.left, address)
        self.batch.end(job)


def simulate_elastic(
    graph: TaskGraph,
    pools: Iterable[VirtualPool],
    controller: Controller | None = None,
    *,
    at_start: Mapping[Name, int] | None = None,
    policy: str = "informed",
    rules: SchedulingSettings | None = None,
    cluster: VirtualCluster | None = None,
    seed: int = 0,
    limit: float = LIMIT,
) -> ElasticRun:
    """Simulate a graph on jobs that a controller requests, and return the run's costs.

    Parameters
    ----------
    controller : Controller, optional
        Default: `Scaling()`.
    at_start : mapping of pool to int, optional
        Jobs that run from the beginning; default: none.
    policy, rules
        Of placement and stealing, as for `simulate`.
    cluster : VirtualCluster, optional
        Links and costs of the simulation; its workers, if any, stay throughout.
    limit : float
        Virtual seconds, since jobs that repeatedly end with their results may recompute them for ever.

    Raises
    ------
    Stuck
        If tasks are left and no worker comes to run them, or at the limit.
    """
    elastic = ElasticDriver(tuple(pools), controller or Scaling(), at_start or {}, seed, limit)
    cluster = cluster if cluster is not None else VirtualCluster(())
    trace = simulate(graph, cluster, policy=policy, rules=rules, seed=seed, attach=elastic.attach)
    begins = elastic.scheduler.submissions
    ends = [*begins[1:], trace.counts["elapsed"]]
    return ElasticRun(
        trace,
        tuple(end - begin for begin, end in zip(begins, ends, strict=True)),
        elastic.batch.node_seconds(),
        len(elastic.batch.jobs) + len(elastic.batch.over),
        recomputed=sum(1 for _ in trace.of("compute")) - len(trace.tasks),
        **elastic.counts,
    )
