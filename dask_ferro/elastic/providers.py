"""Pools of jobs on any Dask cluster that starts workers from a specification (`SpecCluster`).

The controller asks a cluster for its pools and its jobs, requests more of them, and releases some.  `ff.SLURMCluster`
has these methods itself, based on SLURM's reports; `SpecPools` provides them for all others (LocalCluster,
SSHCluster, dask-jobqueue's PBS and LSF clusters, ...), which know only their requested and connected workers.  A job
is an entry of the cluster's specification: one worker, or a group of them.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from dask.utils import parse_bytes
from distributed import SpecCluster, Status
from distributed.metrics import time

from dask_ferro.elastic.site_jobs import DEFAULT, SiteJob
from dask_ferro.errors import InputError
from dask_ferro.policy.estimates import Mean
from dask_ferro.policy.scaling.facts import BOOTING, PENDING, RUNNING, Pool
from dask_ferro.scheduler import upstream_deploy

logger = logging.getLogger(__name__)

# Seconds without workers after which a batch job is over; before that it may return, requeued.  Local workers have a
# nanny for that.
_CLOSE_TIMEOUT = 15.0
# Seconds for a worker that was told to close; its process usually ends within 0.2 s.
_CLOSING = 3.0
# Base and limit of the back-off after a job that could not be started: 10 s, doubled each time.
_BACK_OFF, _MOST_BACK_OFF = 5.0, 600.0
# Until a start was measured; a worker process imports Dask in 1 to 3 s.
_START_UP = 2.0
# For batch systems that do not report their queue wait.
_QUEUE_WAIT = 5.0


class Pools(Protocol):
    """The interface of a cluster for the controller; all is called on the cluster's event loop."""

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The kinds of jobs."""

    async def reconcile(self) -> tuple[SiteJob, ...]:
        """Return the requested jobs that are not over; forget the others."""

    def request(self, pool: str, count: int) -> None:
        """Request more jobs, without waiting for their start."""

    async def release(self, names: Iterable[str]) -> None:
        """End jobs, whatever they do; return when they are gone."""

    def resources(self, pool: str) -> dict[str, float]:
        """Return the abstract resources of each worker of a pool, as far as they are known."""

    def because(self, why: str, jobs: Iterable[str] = ()) -> None:
        """Set the reason why the next jobs are requested, or why the named ones are released."""

    async def wait_submitted(self) -> None:
        """Return when all requested jobs are submitted.

        Raises
        ------
        InputError
            If the site refuses permanently, with its message.
        """


def pools_of(cluster: Any) -> Pools:
    """Return the pools of a cluster.

    Raises
    ------
    InputError
        If the cluster has no worker specification.
    """
    if all(hasattr(cluster, name) for name in vars(Pools) if not name.startswith("_")):
        return cluster  # type: ignore[no-any-return]
    # A `SpecCluster` without a kind of worker cannot get any jobs.
    if getattr(cluster, "new_spec", None) and hasattr(cluster, "worker_spec"):
        return SpecPools(cluster)
    raise InputError(
        f"ff.Elastic: got {type(cluster).__name__}, which cannot start workers; wanted a LocalCluster, "
        "a dask-jobqueue cluster, or another SpecCluster with a worker specification"
    )


@dataclass
class _SpecJob:
    """A job of the specification: its state since when, when it was requested, and when a worker was last connected.

    `asked_at` is None once its start has been measured.
    """

    asked_at: float | None = None
    state: str = ""
    since: float = 0.0
    seen_at: float | None = None
    is_leaving: bool = False


class SpecPools:
    """The only pool of a `distributed.SpecCluster`.

    Parameters
    ----------
    cluster : distributed.SpecCluster
    """

    def __init__(self, cluster: SpecCluster) -> None:
        self.cluster = cluster
        self._known: dict[object, _SpecJob] = {}
        self._start_up = Mean(_START_UP)
        self._is_batch = hasattr(cluster, "job_cls")
        self._correcting: asyncio.Future[None] | None = None
        self._trouble = ""
        self._troubles = 0
        self._closed_until = 0.0

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pool, with its measured start-up."""
        options = self.cluster.new_spec.get("options", {})
        processes = len(self.cluster.new_spec.get("group", ("",)))
        lifetime = math.inf
        if (job := self._batch_job()) is not None:
            # Imported here, since dask-jobqueue is an extra, and other clusters have pools too.
            from dask_ferro.slurm.script import lifetime_of

            threads, memory = job.worker_process_threads * processes, job.worker_memory or 0
            lifetime = self._start_up.value + lifetime_of(job)
        else:
            threads = int(options.get("nthreads") or 1) * processes
            memory = _bytes(options.get("memory_limit")) * processes
        wait = _QUEUE_WAIT if self._is_batch else 0.0
        closed = self._trouble if time() < self._closed_until else ""
        until = self._closed_until if closed else 0.0
        start_up = self._start_up.value
        return (
            Pool(
                DEFAULT, threads, processes, memory, wait, start_up,
                lifetime=lifetime, closed=closed, closed_until=until,
            ),
        )  # fmt: skip

    def resources(self, pool: str) -> dict[str, float]:
        """Return the abstract resources of each worker, as far as its job's script declares them."""
        if (job := self._batch_job()) is None:
            return {}
        from dask_ferro.slurm.script import resources_of

        return resources_of(job)

    def because(self, why: str, jobs: Iterable[str] = ()) -> None:
        """Do nothing: no record of these jobs is kept."""

    def _batch_job(self) -> Any:
        """Return a job of dask-jobqueue that describes all; None for a cluster without batch jobs."""
        if not self._is_batch:
            return None
        from dask_ferro.scheduler.upstream_jobqueue import batch_job_of

        return batch_job_of(self.cluster)

    async def reconcile(self) -> tuple[SiteJob, ...]:
        """Return the jobs of the specification, without those that ended by themselves."""
        jobs = self._jobs()
        ended = [name for name, job in jobs.items() if self._is_over(name, job, time())]
        for name in ended:
            logger.warning("dask_ferro: job %s ended without a request", name)
            self._drop(name)
        if ended:
            await self._correct()
            jobs = self._jobs()  # that took a while, in which others may have been released
        return tuple(jobs.values())

    def _jobs(self) -> dict[object, SiteJob]:
        """Return the current jobs of the specification by name."""
        now = time()
        connected = upstream_deploy.names_of(self.cluster)
        jobs = {}
        for order, (name, spec) in enumerate(self.cluster.worker_spec.items()):
            workers = tuple(f"{name}{suffix}" for suffix in spec.get("group", ("",)))
            job = self._known.setdefault(name, _SpecJob())
            self._look(job, sum(worker in connected for worker in workers), len(workers), now)
            jobs[name] = SiteJob(str(name), DEFAULT, job.state, workers, job.since, order)
        return jobs

    def request(self, pool: str, count: int) -> None:
        """Add jobs to the specification."""
        for _ in range(count):
            for name, spec in upstream_deploy.next_spec(self.cluster).items():
                self.cluster.worker_spec[name] = spec
                self._known[name] = _SpecJob(time())
        self._correcting = asyncio.ensure_future(self._correct())

    async def release(self, names: Iterable[str]) -> None:
        """Remove jobs from the specification, and wait until they are closed."""
        wanted = set(names)
        going = [name for name in self.cluster.worker_spec if str(name) in wanted]
        for name in going:
            self._known.setdefault(name, _SpecJob()).is_leaving = True
        try:
            if not self._is_batch:
                await asyncio.gather(*map(self._closed, going))
        finally:
            for name in going:
                self._drop(name)
        if going:
            await self._correct()

    async def wait_submitted(self) -> None:
        """Return when the cluster matches its specification.

        Raises
        ------
        InputError
            If a job could not be started, with the original message.
        """
        if self._correcting is not None:
            await asyncio.wait({self._correcting})
        if self._trouble:
            raise InputError(f"a job could not be started: {self._trouble}")

    async def _correct(self) -> None:
        """Let the cluster start and close workers according to its specification; record failures."""
        try:
            await upstream_deploy.correct(self.cluster)
            self._trouble = ""
        except Exception as error:  # noqa: BLE001 - whatever a batch system's command or a worker's start raises
            self._trouble, self._troubles = f"{type(error).__name__}: {error}", self._troubles + 1
            self._closed_until = time() + min(_BACK_OFF * 2.0**self._troubles, _MOST_BACK_OFF)
            logger.warning("dask_ferro: a job could not be started: %s", self._trouble)
            for name in [n for n in self.cluster.worker_spec if self._failed(n)]:
                self.cluster.workers.pop(name, None)
                self._drop(name)

    def _failed(self, name: object) -> bool:
        """Return whether a requested job did not start: dask-jobqueue leaves it in its first status."""
        job = self.cluster.workers.get(name)
        return job is None or getattr(job, "status", None) in (Status.created, Status.failed)

    async def _closed(self, name: object) -> None:
        """Wait for a worker that the scheduler told to close; closing its nanny before that would kill it."""
        worker: Any = self.cluster.workers.get(name)
        connected = upstream_deploy.names_of(self.cluster)
        if str(name) not in connected and hasattr(worker, "finished"):
            with suppress(TimeoutError):
                await asyncio.wait_for(worker.finished(), _CLOSING)

    def _look(self, job: _SpecJob, connected: int, workers: int, now: float) -> None:
        """Update a job's state by the number of its connected workers."""
        if connected:
            job.seen_at = now
        if connected == workers:
            state, self._troubles = RUNNING, 0
            if job.asked_at is not None:
                self._start_up.add(now - job.asked_at)
                job.asked_at = None
        else:
            state = PENDING if self._is_batch and job.seen_at is None else BOOTING
        if job.state != state:
            job.state, job.since = state, now

    def _is_over(self, name: object, job: SiteJob, now: float) -> bool:
        """Return whether a job ended by itself: its process is closed, or its workers have been missing for long."""
        known = self._known[name]
        if job.state == RUNNING or known.is_leaving:
            return False
        if not self._is_batch:
            status = getattr(self.cluster.workers.get(name), "status", None)
            return status in (Status.closed, Status.closing, Status.failed)
        return known.seen_at is not None and now - known.seen_at > _CLOSE_TIMEOUT

    def _drop(self, name: object) -> None:
        """Remove a job from the specification."""
        self.cluster.worker_spec.pop(name, None)
        self._known.pop(name, None)


def _bytes(limit: Any) -> int:
    """Return a worker's memory limit in bytes; 0 without one, or for Dask's "auto"."""
    if isinstance(limit, int | float):
        return 0 if limit is True or math.isinf(limit) else int(limit)
    try:
        return int(parse_bytes(limit)) if limit else 0
    except ValueError:
        return 0
