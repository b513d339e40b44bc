"""The workers of a cluster's jobs at its scheduler: who is connected since when, and what is asked there for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from distributed import SpecCluster
from distributed.metrics import time

from dask_ferro.runtime import upstream_deploy
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob

logger = logging.getLogger(__name__)

# Seconds for the scheduler to note that the cluster ends.
_OVER_TOLD = 1.0


class Connections:
    """The connected workers of a cluster.

    Parameters
    ----------
    cluster : SpecCluster
    """

    def __init__(self, cluster: SpecCluster) -> None:
        self._cluster = cluster
        self._since: dict[str, float] = {}

    def changed(self, op: str, msg: Any) -> None:
        """Record a worker that joined ("add", with its facts) or left ("remove")."""
        if op == "remove":
            self._since.pop(str(upstream_deploy.workers_of(self._cluster)[msg]["name"]), None)
        came = [str(worker["name"]) for worker in msg["workers"].values()] if op == "add" else []
        self._since.update(dict.fromkeys(came, time()))

    def names(self) -> set[str]:
        """Return the names of all connected workers."""
        return upstream_deploy.names_of(self._cluster)

    def since(self, job: BatchJob) -> float | None:
        """Return when the last of a job's workers connected."""
        return max((self._since[worker] for worker in job.workers if worker in self._since), default=None)

    @property
    def scheduler_address(self) -> str | None:
        """The address to which workers connect."""
        return upstream_deploy.scheduler_address(self._cluster)

    async def unblame(self, workers: Iterable[str]) -> None:
        """Keep tasks from being blamed for the death of workers that died with their job."""
        scheduler = upstream_deploy.scheduler_rpc(self._cluster)
        try:
            await scheduler.ferro_unblame(names=list(workers))
        except Exception as error:  # noqa: BLE001 - no roster, no scheduler: nothing is taken back
            logger.debug("dask_ferro: tasks are blamed for a job that was ended: %r", error)

    async def publish(self, topic: str, message: object) -> None:
        """Log an event on the scheduler."""
        scheduler = upstream_deploy.scheduler_rpc(self._cluster)
        await scheduler.log_event(topic=topic, msg=message)

    async def tell_over(self) -> None:
        """Let cancelled jobs end at once, since the data of their workers is not needed any more."""
        scheduler = upstream_deploy.scheduler_rpc(self._cluster)
        try:
            async with asyncio.timeout(_OVER_TOLD):
                await scheduler.ferro_over()
        except Exception as error:  # noqa: BLE001 - no roster, no scheduler: they end all the same
            logger.debug("dask_ferro: the scheduler was not told that the cluster ends: %r", error)
