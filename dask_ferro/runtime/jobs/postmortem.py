"""What is asked of SLURM in the background once a job has ended.

Durations are seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence

from dask_ferro.runtime.jobs.connections import Connections
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from dask_ferro.runtime.slurm.parsing import OVER, exit_status
from dask_ferro.runtime.slurm.site import SlurmSite

# SLURM keeps a job in state COMPLETING until its epilog is over.
_ASK_WHY = (3.0, 10.0, 60.0)
# The most failed jobs whose exit status is asked for at a time; a broken script fails hundreds at once.
_EXITS = 4


class Postmortems:
    """The open questions about jobs that have ended.

    Parameters
    ----------
    site : SlurmSite
    connections : Connections
        Takes back the blame of tasks.
    """

    def __init__(self, site: SlurmSite, connections: Connections) -> None:
        self._site, self._connections = site, connections
        # asyncio itself holds tasks weakly.
        self._open: set[asyncio.Task[None]] = set()
        self._exits = asyncio.Semaphore(_EXITS)

    def ended_by_site(self, workers: Sequence[str]) -> None:
        """Take back the blame of the tasks of workers whose job was ended."""
        self._begin(self._connections.unblame(workers))

    def is_ending(self, job: BatchJob, workers: Sequence[str]) -> None:
        """Find out why a job ends, if SLURM only says that it does, and take back the blame of its tasks."""
        self._begin(self._learn_why(job.job_id, workers))

    def failed(self, job: BatchJob) -> None:
        """Add a failed job's exit status to its ending; if many fail at once, of some."""
        if not self._exits.locked():
            self._begin(self._learn_exit(job))

    async def close(self) -> None:
        """Give up the open questions."""
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    async def _learn_why(self, job_id: str, workers: Sequence[str]) -> None:
        for seconds in _ASK_WHY:
            await asyncio.sleep(seconds)
            row = (await self._site.unlisted([job_id])).get(job_id)
            if row is not None and row.phase == OVER:
                if row.is_ended:
                    await self._connections.unblame(workers)
                return

    async def _learn_exit(self, job: BatchJob) -> None:
        async with self._exits:
            try:
                shown = await self._site.ask("scontrol", "--oneliner", "show", "job", job.job_id)
            except Refused:
                return  # then only the reason is known
            job.ending = ", ".join(filter(None, (job.ending, exit_status(shown))))

    def _begin(self, what: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(what)
        self._open.add(task)
        task.add_done_callback(self._open.discard)
