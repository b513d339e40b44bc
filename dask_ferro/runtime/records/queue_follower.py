"""The jobs of a cluster as SLURM reports them: one look at the queue, and what follows from it for each job.

A look compares the rows of `squeue`, what SLURM says of jobs without a row, and the connected workers.  Jobs that ended
are noted in the book; their pool closes if too many fail; what nobody follows is cancelled.  Durations are seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from distributed.metrics import time

from dask_ferro.runtime.jobs.connections import Connections
from dask_ferro.runtime.jobs.postmortem import Postmortems
from dask_ferro.runtime.pools.job_pools import JobPools
from dask_ferro.runtime.records.job_book import JobBook
from dask_ferro.runtime.slurm.cancel_queue import Cancellation
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob, Ending, JobState, Patience
from dask_ferro.runtime.slurm.parsing import ENDING, OVER, QueueRow
from dask_ferro.runtime.slurm.site import SlurmSite
from dask_ferro.runtime.slurm.strays import Strays
from dask_ferro.runtime.slurm.submit_queue import Submission

logger = logging.getLogger(__name__)


@dataclass
class QueueFollower:
    """Follows the jobs of one cluster."""

    site: SlurmSite
    book: JobBook
    submission: Submission
    cancellation: Cancellation
    connections: Connections
    postmortems: Postmortems
    pools: JobPools
    patience: Patience
    strays: Strays = field(default_factory=Strays)

    async def look(self) -> None:
        """Process SLURM's present rows."""
        known = [job for job in self.book.followed if job.job_id]
        attempts = self.submission.attempts
        try:
            rows = await self.site.queue()
        except Refused as refused:
            logger.warning("dask_ferro: squeue failed: %s", refused.words)
            return
        connected = self.connections.names()
        silent = (job for job in known if connected.isdisjoint(job.workers))
        unlisted = [job.job_id for job in silent if job.job_id not in rows]
        others = await self.site.unlisted(unlisted) if unlisted else {}
        on_nodes = any(row.node and row.phase != OVER for row in rows.values())
        draining = await self.site.draining() if on_nodes else frozenset()
        self._follow(known, rows, others, draining)
        if not self.submission.in_flight and attempts == self.submission.attempts:
            self._look_after_strays(rows)

    def _follow(
        self,
        jobs: Iterable[BatchJob],
        rows: Mapping[str, QueueRow],
        others: Mapping[str, QueueRow | None],
        draining: frozenset[str],
    ) -> None:
        now, connected = time(), self.connections.names()
        for job in jobs:
            if job.state in (JobState.LEAVING, JobState.ENDED):
                continue  # released meanwhile
            before, restarts, workers = job.state, job.restarts, job.workers
            row = rows.get(job.job_id) or others.get(job.job_id)
            is_gone = row is None and job.job_id in others
            ending = job.follow(row, connected, now, self.patience, draining, is_sure=is_gone)
            if job.restarts != restarts or (ending is not None and row is not None and row.is_ended):
                self.postmortems.ended_by_site(workers)
            elif ending is not None and row is not None and row.phase == ENDING:
                self.postmortems.is_ending(job, workers)
            if ending is not None:
                self._end(job, ending, is_lost=row is None)
                if not (is_gone or (row is not None and row.phase in (ENDING, OVER))):
                    self.cancellation.add({job.job_id: job})
                continue
            if job.state != before:
                connected_at = self.connections.since(job)
                self.pools[job.pool].measure(job, before, connected_at)
                if job.state == JobState.RUNNING:
                    job.connected_at = job.connected_at or connected_at or now
        self.book.tidy()

    def _end(self, job: BatchJob, ending: Ending, is_lost: bool) -> None:
        """React to the end of a job."""
        level = logging.INFO if ending.state == "COMPLETED" and job.was_whole else logging.WARNING
        logger.log(level, "dask_ferro: job %s (%s) is over: %s", job.name, job.job_id, ending.why)
        self.book.end(job, ending.why, by_us=False, state=ending.state, is_lost=is_lost)
        if ending.state == "FAILED":
            self.postmortems.failed(job)
        kind, now = self.pools[job.pool], time()
        why = f"job {job.job_id}: {ending.why}"
        if job.node:
            address = self.connections.scheduler_address
            why += f" on {job.node}, whose workers connect to {address} by {kind.job.network}"
        if ending.refused and kind.close(why, now):
            self.pools.begin(self.pools.report_closed(kind))
        elif ending.failed and not ending.refused and kind.fail(why, now):
            printed = not (ending.is_held and job.started_at is None)
            self.pools.begin(self.pools.report_closed(kind, job.job_id if printed else ""))

    def _look_after_strays(self, rows: Mapping[str, QueueRow]) -> None:
        """Follow jobs again that were thought gone; end unknown ones, such as those of lost submissions."""
        followed = {job.job_id for job in self.book.jobs.values()} | self.cancellation.job_ids
        found = self.strays.look(rows, followed, self.book.over.values(), time())
        for job in found.back:
            logger.warning("dask_ferro: job %s (%s) was thought gone, and is there", job.name, job.job_id)
            self.book.revive(job)
        if found.ends:
            logger.warning("dask_ferro: cancelled jobs that no cluster follows: %s", ", ".join(found.ends))
            self.cancellation.add(found.ends)
