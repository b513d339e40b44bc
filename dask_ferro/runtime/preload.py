"""The scheduler plugin as a preload, active from the scheduler's start.

``dask scheduler --preload dask_ferro.runtime.preload``, or the same name in the configuration under
``distributed.scheduler.preload``, or in dask-jobqueue's ``scheduler_options``.

An invalid setting ends the scheduler with an error that names it, so that it does not run as stock Dask unnoticed.
"""

from __future__ import annotations

import logging

from distributed import Scheduler, SchedulerPlugin

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.plugin.scheduler import NAME, FerroScheduler

logger = logging.getLogger(__name__)


class Refusal(SchedulerPlugin):  # type: ignore[misc]
    """A plugin whose start raises an error, which ends the scheduler; errors of a preload are only logged."""

    def __init__(self, error: ConfigError) -> None:
        self._error = error

    async def start(self, scheduler: Scheduler) -> None:
        """Raise the configuration's error."""
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
