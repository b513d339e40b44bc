"""The scheduler plugin that learns what tasks cost, and tells it to the graphs that are bundled.

It also lets a bundle's results be picked on the worker where the bundle ran.

Tasks by themselves are measured as they finish (2 us each), those in bundles by their workers (`lower.bundled.report`).
Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import TypedDict
from weakref import WeakValueDictionary

from dask.typing import Key
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_ferro import config
from dask_ferro.graph.bundling.makespan import DASK
from dask_ferro.lower.bundled import expression
from dask_ferro.lower.bundled.choice import CostFacts, HeldResult
from dask_ferro.lower.bundled.costs import Costs, MeasuredTasks, measured_of, names_of
from dask_ferro.lower.bundled.recent import RecentChoices
from dask_ferro.lower.bundled.report import TOPIC
from dask_ferro.lower.bundled.run import is_ours, is_pick
from dask_ferro.lower.upstream import GraphNode
from dask_ferro.runtime.bundling import costs_file
from dask_ferro.runtime.upstream import bandwidth_of, nbytes_of, prefer_no_worker, prefer_worker

logger = logging.getLogger(__name__)

NAME = "ferro-bundles"
# Of a worker's memory for each of its threads, what the results of one bundle's tasks may take.
_SHARE = 1 / 8
# The same in bytes: a task that makes more takes long enough by itself, and a bundle keeps results for all its readers.
_HOLDS = 32 * 2**20
# Of a worker's memory for each of its threads, and in bytes, what results may take at a time though those of single
# tasks would take less.
_ALLOWED, _ALLOWANCE = 1 / 100, 32 * 2**20
# Of the memory of all workers, what the results of a graph may take if none goes before the end.
_OF_MEMORY = 1 / 4
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
        self.clients: set[str] = set()  # those whose graphs are bundled
        self._scheduler: Scheduler | None = None
        self._reading: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._saved = 0
        self._recent = RecentChoices()

    @classmethod
    def configured(cls) -> BundlingPlugin:
        """Return the plugin by the configuration."""
        return cls(config.value("bundle.costs"))

    def __reduce__(self) -> tuple[type[BundlingPlugin], tuple[str | None]]:
        # As it is sent to a scheduler.
        return type(self), (self.path,)

    async def start(self, scheduler: Scheduler) -> None:
        """Begin to read the costs of earlier runs.  Idempotent.

        It gives no other task of the event loop a turn, so that of two clients that install at once, one is the second.
        """
        if self._scheduler is not None or scheduler.id in _plugins:
            return
        self._scheduler = scheduler
        _plugins[scheduler.id] = self
        expression.set_facts(facts_of)
        if self.path is not None:
            self._reading = asyncio.create_task(self._read(self.path))

    async def is_ready(self) -> None:
        """Return when the costs of earlier runs are known."""
        if self._reading is not None:
            await asyncio.shield(self._reading)

    async def _read(self, path: str) -> None:
        for one in await asyncio.to_thread(costs_file.read, path):
            self.costs.add(one)
        self._saved = self.costs.changes
        self._saving = asyncio.create_task(self._save_regularly())

    async def close(self) -> None:
        """Write the costs to their file, and forget the scheduler."""
        for task in filter(None, (self._reading, self._saving)):
            task.cancel()
        if self._scheduler is not None:
            _plugins.pop(self._scheduler.id, None)
            self._scheduler = None
            await self._save()

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(_SAVES)
            await self._save()

    async def _save(self) -> None:
        changes = self.costs.changes
        if self.path is None or changes == self._saved:
            return
        write = partial(costs_file.write, self.path, list(self.costs.all()))
        try:
            try:
                await asyncio.to_thread(write)
            except RuntimeError:
                # The interpreter is ending, and has no threads any more.
                write()
        except (OSError, RuntimeError) as error:
            logger.warning("dask_ferro: what tasks cost could not be written to %s: %s", self.path, error)
        self._saved = changes

    def facts(self) -> CostFacts:
        """Return what is known of tasks now; it reads the scheduler's state, and may be called from any thread."""
        scheduler = self._scheduler
        assert scheduler is not None

        def existing(key: Key) -> GraphNode | None:
            ts = scheduler.tasks.get(key)
            return None if ts is None else ts.run_spec

        def held(key: Key) -> HeldResult | None:
            ts = scheduler.tasks.get(key)
            holders = () if ts is None else tuple(ts.who_has or ())
            if ts is None or not holders:
                return None
            return HeldResult(nbytes_of(ts), tuple(ws.address for ws in holders))

        workers = scheduler.workers.copy().values()
        room = min((ws.memory_limit / ws.nthreads for ws in workers if ws.memory_limit), default=inf)
        holds = min(room * _SHARE, _HOLDS)
        threads = sum(ws.nthreads for ws in workers)
        memory = sum(ws.memory_limit or inf for ws in workers) * _OF_MEMORY
        allowance = threads * min(room * _ALLOWED, _ALLOWANCE)
        overheads = replace(DASK, bytes_per_s=bandwidth_of(scheduler))
        return CostFacts(
            self.costs.of, existing, held, threads, holds, memory, allowance, overheads, self._recent
        )

    def transition(
        self,
        key: Key,
        start: str,
        finish: str,
        *args: object,
        stimulus_id: str,
        startstops: Iterable[_Activity] = (),
        nbytes: int | None = None,
        worker: str = "",
        **kwargs: object,
    ) -> None:
        """Learn from a task that has finished by itself; let the results of a bundle be picked where it ran."""
        ts = None if self._scheduler is None else self._scheduler.tasks.get(key)
        if ts is None:
            return
        if finish == "no-worker" and is_pick(ts.run_spec):
            prefer_no_worker(ts)
        if start != "processing" or finish != "memory":
            return
        if is_ours(ts.run_spec):
            # Elsewhere, a task that picks one result would be sent all of them.
            for reader in ts.dependents:
                if is_pick(reader.run_spec):
                    prefer_worker(reader, worker)
            return
        runs = (entry for entry in startstops or () if entry["action"] == "compute")
        seconds = sum(run["stop"] - run["start"] for run in runs)
        self.costs.add(MeasuredTasks(*names_of(key), 1, seconds, float("nan") if nbytes is None else nbytes))

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Forget a client that left."""
        self.clients.discard(client)

    def log_event(self, topic: str, msg: object) -> None:
        """Learn from tasks that ran in bundles."""
        # From another process, lists arrive as tuples.
        if topic == TOPIC and isinstance(msg, list | tuple):
            found = (measured_of(one) for one in msg if isinstance(one, Mapping))
            for one in filter(None, found):
                self.costs.add(one)
