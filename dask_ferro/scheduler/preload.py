"""The scheduler plugin as a preload, active from the scheduler's start.

``dask scheduler --preload dask_ferro.scheduler.preload``, or the same name in the configuration under
``distributed.scheduler.preload``, or in dask-jobqueue's ``scheduler_options``.

An invalid setting ends the scheduler with an error that names it, so that it does not run as stock Dask unnoticed.
"""

from __future__ import annotations

import logging

from distributed import Scheduler

from dask_ferro.errors import InputError
from dask_ferro.scheduler.plugin import FerroScheduler, put_on
from dask_ferro.scheduler.scheduling import Scheduling, stays_off

logger = logging.getLogger(__name__)


async def dask_setup(scheduler: Scheduler) -> None:
    """Install stealing and placement with the configuration's settings; without what they need, stock Dask goes on."""
    if sentence := stays_off():
        logger.warning(sentence)
        return
    try:
        await put_on(Scheduling(), dask_scheduler=scheduler)
    except InputError as error:
        logger.critical("the scheduler ends: %s", error)
        scheduler.add_plugin(FerroScheduler(scheduler, error))
