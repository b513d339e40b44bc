"""The remaining work of a virtual scheduler as given to scaling: phases that no client has submitted are unknown."""

from __future__ import annotations

from dask_ferro.policy.scaling.facts import Demand
from dask_ferro.policy.scaling.work_profile import profile, schedule
from dask_ferro.simulate.virtual_scheduler import Scheduler

# Up to this many tasks the demand is always recomputed; above, only after one task in this many has ended.
_FEW, _SHARE = 1000, 50


class Remaining:
    """The remaining work, recomputed less often for larger graphs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._seen = (-1, -1)
        self._demands: tuple[Demand, ...] = ()

    def demands(self) -> tuple[Demand, ...]:
        """Return the current demands: one, or none if no tasks are left."""
        scheduler = self._scheduler
        known, left = scheduler.known, scheduler.remaining
        stale = left <= _FEW or known != self._seen[0] or self._seen[1] - left > left // _SHARE
        if stale or left > self._seen[1]:
            self._seen = known, left
            self._demands = self._looked(known)
        return self._demands

    def _looked(self, known: int) -> tuple[Demand, ...]:
        jobs = [job for job in self._scheduler.jobs[:known] if not job.done]
        takes = {job: self._scheduler.decider.projected(job) for job in jobs}
        spans = schedule(
            [job for job in jobs if job.state != "waiting" or not job.missing],
            lambda job: (after for after in job.after if after.state == "waiting" and after in takes),
            lambda job: job.missing,
            takes.__getitem__,
        )
        found = tuple(profile(spans.values()))
        longest = max((seconds for job, seconds in takes.items() if job.state != "waiting"), default=0.0)
        return (Demand(found, longest=longest),) if found else ()
