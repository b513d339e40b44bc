"""Jobs on their way out of SLURM's queue: `scancel`, until `squeue` agrees.

A cancellation that SLURM did not hear is a job that runs for its whole walltime, unseen.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from dask_ferro.runtime.slurmsite import Refused, Site
from dask_ferro.runtime.squeue import ENDING, OVER

logger = logging.getLogger(__name__)

# Between two tries, at first and at most.
_PAUSE, _PAUSE_MOST = 0.5, 30.0


class Cancellation:
    """Jobs that are to end, and those who wait for that.

    Parameters
    ----------
    site : Site
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, job_ids: Iterable[str]) -> None:
        """End jobs, in the background."""
        loop = asyncio.get_running_loop()
        for job_id in job_ids:
            if job_id not in self._ends:
                self._ends[job_id] = loop.create_future()
                self._added.set()
        if self._ends and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._cancel_all())

    async def gone(self, job_ids: Iterable[str]) -> None:
        """End jobs; return when `squeue` says that they do."""
        job_ids = list(job_ids)
        self.add(job_ids)
        waited = [self._ends[job_id] for job_id in job_ids]
        if waited:
            await asyncio.wait(waited)

    async def close(self) -> None:
        """Stop trying; whoever waits is told that it is over."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1.0)
        self._tell(list(self._ends))

    async def _cancel_all(self) -> None:
        pause = _PAUSE
        while self._ends:
            self._added.clear()
            await self._site.cancel(list(self._ends))
            try:
                found = await self._site.queue()
            except Refused as refused:
                logger.warning("dask_ferro: squeue failed: %s", refused.words)
            else:
                self._tell([i for i in self._ends if i not in found or found[i].phase in (ENDING, OVER)])
            if not self._ends:
                return
            try:
                await asyncio.wait_for(self._added.wait(), pause)
                pause = _PAUSE
            except TimeoutError:
                pause = min(pause * 2, _PAUSE_MOST)

    def _tell(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            end = self._ends.pop(job_id)
            if not end.done():
                end.set_result(None)
