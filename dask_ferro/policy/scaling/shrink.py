"""Shrinking: the jobs that go because of the bounds, their end, or lack of work.

Pending jobs hold no data and go first, the newest in front, so that the oldest keeps its place in the batch system's
queue.  Pending jobs of one pool do not replace those of another, whose queue may be much slower.  Of running jobs
those with the least unique data go first, then those that end first, then the newest; a job stays if its data fits
nowhere or if it was refused a moment ago.  If the fleet is over the maximum, jobs that no work could use go before
others of their state.  A booting job goes only for the maximum, where no running one could go
instead.  Where the maximum is an order (`scale(n)`), jobs go down to it in any case, booting ones before those with
data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from dask_ferro.policy.scaling.early_exit import due_jobs
from dask_ferro.policy.scaling.facts import BOOTING, PENDING, RUNNING, Action, Cancel, Drain, Job, Keep, Name
from dask_ferro.policy.scaling.fleet import Fleet, MergedDemand, format_count
from dask_ferro.policy.scaling.grow import fastest
from dask_ferro.policy.scaling.work_profile import peak


def shrink(
    fleet: Fleet, surplus: Mapping[Name, float], now: float, moving: int = 0
) -> tuple[list[Action], dict[Name, float]]:
    """Remove jobs from the fleet; return the actions, and since when each pool has had surplus pending jobs.

    Parameters
    ----------
    surplus : mapping of pool to float
        As returned by the previous step.
    moving : int
        Bytes that jobs which left earlier still have to hand over.
    """
    # A job that ends later may take over the data of one that ends now, though it counts as gone, too: a short life is
    # spent from its beginning on.
    later = [job for job in (*fleet.jobs, *fleet.spent) if job.ends_in > fleet.parameters.notice]
    ending = _Exits(fleet, later, moving)
    _end(fleet, ending)
    _in_turn(fleet, ending)
    others = _Exits(fleet, fleet.jobs, ending.moving)
    _release_excess(fleet, others)
    waiting = _surplus(fleet)
    since = {job.pool: surplus.get(job.pool, now) for job in waiting}
    # While jobs are to come, none goes for lack of work, even if the queue takes no more of them.
    if not fleet.coming.total():
        for job in waiting:
            # Work comes and goes between steps, whereas a lost place in the queue is lost.
            if now - since[job.pool] >= fleet.outlook[job.pool].queue_limit:
                others.take(job, "no work is left that they could run")
        _dismiss_idle(fleet, others)
    return [*ending.actions(), *others.actions()], since


class _Exits:
    """The jobs that go, and the free memory of the running ones among those that stay."""

    def __init__(self, fleet: Fleet, stay: Iterable[Job], moving: int) -> None:
        self._fleet = fleet
        self._stay = {job.name: max(job.free, 0) for job in stay if job.state == RUNNING}
        self._free = sum(self._stay.values())
        self._actions: dict[tuple[type[Cancel | Drain | Keep], str, bool], list[Name]] = {}
        self.moving = moving
        self.taken: set[Name] = set()

    def fits(self, job: Job) -> bool:
        """Return whether a job's unique data fits on the jobs that stay; where none stays, whether it has no data."""
        # There is no other job to take over its data.
        if len(self._stay) == (job.name in self._stay):
            return job.nbytes <= 0 and self.moving <= 0
        # The job's own memory goes with it, and was counted as free.
        own = self._stay.get(job.name, 0)
        changes_nothing = job.unique <= 0 and own <= 0
        return changes_nothing or self.moving + max(job.unique, 0) <= self._free - own

    def take(self, job: Job, why: str, ordered: bool = False) -> bool:
        """Remove a job from the fleet, unless its data keeps it, which it does not under an order."""
        may_drain = ordered or self.fits(job)
        kind = Cancel if job.state == PENDING else Drain if may_drain else Keep
        self._actions.setdefault((kind, why, ordered), []).append(job.name)
        if kind is Keep:
            return False
        self.taken.add(job.name)
        self.moving += max(job.unique, 0)
        self._free -= self._stay.pop(job.name, 0)
        self._fleet.remove(job)
        return True

    def actions(self) -> list[Action]:
        """Return the actions by reason."""
        found: list[Action] = []
        for (kind, why, ordered), names in self._actions.items():
            if kind is Drain:
                found.append(Drain(tuple(names), why, ordered))
            elif kind is Cancel:
                found.append(Cancel(tuple(names), why))
            else:
                found.append(Keep(tuple(names), f"{why}, but their unique data fits nowhere else"))
        return found


def _order(job: Job, ordered: bool = False) -> tuple[int, bool, int, float, int]:
    """Return the sort key that puts the jobs first that go first.

    Booting jobs come before running ones only under an order, since they hold no data.
    """
    if job.state == PENDING:
        return 0, False, 0, 0.0, -job.order
    booting = job.state == BOOTING
    return (2 - booting if ordered else 1 + booting), job.idle_for <= 0.0, job.unique, job.ends_in, -job.order


