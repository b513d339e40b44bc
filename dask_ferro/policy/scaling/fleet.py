"""The jobs and the work of one moment as scaling counts them: the jobs that count, their arrival, and their power.

A job that is about to end counts as gone, and a job on its way counts from its expected arrival.  A wait that has
become longer than expected is projected to last as long again, as nothing else is known.  A leaving job counts only
for the maximum, since it holds its node until it is gone: its replacement waits for that.  The same holds for a
released job until its site confirms the end and, beyond `surge`, for a job that is about to end: where the maximum
leaves no room for successors, jobs go in turn (`early_exit`).
`Fleet` is the working copy of one step: it starts from the facts and includes the decisions made so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import floor, inf
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
from dask_ferro.policy.scaling.work_profile import Profile, clean, merge

# Seconds between two steps, about: a successor arrives after one, and is seen at the next.
_STEP = 1.0
# A limit beyond any cluster: widths come from users and may be anything.
MAX_WIDTH = 10**6


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
    idle_timeout: float = 10.0
    # The least job-seconds that another job must save in total, about as long as each is busy: Dask's target-duration.
    worth: float = 5.0
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
    """The demands that the same pools may run at the same speeds, as one."""

    pools: tuple[Name, ...]
    speeds: Mapping[Name, float]
    profile: Profile
    longest: float

    def speed(self, pool: Name) -> float:
        """Return how many times faster than projected a pool runs it."""
        return self.speeds.get(pool, 1.0)

    def admits(self, job: Job) -> bool:
        """Return whether a job may run it."""
        return job.pool in self.pools and not job.stalled


@dataclass(frozen=True)
class Outlook:
    """A pool, with what is projected for its jobs.

    Attributes
    ----------
    wait : float
        Seconds from a submission now to the start.
    """

    pool: Pool
    wait: float
    parameters: ScalingParameters

    @property
    def lead(self) -> float:
        """Seconds until a job requested now would help."""
        return self.wait + self.pool.start_up

    @property
    def limit(self) -> float:
        """Seconds for which a job may be idle."""
        return max(self.parameters.idle_timeout, min(self.lead, self.parameters.patience_most))

    @property
    def queue_limit(self) -> float:
        """Seconds for which a pending job may be late, or of no use."""
        return max(self.parameters.idle_timeout, min(self.pool.queue_wait, self.parameters.patience_most))

    @property
    def working_life(self) -> float:
        """Seconds that a fresh job has after its start-up."""
        return max(self.pool.lifetime - self.pool.start_up, 0.0)

    def arrival(self, job: Job) -> float:
        """Return the seconds until a job of the pool is projected to help."""
        if job.state == PENDING:
            # A late job is projected to take as long again as it is late.
            return abs(self.pool.queue_wait - job.age) + self.pool.start_up
        return max(self.pool.start_up - job.age, 0.0) if job.state == BOOTING else 0.0

    def is_late(self, job: Job) -> bool:
        """Return whether a job has been pending for much longer than those before it."""
        return job.state == PENDING and job.age > self.pool.queue_wait + self.queue_limit

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
        for_tasks = min(self.lead + max(seconds, default=0.0), self.pool.lifetime / 2)
        # However short the lives: a successor that arrives later takes over no results, and they are lost each time.
        for_data = min(self.lead + self.parameters.notice + _STEP, self.working_life)
        return max(self.parameters.notice, for_tasks, for_data)


class Fleet:
    """The jobs and the work of one step, updated with each decision.

    Attributes
    ----------
    pools : dict of Pool
        By name; paused ones are closed.
    outlook : dict of Outlook
        By pool.
    works : list of MergedDemand
        The most restricted work first.
    ahead : dict of float
        By pool, the seconds before its end from which a job counts as spent.
    spent : list of Job
        Jobs that count as gone because they are about to end.
    leaving : list of Job
        Jobs that take no new work but still exist, so that the maximum counts them (`aside`).
    coming : Counter
        By pool, the new jobs that this step requests.
    """

    def __init__(self, staff: ScalingFacts, parameters: ScalingParameters) -> None:
        self.parameters = parameters
        self.pools = {
            pool.name: pool._replace(closed=pool.closed or ("paused" if pool.is_paused else ""))
            for pool in staff.pools
        }
        self.coming: Counter[Name] = Counter()
        known = sorted((job for job in staff.jobs if job.pool in self.pools), key=lambda job: job.order)
        self.leaving = [job for job in known if job.state == LEAVING]
        known = [job for job in known if job.state in (PENDING, BOOTING, RUNNING)]
        self.outlook = {
            name: Outlook(pool, _wait(pool, known), parameters) for name, pool in self.pools.items()
        }
        # The most restricted work has no choice; the others take the threads that it leaves.
        self.works = sorted(_works(staff.demands, self.pools), key=lambda work: len(work.pools))
        self.ahead = {name: outlook.ahead(self.works) for name, outlook in self.outlook.items()}
        self.spent = [job for job in known if self.is_spent(job)]
        self._there = {job.name: job for job in known if not self.is_spent(job)}
        self._counts = Counter(job.pool for job in self._there.values())

    @property
    def jobs(self) -> list[Job]:
        """The jobs that count, in order of submission."""
        return list(self._there.values())

    def arrival(self, job: Job) -> float:
        """Return the seconds until a job is projected to help."""
        return self.outlook[job.pool].arrival(job)

    def is_spent(self, job: Job) -> bool:
        """Return whether a job ends before a successor requested now could take over its next task."""
        # A pending job has its whole walltime left, whenever it starts.
        return job.state != PENDING and job.ends_in <= self.ahead[job.pool]

    def power(self, work: MergedDemand, pool: Name, threads: int = 0) -> float:
        """Return the threads of a job (by default a new one), scaled by its speed."""
        return (threads if threads > 0 else self.pools[pool].threads) * work.speed(pool)

    def powers(self, work: MergedDemand, team: Iterable[Job] | None = None) -> dict[Name, float]:
        """Return by pool the scaled threads of new jobs and of a team, by default all that may run a work."""
        found = {name: self.coming[name] * self.power(work, name) for name in work.pools}
        for job in self.team(work) if team is None else team:
            found[job.pool] += self.power(work, job.pool, job.threads)
        return found

    def starves(self, work: MergedDemand) -> bool:
        """Return whether a work that could begin now has no job that may run it."""
        return work.profile[0][1] > 0.0 and not any(self.powers(work).values())

    def minimum(self) -> float:
        """Return the least number of workers; work that needs a new job takes the place of others in a full cluster."""
        starving = 0
        for work in filter(self.starves, self.works):
            starving += min(
                (self.pools[name].processes for name in work.pools if self.room(name, inf)), default=0
            )
        return self.parameters.minimum - max(starving - max(self.vacant(), 0.0), 0.0)

    def team(self, work: MergedDemand) -> list[Job]:
        """Return the counting jobs that may run a work."""
        return [job for job in self._there.values() if work.admits(job)]

    def on_the_way(self, pool: Name) -> bool:
        """Return whether jobs of a pool are requested or not yet running."""
        return self.coming[pool] > 0 or any(job.pool == pool and job.state != RUNNING for job in self.jobs)

    def remove(self, gone: Job) -> None:
        """Stop counting a job."""
        if self._there.pop(gone.name, None) is not None:
            self._counts[gone.pool] -= 1

    def vacant(self) -> float:
        """Return the number of workers that the maximum has room for."""
        return self.parameters.maximum - self.workers() - self.aside()

    def room(self, name: Name, vacant: float) -> int:
        """Return the number of jobs that a pool may get where so many workers may be added."""
        pool = self.pools[name]
        if pool.closed:
            return 0
        own = [job for job in (*self.spent, *self.leaving) if job.pool == name]
        # Successors may overlap with ending jobs as far as `surge` allows.
        surge = min(sum(map(self.is_spent, own)), self.parameters.surge // pool.processes)
        openings = pool.maximum - self.count(name) - (len(own) - surge) - pool.lingering
        return floor(max(min(vacant / pool.processes, openings, MAX_WIDTH), 0))

    def aside(self) -> float:
        """Return the number of workers that count only for the maximum."""
        every = [*self.spent, *self.leaving]
        ending = self._processes(filter(self.is_spent, every))
        lingering = sum(pool.lingering * pool.processes for pool in self.pools.values())
        # All workers that exist without counting, less those that successors may overlap with.
        return self._processes(every) + lingering - min(ending, self.parameters.surge)

    def _processes(self, jobs: Iterable[Job]) -> int:
        return sum(self.pools[job.pool].processes for job in jobs)

    def count(self, pool: Name) -> int:
        """Return the number of jobs of a pool that count, new ones included."""
        return self._counts[pool] + self.coming[pool]

    def workers(self) -> int:
        """Return the number of workers of all jobs that count, new ones included."""
        return sum(self.count(name) * pool.processes for name, pool in self.pools.items())


def _wait(pool: Pool, jobs: Iterable[Job]) -> float:
    # The mean lags behind a queue that has just become long; the ages of pending jobs do not.
    ages = (job.age for job in jobs if job.pool == pool.name and job.state == PENDING)
    return max(pool.queue_wait, *ages, 0.0)


def format_count(number: float, what: str) -> str:
    """Return a number with its noun, in the singular or plural."""
    return f"{number:g} {what}" if number == 1 else f"{number:g} {what}s"


def _works(demands: Iterable[Demand], pools: Mapping[Name, Pool]) -> list[MergedDemand]:
    """Return the demands grouped by the pools that may run them and their speeds."""
    groups: dict[tuple[tuple[Name, float], ...], list[Demand]] = {}
    for demand in demands:
        able = [name for name in pools if demand.pools is None or name in demand.pools]
        # Speeds belong to the key: the same pools may run one kind of work on a device and another not.
        groups.setdefault(tuple((name, demand.speeds.get(name, 1.0)) for name in able), []).append(demand)
    works = []
    for speeds, group in groups.items():
        profile = clean(merge(clean(demand.profile) for demand in group))
        if speeds and profile:
            longest = max(demand.longest for demand in group)
            works.append(MergedDemand(tuple(dict(speeds)), dict(speeds), profile, longest))
    return works
