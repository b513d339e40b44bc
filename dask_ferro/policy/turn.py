"""Which jobs go before their time, one after the other, because nobody could take over from them at their end.

Jobs that were submitted together end together.  As long as the maximum (or the batch system's queue) has room, their
successors come ahead.  Where it has none, a successor comes only when a job has gone, and what all hold would go with
the last of them.  So the first goes early, while the others can take what it holds; its successor comes, and then the
next one goes: each in time for all that end after it.
"""

from __future__ import annotations

from itertools import accumulate
from math import ceil, floor, inf
from typing import NamedTuple

from dask_ferro.policy.crew import Crew
from dask_ferro.policy.staff import BOOTING, PENDING, RUNNING, Job


class _Turn(NamedTuple):
    """The jobs that end first, up to one of them, and the turns that it takes to replace them.

    Attributes
    ----------
    seconds : float
        That their turns take, one after the other, without those for whom a successor comes anyway.
    cycle : float
        That one turn takes.
    """

    jobs: tuple[Job, ...]
    seconds: float
    cycle: float

    @property
    def ends_in(self) -> float:
        """Seconds until the last of them ends."""
        return self.jobs[-1].ends_in

    @property
    def at_once(self) -> int:
        """How many turns at a time are in time for the last of them."""
        return ceil(self.seconds / (self.ends_in + self.cycle))


def due(crew: Crew) -> list[Job]:
    """Return the jobs that have to go now, the one that ends first before the others.

    None has to while successors come in time, nor while what those hold that end fits on the others.  No job gives up
    more than half of its life, and half of them stay.
    """
    there = [job for job in (*crew.jobs, *crew.spent) if job.state == RUNNING]
    ending = sorted(
        (job for job in there if job.ends_in < inf and not crew.pools[job.pool].closed),
        key=lambda job: (job.ends_in, job.order),
    )
    late = [turn for turn in _turns(crew, ending) if turn.ends_in <= turn.seconds]
    if not late or _fits(late[-1].jobs, there):
        return []
    most = max(1, min(max(turn.at_once for turn in late), len(there) // 2))
    busy = len(crew.leaving) + sum(job.state == BOOTING for job in crew.jobs)
    able = [job for job in late[-1].jobs if not job.held and crew.is_old(job)]
    return able[: max(most - busy, 0)]


def _turns(crew: Crew, ending: list[Job]) -> list[_Turn]:
    """Return for each job that ends the turns of it and of those before it."""
    cycles = list(accumulate(crew.ahead(job.pool) for job in ending))
    found = []
    for count, (job, seconds) in enumerate(zip(ending, cycles, strict=True), 1):
        open_ = max(count - _successors(crew, job), 0)
        found.append(_Turn(tuple(ending[:count]), seconds * open_ / count, seconds / count))
    return found


def _successors(crew: Crew, job: Job) -> int:
    """Return how many jobs come before one ends, those included that the maximum has room for."""
    coming = [other for other in crew.jobs if other.state in (PENDING, BOOTING)]
    found = sum(crew.arrival(other) <= job.ends_in for other in coming)
    for name, pool in crew.pools.items():
        if not pool.closed and crew.lead(name) <= job.ends_in:
            room = min(crew.vacant() / pool.processes, crew.openings(name), len(crew.jobs) + len(crew.spent))
            found += crew.coming[name] + max(floor(room), 0)
    return found


def _fits(ending: tuple[Job, ...], there: list[Job]) -> bool:
    """Whether what jobs alone hold fits on those that do not end with them."""
    names = {job.name for job in ending}
    free = sum(max(job.free, 0) for job in there if job.name not in names)
    return sum(max(job.unique, 0) for job in ending) <= free
