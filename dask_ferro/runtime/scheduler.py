"""The scheduler plugin: what `ff.install` puts on a running scheduler, and takes off again.

It joins the parts and decides nothing: stealing (`stealing`), placement (`placement`), and the intervals at which
messages leave, and the worker plugin, which measures.  Taking it off gives stock Dask back.
"""

from __future__ import annotations

import logging
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps

from dask_ferro.runtime import seams
from dask_ferro.runtime.placement import Placing
from dask_ferro.runtime.settings import Settings
from dask_ferro.runtime.stealing import Stealing
from dask_ferro.runtime.worker import NAME as WORKER_NAME
from dask_ferro.runtime.worker import FerroWorker

logger = logging.getLogger(__name__)

NAME = "ferro"
# What a client calls to take the plugin off, and to ask for its figures.
REMOVE = "ferro_remove"
FIGURES = "ferro_figures"


class FerroScheduler(SchedulerPlugin):
    """Adaptive stealing and placement, as a plugin of Dask's scheduler.

    Parameters
    ----------
    settings : Settings, optional
        Default: the configuration's.
    """

    name = NAME
    idempotent = True

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings if settings is not None else Settings.configured()
        self.stealing: Stealing | None = None
        self.placing: Placing | None = None
        self._had_stealing = True

    async def start(self, scheduler: Scheduler) -> None:
        """Take over from Dask's stealing and placement.  Idempotent."""
        if self.stealing is not None:
            return
        stock = seams.stealing_of(scheduler)
        self._had_stealing = stock is not None
        await seams.quiet(stock, scheduler)
        self.stealing = Stealing(scheduler, self.settings)
        seams.put_stealing(scheduler, self.stealing)
        await self.stealing.start()
        self.placing = Placing(scheduler, self.stealing, self.settings)
        if self.settings.placement:
            seams.put_placement(scheduler, self.placing.ready, self.placing.queued)
        worker = dumps(FerroWorker(sends=self.settings.worker_sends))
        await scheduler.register_worker_plugin(None, worker, WORKER_NAME, idempotent=False)
        scheduler.handlers[REMOVE] = self.remove
        scheduler.handlers[FIGURES] = self.figures
        self._scheduler = scheduler

    async def remove(self, comm: Any = None) -> None:
        """Give the scheduler its own stealing, placement and intervals back."""
        if self.stealing is None:
            return
        scheduler = self._scheduler
        await self.stealing.stop()
        seams.put_stock_placement(scheduler)
        if self._had_stealing:
            await seams.put_stock_stealing(scheduler)
        else:
            seams.put_stealing(scheduler, None)
        scheduler.plugins.pop(NAME, None)
        scheduler.plugins.pop(Stealing.name, None)
        seams.put_sends(scheduler, scheduler.workers, seams.WORKER_SENDS)
        if WORKER_NAME in scheduler.worker_plugins:
            await scheduler.unregister_worker_plugin(None, WORKER_NAME)
        for handler in (REMOVE, FIGURES):
            scheduler.handlers.pop(handler, None)
        self.stealing = self.placing = None

    def figures(self, comm: Any = None) -> dict[str, Any]:
        """Return what was moved so far, and each worker's threshold in seconds."""
        assert self.stealing is not None
        return {
            "counts": dict(self.stealing.counts),
            "thresholds": dict(self.stealing.state.thresholds),
            "stealing": self.settings.stealing,
        }

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Any], **kwargs: Any) -> None:
        """Order the tasks of a new graph."""
        if self.settings.rank and self.placing is not None:
            self.placing.rank(tasks)
