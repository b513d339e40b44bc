"""The part of the scheduler plugin that `ff.install` puts on a running scheduler and removes again.

It connects other parts and makes no decisions: stealing (`stealing`), placement (`placement`), the intervals at which
messages are sent, and the worker plugin, which measures.  Its removal restores stock Dask.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from importlib.metadata import version

from dask.typing import Key
from distributed import Scheduler
from distributed.protocol.pickle import dumps

from dask_ferro.scheduler import prometheus, reach, upstream
from dask_ferro.scheduler.events import Events
from dask_ferro.scheduler.placement import Placing
from dask_ferro.scheduler.plugin import Part
from dask_ferro.scheduler.settings import Settings
from dask_ferro.scheduler.stealing import Stealing
from dask_ferro.scheduler.worker_plugin import NAME as WORKER_NAME
from dask_ferro.scheduler.worker_plugin import FerroWorker

logger = logging.getLogger(__name__)


def recordings_of(client: str) -> str:
    """Return the common prefix of the names of a client's recordings, here and on the workers."""
    return f"ferro-trace-{client}-"


NOT_INSTALLED = "dask_ferro is not installed on this cluster; call ff.install(client)"


def stays_off() -> str:
    """Return why the plugin cannot be used with the installed Dask, with the remedy; empty: it can."""
    lacks = upstream.missing()
    if not lacks:
        return ""
    return (
        "dask_ferro: the scheduler plugin stays off, and stock Dask goes on: the installed Dask (distributed"
        f" {version('distributed')}) has no {'; no '.join(lacks)}. Install the versions that dask-ferro asks for, or a"
        " newer dask-ferro"
    )


class Scheduling(Part):
    """Adaptive stealing and placement.

    Parameters
    ----------
    settings : Settings, optional
        Default: from the configuration.
    """

    name = "scheduling"

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings if settings is not None else Settings.configured()
        self.stealing: Stealing | None = None
        self.placing: Placing | None = None
        self.events: Events | None = None
        self._scheduler: Scheduler | None = None
        self._had_stealing = True
        self.late: list[str] = []  # workers that had not answered when the latest call returned
        self._take_pages_off: Callable[[], None] | None = None

    # -- from start to stop --------------------------------------------------------------------------------

    def serves(self, other: Scheduling) -> bool:
        """Return whether the settings are the same: a replacement would forget what was learned."""
        return self.settings == other.settings

    async def prepare(self, scheduler: Scheduler) -> None:
        """Wait until stock has its answers to its requests."""
        await upstream.quiesce(scheduler.extensions.get("stealing"), scheduler)

    def start(self, scheduler: Scheduler) -> None:
        """Replace Dask's stealing and placement."""
        stock = scheduler.extensions.get("stealing")
        self._scheduler, self._had_stealing = scheduler, stock is not None
        settings = self.settings.resolved(stock is not None)
        self.stealing = Stealing(scheduler, settings)
        upstream.put_stealing(scheduler, self.stealing, stock)
        self.placing = Placing(scheduler, self.stealing, settings)
        self.events = Events(scheduler, self.stealing)
        if self.settings.placement:
            placing = self.placing
            upstream.put_placement(scheduler, placing.ready, placing.queued, placing.is_tied, placing.ahead)

    async def ready(self) -> None:
        """Begin to steal and to publish, and set up the workers."""
        scheduler, stealing, events = self._scheduler, self.stealing, self.events
        assert scheduler is not None
        assert stealing is not None
        assert events is not None
        await stealing.start()
        events.start()
        prometheus.register()
        # Imported here: `views` is above this room, and a process without a scheduler has no pages.
        from dask_ferro.views.pages import register_pages

        self._take_pages_off = register_pages(scheduler, stealing)
        plugin = dumps(FerroWorker())
        try:
            self.late = await reach.put_on(
                WORKER_NAME, plugin, self.settings.timeout, dask_scheduler=scheduler
            )
        # Whatever a worker lacks, stealing works without its measurements.
        except RuntimeError as error:
            logger.warning("dask_ferro is on no worker, and measures nothing: %s", error)

    async def stop(self) -> None:
        """Restore the workers, and the scheduler's own stealing, placement and intervals.  Idempotent.

        Workers come first, as they may take seconds to answer: stock Dask's stealing must not act meanwhile.
        """
        if self._scheduler is not None:
            try:
                self.late = await reach.take_off(
                    WORKER_NAME, self.settings.timeout, dask_scheduler=self._scheduler
                )
            finally:
                await self.give_way()

    async def give_way(self) -> None:
        """Restore all but the workers: they get another worker plugin in place of this one's, and wait once."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        if self._take_pages_off is not None:
            self._take_pages_off()
            self._take_pages_off = None
        if self.stealing is not None:
            await self.stealing.stop()
        await self.close()
        upstream.put_stock_placement(scheduler)
        if self._had_stealing:
            await upstream.put_stock_stealing(scheduler, self.stealing)
        else:
            upstream.put_stealing(scheduler, None, self.stealing)
        upstream.put_sends(scheduler, scheduler.workers, upstream.WORKER_SENDS)
        self.stealing = self.placing = self.events = self._scheduler = None

    async def close(self) -> None:
        """Stop publishing, counting and recording."""
        if self.events is not None:
            self.events.stop()
        if self.stealing is not None and self.stealing.decision_log is not None:
            await asyncio.to_thread(self.stealing.decision_log.close)

    # -- what happens --------------------------------------------------------------------------------------

    def listeners(self) -> Iterable[object]:
        """Return stealing, which needs each fact, what hears published events, and this part."""
        return (self.stealing, self.events, self)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """End the recordings of a client that left without doing so."""
        mine = recordings_of(client)
        if self.stealing is not None:
            for who in list(self.stealing.records.recordings):
                if who.startswith(mine):
                    self.stealing.records.stop_for(who)
        for name in [name for name in scheduler.worker_plugins if name.startswith(mine)]:
            scheduler.loop.add_callback(reach.take_off, name, self.settings.timeout, dask_scheduler=scheduler)

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Key], **kwargs: object) -> None:
        """Order the tasks of a new graph."""
        if self.settings.rank and self.placing is not None:
            self.placing.rank(tasks)
