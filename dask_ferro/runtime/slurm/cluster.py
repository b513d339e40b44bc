"""`ff.SLURMCluster`: dask-jobqueue's cluster, with every job followed by SLURM's own reports.

Jobs are known by SLURM's id, by a tag in their comment, and by a name of ours that is never reused.  One `squeue` a
look shows which of them are pending, running, over or unable to start; submissions are retried, in arrays, and
refusals reported with SLURM's message; cancellations are repeated until confirmed.  The queue is read in the
background: a caller waits a moment for it and uses the previous state while SLURM is slow.  No job outlives the
cluster: neither its orderly end, nor an exception, nor the death of its process. The number of jobs is decided by
`ff.Elastic`.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import dask
from distributed.metrics import time

from dask_ferro.errors import ConfigError
from dask_ferro.policy.scaling.facts import PENDING
from dask_ferro.runtime import upstream_deploy
from dask_ferro.runtime.elastic.cluster_mixin import ElasticCluster
from dask_ferro.runtime.jobs.cluster_options import check_options
from dask_ferro.runtime.jobs.cluster_repr import Described, Known, outputs
from dask_ferro.runtime.jobs.connections import Connections
from dask_ferro.runtime.jobs.keywords import WHO, ClusterKeywords, described, keywords_of, read
from dask_ferro.runtime.jobs.script import WorkerJob
from dask_ferro.runtime.jobs.worker_names import WorkerNames
from dask_ferro.runtime.pools import failures
from dask_ferro.runtime.pools.closing import Closings, is_young
from dask_ferro.runtime.pools.cluster_pools import PooledCluster
from dask_ferro.runtime.pools.pool import ADDRESS, JobPool, checked_name, overrides_of
from dask_ferro.runtime.pools.rpc import serve
from dask_ferro.runtime.pools.shortage import shortage
from dask_ferro.runtime.records.recorded_cluster import RecordedCluster, recording_of
from dask_ferro.runtime.site_jobs import DEFAULT, SiteJob
from dask_ferro.runtime.slurm.cancel_queue import Cancellation
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob, Ending, Patience
from dask_ferro.runtime.slurm.orphan_guard import GuardedJobs
from dask_ferro.runtime.slurm.parsing import ENDING, OVER, PERMANENT, QueueRow
from dask_ferro.runtime.slurm.site import SlurmSite
from dask_ferro.runtime.slurm.strays import Strays
from dask_ferro.runtime.slurm.submit_queue import Submission
from dask_ferro.runtime.upstream_jobqueue import JobCluster
from dask_ferro.runtime.upstream_names import JOBQUEUE, WORKER

logger = logging.getLogger(__name__)

_OWN = tuple(keywords_of(ClusterKeywords))
_PLUGIN = "dask_ferro.runtime.preload"
# Seconds at the end for the last submission to be answered, and for the jobs to be gone.  The watchdog does the rest.
_LAST_SUBMISSION, _LAST_JOBS = 10.0, 15.0
# Seconds for the scheduler to note that the cluster ends.
_OVER_TOLD = 1.0
# Seconds for reading the queue; a later answer is processed when it arrives.
_LOOK = 1.0


@described(ClusterKeywords)
class SLURMCluster(ElasticCluster, Described, RecordedCluster, Connections, PooledCluster, JobCluster):  # type: ignore[misc]
    """Workers in SLURM jobs, which grow, shrink and are replaced without loss of results.

    Parameters
    ----------
    <keywords>
    name : str, optional
        Name of the cluster, with which its workers' names begin, instead of their pool's name.  The job's shell
        replaces variables, as in ``"run-$SLURM_JOB_ID"``.
    job_name : str, optional
        Name of the jobs, as for ``squeue -n``; other clusters' jobs may have the same.
    **options
        Those of `dask_jobqueue.SLURMCluster`.  ``scheduler_options={"preload": []}`` omits the scheduler plugin.

    Raises
    ------
    ConfigError
        For pools that do not describe a job, or a job name that SLURM's commands would split.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> cluster = ff.SLURMCluster(                                     # doctest: +SKIP
    ...     queue="cpu", cores=8, memory="32GB", walltime="02:00:00",
    ...     pools={"gpu": {"queue": "gpu", "job_extra_directives": ["--gres=gpu:1"], "maximum": 4}},
    ... )
    >>> cluster.adapt(minimum=0, maximum=64)                           # doctest: +SKIP
    """

    job_cls = WorkerJob  # type: ignore[assignment]

    def __init__(self, *args: Any, **options: Any) -> None:
        upstream_deploy.check(f"ff.{type(self).__name__}", WORKER, JOBQUEUE)
        checked = overrides_of(options.get("pools"))
        check_options(options.get("job_cls") or self.job_cls, options, _OWN, checked)
        own = read(ClusterKeywords, WHO, {name: options.pop(name) for name in _OWN if name in options})
        failures.limits()  # invalid limits are reported now
        config = f"jobqueue.{options.get('config_name') or WorkerJob.config_name}"
        job_name = checked_name(options.get("job_name") or dask.config.get(f"{config}.name", "dask-worker"))
        self._tag = f"ferro-{uuid.uuid4().hex[:12]}"
        self._guesses = {name: getattr(own, name) for name in ("queue_wait", "start_up", "preemptible")}
        self._kinds: dict[str, dict[str, Any]] = {DEFAULT: {}} | checked
        self._recording, kept = recording_of(self._tag, own.journal, own.keep)
        self._names = WorkerNames(options.get("name"))
        self._patience = read(Patience, f"{WHO}: patience", own.patience or {})
        self._begin()
        self._open(job_name, kept)
        options |= {"job_name": job_name, "signal_ahead": own.signal_ahead, "grace": own.grace}
        if options.get("processes", 1) is None:  # dask-jobqueue compares it with a number
            del options["processes"]
        options["scheduler_options"] = _with_plugin(options.get("scheduler_options"), config)
        super().__init__(*args, **options)

    def _begin(self) -> None:
        """Initialise the state without jobs and pools."""
        # From previous runs on this journal: jobs without a decision yet, and adopted jobs, which may not have found
        # a scheduler, so that their failure says nothing about their pool.
        self._former: dict[str, BatchJob] = {}
        self._adopted: set[str] = set()
        self._pool_records: dict[str, JobPool] = {}
        self._book: dict[str, BatchJob] = {}
        self._going: dict[str, BatchJob] = {}
        self._looking: asyncio.Task[None] | None = None
        self._strays = Strays()
        self._count = 0
        self._connected_at: dict[str, float] = {}
        self._closing = False
        self._beside: set[asyncio.Task[None]] = set()
        self._closed_by = asyncio.Lock()
        self._graces: dict[str, float] = {}
        self._kill_wait: float | None = None
        self._began = time()

    def _open(self, job_name: str, kept: GuardedJobs) -> None:
        """Create the objects that submit, cancel and check jobs."""
        self._site = SlurmSite(job_name, self._tag, kept)
        self._submission = Submission(self._site, self._submitted, self._accepted, self._refused)
        self._cancellation = Cancellation(self._site, self._addresses, self._let_leave)
        self._closings = Closings(self._site, self.job_script, self._publish)

    async def _open_cluster(self) -> None:
        self._graces, self._kill_wait = await asyncio.gather(self._site.graces(), self._site.kill_wait())
        await super()._open_cluster()
        serve(self.scheduler, self._carry_out, self._pool_rows)

    # -- the kinds of jobs -----------------------------------------------------------------------------------

    def job_script(self, pool: str | None = None) -> str:
        """Return the batch script of a pool's jobs (default: the first pool), except for the scheduler's address."""
        return self._script(next(iter(self._records())) if pool is None else pool, 0)

    def _script(self, pool: str, first: int) -> str:
        script = self._kind(pool).job.job_script(first, self._graces, self._kill_wait)
        return self._addressed(script, ADDRESS)

    def _submitted(self, pool: str, first: int) -> str:
        """Return a script that is submitted next, and create the folder of its logs, without which jobs fail."""
        if folder := self._kind(pool).job.log_directory:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                words = f"log_directory {str(folder)!r} cannot be created: {error.strerror}; give another one"
                raise Refused(words, PERMANENT) from error
        return self._script(pool, first)

    # -- what is said of it ----------------------------------------------------------------------------------

    def _known(self) -> Known:
        adaptive = self._adapting()
        bounds = None if adaptive is None else (adaptive.minimum, adaptive.maximum)
        return Known([job.seen() for job in self._book.values()], self._pool_facts(), bounds)

    def _written(self) -> list[Path]:
        headers = {str(kind.job.job_header) for kind in self._pool_records.values()}
        found = (outputs(header, self._site.job_name, self._began) for header in headers)
        return list(dict.fromkeys(chain.from_iterable(found)))

    # -- what the controller asks for ------------------------------------------------------------------------

    async def reconcile(self) -> tuple[SiteJob, ...]:
        """Read the queue once; return the jobs that are not over.  Jobs that are over are forgotten.

        If SLURM does not answer in time, the previous state is returned.
        """
        if self._closing:
            return ()
        self._reap_look()
        if self._looking is None and self._site.was_used:
            self._looking = asyncio.create_task(self._look())
        if self._looking is not None:
            await asyncio.wait({self._looking}, timeout=_LOOK)
            self._reap_look()
        return () if self._closing else tuple(job.seen() for job in self._book.values())

    def _reap_look(self) -> None:
        """Clear a finished look at the queue; raise its error."""
        if self._looking is not None and self._looking.done():
            looked, self._looking = self._looking, None
            if not looked.cancelled():
                looked.result()

    async def _look(self) -> None:
        """Process SLURM's present rows."""
        known = [job for job in self._book.values() if job.job_id]
        attempts = self._submission.attempts
        try:
            rows = await self._site.queue()
        except Refused as refused:
            logger.warning("dask_ferro: squeue failed: %s", refused.words)
            return
        await asyncio.gather(self._settle_former(rows), self._recording.exchange())
        connected = self._connected_names()
        silent = (job for job in known if connected.isdisjoint(job.workers))
        unlisted = [job.job_id for job in silent if job.job_id not in rows]
        others = await self._site.unlisted(unlisted) if unlisted else {}
        on_nodes = any(row.node and row.phase != OVER for row in rows.values())
        draining = await self._site.draining() if on_nodes else frozenset()
        self._follow(known, rows, others, draining)
        await self._recording.exchange(only_news=True)
        if not self._submission.in_flight and attempts == self._submission.attempts:
            self._look_after_strays(rows)

    def request(self, pool: str, count: int) -> None:
        """Request more jobs of a pool; they are submitted together, in the background."""
        kind = self._kind(pool)
        if self._closing or count < 1 or kind.paused_at is not None:
            return
        processes = kind.job.worker_processes
        first, self._count = self._count, self._count + count
        prefix, names = self._names.prefix(pool), self._names.actual
        jobs = [
            BatchJob(f"{prefix}-{n}", pool, n, processes, time(), names=names)
            for n in range(first, self._count)
        ]
        self._book.update((job.name, job) for job in jobs)
        self._recording.asked(jobs, self._kind_digest(pool) or "")
        self._submission.add(jobs)

    async def release(self, names: Iterable[str]) -> None:
        """End jobs, whatever they do; return when SLURM confirms that they are ending.  Unknown names are ignored."""
        if self._closing:
            return  # all jobs are being ended
        jobs = [self._book.pop(name) for name in set(names) if name in self._book]
        self._going.update((job.name, job) for job in jobs)
        try:
            await self._submission.withdraw(jobs)
            for job in jobs:
                self._strays.forget(job)
            await self._cancellation.gone(job for job in jobs if job.job_id)
            await self._recording.exchange()
        finally:
            for job in jobs:
                self._recording.given_back(job)
                self._going.pop(job.name, None)

    def may_fail_at_once(self) -> bool:
        """Return whether a job of a pool without any worker so far may be about to end: its script may be broken."""
        now = time()
        kinds = {name: kind for name, kind in self._pool_records.items() if not kind.is_proven}
        jobs = [job for job in self._book.values() if job.pool in kinds]
        return any(kinds[job.pool].failures or is_young(job, now) for job in jobs)

    def wait_for_workers(self, n_workers: int, timeout: float | None = None) -> Any:
        """Wait until this many workers are connected.  A client of this cluster waits here too.

        Raises
        ------
        ConfigError
            If they cannot come for now, since the pools are closed or paused: the reason, the time, and the last
            lines of the job that closed them.
        TimeoutError
            After `timeout` seconds.
        """
        if not isinstance(n_workers, int) or n_workers < 1:
            return super().wait_for_workers(n_workers, timeout)
        return self.sync(self._wait_unless_closed, n_workers, timeout)

    async def _wait_unless_closed(self, count: int, timeout: float | None) -> None:
        waits: Any = super().wait_for_workers(count, timeout)
        await self._closings.unless_closed(waits, lambda: self._why_not(count))

    def _why_not(self, count: int) -> str:
        """Return why this many workers cannot come for now; empty: they may."""
        there = upstream_deploy.names_of(self)
        missing, jobs = count - len(there | self.plan), Counter(job.pool for job in self._book.values())
        why = shortage(missing, jobs, self.pools())
        return f"{count} workers cannot come for now: {why}" if why else ""

    async def wait_submitted(self) -> None:
        """Return when all requested jobs are in the queue, or refused permanently.

        Raises
        ------
        ConfigError
            With SLURM's message.
        """
        errors = await self._submission.settled()
        await self._closings.settled()
        if errors:
            raise ConfigError("; ".join(errors) + ". `cluster.job_script(pool)` shows what was submitted")

    # -- what happens ----------------------------------------------------------------------------------------

    def _accepted(self, jobs: Iterable[BatchJob]) -> None:
        for job in jobs:
            job.submitted_at = time()
            job.enter(PENDING, job.submitted_at)
            job.reason = ""
            self._recording.note(job)
        self._recording.write()

    def _refused(self, jobs: Sequence[BatchJob], words: str) -> None:
        logger.warning("dask_ferro: SLURM refuses %d jobs of pool %s: %s", len(jobs), jobs[0].pool, words)
        kind = self._kind(jobs[0].pool)
        if kind.close(words, time()):
            self._closings.tell(kind)
        for job in jobs:
            self._book.pop(job.name, None)
            self._recording.over(job, f"refused: {words}", by_us=True)

    async def _publish(self, topic: str, message: object) -> None:
        scheduler = upstream_deploy.scheduler_rpc(self)
        await scheduler.log_event(topic=topic, msg=message)

    def _follow(
        self,
        jobs: Iterable[BatchJob],
        rows: Mapping[str, QueueRow],
        others: Mapping[str, QueueRow | None],
        draining: frozenset[str],
    ) -> None:
        now, connected = time(), self._connected_names()
        for job in jobs:
            if job.name not in self._book:
                continue  # released meanwhile
            before, restarts, workers = job.state, job.restarts, job.workers
            row = rows.get(job.job_id) or others.get(job.job_id)
            is_gone = row is None and job.job_id in others
            ending = job.follow(row, connected, now, self._patience, draining, is_sure=is_gone)
            if job.restarts != restarts or (ending is not None and row is not None and row.is_ended):
                self._soon(self._unblame(workers))
            elif ending is not None and row is not None and row.phase == ENDING:
                self._soon(self._learn_why(job.job_id, workers))
            if ending is not None:
                self._end(job, ending, now, is_lost=row is None)
                if not (is_gone or (row is not None and row.phase in (ENDING, OVER))):
                    self._cancellation.add({job.job_id: job})
                continue
            self._recording.note(job, self._connected(job))
            if job.state != before:
                self._kind(job.pool).measure(job, before, self._connected(job))
        self._recording.write()

    def _end(self, job: BatchJob, ending: Ending, now: float, is_lost: bool) -> None:
        """Forget a job that is over."""
        level = logging.INFO if ending.state == "COMPLETED" and job.was_whole else logging.WARNING
        logger.log(level, "dask_ferro: job %s (%s) is over: %s", job.name, job.job_id, ending.why)
        del self._book[job.name]
        self._strays.forget(job, is_lost=is_lost)
        self._recording.over(job, ending.why, by_us=False, state=ending.state)
        self._ask_exit(job, ending)
        kind = self._kind(job.pool)
        why = f"job {job.job_id}: {ending.why}"
        if job.node:
            address = upstream_deploy.scheduler_address(self)
            why += f" on {job.node}, whose workers connect to {address} by {kind.job.network}"
        if ending.refused and kind.close(why, now):
            self._closings.tell(kind)
        elif job.name not in self._adopted and ending.failed and not ending.refused and kind.fail(why, now):
            self._closings.tell(kind, "" if ending.is_held and job.started_at is None else job.job_id)

    def _look_after_strays(self, rows: Mapping[str, QueueRow]) -> None:
        """Follow jobs again that were thought gone; end unknown ones, such as those of lost submissions."""
        followed = {job.job_id for job in self._followed()}
        found = self._strays.look(rows, followed | self._cancellation.job_ids, time())
        for job in found.back:
            logger.warning("dask_ferro: job %s (%s) was thought gone, and is there", job.name, job.job_id)
            self._book[job.name] = job
        if found.ends:
            self._cancellation.add(found.ends)

    # -- the end ---------------------------------------------------------------------------------------------

    async def _close_cluster(self) -> None:
        self._closing = True
        gone = False
        async with self._closed_by:  # a second caller waits, and finds nothing left to do
            try:
                gone = await self._end_all()
            finally:
                try:
                    await super()._close_cluster()
                finally:
                    self._site.close(jobs_left=not gone)
                    await self._recording.end(jobs_left=not gone or bool(self._former))

    async def _end_all(self) -> bool:
        """End every job; return whether SLURM confirms that none is left."""
        if tasks := {*self._beside, *filter(None, [self._looking])}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        landed = await self._submission.close(_LAST_SUBMISSION)
        await self._closings.close()
        await self._tell_over()
        await self._recording.exchange()
        there = {job.job_id for job in (*self._book.values(), *self._going.values()) if job.job_id}
        there |= self._cancellation.job_ids
        had_jobs = self._submission.had_jobs or self._site.former_tags
        gone = not had_jobs or await self._site.cancel_all(_LAST_JOBS, there)
        await self._cancellation.close()
        self._book.clear()
        if not (landed and gone):
            text = "dask_ferro: jobs named %s are not known to be gone; a background process continues to cancel them"
            logger.warning(text, f"{self._site.job_name} ({self._tag})")
        return landed and gone

    async def _tell_over(self) -> None:
        """Let cancelled jobs end at once, since the data of their workers is not needed any more."""
        scheduler = upstream_deploy.scheduler_rpc(self)
        try:
            async with asyncio.timeout(_OVER_TOLD):
                await scheduler.ferro_over()
        except Exception as error:  # noqa: BLE001 - no roster, no scheduler: they end all the same
            logger.debug("dask_ferro: the scheduler was not told that the cluster ends: %r", error)


def _with_plugin(options: Mapping[str, object] | None, config: str) -> dict[str, Any]:
    """Return the scheduler's options with our plugin as a preload, unless they set preloads."""
    given = (dask.config.get(f"{config}.scheduler-options", None) if options is None else options) or {}
    configured = dask.config.get("distributed.scheduler.preload") or []
    return {"preload": [*configured, _PLUGIN], **given}
