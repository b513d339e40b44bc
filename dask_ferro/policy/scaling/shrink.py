"""Shrinking: the jobs that go because of the bounds, their end, or lack of work.

Pending jobs hold no data and go first, the newest in front, so that the oldest keeps its place in the batch system's
queue.  Where one queue is much slower than another, pending jobs in one do not replace those in the other.  Of
running jobs those with the least unique data go first, then those that end first, then the newest; a job stays if its
data fits nowhere or if it was refused a moment ago.  A booting job goes only for the maximum, where no running one
could go instead.  Where the maximum is an order (`scale(n)`), jobs go down to it in any case, booting ones before
those with data.  Leaving jobs that the work could use again are recalled before others are requested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf

from dask_ferro.policy.scaling.early_exit import due
from dask_ferro.policy.scaling.facts import (
    BOOTING,
    PENDING,
    RUNNING,
    Action,
    Cancel,
    Drain,
    Job,
    Keep,
    Name,
    Recall,
)
from dask_ferro.policy.scaling.fleet import Fleet, MergedDemand, counted
from dask_ferro.policy.scaling.grow import fastest, starves
from dask_ferro.policy.scaling.work_profile import peak


def shrink(
    fleet: Fleet, surplus: Mapping[Name, float], now: float, may_shrink: bool, moving: int = 0
) -> tuple[list[Action], dict[Name, float]]:
    """Remove jobs from the fleet; return the actions, and since when each pool has had surplus pending jobs.

    Parameters
    ----------
    surplus : mapping of pool to float
        As returned by the previous step.
    may_shrink : bool
        Whether jobs may go for lack of work; false during the cooldown.
    moving : int
        Bytes that jobs which left earlier still have to hand over.
    """
    hold = _FreeMemory(fleet.jobs, moving)
    actions = _end(fleet, hold) + _in_turn(fleet, hold) + _release_excess(fleet, hold)
    # Without a horizon: a pending job is given up only if it will never have work.
    waiting = _spare(fleet, [job for job in fleet.jobs if job.state == PENDING], inf)
    since = {job.pool: surplus.get(job.pool, now) for job in waiting}
    if may_shrink:
        # Work comes and goes between steps, whereas a lost place in the queue is lost.
        ripe = [job for job in waiting if now - since[job.pool] >= fleet.outlook[job.pool].usual_limit]
        pending = _Leavers(fleet, hold, "no work is left that they could run")
        for job in ripe:
            pending.take(job)
        actions += pending.actions() + _dismiss_idle(fleet, hold)
    return actions, since


def recall(fleet: Fleet) -> list[Recall]:
    """Recall leaving jobs that could be used again into the fleet; return the actions.

    The last in the order of leaving come first.  A job in the second half of its life is not recalled: it may have
    left to make room for its successor, and would leave again.
    """
    back: dict[Name, Job] = {}
    starving = [work for work in fleet.works if starves(fleet, work)]
    able = [job for job in fleet.leaving if job.threads > 0 and not fleet.is_old(job)]
    for job in sorted(able, key=_order, reverse=True):
        pool = fleet.pools[job.pool]
        others = [work for work in starving if not work.admits(job)]
        kept = sum(map(fleet.least_job, others))
        room = fleet.parameters.maximum - fleet.workers() - kept
        if pool.processes <= room and fleet.count(job.pool) < pool.maximum:
            fleet.call_back(job)
            back[job.name] = job
    for job in _spare(fleet, list(back.values())):
        fleet.let_go(back.pop(job.name))
    return [Recall(tuple(back), "the work can use them again")] if back else []


def useful(fleet: Fleet) -> dict[Name, int]:
    """Return by pool the jobs, new ones included, that the work can use soon or that the bounds require."""
    spare = Counter(job.pool for job in _spare(fleet, fleet.jobs))
    return {name: fleet.count(name) - spare[name] for name in fleet.pools}


class _FreeMemory:
    """The free memory of the jobs that stay, as leaving jobs use it up."""

    def __init__(self, jobs: Iterable[Job], moving: int) -> None:
        self._stay = {job.name: max(job.free, 0) for job in jobs if job.state == RUNNING}
        self._free = sum(self._stay.values())
        self.load = moving
        self.taken: set[Name] = set()

    def admits(self, job: Job) -> bool:
        """Return whether a job's unique data fits on the jobs that stay; where none stays, whether it has no data."""
        # There is no other job to take over its data.
        if len(self._stay) == (job.name in self._stay):
            return job.nbytes <= 0 and self.load <= 0
        # The job's own memory goes with it, and was counted as free.
        own = self._stay.get(job.name, 0)
        changes_nothing = job.unique <= 0 and own <= 0
        return changes_nothing or self.load + max(job.unique, 0) <= self._free - own

    def take(self, job: Job) -> None:
        self.taken.add(job.name)
        self.load += max(job.unique, 0)
        self._free -= self._stay.pop(job.name, 0)


