"""A cluster of SLURM jobs that keeps records of them, and takes over the jobs of previous runs on the same journal."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import xxhash
from distributed import Status
from distributed.metrics import time

from dask_ferro.errors import ConfigError
from dask_ferro.policy.scaling.facts import BOOTING, PENDING
from dask_ferro.runtime import upstream_deploy
from dask_ferro.runtime.records.inheritance import ADOPT, ASK, END, taken_up, told, verdict
from dask_ferro.runtime.records.journal import JobJournal, Told, by_file, names_of
from dask_ferro.runtime.records.record import JobRecord
from dask_ferro.runtime.records.recording import Recording
from dask_ferro.runtime.site_jobs import DEFAULT
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob, Ending
from dask_ferro.runtime.slurm.orphan_guard import GuardedJobs
from dask_ferro.runtime.slurm.parsing import OVER, STARTED, QueueRow, element, exit_status
from dask_ferro.runtime.slurm.parsing import PENDING as WAITS

logger = logging.getLogger(__name__)

# Seconds for the first check of a previous run's jobs; after that the check continues in the background.
_FIRST_LOOK = 5.0
# The most failed jobs whose exit status is being queried at a time.
_EXITS = 4


def recording_of(
    tag: str, journal: str | os.PathLike[str] | None, keep: float
) -> tuple[Recording, GuardedJobs]:
    """Return a cluster's recording, and the settings of its watchdog for the journal.

    Raises
    ------
    ConfigError
        For `keep` without a journal.
    """
    if journal is None:
        if keep:
            raise ConfigError("ff.SLURMCluster: keep needs journal, in which the next run finds the jobs")
        return Recording(tag), GuardedJobs()
    kept = JobJournal(journal, tag)
    return Recording(tag, kept), GuardedJobs(keep, kept.address_file)


class RecordedCluster:
    """A mixin that records a cluster's jobs, before dask-jobqueue's class."""

    # When jobs could find this scheduler, and when jobs of previous runs were first looked for; whether SLURM has
    # listed those with unknown numbers once; whether runs without jobs were dropped; and the number of pending status
    # queries.
    _announced_at = 0.0
    _former_since = 0.0
    _were_heard = _were_dropped = True
    _asked_exits = 0

    def jobs(self: Any) -> Any:
        """Return all requested jobs, including those that are over, the newest 10,000 of them.

        With a journal, those of previous runs as well.

        Returns
        -------
        tuple of JobRecord
            In the order of the requests: the reason, the outcome, and the tasks of each.
        """
        return self.sync(self._recording.records)

    def because(self: Any, why: str, jobs: Iterable[str] = ()) -> None:
        """Set the reason why the next jobs are requested, or why the named ones are released."""
        self._recording.because(why, jobs)

    async def _open_cluster(self: Any) -> None:
        try:
            before = await self._recording.begin(self._site.job_name)
        except BaseException as error:
            if isinstance(error, ConfigError):
                # It never began, so that it need not be closed.
                self.status = Status.closed
            await self._recording.release()
            raise
        try:
            await super()._open_cluster()  # type: ignore[misc]
            self._inherit(before)
            scheduler, address = upstream_deploy.scheduler_rpc(self), upstream_deploy.scheduler_address(self)
            await self._recording.connect(scheduler, address)
            self._announced_at = time()
        except BaseException:
            await self._recording.release()
            raise
        await self._look_for(before)

    def _inherit(self: Any, before: Told) -> None:
        """Let this run's watchdog look after the jobs of runs that did not end in order.

        The address is published afterwards, as that makes the previous run's watchdog leave the jobs to this one.
        """
        if not before.open_runs:
            return
        try:
            self._site.inherit([run.tag for run in before.open_runs], names_of(before.open_runs))
        except Refused as refused:
            raise ConfigError(
                f"no watchdog would end the jobs of the previous run: {refused.words}"
            ) from refused

    async def _look_for(self: Any, before: Told) -> None:
        """Begin to look for the jobs of runs that did not end in order."""
        self._count = before.following
        if not before.open_runs:
            return
        jobs = [taken_up(record) for record in before.records if not record.is_over]
        for job in jobs:
            job.names = self._names.actual
        self._former = {job.name: job for job in jobs}
        self._were_heard = self._were_dropped = False
        self._former_since = time()
        try:
            async with asyncio.timeout(_FIRST_LOOK):
                await self._settle_former(await self._site.queue())
        except (Refused, TimeoutError) as error:
            logger.warning("dask_ferro: the jobs of the previous run could not be listed yet: %s", error)

    async def _settle_former(self: Any, rows: Mapping[str, QueueRow]) -> None:
        """Adopt or end the jobs of previous runs, as far as SLURM lists them."""
        if not self._were_heard:
            self._were_heard = True
            self._end_unheard(rows)
        if not self._former:
            self._drop_former(rows)
            return
        unlisted = [job.job_id for job in self._former.values() if job.job_id not in rows]
        others = await self._site.unlisted(unlisted) if unlisted else {}
        waited = time() - self._former_since
        for job in list(self._former.values()):
            record = self._recording.book.get(job.name) or JobRecord(job.name)
            row = rows.get(job.job_id) or others.get(job.job_id)
            kind = self._kind_digest(job.pool)
            found = verdict(
                record, row, job.job_id in others, self._site.former_tags, kind, waited,
                is_connected=self._found_us(job, row),
                is_new=row is not None and row.starts is not None and row.starts >= int(self._announced_at),
            )  # fmt: skip
            if found.what == ASK:
                continue
            del self._former[job.name]
            logger.warning("dask_ferro: %s", told(record, found))
            if found.what == ADOPT:
                self._adopt(job, row)
            elif found.what == END:
                self._take_over(job)
                self._cancellation.add({job.job_id: job})
                self._recording.over(job, f"ended by the next run: {found.why}", by_us=True)
            else:
                job.ran = (row.starts, row.ends) if row is not None else job.ran
                self._recording.over(job, f"{found.why}; its cluster had died", by_us=True)
        self._drop_former(rows)

    def _drop_former(self: Any, rows: Mapping[str, QueueRow]) -> None:
        """Drop, once, the previous runs that have no job any more."""
        if self._former or self._were_dropped:
            return
        self._were_dropped = True
        there = [row.comment for row in rows.values() if row.phase != OVER]
        # No tag has a line break, so that a match cannot span two comments.
        comments = "\n".join(there)
        self._recording.drop(tag for tag in self._site.former_tags if f"{tag}." not in comments)

    def _found_us(self: Any, job: BatchJob, row: QueueRow | None) -> bool:
        """Return whether a worker of an inherited job is connected here."""
        restarts = job.restarts if row is None else max(job.restarts, row.restarts)
        return not self._connected_names().isdisjoint(replace(job, restarts=restarts).workers)

    def _is_former(self: Any, row: QueueRow) -> bool:
        """Return whether a job belongs to a previous run on the same journal."""
        return any(f"{tag}." in row.comment for tag in self._site.former_tags)

    def _end_unheard(self: Any, rows: Mapping[str, QueueRow]) -> None:
        """End jobs of previous runs whose submission was not confirmed; they are counted until then."""
        jobs = [job for job in self._former.values() if not job.job_id]
        # SLURM may have them under unknown numbers: those are looked for below.
        for job in jobs:
            del self._former[job.name]
            self._recording.over(job, "its cluster died before SLURM had answered", by_us=True)
        known = {job.job_id for job in self._followed()}
        lives = (row for row in rows.values() if row.phase in (WAITS, STARTED) and row.job_id not in known)
        there = [row for row in lives if self._is_former(row)]
        for row, job in zip_longest(there, jobs[: len(there)]):
            pool = DEFAULT if job is None else job.pool
            unheard = BatchJob(row.job_id, pool, -1, 1, time(), job_id=row.job_id)
            self._take_over(unheard)
            self._cancellation.add({row.job_id: unheard})
            logger.warning(
                "dask_ferro: job %s of the previous run is ended: its cluster died before SLURM had answered",
                row.job_id,
            )

    def _adopt(self: Any, job: BatchJob, row: QueueRow) -> None:
        self._take_over(job)
        job.restarts, job.submitted_at = max(job.restarts, row.restarts), row.submitted or job.submitted_at
        job.enter(PENDING, time())
        if row.phase == STARTED:
            job.started_at, job.ends_at = row.starts, row.ends
            job.enter(BOOTING, time())
        self._adopted.add(job.name)
        self._book[job.name] = job
        self._recording.note(job)
        self._recording.write()

    def _take_over(self: Any, job: BatchJob) -> None:
        try:
            self._site.take_over(element(job.job_id)[0])
        except Refused as refused:
            logger.warning("dask_ferro: %s", refused.words)

    def _ask_exit(self: Any, job: BatchJob, ending: Ending) -> None:
        """Query the exit status of a failed job in the background; if many fail at once, of some."""
        if ending.state == "FAILED" and self._asked_exits < _EXITS:
            self._asked_exits += 1
            self._closings.begin(self._learn_exit(job))

    async def _learn_exit(self: Any, job: BatchJob) -> None:
        try:
            shown = await self._site.ask("scontrol", "--oneliner", "show", "job", job.job_id)
        except Refused:
            return  # then only the reason is known
        finally:
            self._asked_exits -= 1
        if status := exit_status(shown):
            self._recording.amend(job, status)

    def _kind_digest(self: Any, pool: str) -> str | None:
        """Return a digest of a pool's job script; None: there is no such pool."""
        kind = self._pool_records.get(pool) if self._pool_records else None
        return xxhash.xxh3_64_hexdigest(kind.job.job_script().encode()) if kind is not None else None

    def _addressed(self: Any, script: str, placeholder: str) -> str:
        """Return a script with its scheduler's address or, with a journal, with code that looks it up."""
        address = upstream_deploy.scheduler_address(self)
        if self._recording.journal is None:
            return script.replace(placeholder, address or placeholder)
        return by_file(script, placeholder, address or placeholder, self._recording.journal.address_file)
