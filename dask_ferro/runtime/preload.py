"""The scheduler plugin as a preload: on from the scheduler's first moment.

``dask scheduler --preload dask_ferro.runtime.preload``, or the same name in the configuration under
``distributed.scheduler.preload``, or in dask-jobqueue's ``scheduler_options``.

A wrong setting ends the scheduler, with the setting's name: it does not run as stock Dask unnoticed.
"""

from __future__ import annotations

import logging

from distributed import Scheduler, SchedulerPlugin

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.plugin.scheduler import NAME, FerroScheduler

logger = logging.getLogger(__name__)


class Refusal(SchedulerPlugin):  # type: ignore[misc]
    """Raises when the scheduler starts it: an error of a preload Dask only logs, one of a plugin ends the scheduler."""

    def __init__(self, error: ConfigError) -> None:
        self._error = error

    async def start(self, scheduler: Scheduler) -> None:
        """Raise what was wrong."""
        logger.critical("the scheduler ends: %s", self._error)
        raise self._error


async def dask_setup(scheduler: Scheduler) -> None:
    """Install the plugin with the configuration's settings."""
    try:
        plugin = FerroScheduler()
    except ConfigError as error:
        scheduler.add_plugin(Refusal(error), name=NAME)
        return
    await plugin.start(scheduler)
    scheduler.add_plugin(plugin, name=NAME, idempotent=True)
