"""The scheduler plugin that `ff.install` puts on a running scheduler and removes again.

It connects the parts and makes no decisions: stealing (`stealing`), placement (`placement`), the intervals at which
messages are sent, and the worker plugin, which measures.  Its removal restores stock Dask.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypedDict
from weakref import WeakKeyDictionary

from dask.typing import Key
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps

from dask_ferro.runtime import upstream
from dask_ferro.runtime.plugin import reach
from dask_ferro.runtime.plugin.placement import Placing
from dask_ferro.runtime.plugin.settings import Settings
from dask_ferro.runtime.plugin.stealing import Stealing
from dask_ferro.runtime.telemetry import prometheus
from dask_ferro.runtime.telemetry.events import Events
from dask_ferro.runtime.upstream_names import SCHEDULER, missing, remedy, warn_once
from dask_ferro.runtime.worker.plugin import NAME as WORKER_NAME
from dask_ferro.runtime.worker.plugin import WORKER_SENDS, FerroWorker

logger = logging.getLogger(__name__)

NAME = "ferro"


class PluginFigures(TypedDict):
    """The moves so far, each worker's threshold in seconds, the policy, and workers that have not answered."""

    counts: dict[str, float]
    thresholds: dict[str, float]
    stealing: str
    late: list[str]


# One installation or removal at a time.
_turns: WeakKeyDictionary[Scheduler, asyncio.Lock] = WeakKeyDictionary()


def recordings_of(client: str) -> str:
    """Return the common prefix of the names of a client's recordings, here and on the workers."""
    return f"ferro-trace-{client}-"


def _turn(scheduler: Scheduler) -> asyncio.Lock:
    return _turns.setdefault(scheduler, asyncio.Lock())


NOT_INSTALLED = "dask_ferro is not installed on this cluster; call ff.install(client)"


def stays_off() -> str:
    """Return why the plugin cannot be used with the installed Dask, with the remedy; empty: it can."""
    lacks = missing(SCHEDULER)
    return remedy(lacks, "the scheduler plugin stays off, and stock Dask goes on") if lacks else ""


