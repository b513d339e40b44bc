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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import dask
from distributed import Scheduler, Status
from distributed.metrics import time

from dask_ferro import config, notebook
from dask_ferro.elastic.cluster import ElasticCluster
from dask_ferro.elastic.report import in_rows, shortage
from dask_ferro.elastic.site_jobs import DEFAULT, SiteJob
from dask_ferro.errors import ConfigError
from dask_ferro.observe.cluster_rows import JOBS, POOLS
from dask_ferro.scheduler import upstream_deploy
from dask_ferro.scheduler.plugin import put_on
from dask_ferro.scheduler.upstream_jobqueue import job_keywords
from dask_ferro.slurm.cancel_queue import Cancellation
from dask_ferro.slurm.cluster_options import (
    check_cluster_name,
    check_job_name,
    check_options,
    section_of,
)
from dask_ferro.slurm.commands import RefusedError
from dask_ferro.slurm.job_book import ClusterTables, JobBook
from dask_ferro.slurm.job_lifecycle import BatchJob, JobState, Patience
from dask_ferro.slurm.job_pools import PAUSE, ClusterPools, JobPools
from dask_ferro.slurm.keywords import NAME, ClusterKeywords, read
from dask_ferro.slurm.orphan_guard import new_tag
from dask_ferro.slurm.parsing import PERMANENT
from dask_ferro.slurm.pool import ADDRESS, JobPool
from dask_ferro.slurm.queue_follower import QueueFollower
from dask_ferro.slurm.script import WorkerJob, resources_of
from dask_ferro.slurm.site import SlurmSite
from dask_ferro.slurm.submit_queue import Submission

logger = logging.getLogger(__name__)

_PLUGIN = "dask_ferro.scheduler.preload"
# Seconds at the end for the last submission to be answered, and for the jobs to be gone.  The watchdog does the rest.
_LAST_SUBMISSION, _LAST_JOBS = 10.0, 15.0
# Seconds for the scheduler to note that the cluster ends.
_OVER_TOLD = 1.0
# Seconds for reading the queue; a later answer is processed when it arrives.
_LOOK = 1.0
# Seconds between two checks whether a pool has closed, for callers that wait for workers.
_CLOSED_LOOK = 0.1


