"""The reports to a scheduler which jobs may be preempted: after each change, and an empty one at the end."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from dask_ferro.policy.scaling.facts import Pool
from dask_ferro.runtime.scheduler_calls import RosterCalls
from dask_ferro.runtime.site_jobs import SiteJob


class Exposures:
    """The jobs reported to a scheduler as preemptible; None: earlier reports are unknown."""

    def __init__(self) -> None:
        self.told: dict[str, str] | None = None

    async def tell(self, scheduler: RosterCalls, jobs: Iterable[SiteJob], kinds: Iterable[Pool]) -> None:
        """Report the workers of preemptible pools, if they have changed."""
        preemptible = {kind.name for kind in kinds if kind.preemptible}
        exposed: dict[str, str] = {}
        for job in jobs:
            if job.pool in preemptible:
                exposed |= dict.fromkeys(job.workers, job.name)
        if exposed != self.told:
            await scheduler.ferro_exposed(jobs=exposed)
        self.told = exposed

    async def take_back(self, scheduler: RosterCalls) -> None:
        """Report that there are none, since later changes would not be reported."""
        if self.told:
            with suppress(OSError):  # the scheduler is gone
                await scheduler.ferro_exposed(jobs={})
        self.told = None