class _Leavers:
    """The jobs that go for one reason: cancelled, drained, or kept because of their data."""

    def __init__(self, fleet: Fleet, hold: _FreeMemory, why: str, ordered: bool = False) -> None:
        self._fleet, self._hold, self._why, self._ordered = fleet, hold, why, ordered
        self._cancelled: list[Name] = []
        self._drained: list[Name] = []
        self._kept: list[Name] = []

    def take(self, job: Job, is_admitted: bool = False) -> bool:
        """Remove a job from the fleet; return whether it may go."""
        if job.state == PENDING:
            self._cancelled.append(job.name)
        # Under an order, its data does not keep a job.
        elif self._ordered or is_admitted or self._hold.admits(job):
            self._hold.take(job)
            self._drained.append(job.name)
        else:
            self._kept.append(job.name)
            return False
        self._fleet.remove(job)
        return True

    def actions(self) -> list[Action]:
        found: list[Action] = []
        if self._cancelled:
            found.append(Cancel(tuple(self._cancelled), self._why))
        if self._drained:
            found.append(Drain(tuple(self._drained), self._why, self._ordered))
        if self._kept:
            found.append(Keep(tuple(self._kept), f"{self._why}, but their unique data fits nowhere else"))
        return found


def _order(job: Job, ordered: bool = False) -> tuple[int, bool, int, float, int]:
    """Return the sort key that puts the jobs first that go first.

    Booting jobs come before running ones only under an order, since they hold no data.
    """
    if job.state == PENDING:
        return 0, False, 0, 0.0, -job.order
    booting = job.state == BOOTING
    return (2 - booting if ordered else 1 + booting), job.idle_for <= 0.0, job.unique, job.ends_in, -job.order


def _end(fleet: Fleet, hold: _FreeMemory) -> list[Action]:
    """Drain ending jobs: idle ones as soon as no replacement is on its way, all of them at the last moment."""
    leavers = _Leavers(fleet, hold, "their time ends")
    # A job that ends later may take over the data of one that ends now, though it counts as gone, too: a short life is
    # spent from its beginning on.
    stay = [job for job in (*fleet.jobs, *fleet.spent) if job.ends_in > fleet.parameters.notice]
    later = _FreeMemory(stay, hold.load)
    for job in sorted(fleet.spent, key=lambda job: (job.ends_in, _order(job))):
        if job.state != RUNNING or job.held:
            continue
        # An idle job that could not finish the longest task is of no use any more.
        longest = max((work.longest for work in fleet.works if job.pool in work.pools), default=0.0)
        idle = job.idle_for > (0.0 if job.ends_in < longest else fleet.outlook[job.pool].limit)
        goes = job.ends_in <= fleet.parameters.notice or (idle and not fleet.on_the_way(job.pool))
        if goes and leavers.take(job, is_admitted=later.admits(job)):
            later.take(job)
    return leavers.actions()


def _in_turn(fleet: Fleet, hold: _FreeMemory) -> list[Action]:
    """Drain jobs in turn, while others can take over their data, where no successor would arrive in time."""
    leavers = _Leavers(fleet, hold, "all would end before another could come")
    others = _FreeMemory(
        [job for job in (*fleet.jobs, *fleet.spent) if job.name not in hold.taken], hold.load
    )
    for job in due(fleet):
        if job.name not in hold.taken and others.admits(job):
            others.take(job)
            leavers.take(job, is_admitted=True)
    return leavers.actions()


def _release_excess(fleet: Fleet, hold: _FreeMemory) -> list[Action]:
    """Shrink to the maximum, busy jobs included."""
    p = fleet.parameters
    leavers = _Leavers(fleet, hold, f"at most {counted(p.maximum, 'worker')}", p.ordered)
    for job in sorted(fleet.jobs, key=lambda job: _order(job, p.ordered)):
        pool, workers = fleet.pools[job.pool], fleet.workers(new=False)
        many = workers > p.maximum or fleet.count(job.pool) - fleet.coming[job.pool] > pool.maximum
        # Rounding to whole jobs may exceed the minimum.
        if not many or workers < p.minimum + pool.processes:
            continue
        if p.ordered or (_may_be_excess(fleet, job) and not job.held):
            leavers.take(job)
    return leavers.actions()


