"""The cancellation of jobs: `scancel`, repeated until SLURM confirms that they are gone.

A job whose cancellation SLURM missed would run for its whole walltime, unseen.  A job missing from `squeue` need not
be gone: `scontrol` is asked.  While its time lasts, a running job lets its workers retire (`job_preload`).  Durations
are seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress

from dask_ferro.slurm.commands import RefusedError
from dask_ferro.slurm.job_lifecycle import BatchJob
from dask_ferro.slurm.parsing import ENDING, TERMINAL, QueueRow
from dask_ferro.slurm.site import SlurmSite

logger = logging.getLogger(__name__)

# Seconds between two attempts, at first and at most.
_PAUSE, _PAUSE_MOST = 0.1, 3.0


class Cancellation:
    """The jobs that are to end, and the callers that wait for that.

    Parameters
    ----------
    site : SlurmSite
    """

    def __init__(self, site: SlurmSite) -> None:
        self._site = site
        # The jobs, which are None if nobody followed them, and the futures of their ends, by id.
        self.jobs: dict[str, BatchJob | None] = {}
        self._ends: dict[str, asyncio.Future[None]] = {}
        self._added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # The phases of a job that is gone; at the end of the cluster none may be left in the queue.
        self._gone: tuple[str, ...] = (ENDING, TERMINAL)

    def add(self, jobs: Mapping[str, BatchJob | None]) -> None:
        """End jobs, by their ids, in the background."""
        loop = asyncio.get_running_loop()
        for job_id, job in jobs.items():
            if job_id not in self._ends:
                self.jobs[job_id], self._ends[job_id] = job, loop.create_future()
                self._added.set()
        if self._ends and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._cancel_all())

    async def gone(self, jobs: Mapping[str, BatchJob | None]) -> None:
        """End jobs, by their ids; return when SLURM confirms that they are ending."""
        self.add(jobs)
        if jobs:
            await asyncio.wait([self._ends[job_id] for job_id in jobs])

    async def all_gone(self, job_ids: Iterable[str], patience: float) -> bool:
        """End these jobs and all others of the cluster; return whether none is left within `patience` seconds."""
        self._gone, left = (TERMINAL,), dict.fromkeys(job_ids)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while True:
                    await self.gone(left | dict.fromkeys(self._ends))
                    if (rows := await self._listed()) is None:
                        await asyncio.sleep(_PAUSE_MOST)
                        continue
                    left = {job_id: None for job_id, row in rows.items() if row.phase != TERMINAL}
                    if not left:
                        return True
        return False

    async def close(self) -> None:
        """Stop the attempts; waiting callers return."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1.0)
        self._tell(list(self._ends))

    async def _cancel_all(self) -> None:
        pause = _PAUSE
        while self._ends:
            self._added.clear()
            await self._site.cancel(list(self._ends))
            await self._look(await self._listed() or {})
            if not self._ends:
                return
            try:
                await asyncio.wait_for(self._added.wait(), pause)
                pause = _PAUSE
            except TimeoutError:
                pause = min(pause * 2, _PAUSE_MOST)

    async def _listed(self) -> dict[str, QueueRow] | None:
        """Return the rows of `squeue`; None: it did not answer."""
        try:
            return await self._site.queue()
        except RefusedError as refused:
            logger.warning("dask_ferro: squeue failed: %s", refused.words)
            return None

    async def _look(self, rows: Mapping[str, QueueRow]) -> None:
        """Process the rows of `squeue`, and those of `scontrol` for jobs that it does not list."""
        unlisted = [job_id for job_id in self._ends if job_id not in rows]
        others = await self._site.unlisted(unlisted) if unlisted else {}
        gone = [job_id for job_id, row in others.items() if row is None]
        gone += [
            job_id
            for job_id, row in {**others, **rows}.items()
            if row is not None and row.phase in self._gone
        ]
        self._tell([job_id for job_id in dict.fromkeys(gone) if job_id in self._ends])

    def _tell(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            del self.jobs[job_id]
            if not (end := self._ends.pop(job_id)).done():
                end.set_result(None)