def _end(fleet: Fleet, exits: _Exits) -> None:
    """Drain ending jobs: idle ones as soon as no replacement is on its way, all of them at the last moment."""
    for job in sorted(fleet.spent, key=lambda job: (job.ends_in, _order(job))):
        if job.state != RUNNING or job.held:
            continue
        # An idle job that could not finish the longest task is of no use any more.
        longest = max((work.longest for work in fleet.works if job.pool in work.pools), default=0.0)
        idle = job.idle_for > (0.0 if job.ends_in < longest else fleet.outlook[job.pool].limit)
        if job.ends_in <= fleet.parameters.notice or (idle and not fleet.on_the_way(job.pool)):
            exits.take(job, "their time ends")


def _in_turn(fleet: Fleet, exits: _Exits) -> None:
    """Drain jobs in turn, while others can take over their data, where no successor would arrive in time."""
    for job in due_jobs(fleet):
        if job.name not in exits.taken and exits.fits(job):
            exits.take(job, "all would end before another could come")


def _release_excess(fleet: Fleet, exits: _Exits) -> None:
    """Shrink to the maximum, busy jobs included."""
    p = fleet.parameters
    new = sum(count * fleet.pools[name].processes for name, count in fleet.coming.items())

    def order(job: Job) -> tuple[int, bool, tuple[int, bool, int, float, int]]:
        """Put jobs that no work could use first among those of one state."""
        usual = _order(job, p.ordered)
        return usual[0], any(work.admits(job) for work in fleet.works), usual

    for job in sorted(fleet.jobs, key=order):
        pool, workers = fleet.pools[job.pool], fleet.workers() - new
        many = workers > p.maximum or fleet.count(job.pool) - fleet.coming[job.pool] > pool.maximum
        # Rounding to whole jobs may exceed the minimum.
        if not many or workers < p.minimum + pool.processes:
            continue
        if p.ordered or (_may_be_excess(fleet, job) and not job.held):
            exits.take(job, f"at most {format_count(p.maximum, 'worker')}", p.ordered)


def _may_be_excess(fleet: Fleet, job: Job) -> bool:
    """Return whether a job may go for the maximum.

    A booting job takes over from running ones, so it goes only if none runs or none is to stay.
    """
    if job.state != BOOTING:
        return True
    pool = fleet.pools[job.pool]
    nobody = min(fleet.parameters.maximum / pool.processes, pool.maximum) < 1
    return nobody or not any(other.state == RUNNING for other in fleet.jobs)


def _dismiss_idle(fleet: Fleet, exits: _Exits) -> None:
    """Drain the idle jobs that the work cannot use soon; a job kept by its data does not replace another."""
    # One after the other, as each reduces the slack for the next.
    slack = _Slack(fleet)
    for job in sorted(fleet.jobs, key=_order):
        is_idle = job.state == RUNNING and not job.held and job.idle_for >= fleet.outlook[job.pool].limit
        why = "nothing to do for longer than a new job would take to come"
        if is_idle and slack.spares(job) and exits.take(job, why):
            slack.drop(job)


def _surplus(fleet: Fleet) -> list[Job]:
    """Return the pending jobs that neither the work nor the bounds will ever need."""
    slack, found = _Slack(fleet, within=inf), []
    for job in sorted((job for job in fleet.jobs if job.state == PENDING), key=_order):
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
        self._workers, self._minimum = fleet.workers(), fleet.minimum()
        self._counts = {name: fleet.count(name) for name in fleet.pools}
        # the third value: threads of pending and new jobs, by pool
        self._slack: list[tuple[MergedDemand, float, dict[Name, float]]] = []
        needs: list[tuple[dict[Name, float], float]] = []
        for work in fleet.works:
            powers = fleet.powers(work)
            need = _width(fleet, work, powers, within)
            # The threads that more restricted works keep busy are not available to this one.
            beside = sum(_busy_beside(theirs, other, powers) for theirs, other in needs)
            needs.append((powers, need))
            waiting = fleet.powers(work, [job for job in fleet.team(work) if job.state == PENDING])
            self._slack.append((work, sum(powers.values()) - need - beside, waiting))

    def spares(self, job: Job) -> bool:
        """Return whether neither the work nor the bounds need a job."""
        pool = self._fleet.pools[job.pool]
        if self._workers - pool.processes < self._minimum or self._counts[job.pool] - 1 < pool.minimum:
            return False
        for work, left, waiting in self._slack:
            if work.admits(job):
                # Another pool's queue may take much longer: what waits there does not replace a pending job.
                elsewhere = sum(waiting.values()) - waiting[job.pool] if job.state == PENDING else 0.0
                if left - elsewhere < self._fleet.power(work, job.pool, job.threads):
                    return False
        return True

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
