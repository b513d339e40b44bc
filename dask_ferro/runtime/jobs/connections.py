"""What is asked of a cluster's scheduler for its jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from distributed import SpecCluster

from dask_ferro.runtime import upstream_deploy

logger = logging.getLogger(__name__)

# Seconds for the scheduler to note that the cluster ends.
_OVER_TOLD = 1.0


class Connections:
    """The connection of a cluster to its scheduler.

    Parameters
    ----------
    cluster : SpecCluster
    """

    def __init__(self, cluster: SpecCluster) -> None:
        self._cluster = cluster

    def names(self) -> set[str]:
        """Return the names of all connected workers."""
        return upstream_deploy.names_of(self._cluster)

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
