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
from math import ceil, inf

from dask_ferro.policy.scaling.facts import BOOTING, PENDING, RUNNING, Job
from dask_ferro.policy.scaling.fleet import Fleet


def due_jobs(fleet: Fleet) -> list[Job]:
    """Return the jobs that have to go now, the one that ends first in front.

    None has to while successors come in time, or while the data of the ending jobs fits on the others.  No job gives
    up more than half of its life, and half of them stay.
    """
    there = [job for job in (*fleet.jobs, *fleet.spent) if job.state == RUNNING]
    if all(pool.closed for pool in fleet.pools.values()):  # no successor can come
        return []
    ending = sorted((job for job in there if job.ends_in < inf), key=lambda job: (job.ends_in, job.order))
    coming = _arrivals(fleet, len(ending))
    cycles = accumulate(fleet.ahead[job.pool] for job in ending)
    late, most = 0, 1
    for count, (job, cycle) in enumerate(zip(ending, cycles, strict=True), 1):
        # Jobs up to this one have to be replaced one by one before it ends, but for those whose successors come anyway.
        alone = max(count - bisect_right(coming, job.ends_in), 0)
        seconds = cycle * alone / count
        if seconds > 0 and job.ends_in <= seconds:
            # So many of them at a time, to be done in time.
            late, most = count, max(most, ceil(seconds / (max(job.ends_in, 0.0) + cycle / count)))
    if not late or _fits(ending[:late], there):
        return []
    most = max(1, min(most, len(there) // 2))
    busy = len(fleet.leaving) + sum(job.state == BOOTING for job in fleet.jobs)
    able = [job for job in ending[:late] if not job.held and _is_old(fleet, job)]
    return able[: max(most - busy, 0)]


def _arrivals(fleet: Fleet, most: int) -> list[float]:
    """Return the seconds until successors arrive, including those that the maximum has room for.

    Without work, successors are requested one after the other, only to take over data.
    """
    found = [fleet.arrival(job) for job in fleet.jobs if job.state in (PENDING, BOOTING)]
    vacant = fleet.vacant()
    most = most if fleet.works else 1
    for name, outlook in fleet.outlook.items():
        found += [outlook.lead] * (fleet.coming[name] + min(fleet.room(name, vacant), most))
    return sorted(found)


def _is_old(fleet: Fleet, job: Job) -> bool:
    """Return whether a job has at most half of its life left."""
    return fleet.is_spent(job) or job.ends_in <= fleet.outlook[job.pool].working_life / 2


def _fits(ending: Sequence[Job], there: Sequence[Job]) -> bool:
    """Return whether the data that only these jobs hold fits on the jobs that do not end with them."""
    names = {job.name for job in ending}
    stay = [job for job in there if job.name not in names]
    if not stay:
        return not any(job.nbytes > 0 for job in ending)
    return sum(max(job.unique, 0) for job in ending) <= sum(max(job.free, 0) for job in stay)
