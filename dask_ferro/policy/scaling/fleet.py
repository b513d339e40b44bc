"""The jobs and the work of one moment, as scaling sees them: who counts, since when, and what one more would bring.

A job that is about to end counts as gone, and a job on its way as there from the moment that it is expected.  A
wait that is longer than it should be is expected to last as much longer as it already has: nothing else is known.
Nobody in a queue is expected before those ahead, nor a new job to wait less than they have by now.
A job that leaves counts for nothing but the maximum, since it holds its node until it is gone: what takes its place
waits for that.  The same holds of one that was given back, until its site confirms that, and, beyond `surge`, of one
that is about to end: where the maximum leaves no room for successors, jobs go in turn (`early_exit`).
Jobs of a pool that was removed are about to end, too.
`Fleet` is the sheet on which one step works: it starts from the facts and takes in what is decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import inf, isnan
from typing import NamedTuple

from dask_ferro import options
from dask_ferro.policy.estimates import SPARE
from dask_ferro.policy.scaling.facts import (
    BOOTING,
    LEAVING,
    PENDING,
    REMOVED,
    RUNNING,
    Demand,
    Job,
    Name,
    Pool,
    ScalingFacts,
)
from dask_ferro.policy.scaling.work_profile import Profile, apart, cleaned, merged, widest

# Speeds beyond these are none.
_SLOWEST, _FASTEST = 1e-6, 1e6


@dataclass(frozen=True)
class ScalingParameters:
    """Parameters of scaling: options, but for those of one cluster.

    Attributes
    ----------
    minimum, maximum : float
        Workers (processes) over all pools.  In whole jobs the minimum is rounded up, the maximum down; where they
        contradict each other then, the minimum holds.  Jobs that are about to end, that leave, or that may be there
        still count for the maximum, but for `surge`.
    ordered : bool
        The maximum is an order: jobs beyond it go whatever they hold or run, booting ones too.
    """

    efficiency: float = options.number(
        0.6,
        "The parallel efficiency under which another job is not worth its node-seconds: the share of them, its"
        " start-up included, in which it works. Near 1 hardly any job pays for its start; small values buy speed at"
        " any price.",
        most=1.0,
        above=True,
    )
    worth: float = options.seconds(
        "5s",
        "Job-seconds that another job has to save all of them together: about so long each is busy. Dask's"
        " target-duration.",
    )
    max_pending: float = options.count(
        None,
        "Jobs that may wait in the queue at a time; null: as many as are wanted.",
        unit="jobs",
        auto=True,
        nothing=inf,
    )
    surge: float = options.number(
        0.0,
        "Workers beyond the maximum while successors take over from jobs that are about to end (their walltime, a"
        " node that is drained, a preemption). 0: never; jobs that end together then go one after the other, in"
        " time. A maximum of one job has nobody to take over what it holds: give it 1.",
        unit="workers",
    )
    cooldown: float = options.seconds("5s", "The least time from one change to the next shrink.")
    patience: float = options.seconds(
        "10s", "A job may be idle for as long as a new one would take to come, but for so long at least."
    )
    patience_most: float = options.seconds("10m", "And for so long at most.")
    order_patience: float = options.seconds(
        "30s",
        "How long jobs that `scale(n)` ends may take to end their tasks and to hand over what they hold, where"
        " workers stay. Then they end all the same, and it is said what is lost.",
    )
    notice: float = options.seconds(
        "1500ms",
        "A job is drained so long before it has to move what it holds, whatever it runs: the next look may come"
        " too late.",
    )
    minimum: float = 0.0
    maximum: float = inf
    ordered: bool = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises
        ------
        ValueError
            Naming the parameter, with what it got and what is wanted.
        """
        options.refuse_out_of_bounds(self)
        for name in ("minimum", "maximum"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, wanted a number of at least 0")
        if self.minimum > self.maximum:
            raise ValueError(f"minimum: got {self.minimum!r}, wanted at most maximum, {self.maximum!r}")


class MergedDemand(NamedTuple):
    """The demands that the same pools may run, as one.

    Attributes
    ----------
    lasts : float
        Seconds, on a pool of speed 1, that a job has to have left to run any of it.
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
        """Whether a job may run it, and has the time."""
        return (
            job.pool in self.pools and not job.stalled and not job.ends_in < self.lasts / self.speed(job.pool)
        )


class Fleet:
    """Who is there and what there is to do, changed by each decision of a step.

    Attributes
    ----------
    pools : dict of Pool
        With numbers that make sense.
    works : list of MergedDemand
        The most restricted first.
    spent : list of Job
        Those that count as gone: they are about to end.
    coming : Counter
        By pool, new jobs that this step asks for.
    ahead : dict of float
        By pool, the seconds that it takes to replace a job: the longest task, then a successor that comes.
    """

    def __init__(self, staff: ScalingFacts, parameters: ScalingParameters) -> None:
        self.parameters = parameters
        self.pools = {pool.name: _sane(pool) for pool in staff.pools}
        self.coming: Counter[Name] = Counter()
        known = sorted((job for job in staff.jobs if job.pool in self.pools), key=lambda job: job.order)
        # Of a removed pool: as if its time were over, it is drained by the same rules and counts for no work.
        known = [job._replace(ends_in=0.0) if self.is_unwanted(job) else job for job in known]
        # Those that leave take no new work, but their workers are there: the maximum counts them (`_aside`).
        self._leaving = {job.name: job for job in known if job.state == LEAVING}
        known = [job for job in known if job.state in (PENDING, BOOTING, RUNNING)]
        self._waits = {name: expected_wait(pool, known) for name, pool in self.pools.items()}
        # By how much a queue is slower now than on average: what waits there is not expected sooner.
        self._late = {
            name: max(self._waits[name] - pool.queue_wait, 0.0) for name, pool in self.pools.items()
        }
        self._last: dict[Name, float] = {}
        for job in known:
            if job.state == PENDING:
                self._last[job.pool] = max(self._last.get(job.pool, 0.0), self.arrival(job))
        self._lifetimes = {name: _lifetime(pool, known) for name, pool in self.pools.items()}
        works = _works(staff.demands, self.pools)
        # Before works are parted: which jobs count as gone decides what is parted from what.
        self.ahead = {name: self._warning(name, works) for name in self.pools}
        self.spent = [job for job in known if self.is_spent(job)]
        gone = {job.name for job in self.spent}
        self._there = {job.name: job for job in known if job.name not in gone}
        self._counts = Counter(job.pool for job in self._there.values())
        self._ending = Counter(job.pool for job in self.spent)
        parts = chain.from_iterable(map(self._parted, works))
        # The most restricted first: they have no choice, and what they leave is for those that have.
        self.works = sorted(parts, key=lambda work: (len(work.pools), -work.lasts))

    @property
    def jobs(self) -> list[Job]:
        """Those that count, by order of submission, and those that are called back."""
        return list(self._there.values())

    @property
    def leaving(self) -> list[Job]:
        """Those that leave and are not called back."""
        return list(self._leaving.values())

    def lead(self, pool: Name) -> float:
        """Return the seconds until a job that is asked for now would help."""
        return self._waits[pool] + self.pools[pool].start_up

    def limit(self, pool: Name, queued: bool = True) -> float:
        """Return the seconds for which a job of a pool may be idle.

        Parameters
        ----------
        queued : bool
            Whether the jobs that wait now say what a new one would take; otherwise, those that came do.
        """
        p, usual = self.parameters, self.pools[pool].queue_wait + self.pools[pool].start_up
        return max(p.patience, min(self.lead(pool) if queued else usual, p.patience_most))

    def arrival(self, job: Job) -> float:
        """Return the seconds until a job is expected to help."""
        # Ages are differences of two clocks, and may be less than nothing.
        pool, age = self.pools[job.pool], _finite(job.age)
        if job.state == PENDING:
            # One that is late is expected to take as long again as it is late: nothing else is known of it.
            return max(abs(pool.queue_wait - age), self._late[job.pool]) + pool.start_up
        return max(pool.start_up - age, 0.0) if job.state == BOOTING else 0.0

    def is_outrun(self, job: Job, pool: Name) -> bool:
        """Whether a new job of another pool would help so long before one that waits that it is worth a thought."""
        if job.state != PENDING or job.pool == pool:
            return False
        return self.arrival(job) > self.lead(pool) + self.limit(pool, queued=False)

    def are_apart(self, one: Name, other: Name) -> bool:
        """Whether what waits in one of two queues does not stand for what waits in the other.

        Without one of them, a new job there would outrun the other: both are kept until one of them starts.
        """
        return one != other and (self._would_outrun(one, other) or self._would_outrun(other, one))

    def _would_outrun(self, pool: Name, other: Name) -> bool:
        """Whether a new job of a pool of which nothing waits would outrun what waits in another."""
        fresh = self.pools[pool].queue_wait + self.pools[pool].start_up
        return self._last.get(other, 0.0) > fresh + self.limit(pool, queued=False)

    def is_spent(self, job: Job) -> bool:
        """Whether a job ends before a successor that is asked for now could take the next task from it."""
        if self.is_unwanted(job):
            return True
        # One that waits has its walltime before it, whenever it starts.
        return job.state != PENDING and job.ends_in <= self.ahead[job.pool]

    def is_old(self, job: Job) -> bool:
        """Whether a job has at most half of its life left."""
        return self.is_spent(job) or (job.ends_in < inf and job.ends_in <= self._lifetimes[job.pool] / 2)

    def is_unwanted(self, job: Job) -> bool:
        """Whether a job is of a pool that was removed."""
        return self.pools[job.pool].mode == REMOVED

    def _warning(self, pool: Name, works: Iterable[MergedDemand]) -> float:
        """Return the seconds before its end from which on a job counts as spent.

        Half of a short life is not given up for that, nor anything for a task that a successor had no time for.
        """
        # A task that begins just before the successor comes has to be able to end on the old job.
        seconds = [work.longest / work.speed(pool) for work in works if self._suffices(pool, work)]
        wanted = self.lead(pool) + max(seconds, default=0.0)
        return max(self.parameters.notice, min(wanted, self._lifetimes[pool] / 2))

    def _suffices(self, pool: Name, work: MergedDemand) -> bool:
        """Whether a fresh job of a pool may run a work and has the time for its longest task."""
        if pool not in work.pools:
            return False
        needs = (work.longest + SPARE) / work.speed(pool)
        return self.pools[pool].start_up + needs <= self._lifetimes[pool]

    def _parted(self, work: MergedDemand) -> list[MergedDemand]:
        """Set the longest tasks apart where some jobs or pools have no time for them, and fresh ones would."""
        able = tuple(name for name in work.pools if self._suffices(name, work))
        # Nothing is set apart for fresh jobs that cannot come.
        if work.longest <= 0.0 or all(self.pools[name].closed for name in able):
            return [work]
        long, rest = apart(work.profile, work.longest)
        part = MergedDemand(able, work.speeds, long, work.longest, work.longest + SPARE)
        there = (job for job in self._there.values() if job.pool in work.pools)
        if able == work.pools and all(part.admits(job) for job in there):
            return [work]
        # Without any width left, the rest is no work of its own.
        return [part, work._replace(profile=rest)] if widest(rest) > 0.0 else [part]

    def power(self, work: MergedDemand, pool: Name, threads: int = 0) -> float:
        """Return the threads with which a job helps, by default a new one; one twice as fast counts as two."""
        return (threads if threads > 0 else self.pools[pool].threads) * work.speed(pool)

    def least_job(self, work: MergedDemand) -> int:
        """Return the workers of the smallest job that may run a work."""
        return min(self.pools[name].processes for name in work.pools)

    def powers(self, work: MergedDemand, but: Collection[Name] = ()) -> dict[Name, float]:
        """Return by pool the threads of all jobs that count and may run a work, with the new ones, but for some."""
        found = {name: self.coming[name] * self.power(work, name) for name in work.pools}
        for job in self.team(work):
            if job.name not in but:
                found[job.pool] += self.power(work, job.pool, job.threads)
        return found

    def team(self, work: MergedDemand) -> list[Job]:
        """Return the jobs that count and may run a work."""
        return [job for job in self.jobs if work.admits(job)]

    def on_the_way(self, pool: Name) -> bool:
        """Whether jobs of a pool are asked for and not there."""
        return self.coming[pool] > 0 or any(job.pool == pool and job.state != RUNNING for job in self.jobs)

    def remove(self, gone: Job) -> None:
        """Let a job count no more."""
        if self._there.pop(gone.name, None) is not None:
            self._counts[gone.pool] -= 1

    def call_back(self, job: Job) -> None:
        """Let one that leaves count as running."""
        self._there[job.name] = self._leaving.pop(job.name)._replace(state=RUNNING)
        self._counts[job.pool] += 1

    def let_go(self, job: Job) -> None:
        """Let one that was called back leave."""
        self.remove(job)
        self._leaving[job.name] = job._replace(state=LEAVING)

    def vacant(self) -> float:
        """Return the workers that the maximum has room for."""
        return self.parameters.maximum - self.workers() - self._aside()

    def missing(self) -> float:
        """Return the workers that are to come for the minimum, as far as those that go make room."""
        p = self.parameters
        # Those that go still count to the maximum, which is not exceeded for the minimum's sake.
        return min(p.minimum, p.maximum - self._aside()) - self.workers()

    def room(self, pool: Pool) -> float:
        """Return the workers that may come where whole jobs of a pool add to the minimum.

        While jobs go, nothing is rounded up: fewer than the minimum are there for a moment.
        """
        p, aside = self.parameters, self._aside()
        most = p.maximum if aside else max(p.maximum, p.minimum + pool.processes - 1)
        return most - self.workers() - aside

    def openings(self, name: Name) -> float:
        """Return the jobs that a pool's own maximum has room for."""
        pool = self.pools[name]
        leaving = [job for job in self.leaving if job.pool == name]
        ends = self._ending[name] + sum(self.is_spent(job) for job in leaving)
        # Successors may overlap with those that are about to end, as far as `surge` allows.
        aside = max(ends - self.parameters.surge // pool.processes, 0) + pool.lingering
        return pool.maximum - self.count(name) - aside - sum(not self.is_spent(job) for job in leaving)

    def _aside(self) -> float:
        """Return the workers that count for nothing but the maximum."""
        ending = [*self.spent, *filter(self.is_spent, self.leaving)]
        lingering = sum(pool.lingering * pool.processes for pool in self.pools.values())
        # All that are there without counting, less those that successors may overlap with.
        every = self._processes([*self.spent, *self.leaving]) + lingering
        return every - min(self._processes(ending), self.parameters.surge)

    def _processes(self, jobs: Iterable[Job]) -> int:
        return sum(self.pools[job.pool].processes for job in jobs)

    def count(self, pool: Name) -> int:
        """Return the jobs of a pool that count, with the new ones."""
        return self._counts[pool] + self.coming[pool]

    def workers(self, new: bool = True) -> int:
        """Return the workers of all jobs that count, with or without the new ones."""
        return sum(
            (self._counts[name] + new * self.coming[name]) * pool.processes
            for name, pool in self.pools.items()
        )


def expected_wait(pool: Pool, jobs: Iterable[Job]) -> float:
    """Return the seconds that a job that is asked for now would wait: no less than those that wait have by now."""
    ages = (_finite(job.age) for job in jobs if job.pool == pool.name and job.state == PENDING)
    # The mean lags behind a queue that has just become long; those that wait in it do not.
    return max(pool.queue_wait, *ages, 0.0)


def counted(number: float, what: str) -> str:
    """Return a number of things in words."""
    return f"{number:g} {what}" if number == 1 else f"{number:g} {what}s"


def _lifetime(pool: Pool, jobs: Iterable[Job]) -> float:
    """Return the seconds that a fresh job would have; where its pool does not tell, as many as those that run."""
    if pool.lifetime < inf:
        return pool.lifetime
    # A job that runs tells by its age and its end how long it will have been.
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
        # Costs are factors: one of 0 would make a pool the best, whatever it brings.
        cost=pool.cost if 0.0 < pool.cost < inf else 1.0,
        closed=pool.closed or pool.mode,
    )


def _works(demands: Iterable[Demand], pools: Mapping[Name, Pool]) -> list[MergedDemand]:
    """Return the demands as works: one for those that the same pools run at the same speeds."""
    groups: dict[tuple[tuple[Name, float], ...], list[Demand]] = {}
    for demand in demands:
        able = [name for name in pools if demand.pools is None or name in demand.pools]
        # Speeds are part of it: the same pools may run one kind of work on a device and another not.
        groups.setdefault(tuple((name, demand.speeds.get(name, 1.0)) for name in able), []).append(demand)
    works = []
    for speeds, group in groups.items():
        profile = cleaned(merged(cleaned(demand.profile) for demand in group))
        if speeds and profile:
            longest = max(_finite(demand.longest) for demand in group)
            works.append(MergedDemand(tuple(dict(speeds)), dict(speeds), profile, longest))
    return works
