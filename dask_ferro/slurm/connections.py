"""What is asked of a cluster's scheduler for its jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from distributed import SpecCluster

from dask_ferro.scheduler import upstream_deploy

logger = logging.getLogger(__name__)

# Seconds for the scheduler to note that the cluster ends.
_OVER_TOLD = 1.0


async def unblame(cluster: SpecCluster, workers: Iterable[str]) -> None:
    """Keep tasks from being blamed for the death of workers that died with their job."""
    try:
        await upstream_deploy.scheduler_rpc(cluster).ferro_unblame(names=list(workers))
    except Exception as error:  # noqa: BLE001 - no roster, no scheduler: nothing is taken back
        logger.debug("dask_ferro: tasks are blamed for a job that was ended: %r", error)


async def publish(cluster: SpecCluster, topic: str, message: object) -> None:
    """Log an event on the scheduler."""
    await upstream_deploy.scheduler_rpc(cluster).log_event(topic=topic, msg=message)


async def tell_over(cluster: SpecCluster) -> None:
    """Let cancelled jobs end at once, since the data of their workers is not needed any more."""
    try:
        async with asyncio.timeout(_OVER_TOLD):
            await upstream_deploy.scheduler_rpc(cluster).ferro_over()
    except Exception as error:  # noqa: BLE001 - no roster, no scheduler: they end all the same
        logger.debug("dask_ferro: the scheduler was not told that the cluster ends: %r", error)
