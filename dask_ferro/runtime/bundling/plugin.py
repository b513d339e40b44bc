"""The scheduler plugin that learns what tasks cost, and tells it to the graphs that are bundled.

Tasks by themselves are measured as they finish (2 us each), those in bundles by their workers (`lower.bundled.report`).
Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from math import inf
from typing import TypedDict
from weakref import WeakValueDictionary

from dask.typing import Key
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_ferro import config
from dask_ferro.lower.bundled import expression
from dask_ferro.lower.bundled.choice import CostFacts
from dask_ferro.lower.bundled.costs import Costs, MeasuredTasks, measured_of, names_of
from dask_ferro.lower.bundled.report import TOPIC
from dask_ferro.lower.bundled.run import is_ours
from dask_ferro.lower.upstream import GraphNode
from dask_ferro.runtime.bundling import costs_file

logger = logging.getLogger(__name__)

NAME = "ferro-bundles"
# Of a worker's memory for each of its threads, what the results of one bundle's tasks may take.
_SHARE = 1 / 8
# The same where workers have no limit.
_HOLDS = 256 * 2**20
# Seconds between two writes of the file of costs.
_SAVES = 60.0

# By the scheduler's identifier: expressions find it by that, in the thread that writes out a graph.
_plugins: WeakValueDictionary[str, BundlingPlugin] = WeakValueDictionary()


class _Activity(TypedDict):
    """A part of what a worker did for a task, in seconds of the system's clock."""

    action: str
    start: float
    stop: float


def facts_of(scheduler: str) -> CostFacts | None:
    """Return what a scheduler of this process knows of tasks, or None if it has no plugin."""
    plugin = _plugins.get(scheduler)
    return None if plugin is None else plugin.facts()


class BundlingPlugin(SchedulerPlugin):
    """What tasks cost on this scheduler.

    Parameters
    ----------
    path : str, optional
        The file in which costs are kept, on the scheduler's machine; None: they are forgotten with the scheduler.
    """

    name = NAME
    idempotent = True

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.costs = Costs()
        self._scheduler: Scheduler | None = None
        self._saves: asyncio.Task[None] | None = None
        self._saved = 0

    @classmethod
    def configured(cls) -> BundlingPlugin:
        """Return the plugin by the configuration."""
        return cls(config.value("bundle.costs"))

    async def start(self, scheduler: Scheduler) -> None:
        """Read the costs of earlier runs.  Idempotent."""
        if self._scheduler is not None or scheduler.plugins.get(NAME) is not None:
            return
        self._scheduler = scheduler
        _plugins[scheduler.id] = self
        expression.set_facts(facts_of)
        if self.path is not None:
            self.costs = Costs(await asyncio.to_thread(costs_file.read, self.path))
            self._saved = self.costs.changes
            self._saves = asyncio.create_task(self._saving())

    async def close(self) -> None:
        """Write the costs to their file."""
        if self._saves is not None:
            self._saves.cancel()
            self._saves = None
            await self._save()
        if self._scheduler is not None:
            _plugins.pop(self._scheduler.id, None)
            self._scheduler = None

    async def _saving(self) -> None:
        while True:
            await asyncio.sleep(_SAVES)
            await self._save()

    async def _save(self) -> None:
        if self.path is None or self.costs.changes == self._saved:
            return
        self._saved, costs = self.costs.changes, list(self.costs.all())
        try:
            await asyncio.to_thread(costs_file.write, self.path, costs)
        except OSError as error:
            logger.warning("dask_ferro: what tasks cost could not be written to %s: %s", self.path, error)

    def facts(self) -> CostFacts:
        """Return what is known of tasks now; it reads the scheduler's state, and may be called from any thread."""
        scheduler = self._scheduler
        assert scheduler is not None

        def existing(key: Key) -> GraphNode | None:
            ts = scheduler.tasks.get(key)
            return None if ts is None else ts.run_spec

        workers = list(scheduler.workers.values())
        room = min((ws.memory_limit / ws.nthreads for ws in workers if ws.memory_limit), default=inf)
        holds = room * _SHARE if room < inf else _HOLDS
        return CostFacts(self.costs.of, existing, sum(ws.nthreads for ws in workers), holds)

    def transition(
        self,
        key: Key,
        start: str,
        finish: str,
        *args: object,
        stimulus_id: str,
        startstops: Iterable[_Activity] = (),
        nbytes: int | None = None,
        **kwargs: object,
    ) -> None:
        """Learn from a task that has finished by itself."""
        if start != "processing" or finish != "memory" or self._scheduler is None:
            return
        ts = self._scheduler.tasks.get(key)
        if ts is None or is_ours(ts.run_spec):
            return
        runs = (entry for entry in startstops or () if entry["action"] == "compute")
        seconds = sum(run["stop"] - run["start"] for run in runs)
        self.costs.add(MeasuredTasks(*names_of(key), 1, seconds, float("nan") if nbytes is None else nbytes))

    def log_event(self, topic: str, msg: object) -> None:
        """Learn from tasks that ran in bundles."""
        if topic == TOPIC and isinstance(msg, list):
            found = (measured_of(one) for one in msg if isinstance(one, Mapping))
            for one in filter(None, found):
                self.costs.add(one)
