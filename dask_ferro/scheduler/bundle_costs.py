"""The part of the scheduler plugin that learns what tasks cost, and tells it to the graphs that are bundled.

It also lets a bundle's results be picked on the worker where the bundle ran.

Tasks by themselves are measured as they finish (2 us each), those in bundles by their workers (`flow.times`).
Costs are kept from run to run in a file, a line with a checksum for each group.  It is replaced as a whole, by
renaming; costs that another scheduler wrote meanwhile are kept, and damaged lines are ignored.  Durations are seconds,
sizes bytes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from math import inf
from pathlib import Path
from secrets import token_bytes
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakValueDictionary

from dask.typing import Key
from distributed import Scheduler
from distributed.metrics import time
from distributed.protocol.pickle import dumps
from distributed.scheduler import TaskState

from dask_ferro.flow import worker as flow_worker
from dask_ferro.flow.costs import Costs, MeasuredTasks, names_of, to_measured
from dask_ferro.flow.member import is_ours, is_pick, share_of
from dask_ferro.flow.times import TOPIC
from dask_ferro.flow.worker import FlowWorker
from dask_ferro.lines import format_line, parse_line
from dask_ferro.lower.bundling import expression
from dask_ferro.lower.bundling.choice import CostFacts, HeldResult
from dask_ferro.lower.bundling.recent import GraphPlans, RecentChoices, Way
from dask_ferro.lower.upstream import GraphNode
from dask_ferro.scheduler import reach
from dask_ferro.scheduler.flow_log import FlowRow
from dask_ferro.scheduler.flows import Flows
from dask_ferro.scheduler.log import Ring
from dask_ferro.scheduler.plugin import Part, take_off
from dask_ferro.scheduler.upstream import prefer_no_worker, prefer_worker

logger = logging.getLogger(__name__)

# Of a worker's memory for each of its threads, what the results of one bundle's tasks may take.
_SHARE = 1 / 8
# The same in bytes: a task that makes more takes long enough by itself, and a bundle keeps results for all its readers.
_HOLDS = 32 * 2**20
# Of a worker's memory for each of its threads, and in bytes, what results may take at a time though those of single
# tasks would take less.
_MEMORY_SHARE, _ALLOWANCE = 1 / 100, 32 * 2**20
# Of the memory of all workers, what the results of a graph may take if none goes before the end.
_OF_MEMORY = 1 / 4
# Seconds between two writes of the file of costs.
_SAVES = 60.0
# The states in which a graph's wanted key is not waited for any more.
_ENDS = ("memory", "erred", "forgotten")
# Members of a flow at most; seconds for which a worker is waited for.
MEMBERS, _ANSWERS = 32, 10.0

# By the scheduler's identifier: expressions find it by that, in the thread that writes out a graph.
_COSTS: WeakValueDictionary[str, BundleCosts] = WeakValueDictionary()


def facts_of(scheduler: str) -> CostFacts | None:
    """Return what a scheduler of this process knows of tasks, or None if it learns nothing."""
    costs = _COSTS.get(scheduler)
    return None if costs is None else costs.facts()


class _GraphRun(NamedTuple):
    """A graph that runs: its plans, which one it runs by, the start, and wanted keys that are not in memory yet."""

    plans: GraphPlans
    way: Way
    start: float
    left: set[Key]


class BundleCosts(Part):
    """What tasks cost on this scheduler.

    Parameters
    ----------
    client : str
        A client whose graphs are bundled.
    path : str, optional
        The file in which costs are kept, on the scheduler's machine; None: they are forgotten with the scheduler.
    """

    name = "bundles"

    def __init__(self, client: str, path: str | None) -> None:
        self.path = path
        self.costs = Costs()
        self.clients = {client}
        self._scheduler: Scheduler | None = None
        self._saving: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._saved = 0
        self._recent = RecentChoices()
        # By wanted key.
        self._runs: dict[Key, _GraphRun] = {}
        self._flows: Flows | None = None

    def serves(self, other: BundleCosts) -> bool:
        """Serve another's clients as well."""
        self.clients |= other.clients
        return True

    @property
    def is_needed(self) -> bool:
        """Whether graphs of any client are bundled, or results of flows may be needed again."""
        return bool(self.clients) or (self._flows is not None and self._flows.are_known)

    @property
    def flow_rows(self) -> Ring[FlowRow]:
        """The rows of the newest flows, and the number of all."""
        return self._flows.rows if self._flows is not None else Ring(0)

    def _leave(self) -> None:
        """Go, as the last flow is forgotten, unless there are clients."""
        if not self.clients and self._scheduler is not None:
            self._leaving = asyncio.create_task(take_off(self.name, dask_scheduler=self._scheduler))

    async def prepare(self, scheduler: Scheduler) -> None:
        """Read the costs of earlier runs."""
        if self.path is not None:
            for one in await asyncio.to_thread(read, self.path):
                self.costs.add(one)
            self._saved = self.costs.changes

    def start(self, scheduler: Scheduler) -> None:
        """Let expressions find the costs."""
        self._scheduler = scheduler
        self._flows = Flows(scheduler, self._leave)
        _COSTS[scheduler.id] = self
        expression.set_facts(facts_of)
        if self.path is not None:
            self._saving = asyncio.create_task(self._save_regularly())

    async def ready(self) -> None:
        """Let the workers take part in flows."""
        assert self._scheduler is not None
        assert self._flows is not None
        plugin = dumps(FlowWorker(token_bytes(32), self._flows.installation))
        await reach.put_on(flow_worker.NAME, plugin, _ANSWERS, dask_scheduler=self._scheduler)

    def listeners(self) -> Iterable[object]:
        """Return what hears of tasks."""
        return (self, self._flows) if self._flows is not None else (self,)

    async def stop(self) -> None:
        """Write the costs to their file, and forget the scheduler."""
        if self._scheduler is not None:
            # No graph that is written from now on has flows.
            _COSTS.pop(self._scheduler.id, None)
            await reach.take_off(flow_worker.NAME, _ANSWERS, dask_scheduler=self._scheduler)
            self._scheduler = None
        await self.close()

    async def close(self) -> None:
        """Write the costs to their file."""
        if self._saving is not None:
            self._saving.cancel()
        await self._save()

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(_SAVES)
            await self._save()

    async def _save(self) -> None:
        changes = self.costs.changes
        if self.path is None or changes == self._saved:
            return
        made = partial(write, self.path, list(self.costs.all()))
        try:
            try:
                await asyncio.to_thread(made)
            except RuntimeError:
                # The interpreter is ending, and has no threads any more.
                made()
        except (OSError, RuntimeError) as error:
            logger.warning("dask_ferro: the costs of tasks could not be written to %s: %s", self.path, error)
        self._saved = changes

    def facts(self) -> CostFacts:
        """Return what is known of tasks now; it reads the scheduler's state, and may be called from any thread."""
        scheduler, flows = self._scheduler, self._flows
        assert scheduler is not None
        assert flows is not None

        def existing(key: Key) -> GraphNode | None:
            ts = scheduler.tasks.get(key)
            return None if ts is None else ts.run_spec

        def held(key: Key) -> HeldResult | None:
            ts = scheduler.tasks.get(key)
            holders = () if ts is None else tuple(ts.who_has or ())
            if ts is None or not holders:
                return None
            return HeldResult(ts.get_nbytes(), tuple(ws.address for ws in holders))

        workers = scheduler.workers.copy().values()
        room = min((ws.memory_limit / ws.nthreads for ws in workers if ws.memory_limit), default=inf)
        holds = min(room * _SHARE, _HOLDS)
        threads = sum(ws.nthreads for ws in workers)
        memory = sum(ws.memory_limit or inf for ws in workers) * _OF_MEMORY
        allowance = threads * min(room * _MEMORY_SHARE, _ALLOWANCE)
        members, bytes_per_s = min(flows.members, MEMBERS), scheduler.bandwidth
        return CostFacts(
            self.costs.of,
            existing,
            held,
            threads,
            holds,
            memory,
            allowance,
            bytes_per_s,
            members,
            self._recent,
        )

    def update_graph(self, scheduler: Scheduler, *, keys: Collection[Key] = (), **facts: object) -> None:
        """Begin to measure what a graph takes that may be run in more than one way."""
        chosen = self._recent.chosen(keys)
        left = {key for key in keys if key not in scheduler.tasks or not scheduler.tasks[key].who_has}
        if chosen is not None and left:
            self._runs.update(dict.fromkeys(left, _GraphRun(*chosen, time(), left)))

    def restart(self, scheduler: Scheduler) -> None:
        """Measure no graph any more."""
        self._runs.clear()

    def task_changed(self, ts: TaskState, start: str, finish: str) -> None:
        """Let a task whose preferred worker is gone run anywhere: Dask would wait for that worker."""
        if ts.key in self._runs and finish in _ENDS:
            self._end(ts.key, finish)
        if finish == "no-worker":
            prefer_no_worker(ts)

    def task_left(
        self, ts: TaskState, finish: str, seconds: float | None, message: Mapping[str, Any]
    ) -> None:
        """Learn from a task that has finished by itself; let the results of a bundle be picked where it ran."""
        if ts.key in self._runs and finish in _ENDS:
            self._end(ts.key, finish)
        if finish != "memory":
            return
        if is_ours(ts.run_spec):
            share = share_of(ts.run_spec)
            # Elsewhere, a task that picks one result would be sent all of them.
            for reader in ts.dependents if share is not None and share.outputs else ():
                if is_pick(reader.run_spec):
                    prefer_worker(reader, message["worker"])
            return
        nbytes = message.get("nbytes")
        size = float("nan") if nbytes is None else nbytes
        self.costs.add(MeasuredTasks(*names_of(ts.key), 1, seconds or 0.0, size))

    def _end(self, key: Key, finish: str) -> None:
        """Note what a graph took, all of whose wanted keys are in memory."""
        run = self._runs.pop(key)
        if finish == "memory":
            run.left.discard(key)
            if not run.left:
                run.plans.took(run.way, time() - run.start)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Forget a client that left."""
        self.clients.discard(client)

    def logged(self, topic: str, msg: object) -> None:
        """Learn from tasks that ran in bundles."""
        # From another process, lists arrive as tuples.
        if topic == TOPIC and isinstance(msg, list | tuple):
            found = (to_measured(one) for one in msg if isinstance(one, Mapping))
            for one in filter(None, found):
                self.costs.add(one)


def read(path: str) -> list[MeasuredTasks]:
    """Return the costs in a file, the least recently measured first; none if there is no such file."""
    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
    except FileNotFoundError:
        return []
    # Where nobody knows a home folder, it is a RuntimeError.
    except (OSError, RuntimeError) as error:
        logger.warning("dask_ferro: the costs of tasks in earlier runs could not be read: %s", error)
        return []
    records = (parse_line(line) for line in lines)
    found = (to_measured(record) for record in records if record is not None)
    return [one for one in found if one is not None]


def write(path: str, costs: Iterable[MeasuredTasks]) -> None:
    """Replace a file of costs, whose own costs are kept if they are of other groups.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    mine = list(costs)
    known = {(one.prefix, one.group) for one in mine}
    both = Costs([one for one in read(path) if (one.prefix, one.group) not in known] + mine)
    target = Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}-{uuid4().hex}")
    try:
        part.write_bytes(b"".join(format_line(one._asdict()) for one in both.all()))
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
