"""The scheduler plugin: what `ff.install` puts on a running scheduler, and takes off again.

It joins the parts and decides nothing: stealing (`stealing`), placement (`placement`), and the intervals at which
messages leave, and the worker plugin, which measures.  Taking it off gives stock Dask back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from weakref import WeakKeyDictionary

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


# One comes on or goes off at a time.
_turns: WeakKeyDictionary[Scheduler, asyncio.Lock] = WeakKeyDictionary()


def _turn(scheduler: Scheduler) -> asyncio.Lock:
    return _turns.setdefault(scheduler, asyncio.Lock())


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
        self._scheduler: Scheduler | None = None
        self._had_stealing = True

    async def start(self, scheduler: Scheduler) -> None:
        """Take over from Dask's stealing and placement, or from another of our kind.  Idempotent."""
        async with _turn(scheduler):
            current = scheduler.plugins.get(NAME)
            if self.stealing is not None or current is self:
                return
            if isinstance(current, FerroScheduler):  # another client was quicker
                await current.take_off()
            try:
                await self._put_on(scheduler)
            except BaseException:
                await self.take_off()
                raise

    async def remove(self, comm: Any = None) -> None:
        """Give the scheduler its own stealing, placement and intervals back.  Idempotent."""
        if self._scheduler is not None:
            async with _turn(self._scheduler):
                await self.take_off()

    async def _put_on(self, scheduler: Scheduler) -> None:
        stock = seams.stealing_of(scheduler)
        self._scheduler, self._had_stealing = scheduler, stock is not None
        await seams.quiet(stock, scheduler)
        self.stealing = Stealing(scheduler, self.settings)
        seams.put_stealing(scheduler, self.stealing, stock)
        await self.stealing.start()
        self.placing = Placing(scheduler, self.stealing, self.settings)
        if self.settings.placement:
            seams.put_placement(scheduler, self.placing.ready, self.placing.queued)
        scheduler.handlers[REMOVE] = self.remove
        scheduler.handlers[FIGURES] = self.figures
        await self._put_on_workers(scheduler)

    async def _put_on_workers(self, scheduler: Scheduler) -> None:
        plugin = dumps(FerroWorker(sends=self.settings.worker_sends))
        try:
            await scheduler.register_worker_plugin(None, plugin, WORKER_NAME, idempotent=False)
        except Exception as error:  # noqa: BLE001 - whatever a worker lacks
            # It would keep every later worker from starting.  Without it nothing is measured on workers.
            scheduler.worker_plugins.pop(WORKER_NAME, None)
            logger.warning("dask_ferro is not on all workers, and measures nothing there: %r", error)

    async def take_off(self) -> None:
        """Do what `remove` does, for one whose turn it is."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        if self.stealing is not None:
            await self.stealing.stop()
        seams.put_stock_placement(scheduler)
        if self._had_stealing:
            await seams.put_stock_stealing(scheduler, self.stealing)
        else:
            seams.put_stealing(scheduler, None, self.stealing)
        for name in (NAME, Stealing.name):
            scheduler.plugins.pop(name, None)
        for handler in (REMOVE, FIGURES):
            scheduler.handlers.pop(handler, None)
        seams.put_sends(scheduler, scheduler.workers, seams.WORKER_SENDS)
        self.stealing = self.placing = self._scheduler = None
        if WORKER_NAME in scheduler.worker_plugins:
            await scheduler.unregister_worker_plugin(None, WORKER_NAME)

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
