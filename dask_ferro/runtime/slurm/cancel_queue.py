"""The cancellation of jobs: `scancel`, repeated until SLURM confirms that they are gone.

A job whose cancellation SLURM missed would run for its whole walltime, unseen.  A pending one may have started by the
time that SLURM reacts: its workers retire before the next attempt.  A job missing from `squeue` need not be gone:
other commands are asked.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from dask_ferro.runtime.slurm.parsing import ENDING, OVER, QueueRow
from dask_ferro.runtime.slurm.site import SlurmSite

logger = logging.getLogger(__name__)

# Seconds between two attempts, at first and at most.
_PAUSE, _PAUSE_MOST = 0.5, 30.0
# Seconds without a row in squeue after which a job counts as gone if no other command answers.
_UNLISTED = 60.0
# Number of checks after which a squeue that still lists a job as alive may be outdated.
_LOOKS = 3
# Seconds for workers that are connected although their job was cancelled; then the job ends with them.
_LEAVING = 30.0


@dataclass(eq=False)
class _End:
    """A job that is to end.

    Attributes
    ----------
    job : BatchJob or None
        None if its workers are unknown.
    leaves : asyncio.Task or None
        The retirement of its workers.
    until : float or None
        The end of the workers' time; None while none was connected.
    unlisted_at : float or None
        Since when `squeue` has not listed it.
    looks : int
        The number of checks.
    """

    over: asyncio.Future[None]
    job: BatchJob | None
    leaves: asyncio.Task[bool] | None = None
    until: float | None = None
    unlisted_at: float | None = None
    looks: int = 0


class Cancellation:
    """The jobs that are to end, and the callers that wait for that.

    Parameters
    ----------
    site : SlurmSite
    connected : callable
        Returns the addresses of a job's workers at the scheduler.
    leave : callable
        Retires workers from the scheduler; returns whether they have left.
    """

    def __init__(
        self,
        site: SlurmSite,
        connected: Callable[[BatchJob], list[str]],
        leave: Callable[[list[str]], Awaitable[bool]],
    ) -> None:
        self._site, self._connected, self._leave = site, connected, leave
        self._ends: dict[str, _End] = {}
        self._added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def jobs(self) -> list[BatchJob]:
        """The followed jobs that may still exist."""
        return [end.job for end in self._ends.values() if end.job is not None]

    @property
    def job_ids(self) -> set[str]:
        """The ids of all jobs that may still exist."""
        return set(self._ends)

    def add(self, jobs: Mapping[str, BatchJob | None]) -> None:
        """End jobs, by their ids, in the background."""
        loop = asyncio.get_running_loop()
        for job_id, job in jobs.items():
            if job_id not in self._ends:
                self._ends[job_id] = _End(loop.create_future(), job)
                self._added.set()
        if self._ends and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._cancel_all())

    async def gone(self, jobs: Iterable[BatchJob]) -> None:
        """End jobs; return when SLURM confirms that they are ending."""
        wanted = {job.job_id: job for job in jobs}
        self.add(wanted)
        if wanted:
            await asyncio.wait([self._ends[job_id].over for job_id in wanted])

    async def close(self) -> None:
        """Stop the attempts; waiting callers return."""
        tasks = [self._task, *(end.leaves for end in self._ends.values())]
        running = {task for task in tasks if task is not None and not task.done()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=1.0)
        self._tell(list(self._ends))

    async def _cancel_all(self) -> None:
        pause = _PAUSE
        while self._ends:
            self._added.clear()
            await self._site.cancel([job_id for job_id, end in self._ends.items() if self._may_end(end)])
            await self._look(await self._listed())
            if not self._ends:
                return
            try:
                await asyncio.wait_for(self._added.wait(), pause)
                pause = _PAUSE
            except TimeoutError:
                pause = min(pause * 2, _PAUSE_MOST)

    def _may_end(self, end: _End) -> bool:
        """Return whether a job may be cancelled now; if its workers are connected, retire them first."""
        if end.job is None or not (addresses := self._connected(end.job)):
            return True
        now = asyncio.get_running_loop().time()
        if end.until is None:
            end.until = now + _LEAVING
        if now >= end.until:
            return True
        if end.leaves is None or end.leaves.done():
            end.leaves = asyncio.create_task(self._let_leave(addresses))
        return False

    async def _let_leave(self, addresses: list[str]) -> bool:
        left = await self._leave(addresses)
        if left:
            self._added.set()
        return left

    async def _listed(self) -> dict[str, QueueRow] | None:
        """Return the rows of `squeue`; None: it did not answer."""
        try:
            return await self._site.queue()
        except Refused as refused:
            logger.warning("dask_ferro: squeue failed: %s", refused.words)
            return None

    async def _look(self, answer: Mapping[str, QueueRow] | None) -> None:
        """Process the rows of `squeue`, and those of other commands where it may be wrong or gave no answer."""
        listed = answer or {}
        doubtful = [job_id for job_id, end in self._ends.items() if _is_doubtful(end, listed.get(job_id))]
        others = await self._site.unlisted(doubtful) if doubtful else {}
        now = asyncio.get_running_loop().time()
        gone = []
        for job_id, end in self._ends.items():
            row = others.get(job_id) or listed.get(job_id)
            if row is not None:
                is_gone = row.phase in (ENDING, OVER)
                end.unlisted_at = None
                if end.job is not None and row.restarts > end.job.restarts:
                    end.job.restarts = row.restarts  # its workers have other names then
            else:
                if answer is not None and end.unlisted_at is None:
                    end.unlisted_at = now
                for_long = end.unlisted_at is not None and now - end.unlisted_at >= _UNLISTED
                is_gone = job_id in others or for_long
            end.looks += 1
            if is_gone:
                gone.append(job_id)
        self._tell(gone)

    def _tell(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            end = self._ends.pop(job_id)
            if not end.over.done():
                end.over.set_result(None)


def _is_doubtful(end: _End, row: QueueRow | None) -> bool:
    """Return whether the row of `squeue` for a job may be wrong."""
    return row is None or (end.looks >= _LOOKS and row.phase not in (ENDING, OVER))
