"""The jobs of a cluster as SLURM reports them: one look at the queue, and what follows from it for each job.

A look compares the rows of `squeue`, what `scontrol` says of jobs without a row, and the connected workers.  Jobs that
ended are noted in the book; their pool closes if too many fail.  Strays are cancelled: jobs of this cluster, or of a
dead one, that nobody follows (lost submissions, jobs thought gone).  Durations are seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from distributed import SpecCluster
from distributed.metrics import time

from dask_ferro.scheduler import upstream_deploy
from dask_ferro.slurm.cancel_queue import Cancellation
from dask_ferro.slurm.commands import RefusedError
from dask_ferro.slurm.job_book import JobBook
from dask_ferro.slurm.job_lifecycle import BatchJob, JobEnd, JobState, Patience
from dask_ferro.slurm.job_pools import JobPools
from dask_ferro.slurm.parsing import ENDING, TERMINAL, QueueRow
from dask_ferro.slurm.site import SlurmSite
from dask_ferro.slurm.submit_queue import Submission

logger = logging.getLogger(__name__)

# Seconds between the first sight of a stray and its cancellation, since `squeue` may be half a minute old.
_STRAY = 3.0


@dataclass
class QueueFollower:
    """Follows the jobs of one cluster."""

    cluster: SpecCluster
    site: SlurmSite
    book: JobBook
    submission: Submission
    cancellation: Cancellation
    pools: JobPools
    patience: Patience
    # When each stray was first seen, by id.
    strays: dict[str, float] = field(default_factory=dict)
    # The workers of jobs that ended for a reason that SLURM has not reported yet, by id.
    ending: dict[str, tuple[str, ...]] = field(default_factory=dict)

    async def look(self) -> None:
        """Process SLURM's present rows."""
        known = [job for job in self.book.followed if job.job_id]
        calls = self.submission.calls
        try:
            rows = await self.site.queue()
        except RefusedError as refused:
            logger.warning("dask_ferro: squeue failed: %s", refused.words)
            return
        connected = upstream_deploy.names_of(self.cluster)
        silent = (job for job in known if connected.isdisjoint(job.workers))
        unlisted = [job.job_id for job in silent if job.job_id not in rows]
        others = await self.site.unlisted(unlisted) if unlisted else {}
        runs = any(job.started_at is not None for job in known)
        draining = await self.site.draining() if runs else frozenset()
        blameless = self._follow(known, rows, others, draining)
        if not self.submission.in_flight and calls == self.submission.calls:
            self._look_after_strays(rows)
        if blameless:
            await self._unblame(blameless)

    async def _unblame(self, workers: list[str]) -> None:
        """Keep tasks from being blamed for the death of workers that died with their job."""
        try:
            await upstream_deploy.scheduler_rpc(self.cluster).ferro_unblame(names=workers)
        except Exception as error:  # noqa: BLE001 - no roster, no scheduler: nothing is taken back
            logger.debug("dask_ferro: tasks are blamed for a job that was ended: %r", error)

    def _follow(
        self,
        jobs: Iterable[BatchJob],
        rows: Mapping[str, QueueRow],
        others: Mapping[str, QueueRow | None],
        draining: frozenset[str],
    ) -> list[str]:
        """Process the rows; return the workers whose death is not the fault of their tasks."""
        now, connected = time(), upstream_deploy.names_of(self.cluster)
        blameless: list[str] = []
        for job in jobs:
            if job.state in (JobState.LEAVING, JobState.ENDED):
                continue  # released meanwhile
            before, restarts, workers = job.state, job.restarts, job.workers
            row = rows.get(job.job_id) or others.get(job.job_id)
            is_gone = row is None and job.job_id in others
            ending = job.follow(row, connected, now, self.patience, draining, is_sure=is_gone)
            if job.restarts != restarts or (ending is not None and row is not None and row.is_ended):
                blameless += workers
            elif ending is not None and row is not None and row.phase == ENDING:
                self.ending[job.job_id] = workers
            if ending is not None:
                self._end(job, ending)
                if not (is_gone or (row is not None and row.phase in (ENDING, TERMINAL))):
                    self.cancellation.add({job.job_id: job})
                continue
            if job.state != before:
                self.pools[job.pool].measure(job, before)
        for job_id in list(self.ending):
            row = rows.get(job_id)
            if row is None or row.phase == TERMINAL:
                workers = self.ending.pop(job_id)
                blameless += workers if row is not None and row.is_ended else ()
        return blameless

    def _end(self, job: BatchJob, ending: JobEnd) -> None:
        """React to the end of a job."""
        level = logging.INFO if ending.state == "COMPLETED" and job.was_whole else logging.WARNING
        logger.log(level, "dask_ferro: job %s (%s) is over: %s", job.name, job.job_id, ending.why)
        by_others = ending.state == "CANCELLED"
        self.book.end(job, "cancelled, and not by this cluster" if by_others else ending.why)
        kind = self.pools[job.pool]
        why = f"job {job.job_id}: {ending.why}"
        if job.node:
            address = upstream_deploy.scheduler_address(self.cluster)
            why += f" on {job.node}, whose workers connect to {address} by {kind.job.network}"
        if ending.refused:
            self.pools.begin(self.pools.close_pool(kind, why))
        elif ending.failed and (reason := kind.fail(why)):
            printed = not (ending.is_held and job.started_at is None)
            self.pools.begin(self.pools.close_pool(kind, reason, job if printed else None))

    def _look_after_strays(self, rows: Mapping[str, QueueRow]) -> None:
        """Cancel the jobs that nobody follows, once they have been seen for a while."""
        followed = {job.job_id for job in self.book.jobs.values()} | self.cancellation.jobs.keys()
        alive = (row.job_id for row in rows.values() if row.phase not in (ENDING, TERMINAL))
        now = time()
        self.strays = {job_id: self.strays.get(job_id, now) for job_id in alive if job_id not in followed}
        if ripe := [job_id for job_id, at in self.strays.items() if now - at >= _STRAY]:
            logger.warning("dask_ferro: cancelled jobs that no cluster follows: %s", ", ".join(ripe))
            self.cancellation.add(dict.fromkeys(ripe))