class FerroScheduler(SchedulerPlugin):
    """Adaptive stealing and placement, as a plugin of Dask's scheduler.

    Parameters
    ----------
    settings : Settings, optional
        Default: from the configuration.
    """

    name = NAME
    idempotent = False  # a later one replaces the first, in one turn

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings if settings is not None else Settings.configured()
        self.stealing: Stealing | None = None
        self.placing: Placing | None = None
        self.events: Events | None = None
        self._scheduler: Scheduler | None = None
        self._had_stealing = True
        self.late: list[str] = []  # workers that had not answered when the latest call returned
        self._take_pages_off: Callable[[], None] | None = None

    async def start(self, scheduler: Scheduler) -> None:
        """Replace Dask's stealing and placement, or another plugin of this class.  Idempotent.

        If the installed Dask lacks a required attribute, the plugin stays off with a warning, and stock Dask goes on.
        """
        if sentence := stays_off():
            warn_once(sentence)
            # Later, since the caller adds it to the plugins after this returns.
            scheduler.loop.add_callback(self._leave, scheduler)
            return
        async with _turn(scheduler):
            current = scheduler.plugins.get(NAME)
            if self.stealing is not None or current is self:
                return
            # With other settings, or of another client that was faster: the later call holds.  Workers get the new
            # worker plugin in place of the old one, so that they are waited for once.
            if isinstance(current, FerroScheduler):
                await current.put_stock()
            try:
                await self._put_on(scheduler)
            except BaseException:
                await self.take_off()
                raise

    def _leave(self, scheduler: Scheduler) -> None:
        if scheduler.plugins.get(NAME) is self:
            del scheduler.plugins[NAME]

    async def remove(self) -> list[str]:
        """Restore the scheduler's own stealing, placement and intervals.  Idempotent.

        Returns
        -------
        list of str
            Addresses of workers that have not answered yet; they are restored when they do.
        """
        if self._scheduler is not None:
            async with _turn(self._scheduler):
                await self.take_off()
        return self.late

    async def _put_on(self, scheduler: Scheduler) -> None:
        stock = upstream.stealing_of(scheduler)
        self._scheduler, self._had_stealing = scheduler, stock is not None
        # First of all, answers to stock's requests must reach stock.
        await upstream.quiet(stock, scheduler)
        settings = self.settings.resolved(stock is not None)
        self.stealing = Stealing(scheduler, settings)
        upstream.put_stealing(scheduler, self.stealing, stock)
        await self.stealing.start()
        self.placing = Placing(scheduler, self.stealing, settings)
        self.events = Events(scheduler, self.stealing)
        if self.settings.placement:
            placing = self.placing
            upstream.put_placement(scheduler, placing.ready, placing.queued, placing.is_tied, placing.ahead)
        self.events.start()
        prometheus.register()
        # Imported here: `views` is above the runtime, and a process without a scheduler has no pages.
        from dask_ferro.views.pages import put_on

        self._take_pages_off = put_on(scheduler, self.stealing)
        await self._put_on_workers(scheduler)

    async def _put_on_workers(self, scheduler: Scheduler) -> None:
        plugin = dumps(FerroWorker(sends=WORKER_SENDS))
        try:
            self.late = await reach.put_on(
                WORKER_NAME, plugin, self.settings.answer, dask_scheduler=scheduler
            )
        # Whatever a worker lacks, stealing works without its measurements.
        except RuntimeError as error:
            logger.warning("dask_ferro is not on all workers, and measures nothing there: %s", error)

    async def take_off(self) -> None:
        """Do what `remove` does, for a caller that holds the lock.

        Workers come first, as they may take seconds to answer: stock Dask's stealing must not act in the middle of a
        replacement of one plugin by another.
        """
        scheduler = self._scheduler
        if scheduler is None:
            return
        try:
            self.late = await reach.take_off(WORKER_NAME, self.settings.answer, dask_scheduler=scheduler)
        finally:
            await self.put_stock()

    async def put_stock(self) -> None:
        """Restore the scheduler's own parts, apart from the worker plugin."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        if self._take_pages_off is not None:
            self._take_pages_off()
            self._take_pages_off = None
        self._end_events()
        if self.stealing is not None:
            await self.stealing.stop()
            await self._close_log()
        upstream.put_stock_placement(scheduler)
        if self._had_stealing:
            await upstream.put_stock_stealing(scheduler, self.stealing)
        else:
            upstream.put_stealing(scheduler, None, self.stealing)
        for name in (NAME, Stealing.name):
            scheduler.plugins.pop(name, None)
        upstream.put_sends(scheduler, scheduler.workers, upstream.WORKER_SENDS)
        self.stealing = self.placing = self.events = self._scheduler = None

    async def close(self) -> None:
        """Stop publishing, counting and recording, as the scheduler is closing."""
        self._end_events()
        await self._close_log()

    async def _close_log(self) -> None:
        if self.stealing is not None and self.stealing.decision_log is not None:
            await asyncio.to_thread(self.stealing.decision_log.close)

    def _end_events(self) -> None:
        if self.events is not None:
            self.events.stop()

    def log_event(self, topic: str, msg: object) -> None:
        """Forward a logged event."""
        if self.events is not None:
            self.events.heard(topic, msg)

    def figures(self) -> PluginFigures:
        """Return the moves so far, and each worker's threshold in seconds."""
        assert self.stealing is not None
        return {
            "counts": dict(self.stealing.counts),
            "thresholds": dict(self.stealing.core.state.thresholds),
            "stealing": self.stealing.settings.stealing,
            "late": self.late,
        }

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """End the recordings of a client that left without doing so."""
        mine = recordings_of(client)
        if self.stealing is not None:
            for who in list(self.stealing.records.wanted):
                if who.startswith(mine):
                    self.stealing.records.stop_for(who)
        for name in [name for name in upstream.worker_plugins(scheduler) if name.startswith(mine)]:
            scheduler.loop.add_callback(reach.take_off, name, self.settings.answer, dask_scheduler=scheduler)

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Key], **kwargs: object) -> None:
        """Order the tasks of a new graph."""
        if self.settings.rank and self.placing is not None:
            self.placing.rank(tasks)