def _may_be_excess(fleet: Fleet, job: Job) -> bool:
    """Return whether a job may go for the maximum.

    A booting job takes over from running ones, so it goes only if none runs or none is to stay.
    """
    if job.state != BOOTING:
        return True
    pool = fleet.pools[job.pool]
    nobody = min(fleet.parameters.maximum / pool.processes, pool.maximum) < 1
    return nobody or not any(other.state == RUNNING for other in fleet.jobs)


def _dismiss_idle(fleet: Fleet, hold: _FreeMemory) -> list[Action]:
    """Drain the idle jobs that the work cannot use soon; a job kept by its data does not replace another."""
    leavers = _Leavers(fleet, hold, "nothing to do for longer than a new job would take to come")
    # One after the other, as each reduces the slack for the next.
    slack = _Slack(fleet)
    for job in sorted(fleet.jobs, key=_order):
        is_idle = job.state == RUNNING and not job.held and job.idle_for >= fleet.outlook[job.pool].limit
        if is_idle and slack.spares(job) and leavers.take(job):
            slack.drop(job)
    return leavers.actions()


def _spare(fleet: Fleet, jobs: list[Job], within: float | None = None) -> list[Job]:
    """Return the jobs among these that neither the work nor the bounds need."""
    slack = _Slack(fleet, within)
    found = []
    for job in sorted(jobs, key=_order):
        if slack.spares(job):
            slack.drop(job)
            found.append(job)
    return found


def _busy_beside(theirs: Mapping[Name, float], need: float, powers: Mapping[Name, float]) -> float:
    """Return how many of the threads that one work needs come from pools that another work uses too."""
    total = sum(theirs.values())
    shared = sum(power for name, power in theirs.items() if name in powers)
    return min(need, total) * shared / max(total, 1.0)


class _Slack:
    """The number of threads that each work could lose without delaying any of its parallel tasks.

    It considers the next `within` seconds; by default the arrival time of a new job plus the idle limit.
    """

    def __init__(self, fleet: Fleet, within: float | None = None) -> None:
        self._fleet = fleet
        self._workers = fleet.workers()
        # Work that no job may run, and that the maximum has no room for, takes the place of idle jobs.
        starving = sum(fleet.least_job(work) for work in fleet.works if starves(fleet, work))
        self._minimum = fleet.parameters.minimum - max(starving - max(fleet.vacant(), 0.0), 0.0)
        self._counts = {name: fleet.count(name) for name in fleet.pools}
        # the third value: threads of pending and new jobs, by pool
        self._slack: list[tuple[MergedDemand, float, dict[Name, float]]] = []
        needs: list[tuple[dict[Name, float], float]] = []
        for work in fleet.works:
            powers = fleet.powers(work)
            total = sum(powers.values())
            need = _width(fleet, work, powers, within)
            # The threads that more restricted works keep busy are not available to this one.
            beside = sum(_busy_beside(theirs, other, powers) for theirs, other in needs)
            needs.append((powers, need))
            waiting = {name: fleet.coming[name] * fleet.power(work, name) for name in work.pools}
            for job in fleet.team(work):
                if job.state == PENDING:
                    waiting[job.pool] += fleet.power(work, job.pool, job.threads)
            self._slack.append((work, total - need - beside, waiting))

    def spares(self, job: Job) -> bool:
        """Return whether neither the work nor the bounds need a job."""
        pool = self._fleet.pools[job.pool]
        if self._workers - pool.processes < self._minimum or self._counts[job.pool] - 1 < pool.minimum:
            return False
        return all(
            left - self._elsewhere(job, waiting) >= self._fleet.power(work, job.pool, job.threads)
            for work, left, waiting in self._slack
            if work.admits(job)
        )

    def _elsewhere(self, job: Job, waiting: Mapping[Name, float]) -> float:
        """Return the pending threads that do not replace a pending job."""
        if job.state != PENDING:
            return 0.0
        return sum(power for name, power in waiting.items() if self._fleet.are_apart(name, job.pool))

    def drop(self, job: Job) -> None:
        """Remove a job from the slack."""
        self._workers -= self._fleet.pools[job.pool].processes
        self._counts[job.pool] -= 1
        for at, (work, left, waiting) in enumerate(self._slack):
            if work.admits(job):
                power = self._fleet.power(work, job.pool, job.threads)
                self._slack[at] = work, left - power, waiting
                if job.state == PENDING:
                    waiting[job.pool] -= power


def _width(fleet: Fleet, work: MergedDemand, powers: dict[Name, float], within: float | None) -> float:
    """Return the threads that a work could use at a time, at the speed of its fastest pool."""
    if within is None:
        within = max(fleet.outlook[name].lead + fleet.outlook[name].limit for name in work.pools)
    speed = max(work.speed(name) for name in work.pools)
    return speed * peak(work.profile, sum(powers.values()), within, fastest(work, powers))
