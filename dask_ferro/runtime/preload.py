"""The scheduler plugin as a preload: on from the scheduler's first moment.

``dask scheduler --preload dask_ferro.runtime.preload``, or the same name in the configuration under
``distributed.scheduler.preload``, or in dask-jobqueue's ``scheduler_options``.
"""

from __future__ import annotations

from distributed import Scheduler

from dask_ferro.runtime.scheduler import NAME, FerroScheduler


async def dask_setup(scheduler: Scheduler) -> None:
    """Install the plugin with the configuration's settings."""
    plugin = FerroScheduler()
    await plugin.start(scheduler)
    scheduler.add_plugin(plugin, name=NAME, idempotent=True)