class SLURMCluster(ElasticCluster):
    """Workers in SLURM jobs, which grow, shrink and are replaced without loss of results.

    Parameters
    ----------
    n_workers : int
        Number of workers to begin with.
    pools : mapping of str to mapping, optional
        Further kinds of jobs by name, each with the keywords that replace the cluster's.  The arguments themselves are
        the pool "default".  A pool may also have `minimum`, `maximum` and `cost`.
    timeouts : mapping of str to float, optional
        How long to wait for conditions that may pass, by name, as in ``{"stuck": 60}``.
    retire_before : float or str, optional
        How long before the end of a job's walltime its workers are retired; by default 60 s.
    grace : float or str, optional
        How long a preempted job continues after SLURM's signal; by default the partition's grace time, or 30 s.
    preemptible : bool, optional
        Whether SLURM may end the jobs without a warning; by default the preemption mode of the partition.
    **options
        Options of `dask_jobqueue.SLURMCluster`, such as `queue`, `cores`, `memory` and `walltime`.  Workers' names
        begin with `name`, if it is set, instead of their pool's name.  ``scheduler_options={"preload": []}`` omits
        the scheduler plugin.

    Raises
    ------
    ConfigError
        If a pool does not describe a job, or SLURM's commands would split a job name.

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

    def __init__(
        self,
        n_workers: int = 0,
        *,
        pools: Mapping[str, Mapping[str, object]] | None = None,
        timeouts: Mapping[str, float] | None = None,
        retire_before: float | str | None = None,
        grace: float | str | None = None,
        preemptible: bool | None = None,
        **options: Any,
    ) -> None:
        job_cls = options.get("job_cls") or self.job_cls
        section, configured = section_of(job_cls, options)
        arguments = {
            "pools": pools, "timeouts": timeouts, "retire_before": retire_before, "grace": grace,
            "preemptible": preemptible,
        }  # fmt: skip
        # As for dask-jobqueue's own, None leaves a keyword to the configuration.
        own = configured | {name: value for name, value in arguments.items() if value is not None}
        keywords = read(ClusterKeywords, NAME, own)
        overrides = keywords.pools or {}
        check_options(job_cls, section, options, overrides)
        config.value("elastic.failures")  # an invalid one is reported now
        job_name = check_job_name(
            options.get("job_name") or dask.config.get(f"{section}.name", "dask-worker")
        )
        self._tag = new_tag()
        every = {"preemptible": keywords.preemptible}
        self._kinds = {DEFAULT: every} | {name: every | dict(pool) for name, pool in overrides.items()}
        name = options.get("name")
        self._name_prefix = None if name is None else check_cluster_name(name)
        self._begin(job_name, read(Patience, f"{NAME}: timeouts", keywords.timeouts or {}))
        options |= {"job_name": job_name, "retire_before": keywords.retire_before, "grace": keywords.grace}
        if options.get("processes", 1) is None:  # dask-jobqueue compares it with a number
            del options["processes"]
        options["scheduler_options"] = _add_plugin(options.get("scheduler_options"), section)
        super().__init__(n_workers, **options)

    def _begin(self, job_name: str, patience: Patience) -> None:
        """Create the cluster's parts; there is no job yet."""
        # All jobs, those that are over included.
        self._book = JobBook()
        self._looking: asyncio.Task[None] | None = None
        self._count = 0
        self._closing = False
        self._closed_by = asyncio.Lock()
        self._site = SlurmSite(job_name, self._tag)
        self._submission = Submission(self._site, self._script_to_submit, self._accepted, self._refused)
        self._cancellation = Cancellation(self._site)
        self._pools = JobPools(self._build_pools, self._site, self._submission.trouble, self)
        self._follower = QueueFollower(
            self, self._site, self._book, self._submission, self._cancellation, self._pools, patience
        )

    async def _open_cluster(self) -> None:
        await self._site.learn()
        await super()._open_cluster()
        # A scheduler in another process cannot read this cluster.
        if isinstance(self.scheduler, Scheduler):
            tables = ClusterTables({JOBS: self._job_rows, POOLS: self._pool_rows})
            await put_on(tables, dask_scheduler=self.scheduler)

    async def _job_rows(self) -> list[dict[str, Any]]:
        return self._book.rows()

    async def _pool_rows(self, order: str = "", name: str = "") -> list[dict[str, Any]]:
        """Return the pools for a table, after one of them was paused or resumed on an order."""
        if order:
            await self._carry_out(order, name)
        return self._pools.rows(self._book.followed, self.pools)

    # -- the kinds of jobs -----------------------------------------------------------------------------------

    @property
    def pools(self) -> ClusterPools:
        """The kinds of jobs, with measurements, and the reason why one is closed or paused."""
        return ClusterPools(self._pools.facts(self._lingering()), self._order_pool)

    def _lingering(self) -> Counter[str]:
        """Return the number of jobs by pool that nobody follows and that may still exist."""
        # Jobs that are being ended count for the maximum; strays, mostly of lost submissions, for the first pool.
        leaving = {job.job_id or job.name: job.pool for job in self._book.leaving}
        ending = {job_id: job.pool if job else DEFAULT for job_id, job in self._cancellation.jobs.items()}
        return Counter((leaving | ending).values())

    def _order_pool(self, order: str, name: str) -> Any:
        return self._awaited(self._carry_out, order, name)

    async def _carry_out(self, order: str, name: str) -> None:
        """Pause or resume a pool."""
        if self._closing or self.status in (Status.closing, Status.closed, Status.failed):
            raise ConfigError(f"{NAME}: pool {name!r}: the cluster is closed")
        if order == PAUSE:
            self._pools[name].pause(time())
            submitting = [job for job in self._book.followed if job.state == JobState.SUBMITTING]
            # In the background, since commands may hang.
            self._pools.begin(self.release([job.name for job in submitting if job.pool == name]))
        else:
            self._pools[name].resume()
            self._submission.retry(name)
        logger.info("dask_ferro: %s pool %s", order, name)
        await self._look_now()

    def resources(self, pool: str) -> dict[str, float]:
        """Return the abstract resources of each worker of a pool."""
        return resources_of(self._pools[pool].job)

    def _first_job(self) -> WorkerJob:
        return self._pools[DEFAULT].job

    def _build_pools(self) -> dict[str, JobPool]:
        """Return the pools: dask-jobqueue has the keywords of all jobs when it asks for the first one."""
        keywords, pools = job_keywords(self), {}
        for name, own in self._kinds.items():
            # Workers are "gpu-7", or with the cluster's name "run-gpu-7" and "run-7".
            parts = (self._name_prefix or "", "" if self._name_prefix and name == DEFAULT else name)
            prefix = "-".join(filter(None, parts))
            pools[name] = JobPool.build(name, self.job_cls, keywords, own, prefix)
        return pools

    def job_script(self, pool: str | None = None) -> str:
        """Return the batch script of a pool's jobs (default: "default"), except for the scheduler's address."""
        return self._script(DEFAULT if pool is None else pool, 0)

    def _script(self, pool: str, first: int) -> str:
        script = self._pools[pool].job.job_script(first, self._site.graces, self._site.kill_wait)
        return script.replace(ADDRESS, upstream_deploy.scheduler_address(self) or ADDRESS)

    def _script_to_submit(self, pool: str, first: int) -> str:
        """Return the script, and create the folder of its logs, without which jobs fail."""
        if folder := self._pools[pool].job.log_directory:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                words = f"log_directory {str(folder)!r} cannot be created: {error.strerror}; give another one"
                raise RefusedError(words, PERMANENT) from error
        return self._script(pool, first)

    # -- the names of workers --------------------------------------------------------------------------------

    @property
    def plan(self) -> set[str]:
        """The names of the workers of all requested jobs."""
        return set(chain.from_iterable(job.workers for job in self._book.followed))

    @property
    def requested(self) -> set[str]:
        """The names of the workers whose jobs SLURM knows."""
        return set(chain.from_iterable(job.workers for job in self._book.followed if job.job_id))

    # -- descriptions ----------------------------------------------------------------------------------------

    def jobs(self) -> Any:
        """Return all requested jobs, including those that are over, the newest 10,000 of them.

        Returns
        -------
        tuple of BatchJob
            In the order of the requests: the reason and the outcome of each.
        """
        return self.sync(self._jobs_now)

    async def _jobs_now(self) -> tuple[BatchJob, ...]:
        return self._book.copies()

    def because(self, why: str, jobs: Iterable[str] = ()) -> None:
        """Set the reason why the next jobs are requested, or why the named ones are released."""
        self._book.because(why, jobs)

    def __repr__(self) -> str:
        rows = ", ".join(f"{name}: {text}" for name, text in self._rows())
        return f"{super().__repr__()[:-1]}, {rows})"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        of_dask: str = super()._repr_html_(cluster_status=cluster_status)
        return of_dask + notebook.table("jobs", self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        adaptive = self._adapting()
        bounds = None if adaptive is None else (adaptive.minimum, adaptive.maximum)
        return in_rows([job.site_job() for job in self._book.followed], self.pools, bounds)

    # -- what the controller asks for ------------------------------------------------------------------------

    async def reconcile(self) -> tuple[SiteJob, ...]:
        """Read the queue once; return the jobs that are not over.  Jobs that are over are forgotten.

        If SLURM does not answer in time, the previous state is returned.
        """
        if self._closing:
            return ()
        if (self._looking is None or self._looking.done()) and self._site.was_used:
            self._looking = asyncio.create_task(self._follower.look())
        if (looking := self._looking) is not None:
            await asyncio.wait({looking}, timeout=_LOOK)
            if looking.done() and not looking.cancelled():
                looking.result()
        return () if self._closing else tuple(job.site_job() for job in self._book.followed)

    def request(self, pool: str, count: int) -> None:
        """Request more jobs of a pool; they are submitted together, in the background."""
        kind = self._pools[pool]
        if self._closing or count < 1 or kind.paused_at is not None:
            return
        processes = kind.job.worker_processes
        first, self._count = self._count, self._count + count
        jobs = [
            BatchJob(f"{kind.job.prefix}-{n}", pool, n, processes, time()) for n in range(first, self._count)
        ]
        self._book.request(jobs)
        self._submission.add(jobs)

    async def release(self, names: Iterable[str]) -> None:
        """End jobs, whatever they do; return when SLURM confirms that they are ending.  Unknown names are ignored."""
        if self._closing:
            return  # all jobs are being ended
        jobs = self._book.release(names)
        try:
            await self._submission.withdraw(jobs)
            await self._cancellation.gone({job.job_id: job for job in jobs if job.job_id})
        finally:
            for job in jobs:
                self._book.end(job)

    def wait_for_workers(self, n_workers: int, timeout: float | None = None) -> Any:
        """Wait until this many workers are connected.  A client of this cluster waits here too.

        Raises
        ------
        ConfigError
            If the workers cannot start for now, because the pools are closed or paused; the error has the reason, the
            time, and the last lines of the job that closed them.
        TimeoutError
            If `timeout` seconds have passed.
        """
        if not isinstance(n_workers, int) or n_workers < 1:
            return super().wait_for_workers(n_workers, timeout)
        return self.sync(self._wait_unless_closed, n_workers, timeout)

    async def _wait_unless_closed(self, count: int, timeout: float | None) -> None:
        connected: Any = super().wait_for_workers(count, timeout)
        waits = asyncio.ensure_future(connected)
        try:
            while not (await asyncio.wait({waits}, timeout=_CLOSED_LOOK))[0]:
                if why := self._why_not(count):
                    raise ConfigError(why)
            await waits
        finally:
            waits.cancel()

    def _why_not(self, count: int) -> str:
        """Return why this many workers cannot come for now; empty: they may."""
        there = upstream_deploy.names_of(self)
        missing, jobs = count - len(there | self.plan), Counter(job.pool for job in self._book.followed)
        why = shortage(missing, jobs, self.pools)
        return f"{count} workers cannot come for now: {why}" if why else ""

    async def wait_submitted(self) -> None:
        """Wait until all requested jobs are in the queue, or refused permanently.

        Raises
        ------
        ConfigError
            If SLURM refuses a job; the error has SLURM's message.
        """
        errors = await self._submission.settled()
        await self._pools.settled()
        if errors:
            raise ConfigError("; ".join(errors) + ". `cluster.job_script(pool)` shows what was submitted")

    # -- what happens ----------------------------------------------------------------------------------------

    def _accepted(self, jobs: Iterable[BatchJob]) -> None:
        for job in jobs:
            job.submitted_at, job.reason = time(), ""
            if job.state == JobState.SUBMITTING:  # not released meanwhile
                job.enter(JobState.PENDING, job.submitted_at)
            elif job.state == JobState.ENDED:  # released by a caller who did not wait for its end
                self._cancellation.add({job.job_id: job})

    def _refused(self, jobs: Sequence[BatchJob], words: str) -> None:
        logger.warning("dask_ferro: SLURM refuses %d jobs of pool %s: %s", len(jobs), jobs[0].pool, words)
        self._pools.begin(self._pools.close_pool(self._pools[jobs[0].pool], words))
        for job in jobs:
            self._book.end(job, f"refused: {words}")

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

    async def _end_all(self) -> bool:
        """End every job; return whether SLURM confirms that none is left."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})
        landed = await self._submission.close(_LAST_SUBMISSION)
        await self._pools.close()
        # Cancelled jobs end at once then, since nobody needs the data of their workers any more.
        try:
            async with asyncio.timeout(_OVER_TOLD):
                await upstream_deploy.scheduler_rpc(self).ferro_over()
        except Exception as error:  # noqa: BLE001 - no roster, no scheduler: they end all the same
            logger.debug("dask_ferro: the scheduler did not receive the end of the cluster: %r", error)
        there = {job.job_id for job in self._book.jobs.values() if job.job_id}
        gone = not self._submission.had_jobs or await self._cancellation.all_gone(there, _LAST_JOBS)
        await self._cancellation.close()
        for job in [*self._book.jobs.values()]:
            self._book.end(job, "its cluster ended")
        if not (landed and gone):
            text = "dask_ferro: jobs named %s are not known to be gone; a background process continues to cancel them"
            logger.warning(text, f"{self._site.job_name} ({self._tag})")
        return landed and gone


def _add_plugin(options: Mapping[str, object] | None, section: str) -> dict[str, Any]:
    """Return the scheduler's options with our plugin as a preload, unless they set preloads."""
    stated = (dask.config.get(f"{section}.scheduler-options", None) if options is None else options) or {}
    configured = dask.config.get("distributed.scheduler.preload") or []
    return {"preload": [*configured, _PLUGIN], **stated}
