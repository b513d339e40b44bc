"""What a scheduler is told of jobs that may be preempted: whenever that changes, and that there are none in the end."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from dask_ferro.policy.scaling.facts import Pool
from dask_ferro.runtime.scheduler_calls import RosterCalls
from dask_ferro.runtime.site_jobs import SiteJob


class Exposures:
    """Whose jobs may be preempted, as a scheduler was told; None: nobody knows what it was told before."""

    def __init__(self) -> None:
        self.told: dict[str, str] | None = None

    async def tell(self, scheduler: RosterCalls, jobs: Iterable[SiteJob], kinds: Iterable[Pool]) -> None:
        """Tell of jobs of preemptible pools, where that has changed."""
        preemptible = {kind.name for kind in kinds if kind.preemptible}
        exposed: dict[str, str] = {}
        for job in jobs:
            if job.pool in preemptible:
                exposed |= dict.fromkeys(job.workers, job.name)
        if exposed != self.told:
            await scheduler.ferro_exposed(jobs=exposed)
        self.told = exposed

    async def take_back(self, scheduler: RosterCalls) -> None:
        """Tell that there are none: nobody would say when one is safe, or gone."""
        if self.told:
            with suppress(OSError):  # the scheduler is gone
                await scheduler.ferro_exposed(jobs={})
        self.told = None
