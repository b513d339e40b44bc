"""How wide the remaining work of a virtual scheduler is, and for how long: what scaling is shown of it.

Each task is put where it would run with threads without end, by its projected seconds; the widths of that schedule
are the profile.  Tasks that no client has submitted yet are not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from dask_ferro.policy.staff import Demand
from dask_ferro.simulate.jobs import Job
from dask_ferro.simulate.scheduler import Scheduler

# Entries of a profile: steps of narrow width say nothing that a controller could use.
_ENTRIES = 64
# Begins and ends are told apart to a millisecond.
_DIGITS = 3
# Below so many tasks every look is a fresh one; above, the last one stands until one in so many is done.
_FEW, _SHARE = 1000, 50


class Remaining:
    """The work that is left, looked at as seldom as its size asks for."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._seen = (-1, -1)
        self._demands: tuple[Demand, ...] = ()

    def demands(self) -> tuple[Demand, ...]:
        """Return the demands of now: one, or none where nothing is left."""
        scheduler = self._scheduler
        known, left = scheduler.known, scheduler.remaining
        stale = left <= _FEW or known != self._seen[0] or self._seen[1] - left > left // _SHARE
        if stale or left > self._seen[1]:
            self._seen = known, left
            self._demands = self._looked(scheduler.jobs[:known])
        return self._demands

    def _looked(self, jobs: Iterable[Job]) -> tuple[Demand, ...]:
        changes: dict[float, int] = {}
        ends: dict[int, float] = {}
        longest = 0.0
        for job in jobs:
            if job.done:
                continue
            begin = max((ends.get(dependency.number, 0.0) for dependency in job.inputs), default=0.0)
            seconds = self._scheduler.decider.projected(job)
            end = ends[job.number] = begin + seconds
            if job.state != "waiting":
                longest = max(longest, seconds)
            begin, end = round(begin, _DIGITS), round(end, _DIGITS)
            changes[begin] = changes.get(begin, 0) + 1
            changes[end] = changes.get(end, 0) - 1
        profile = _shortened(_profile(changes))
        return (Demand(profile, longest=longest),) if profile else ()


def _profile(changes: dict[float, int]) -> list[tuple[float, float]]:
    """Return (seconds, width) from the changes of the width by time."""
    times = sorted(changes)
    width, found = 0, []
    for at, until in pairwise(times):
        width += changes[at]
        if width:
            found.append((until - at, float(width)))
    return found


def _shortened(profile: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the profile with neighbours joined, work and critical path kept."""
    each = -(-len(profile) // _ENTRIES)
    if each <= 1:
        return tuple(profile)
    found = []
    for first in range(0, len(profile), each):
        some = profile[first : first + each]
        seconds = sum(s for s, _ in some)
        found.append((seconds, sum(s * w for s, w in some) / seconds))
    return tuple(found)
