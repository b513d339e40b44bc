"""The pools of an `ff.SLURMCluster`: `cluster.pools`, which its user may pause and resume.

    cluster.pools                      # (Pool(name='default', ...), Pool(name='gpu', ...))
    cluster.pools.pause("gpu")
    cluster.pools.resume("gpu")

Jobs are not decided on here: that a pool is paused is a fact for `policy.scaling.step`, and the controller reacts at
once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

from distributed import Status
from distributed.metrics import time

from dask_ferro.errors import ConfigError
from dask_ferro.policy.scaling.facts import Pool
from dask_ferro.runtime.jobs.keywords import WHO
from dask_ferro.runtime.jobs.script import WorkerJob, resources_of
from dask_ferro.runtime.pools.pool import JobPool
from dask_ferro.runtime.pools.rpc import PAUSE, RESUME, PoolRow
from dask_ferro.runtime.pools.shortage import is_shut, told_closed
from dask_ferro.runtime.site_jobs import DEFAULT
from dask_ferro.runtime.telemetry.events import POOL, TOPIC
from dask_ferro.runtime.upstream_jobqueue import job_keywords

logger = logging.getLogger(__name__)


class ClusterPools(tuple[Pool, ...]):
    """The pools of a cluster as they are now; a call, as in ``cluster.pools()``, returns them too."""

    _cluster: Any

    @classmethod
    def of(cls, cluster: Any) -> ClusterPools:
        """Return the pools of a cluster."""
        pools = cls(cluster._pool_facts())
        pools._cluster = cluster
        return pools

    def __call__(self) -> ClusterPools:
        return self

    def pause(self, name: str) -> Any:
        """Request no more jobs of a pool until it is resumed; pending and running jobs continue."""
        return self._cluster._order_pool(PAUSE, name)

    def resume(self, name: str) -> Any:
        """Request jobs of a pool again that was paused, or closed by failures."""
        return self._cluster._order_pool(RESUME, name)


class PooledCluster:
    """A mixin with the pools of an `ff.SLURMCluster`, before dask-jobqueue's class."""

    @property
    def pools(self: Any) -> ClusterPools:
        """The kinds of jobs, with measurements, and the reason why one is closed or paused."""
        return ClusterPools.of(self)

    def resources(self: Any, pool: str) -> dict[str, float]:
        """Return the abstract resources of each worker of a pool."""
        return resources_of(self._kind(pool).job)

    def _first_job(self: Any) -> WorkerJob:
        """Return the default pool's job; the first call, by dask-jobqueue before the start, builds all pools."""
        return self._records()[DEFAULT].job  # type: ignore[no-any-return]

    def _records(self: Any) -> dict[str, JobPool]:
        """Return the pools by name."""
        if not self._pool_records:
            self._pool_records = {
                name: JobPool.built(
                    name, self.job_cls, job_keywords(self), self._guesses | options, self._names.prefix(name)
                )
                for name, options in self._kinds.items()
            }
        return self._pool_records  # type: ignore[no-any-return]

    def _kind(self: Any, pool: str) -> JobPool:
        records: dict[str, JobPool] = self._records()
        if pool not in records:
            raise ConfigError(f"{WHO}: no pool {pool!r}; there are {', '.join(records)}")
        return records[pool]

    def _pool_facts(self: Any) -> tuple[Pool, ...]:
        now = time()
        # Cancelled jobs may still exist: they count for the maximum.
        ending = {job.name: job for job in (*self._book.leaving, *self._cancellation.jobs)}
        followed = {job.name for job in self._book.followed}
        lingering = Counter(job.pool for name, job in ending.items() if name not in followed)
        # Unknown strays, mostly of lost submissions, count for the first pool.
        unknown = self._cancellation.job_ids - {job.job_id for job in self._cancellation.jobs}
        lingering[DEFAULT] += len(unknown)
        return tuple(
            kind.pool(now, self._submission.trouble(name), self._site.preemptible)._replace(
                lingering=lingering[name]
            )
            for name, kind in self._records().items()
        )

    def _pool_rows(self: Any) -> list[PoolRow]:
        """Return the rows of a table of pools, in types that msgpack supports."""
        states: dict[str, Counter[str]] = {}
        for job in self._book.followed:
            states.setdefault(job.pool, Counter())[job.state] += 1
        return [
            {
                "name": pool.name,
                "state": "paused" if pool.is_paused else "closed" if pool.closed else "open",
                "why": pool.closed,
                "until": pool.closed_until or None,
                "jobs": dict(states.get(pool.name, {})),
                "minimum": pool.minimum,
                "maximum": None if pool.maximum == float("inf") else pool.maximum,
                "processes": pool.processes,
                "threads": pool.threads,
                "queue": ",".join(self._kind(pool.name).job.partitions),
            }
            for pool in self._pool_facts()
        ]

    def _order_pool(self: Any, what: str, name: str) -> Any:
        """Pause or resume a pool; on an event loop, return an awaitable for it."""
        if self.asynchronous or self.called_from_running_loop:
            return asyncio.ensure_future(self._carry_out(what, name))
        return self.sync(self._carry_out, what, name)

    async def _carry_out(self: Any, what: str, name: str) -> None:
        if self._closing or self.status in (Status.closing, Status.closed, Status.failed):
            raise ConfigError(f"{WHO}: pool {name!r}: the cluster is closed")
        kind = self._kind(name)
        if what == PAUSE:
            kind.pause(time())
            if waiting := [job.name for job in self._submission.waiting(name)]:
                # In the background, since commands may hang.
                self._closings.begin(self.release(waiting))
        else:
            kind.resume()
            self._submission.retry(name)
        logger.info("dask_ferro: %s pool %s", what, name)
        if self.status == Status.running:
            self._closings.begin(self._tell_order(what, name))
        await self._look_now()

    async def _tell_order(self: Any, what: str, name: str) -> None:
        """Publish an operation; if no pool is open afterwards, each client warns, since its tasks may wait."""
        await self._publish(TOPIC, {"action": POOL, "time": time(), "pool": name, "order": what})
        pools = self._pool_facts()
        if what == PAUSE and all(map(is_shut, pools)):
            text = f"dask_ferro: pool {told_closed(pools)}"
            logger.warning("%s", text)
            await self._publish("warn", text)
