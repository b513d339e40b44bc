"""The pools of an `ff.SLURMCluster`: what is known of them, and what is reported when one closes.

    cluster.pools                      # (Pool(name='default', ...), Pool(name='gpu', ...))
    cluster.pools.pause("gpu")
    cluster.pools.resume("gpu")

Jobs are not decided on here: that a pool is paused or closed is a fact for `policy.scaling.step`.  When a pool closes,
the last output lines of the failed job are read first.  Then a warning is logged, an event of topic "ferro" is
published, and each client of the scheduler warns; `cluster.pools` has the reason from then on.  Reports run in the
background, with time limits of seconds.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import cached_property
from math import inf
from typing import Any

from distributed import SpecCluster
from distributed.metrics import time

from dask_ferro.elastic.report import closed_text
from dask_ferro.errors import ConfigError
from dask_ferro.policy.scaling.facts import Pool
from dask_ferro.scheduler import upstream_deploy
from dask_ferro.scheduler.events import POOL_CLOSED, TOPIC
from dask_ferro.slurm.job_lifecycle import BatchJob
from dask_ferro.slurm.keywords import NAME
from dask_ferro.slurm.logs import last_output
from dask_ferro.slurm.pool import JobPool
from dask_ferro.slurm.site import SlurmSite

logger = logging.getLogger(__name__)

PAUSE, RESUME = "pause", "resume"
# Seconds for the scheduler, which usually runs in this process.
_PUBLISHING = 5.0


class ClusterPools(tuple[Pool, ...]):
    """The pools of a cluster as they are now, and orders for them."""

    _order: Callable[[str, str], Any]

    def __new__(cls, pools: Iterable[Pool], order: Callable[[str, str], Any]) -> ClusterPools:
        self = super().__new__(cls, pools)
        self._order = order
        return self

    def pause(self, name: str) -> Any:
        """Request no more jobs of a pool until it is resumed; pending and running jobs continue."""
        return self._order(PAUSE, name)

    def resume(self, name: str) -> Any:
        """Request jobs of a pool again that was paused, or closed by failures."""
        return self._order(RESUME, name)


class JobPools:
    """The kinds of jobs of one cluster.

    Parameters
    ----------
    build : callable
        Returns the pools by name.
    site : SlurmSite
    trouble : callable
        Returns why a pool's jobs are not accepted at the moment.
    cluster : SpecCluster
    """

    def __init__(
        self,
        build: Callable[[], dict[str, JobPool]],
        site: SlurmSite,
        trouble: Callable[[str], str],
        cluster: SpecCluster,
    ) -> None:
        self._build, self._site, self._trouble, self._cluster = build, site, trouble, cluster
        self._running: set[asyncio.Task[None]] = set()

    @cached_property
    def by_name(self) -> dict[str, JobPool]:
        """All pools, the default one first; they are built by dask-jobqueue's question for a job."""
        return self._build()

    def __getitem__(self, name: str) -> JobPool:
        if name not in self.by_name:
            raise ConfigError(f"{NAME}: no pool {name!r}; there are {', '.join(self.by_name)}")
        return self.by_name[name]

    def facts(self, lingering: Mapping[str, int]) -> tuple[Pool, ...]:
        """Return the policy's facts.

        Parameters
        ----------
        lingering : mapping of str to int
            The number of jobs, by pool, that nobody follows and that may still exist.
        """
        return tuple(
            pool.pool(time(), self._trouble(name), self._site.preemptible, lingering.get(name, 0))
            for name, pool in self.by_name.items()
        )

    def rows(self, jobs: Iterable[BatchJob], facts: Iterable[Pool]) -> list[dict[str, Any]]:
        """Return the facts as rows for msgpack, with the number of jobs by state and the partitions; None: no limit."""
        states: dict[str, Counter[str]] = {}
        for job in jobs:
            states.setdefault(job.pool, Counter())[str(job.state)] += 1
        rows = []
        for pool in facts:
            row = {key: None if value == inf else value for key, value in pool._asdict().items()}
            queue = ",".join(self[pool.name].job.partitions)
            rows.append(row | {"jobs": dict(states.get(pool.name, {})), "queue": queue})
        return rows

    # -- reports -----------------------------------------------------------------------------------------------

    def begin(self, what: Coroutine[object, object, None]) -> None:
        """Run a coroutine in the background, for which `settled` waits."""
        task = asyncio.get_running_loop().create_task(what)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("dask_ferro: reporting on a pool failed: %r", error)

    async def settled(self) -> None:
        """Return when everything is reported."""
        while self._running:
            await asyncio.wait(self._running)

    async def close(self) -> None:
        """Stop reporting."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=1.0)

    async def close_pool(self, pool: JobPool, why: str, job: BatchJob | None = None) -> None:
        """Close a pool, and report it with the last lines of the job that closed it, if there is one."""
        if time() < pool.closed_until:
            return
        log = None
        if job is not None:
            log = await last_output(str(pool.job.job_header), self._site.job_name, job)
            why = f"{why}; {log.brief()}"
        if not pool.close(why, time(), log.indented() if log else ""):
            return
        event = {
            "action": POOL_CLOSED,
            "time": time(),
            "pool": pool.name,
            "why": pool.closed,
            "until": pool.closed_until,
            "job": job.job_id if job else "",
            "log": log.path if log else "",
            "lines": list(log.lines) if log else [],
        }
        text = f"dask_ferro: pool {closed_text([pool.pool(time())])}"
        logger.warning("%s", text)
        try:
            async with asyncio.timeout(_PUBLISHING):
                await upstream_deploy.scheduler_rpc(self._cluster).log_event(topic=TOPIC, msg=event)
                # Each client warns, however it is connected.
                await upstream_deploy.scheduler_rpc(self._cluster).log_event(topic="warn", msg=text)
        except Exception as error:  # noqa: BLE001 - it was logged; the scheduler may be going
            logger.info("dask_ferro: the clients did not receive it: %r", error)
