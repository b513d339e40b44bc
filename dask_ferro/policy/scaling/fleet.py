"""The jobs and the work of one moment as scaling counts them: the jobs that count, their arrival, and their power.

A job that is about to end counts as gone, and a job on its way counts from its expected arrival.  A wait that has
become longer than expected is projected to last as long again, as nothing else is known.  A queued job is projected
to start no earlier than those ahead of it, and a new job to wait at least as long as they have by now.  A leaving job
counts only for the maximum, since it holds its node until it is gone: its replacement waits for that.  The same holds
for a released job until its site confirms the end and, beyond `surge`, for a job that is about to end: where the
maximum leaves no room for successors, jobs go in turn (`early_exit`).
`Fleet` is the working copy of one step: it starts from the facts and includes the decisions made so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import inf, isnan
from typing import NamedTuple

from dask_ferro.policy.estimates import SPARE
from dask_ferro.policy.scaling.facts import (
    BOOTING,
    LEAVING,
    PENDING,
    RUNNING,
    Demand,
    Job,
    Name,
    Pool,
    ScalingFacts,
)
from dask_ferro.policy.scaling.work_profile import Profile, apart, cleaned, merged, widest

# Speeds outside these bounds are ignored.
_SLOWEST, _FASTEST = 1e-6, 1e6
# Seconds between two steps, about: a successor arrives after one, and is seen at the next.
_STEP = 1.0


@dataclass(frozen=True)
class ScalingParameters:
    """Parameters of scaling.

    Attributes
    ----------
    minimum, maximum : float
        Workers (processes) over all pools.  In whole jobs the minimum is rounded up and the maximum down; if they
        then contradict each other, the minimum holds.  Jobs that are about to end, leave, or may still exist count
        for the maximum, except for `surge`.
    ordered : bool
        Whether the maximum is an order: jobs beyond it go whatever they hold or run, booting ones too.
    """

    # Options with the same names (`options.ElasticOptions`), which say what they mean.
    efficiency: float = 0.6
    max_pending: float = inf
    surge: float = 0.0
    patience: float = 10.0
    # The least job-seconds that another job must save in total, about as long as each is busy: Dask's target-duration.
    worth: float = 5.0
    # The least time from one change to the next shrink: a job that was just requested has not taken work yet.
    cooldown: float = 5.0
    # The most idle time of a job before it goes.
    patience_most: float = 600.0
    # How long jobs that `scale(n)` ends may take to finish their tasks and to hand over their data, where workers stay.
    # After that they end in any case, and the log says what was lost.
    order_patience: float = 30.0
    # A job is drained this long before it has to move its data, whatever it runs: the next step may come too late.
    notice: float = 1.5
    minimum: float = 0.0
    maximum: float = inf
    ordered: bool = False


class MergedDemand(NamedTuple):
    """The demands that the same pools may run at the same speeds, as one.

    Attributes
    ----------
    lasts : float
        Seconds, on a pool of speed 1, that a job must have left to run any of it.
    """

    pools: tuple[Name, ...]
    speeds: Mapping[Name, float]
    profile: Profile
    longest: float
    lasts: float = 0.0

    def speed(self, pool: Name) -> float:
        """Return how many times faster than projected a pool runs it."""
        speed = self.speeds.get(pool, 1.0)
        return speed if _SLOWEST < speed < _FASTEST else 1.0

    def admits(self, job: Job) -> bool:
        """Return whether a job may run it and has the time."""
        return (
            job.pool in self.pools and not job.stalled and not job.ends_in < self.lasts / self.speed(job.pool)
        )


@dataclass(frozen=True)
class Outlook:
    """A pool, with what is projected for its jobs.

    Attributes
    ----------
    wait : float
        Seconds from a submission now to the start: no less than pending jobs have waited so far.
    life : float
        Seconds that a fresh job may run.
    parameters : ScalingParameters
    """

    pool: Pool
    wait: float
    life: float
    parameters: ScalingParameters

    @property
    def lead(self) -> float:
        """Seconds until a job requested now would help."""
        return self.wait + self.pool.start_up

    @property
    def usual_lead(self) -> float:
        """Seconds until a job helps, by the mean of past ones."""
        return self.pool.queue_wait + self.pool.start_up

    @property
    def limit(self) -> float:
        """Seconds for which a job may be idle, by the expected arrival of a new one."""
        return max(self.parameters.patience, min(self.lead, self.parameters.patience_most))

    @property
    def usual_limit(self) -> float:
        """Seconds for which a job may be idle, by the mean arrival of past ones."""
        return max(self.parameters.patience, min(self.usual_lead, self.parameters.patience_most))

    @property
    def working_life(self) -> float:
        """Seconds that a fresh job has after its start-up."""
        return max(self.life - self.pool.start_up, 0.0)

    def arrival(self, job: Job) -> float:
        """Return the seconds until a job of the pool is projected to help."""
        age = _finite(job.age)  # ages are differences of two clocks, and may be negative
        if job.state == PENDING:
            # A late job is projected to take as long again as it is late, and no less than the queue is late.
            late = max(self.wait - self.pool.queue_wait, 0.0)
            return max(abs(self.pool.queue_wait - age), late) + self.pool.start_up
        return max(self.pool.start_up - age, 0.0) if job.state == BOOTING else 0.0

    def suffices(self, work: MergedDemand) -> bool:
        """Return whether a fresh job may run a work and has the time for its longest task."""
        if self.pool.name not in work.pools:
            return False
        return (work.longest + SPARE) / work.speed(self.pool.name) <= self.working_life

    def ahead(self, works: Iterable[MergedDemand]) -> float:
        """Return the seconds that it takes to replace a job: its longest task, then the arrival of a successor.

        For tasks it is at most half of the job's life, and those that no successor would have time for are ignored.
        """
        # A task that begins just before the successor arrives must be able to finish on the old job.
        seconds = [work.longest / work.speed(self.pool.name) for work in works if self.suffices(work)]
        for_tasks = min(self.lead + max(seconds, default=0.0), self.life / 2)
        # However short the lives: a successor that arrives later takes over no results, and they are lost each time.
        for_data = min(self.lead + self.parameters.notice + _STEP, self.working_life)
        return max(self.parameters.notice, for_tasks, for_data)


class Fleet:
    """The jobs and the work of one step, updated with each decision.

    Attributes
    ----------
    pools : dict of Pool
        Pools with invalid numbers replaced.
    outlook : dict of Outlook
        By pool.
    works : list of MergedDemand
        The most restricted work first.
    ahead : dict of float
        By pool, the seconds before its end from which a job counts as spent.
    spent : list of Job
        Jobs that count as gone because they are about to end.
    coming : Counter
        By pool, the new jobs that this step requests.
    """

    def __init__(self, staff: ScalingFacts, parameters: ScalingParameters) -> None:
        self.parameters = parameters
        self.pools = {pool.name: _sane(pool) for pool in staff.pools}
        self.coming: Counter[Name] = Counter()
        known = sorted((job for job in staff.jobs if job.pool in self.pools), key=lambda job: job.order)
        # Leaving jobs take no new work but still exist, so that the maximum counts them (`aside`).
        self._leaving = {job.name: job for job in known if job.state == LEAVING}
        known = [job for job in known if job.state in (PENDING, BOOTING, RUNNING)]
        self.outlook = {
            name: Outlook(pool, expected_wait(pool, known), _lifetime(pool, known), parameters)
            for name, pool in self.pools.items()
        }
        self._last: dict[Name, float] = {}  # by pool, the arrival of the last pending job
        for job in known:
            if job.state == PENDING:
                self._last[job.pool] = max(self._last.get(job.pool, 0.0), self.arrival(job))
        works = _works(staff.demands, self.pools)
        # Before works are parted, which depends on the jobs that count as gone.
        self.ahead = {name: outlook.ahead(works) for name, outlook in self.outlook.items()}
        self.spent = [job for job in known if self.is_spent(job)]
        gone = {job.name for job in self.spent}
        self._there = {job.name: job for job in known if job.name not in gone}
        self._counts = Counter(job.pool for job in self._there.values())
        self._ending = Counter(job.pool for job in self.spent)
        parts = chain.from_iterable(map(self._parted, works))
        # The most restricted work has no choice; the others take the threads that it leaves.
        self.works = sorted(parts, key=lambda work: (len(work.pools), -work.lasts))

    @property
    def jobs(self) -> list[Job]:
        """The jobs that count, in order of submission, and those that were recalled."""
        return list(self._there.values())

    @property
    def leaving(self) -> list[Job]:
        """The jobs that leave and were not recalled."""
        return list(self._leaving.values())

    def arrival(self, job: Job) -> float:
        """Return the seconds until a job is projected to help."""
        return self.outlook[job.pool].arrival(job)

    def is_outrun(self, job: Job, pool: Name) -> bool:
        """Return whether a new job of another pool would arrive well before a pending one."""
        if job.state != PENDING or job.pool == pool:
            return False
        return self.arrival(job) > self.outlook[pool].lead + self.outlook[pool].usual_limit

    def are_apart(self, one: Name, other: Name) -> bool:
        """Return whether pending jobs of two pools are too far apart in time to replace each other.

        Without one of them, a new job there would outrun the other: both are kept until one of them starts.
        """
        return one != other and (self._would_outrun(one, other) or self._would_outrun(other, one))

    def _would_outrun(self, pool: Name, other: Name) -> bool:
        """Return whether a new job of a pool without pending jobs would outrun those pending in another."""
        return self._last.get(other, 0.0) > self.outlook[pool].usual_lead + self.outlook[pool].usual_limit

    def is_spent(self, job: Job) -> bool:
        """Return whether a job ends before a successor requested now could take over its next task."""
        # A pending job has its whole walltime left, whenever it starts.
        return job.state != PENDING and job.ends_in <= self.ahead[job.pool]

    def is_old(self, job: Job) -> bool:
        """Return whether a job has at most half of its life left."""
        return self.is_spent(job) or (
            job.ends_in < inf and job.ends_in <= self.outlook[job.pool].working_life / 2
        )

    def _parted(self, work: MergedDemand) -> list[MergedDemand]:
        """Separate the longest tasks of a work, if some jobs or pools have no time for them and fresh ones would."""
        able = tuple(name for name in work.pools if self.outlook[name].suffices(work))
        # There is no point without pools that can give fresh jobs.
        if work.longest <= 0.0 or all(self.pools[name].closed for name in able):
            return [work]
        long, rest = apart(work.profile, work.longest)
        part = MergedDemand(able, work.speeds, long, work.longest, work.longest + SPARE)
        there = (job for job in self._there.values() if job.pool in work.pools)
        if able == work.pools and all(part.admits(job) for job in there):
            return [work]
        # A rest without any width is no work of its own.
        return [part, work._replace(profile=rest)] if widest(rest) > 0.0 else [part]

    def power(self, work: MergedDemand, pool: Name, threads: int = 0) -> float:
        """Return the threads of a job (by default a new one), scaled by its speed."""
        return (threads if threads > 0 else self.pools[pool].threads) * work.speed(pool)

    def least_job(self, work: MergedDemand) -> int:
        """Return the number of workers of the smallest job that may run a work."""
        return min(self.pools[name].processes for name in work.pools)

    def powers(self, work: MergedDemand, but: Collection[Name] = ()) -> dict[Name, float]:
        """Return by pool the scaled threads of the jobs that may run a work, new ones included, except those
        in `but`.
        """
        found = {name: self.coming[name] * self.power(work, name) for name in work.pools}
        for job in self.team(work):
            if job.name not in but:
                found[job.pool] += self.power(work, job.pool, job.threads)
        return found

    def team(self, work: MergedDemand) -> list[Job]:
        """Return the counting jobs that may run a work."""
        return [job for job in self.jobs if work.admits(job)]

    def on_the_way(self, pool: Name) -> bool:
        """Return whether jobs of a pool are requested or not yet running."""
        return self.coming[pool] > 0 or any(job.pool == pool and job.state != RUNNING for job in self.jobs)

    def remove(self, gone: Job) -> None:
        """Stop counting a job."""
        if self._there.pop(gone.name, None) is not None:
            self._counts[gone.pool] -= 1

    def call_back(self, job: Job) -> None:
        """Count a leaving job as running again."""
        self._there[job.name] = self._leaving.pop(job.name)._replace(state=RUNNING)
        self._counts[job.pool] += 1

    def let_go(self, job: Job) -> None:
        """Count a recalled job as leaving again."""
        self.remove(job)
        self._leaving[job.name] = job._replace(state=LEAVING)

    def vacant(self) -> float:
        """Return the number of workers that the maximum has room for."""
        return self.parameters.maximum - self.workers() - self.aside()

    def openings(self, name: Name) -> float:
        """Return the number of jobs that a pool's own maximum has room for."""
        pool = self.pools[name]
        leaving = [job for job in self.leaving if job.pool == name]
        ends = self._ending[name] + sum(self.is_spent(job) for job in leaving)
        # Successors may overlap with ending jobs as far as `surge` allows.
        aside = max(ends - self.parameters.surge // pool.processes, 0) + pool.lingering
        return pool.maximum - self.count(name) - aside - sum(not self.is_spent(job) for job in leaving)

    def aside(self) -> float:
        """Return the number of workers that count only for the maximum."""
        ending = [*self.spent, *filter(self.is_spent, self.leaving)]
        lingering = sum(pool.lingering * pool.processes for pool in self.pools.values())
        # All workers that exist without counting, less those that successors may overlap with.
        every = self._processes([*self.spent, *self.leaving]) + lingering
        return every - min(self._processes(ending), self.parameters.surge)

    def _processes(self, jobs: Iterable[Job]) -> int:
        return sum(self.pools[job.pool].processes for job in jobs)

    def count(self, pool: Name) -> int:
        """Return the number of jobs of a pool that count, new ones included."""
        return self._counts[pool] + self.coming[pool]

    def workers(self, new: bool = True) -> int:
        """Return the number of workers of all jobs that count, with or without the new ones."""
        return sum(
            (self._counts[name] + new * self.coming[name]) * pool.processes
            for name, pool in self.pools.items()
        )


def expected_wait(pool: Pool, jobs: Iterable[Job]) -> float:
    """Return the projected queue wait of a job requested now: no less than pending jobs have waited so far."""
    ages = (_finite(job.age) for job in jobs if job.pool == pool.name and job.state == PENDING)
    # The mean lags behind a queue that has just become long; the ages of pending jobs do not.
    return max(pool.queue_wait, *ages, 0.0)


def counted(number: float, what: str) -> str:
    """Return a number with its noun, in the singular or plural."""
    return f"{number:g} {what}" if number == 1 else f"{number:g} {what}s"


def _lifetime(pool: Pool, jobs: Iterable[Job]) -> float:
    """Return the seconds that a fresh job would have: the pool's lifetime, or else that of its running jobs."""
    if pool.lifetime < inf:
        return pool.lifetime
    # Age plus remaining time is the lifetime of a running job.
    seen = [
        _finite(job.age) + job.ends_in
        for job in jobs
        if job.pool == pool.name and (job.state == RUNNING or (job.state == BOOTING and job.ends_in < inf))
    ]
    return max((seconds for seconds in seen if not isnan(seconds)), default=inf)


def _finite(value: float) -> float:
    return value if 0.0 <= value < inf else 0.0


def _sane(pool: Pool) -> Pool:
    return pool._replace(
        threads=max(pool.threads, 1),
        processes=max(pool.processes, 1),
        queue_wait=_finite(pool.queue_wait),
        start_up=_finite(pool.start_up),
        minimum=_finite(pool.minimum),
        maximum=pool.maximum if pool.maximum >= 0 else inf,
        lifetime=pool.lifetime if pool.lifetime > 0 else inf,
        # Costs are factors: a cost of 0 would make a pool the best in every case.
        cost=pool.cost if 0.0 < pool.cost < inf else 1.0,
        closed=pool.closed or ("paused" if pool.is_paused else ""),
    )


def _works(demands: Iterable[Demand], pools: Mapping[Name, Pool]) -> list[MergedDemand]:
    """Return the demands grouped by the pools that may run them and their speeds."""
    groups: dict[tuple[tuple[Name, float], ...], list[Demand]] = {}
    for demand in demands:
        able = [name for name in pools if demand.pools is None or name in demand.pools]
        # Speeds belong to the key: the same pools may run one kind of work on a device and another not.
        groups.setdefault(tuple((name, demand.speeds.get(name, 1.0)) for name in able), []).append(demand)
    works = []
    for speeds, group in groups.items():
        profile = cleaned(merged(cleaned(demand.profile) for demand in group))
        if speeds and profile:
            longest = max(_finite(demand.longest) for demand in group)
            works.append(MergedDemand(tuple(dict(speeds)), dict(speeds), profile, longest))
    return works
