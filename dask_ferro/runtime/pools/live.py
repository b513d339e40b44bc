"""The pools of a running cluster: `cluster.pools`, with the operations of its user.

    cluster.pools                      # (Pool(name='default', ...), Pool(name='gpu', ...))
    cluster.pools.add("gpu", queue="gpu", maximum=4)
    cluster.pools.pause("gpu")
    cluster.pools.resume("gpu")
    cluster.pools.remove("gpu")

One operation is carried out at a time, and the controller reacts at once.  Jobs are not decided on here: that a pool
is paused or removed is a fact for `policy.scaling.step`.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from distributed import Status
from distributed.metrics import time

from dask_ferro.errors import ConfigError
from dask_ferro.policy.scaling.facts import REMOVED, Pool
from dask_ferro.runtime.jobs.cluster_options import check_options
from dask_ferro.runtime.jobs.script import WorkerJob
from dask_ferro.runtime.pools.pool import JobPool, overrides_of
from dask_ferro.runtime.pools.providers import told_closed
from dask_ferro.runtime.pools.rpc import PoolRow
from dask_ferro.runtime.pools.shortage import is_shut
from dask_ferro.runtime.site_jobs import DEFAULT, SiteJob
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from dask_ferro.runtime.telemetry.events import POOL, TOPIC
from dask_ferro.runtime.upstream_jobqueue import job_keywords

logger = logging.getLogger(__name__)

_WHO = "ff.SLURMCluster"
# The placeholder in scripts that are rendered before there is a scheduler.
ADDRESS = "tcp://<insert-scheduler-address-here>:8786"


class LivePools(Sequence[Pool]):
    """The current pools of a cluster: a sequence of `Pool`; a call returns a tuple.

    Parameters
    ----------
    facts : callable
        Returns the current pools.
    order : callable
        Carries out an operation: (what, name, options).
    """

    def __init__(self, facts: Callable[[], tuple[Pool, ...]], order: Callable[..., object]) -> None:
        self._facts, self._order = facts, order

    def __call__(self) -> tuple[Pool, ...]:
        return self._facts()

    def __len__(self) -> int:
        return len(self._facts())

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._facts())

    @overload
    def __getitem__(self, at: int) -> Pool: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Pool, ...]: ...
    def __getitem__(self, at: int | slice) -> Pool | tuple[Pool, ...]:
        return self._facts()[at]

    def __eq__(self, other: object) -> bool:
        return self._facts() == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return repr(self._facts())

    def add(self, name: str, **options: object) -> Any:
        """Add a kind of jobs, which the controller may request from now on.

        Parameters
        ----------
        name : str
        **options
            As in ``pools={name: {...}}`` when the cluster is made.

        Raises
        ------
        ConfigError
            For an invalid name or option, or if SLURM would never start such jobs: it is asked first.
        """
        return self._order("add", name, options)

    def remove(self, name: str) -> Any:
        """Remove a pool.  Returns when the removal has begun.

        Pending jobs are cancelled; running ones finish their tasks, and end when their data has moved elsewhere.  The
        name is free again when the last has ended.

        Raises
        ------
        ConfigError
            If it is the last pool.
        """
        return self._order("remove", name)

    def pause(self, name: str) -> Any:
        """Request no more jobs of a pool until it is resumed; pending and running jobs continue."""
        return self._order("pause", name)

    def resume(self, name: str) -> Any:
        """Request jobs of a pool again that was paused, or closed by failures."""
        return self._order("resume", name)


class PoolOrders:
    """A mixin with the pools of an `ff.SLURMCluster`, before dask-jobqueue's class."""

    @property
    def pools(self: Any) -> LivePools:
        """The kinds of jobs, with measurements, and the reason why one is closed or paused."""
        return self._live_pools

    def resources(self: Any, pool: str) -> dict[str, float]:
        """Return the abstract resources of each worker of a pool."""
        return self._kind(pool).job.resources

    def _first_job(self: Any) -> WorkerJob:
        """Return the default pool's job; the first call, by dask-jobqueue before the start, builds all pools."""
        self._records()
        return self._template

    def _records(self: Any) -> dict[str, JobPool]:
        """Return the pools by name; the dictionary is replaced and never changed, as other threads read it."""
        if not self._pool_records:
            self._pool_records = {name: self._built(name, options) for name, options in self._kinds.items()}
            self._template = self._pool_records[DEFAULT].job
        return self._pool_records

    def _built(self: Any, name: str, overrides: Mapping[str, object]) -> JobPool:
        prefix = self._names.prefix(name)
        return JobPool.built(
            name, self.job_cls, ADDRESS, job_keywords(self), self._guesses | overrides, prefix
        )

    def _kind(self: Any, pool: str) -> JobPool:
        records = self._records()
        if pool not in records:
            raise ConfigError(f"{_WHO}: no pool {pool!r}; there are {', '.join(records)}")
        return records[pool]

    def _pool_facts(self: Any) -> tuple[Pool, ...]:
        now = time()
        # Cancelled jobs may still exist: they count for the maximum.
        ending = {job.name: job for job in (*self._book.leaving, *self._cancellation.jobs)}
        followed = {job.name for job in self._book.followed}
        lingering = Counter(job.pool for name, job in ending.items() if name not in followed)
        # Unknown strays, mostly of lost submissions, count for the first pool.
        unknown = self._cancellation.job_ids - {job.job_id for job in self._cancellation.jobs}
        lingering[next(iter(self._records()))] += len(unknown)
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
                "state": pool.mode or ("closed" if pool.closed else "open"),
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

    # -- orders ----------------------------------------------------------------------------------------------

    def _order_pool(self: Any, what: str, name: str, options: Mapping[str, object] | None = None) -> Any:
        """Carry out an operation; on an event loop, return an awaitable for it."""
        if self.asynchronous or self.called_from_running_loop:
            return asyncio.ensure_future(self._carry_out(what, name, options))
        return self.sync(self._carry_out, what, name, options)

    async def _carry_out(
        self: Any, what: str, name: str, options: Mapping[str, object] | None = None
    ) -> None:
        if self._closing or self.status in (Status.closing, Status.closed, Status.failed):
            raise ConfigError(f"{_WHO}: pool {name!r}: the cluster is closed")
        async with self._orders:
            match what:
                case "add":
                    await self._add_pool(name, options or {})
                case "remove":
                    await self._remove_pool(name)
                case "pause":
                    await self._pause_pool(name)
                case _:
                    await self._resume_pool(name)
        logger.info("dask_ferro: %s pool %s", what, name)
        if self.status == Status.running:
            self._closings.begin(self._tell_order(what, name))
        await self._look_now()

    async def _tell_order(self: Any, what: str, name: str) -> None:
        """Publish an operation; if no pool is open afterwards, each client warns, since its tasks may wait."""
        await self._publish(TOPIC, {"action": POOL, "time": time(), "pool": name, "order": what})
        pools = self._pool_facts()
        if what in ("pause", "remove") and all(map(is_shut, pools)):
            text = f"dask_ferro: pool {told_closed(pools)}"
            logger.warning("%s", text)
            await self._publish("warn", text)

    async def _add_pool(self: Any, name: str, options: Mapping[str, object]) -> None:
        checked = overrides_of({name: options})
        if (there := self._records().get(name)) is not None:
            state = f"is being removed, {there.told_mode()}" if there.mode == REMOVED else "is there already"
            raise ConfigError(f"{_WHO}: pool {name!r} {state}; wanted another name")
        check_options(self.job_cls, self._given, self._given, checked)
        kind = self._built(name, checked[name])
        why = await self._closings.trial(self._rendered(kind, 0))
        if why:
            raise ConfigError(f"{_WHO}: pool {name!r}: SLURM would never start jobs of it: {why}")
        if why is not None:
            self._closings.is_asked(name)
        self._pool_records = {**self._records(), name: kind}

    async def _remove_pool(self: Any, name: str) -> None:
        kind = self._kind(name)
        if all(other.mode == REMOVED for other in self._records().values() if other is not kind):
            raise ConfigError(
                f"{_WHO}: pool {name!r} is the last one and cannot be removed; "
                "add another one before, pause it, or close the cluster"
            )
        kind.retire(time())
        going = self._submission.waiting(name)
        if self._adapting() is None:
            going = [job for job in self._book.followed if job.pool == name and not job.started_at]
        self._release_soon(going)
        self._forget_removed()

    async def _pause_pool(self: Any, name: str) -> None:
        self._not_removed(name).pause(time())
        self._release_soon(self._submission.waiting(name))

    async def _resume_pool(self: Any, name: str) -> None:
        self._not_removed(name).resume()
        self._submission.retry(name)

    def _not_removed(self: Any, name: str) -> JobPool:
        kind: JobPool = self._kind(name)
        if kind.mode == REMOVED:
            raise ConfigError(f"{_WHO}: pool {name!r} is being removed, {kind.told_mode()}")
        return kind

    def _release_soon(self: Any, jobs: Iterable[SiteJob] | Iterable[BatchJob]) -> None:
        """End jobs in the background, since commands may hang."""
        if names := [job.name for job in jobs]:
            self._closings.begin(self.release(names))

    def _forget_removed(self: Any) -> None:
        """Forget removed pools once none of their jobs is left."""
        if all(kind.mode != REMOVED for kind in self._pool_records.values()):
            return
        there = {job.pool for job in (*self._book.jobs.values(), *self._cancellation.jobs)}
        gone = {n: kind for n, kind in self._pool_records.items() if kind.mode == REMOVED and n not in there}
        if gone:
            self._past |= gone
            self._pool_records = {n: kind for n, kind in self._pool_records.items() if n not in gone}
            logger.info("dask_ferro: removed pools are gone: %s", ", ".join(gone))
