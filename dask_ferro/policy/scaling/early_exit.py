"""The jobs that have to go early, in turn, because otherwise no successor could take over their data at their end.

Jobs that were submitted together end together.  While the maximum (and the batch system's queue) has room, their
successors are requested ahead.  Where there is no room, a successor comes only when a job has gone, and all data
would be lost with the last job.  So the first job goes early, while the others can take its data; its successor
comes, and then the next one goes: each in time for all that end after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import ceil, floor, inf
from typing import NamedTuple

from dask_ferro.policy.scaling.facts import BOOTING, PENDING, RUNNING, Job
from dask_ferro.policy.scaling.fleet import Fleet


class _Turn(NamedTuple):
    """The jobs that end first, up to one of them, and the time that it takes to replace them one by one.

    Attributes
    ----------
    count : int
        Number of those jobs.
    ends_in : float
        Seconds until the last of them ends.
    seconds : float
        Seconds for replacing them one after the other, without those whose successors come anyway.
    cycle : float
        Seconds for replacing one of them.
    """

    count: int  # type: ignore[assignment]  # tuple has a method of that name
    ends_in: float
    seconds: float
    cycle: float

    @property
    def at_once(self) -> int:
        """How many jobs have to be replaced at a time to be done before the last of them ends."""
        return ceil(self.seconds / (max(self.ends_in, 0.0) + self.cycle)) if self.cycle else 1


def due(fleet: Fleet) -> list[Job]:
    """Return the jobs that have to go now, the one that ends first in front.

    None has to while successors come in time, or while the data of the ending jobs fits on the others.  No job gives
    up more than half of its life, and half of them stay.
    """
    there = [job for job in (*fleet.jobs, *fleet.spent) if job.state == RUNNING]
    if all(pool.closed for pool in fleet.pools.values()):  # no successor can come
        return []
    ending = sorted((job for job in there if job.ends_in < inf), key=lambda job: (job.ends_in, job.order))
    late = [turn for turn in _turns(fleet, ending) if turn.seconds > 0 and turn.ends_in <= turn.seconds]
    if not late:
        return []
    first = ending[: late[-1].count]
    if _fits(first, there):
        return []
    most = max(1, min(max(turn.at_once for turn in late), len(there) // 2))
    busy = len(fleet.leaving) + sum(job.state == BOOTING for job in fleet.jobs)
    able = [job for job in first if not job.held and fleet.is_old(job)]
    return able[: max(most - busy, 0)]


def _turns(fleet: Fleet, ending: Sequence[Job]) -> list[_Turn]:
    """Return a `_Turn` for each ending job, which covers it and all that end before it."""
    cycles, coming = accumulate(fleet.ahead[job.pool] for job in ending), _arrivals(fleet, len(ending))
    found = []
    for count, (job, seconds) in enumerate(zip(ending, cycles, strict=True), 1):
        alone = max(count - bisect_right(coming, job.ends_in), 0)
        found.append(_Turn(count, job.ends_in, seconds * alone / count, seconds / count))
    return found


def _arrivals(fleet: Fleet, most: int) -> list[float]:
    """Return the seconds until successors arrive, including those that the maximum has room for.

    Without work, successors are requested one after the other, only to take over data.
    """
    found = [fleet.arrival(job) for job in fleet.jobs if job.state in (PENDING, BOOTING)]
    vacant = fleet.vacant()
    most = most if fleet.works else 1
    for name, pool in fleet.pools.items():
        room = 0 if pool.closed else floor(min(vacant / pool.processes, fleet.openings(name), most))
        found += [fleet.lead(name)] * (fleet.coming[name] + max(room, 0))
    return sorted(found)


def _fits(ending: Sequence[Job], there: Sequence[Job]) -> bool:
    """Return whether the data that only these jobs hold fits on the jobs that do not end with them."""
    names = {job.name for job in ending}
    stay = [job for job in there if job.name not in names]
    if not stay:
        return not any(job.nbytes > 0 for job in ending)
    return sum(max(job.unique, 0) for job in ending) <= sum(max(job.free, 0) for job in stay)
