"""The one plugin of Dask's scheduler, and its parts: each feature is a part, put on and taken off by one call.

    await put_on(part, dask_scheduler=scheduler)                 on the scheduler
    await client.run_on_scheduler(put_on, part=part)             from a client
    await client.run_on_scheduler(take_off, name=Part.name)

The plugin is on a scheduler while it has a part.  It derives each fact once, and passes it to the parts that have a
method for it (`HOOKS`).  Of a task's six transitions two concern processing; the others go to parts that ask for them.
Parts know nothing of each other, and an error of one is logged and does not reach the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakMethod

from dask.typing import Key
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

logger = logging.getLogger(__name__)

NAME = "ferro"

P = TypeVar("P", bound="Part")

# The facts for parts.  Of tasks and workers:
#     task_assigned(ts)                             it begins to process
#     task_left(ts, finish, seconds, message)       it ends processing: in a state, and if done the seconds that it ran
#     task_changed(ts, start, finish)               another transition, to a state that is none of `_NOT_YET`
#     worker_changed(ws)                            its status is another one
#     logged(topic, message)                        any event but those of `worker_changed`
# and those of Dask's plugins, as Dask calls them.
_DASKS = ("add_worker", "remove_worker", "remove_client", "update_graph", "restart")
HOOKS = ("task_assigned", "task_left", "task_changed", "worker_changed", "logged", *_DASKS)
# States before a task is on a worker, which concern no part.
_NOT_YET = ("waiting", "queued")

# One part is put on or taken off at a time.
_turns: WeakKeyDictionary[Scheduler, asyncio.Lock] = WeakKeyDictionary()


class Part:
    """A feature of the plugin on one scheduler; it may have a method for each of `HOOKS`."""

    name: str

    def serves(self, other: Any) -> bool:
        """Return whether this part, which is on, does for another one of its name that is to be put on."""
        return True

    @property
    def is_needed(self) -> bool:
        """Whether somebody still needs this part, so that it stays although it is to be taken off."""
        return False

    async def prepare(self, scheduler: Scheduler) -> None:
        """Do what has to wait before `start`."""

    def start(self, scheduler: Scheduler) -> None:
        """Read the scheduler's state; facts arrive from then on."""

    async def ready(self) -> None:
        """Do what has to wait after `start`."""

    async def stop(self) -> None:
        """Undo `start` and `ready`, or as much of them as was done."""

    async def give_way(self) -> None:
        """Stop for another part of this name, which is put on at once."""
        await self.stop()

    async def close(self) -> None:
        """End what the scheduler does not end, as it is closing."""

    def listeners(self) -> Iterable[object]:
        """Return the objects whose methods are called."""
        return (self,)

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        """Return the methods that clients may call on the scheduler, by their names there."""
        return {}


class FerroScheduler(SchedulerPlugin):
    """The plugin of one scheduler.

    Attributes
    ----------
    parts : dict of str to Part
        What is on, by name.
    refusal : Exception or None
        Keeps the scheduler from starting.
    """

    name = NAME

    def __init__(self, scheduler: Scheduler, refusal: Exception | None = None) -> None:
        self.parts: dict[str, Part] = {}
        self.refusal = refusal
        self._scheduler = scheduler
        self._connect()

    async def start(self, scheduler: Scheduler) -> None:
        """Raise the refusal, which ends a scheduler that starts; errors of a preload are only logged."""
        if self.refusal is not None:
            raise self.refusal

    def add(self, part: Part) -> None:
        """Begin to pass facts and calls to a part."""
        self.parts[part.name] = part
        self._scheduler.plugins[NAME] = self
        self._scheduler.handlers.update({name: _weak_handler(call) for name, call in part.calls().items()})
        self._connect()

    def drop(self, part: Part) -> None:
        """Pass nothing more to a part; the plugin goes with the last one.  Idempotent."""
        if self.parts.get(part.name) is part:
            del self.parts[part.name]
            for name in part.calls():
                self._scheduler.handlers.pop(name, None)
            self._connect()
            if not self.parts:
                self._scheduler.plugins.pop(NAME, None)

    def _connect(self) -> None:
        there = [listener for part in self.parts.values() for listener in part.listeners()]
        self._calls = {hook: [getattr(one, hook) for one in there if hasattr(one, hook)] for hook in HOOKS}

    def _pass(self, hook: str, *facts: Any, **more: Any) -> None:
        for call in self._calls[hook]:
            try:
                call(*facts, **more)
            # A part may be wrong about what is named here from now on.
            except Exception:
                logger.exception("dask_ferro lost track: %s of %r", hook, facts)

    # -- what Dask calls -----------------------------------------------------------------------------------

    def transition(self, key: Key, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Pass on that a task begins or ends processing, and other changes to parts that ask for them."""
        if start == "processing":
            seconds = _seconds(kwargs.get("startstops") or ()) if finish == "memory" else None
            self._pass("task_left", self._scheduler.tasks[key], finish, seconds, kwargs)
        if finish == "processing":
            self._pass("task_assigned", self._scheduler.tasks[key])
        elif finish not in _NOT_YET and start != "processing" and self._calls["task_changed"]:
            self._pass("task_changed", self._scheduler.tasks[key], start, finish)

    def log_event(self, topic: str, msg: Any) -> None:
        """Pass on an event, and that a worker pauses, resumes or retires, for which Dask has no hook."""
        if isinstance(msg, dict) and msg.get("action") == "worker-status-change":
            if (ws := self._scheduler.workers.get(topic)) is not None:
                self._pass("worker_changed", ws)
        else:
            self._pass("logged", topic, msg)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Pass on a new worker."""
        self._pass("add_worker", scheduler, worker)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Pass on that a worker is gone; its tasks have been taken back by now."""
        self._pass("remove_worker", scheduler, worker, **kwargs)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Pass on that a client is gone."""
        self._pass("remove_client", scheduler, client)

    def update_graph(self, scheduler: Scheduler, **kwargs: Any) -> None:
        """Pass on the tasks of a new graph."""
        self._pass("update_graph", scheduler, **kwargs)

    def restart(self, scheduler: Scheduler) -> None:
        """Pass on that all tasks are forgotten."""
        self._pass("restart", scheduler)

    async def before_close(self) -> None:
        """Close the parts, as the scheduler is closing."""
        await asyncio.gather(*(part.close() for part in self.parts.values()))


def plugin_of(scheduler: Scheduler) -> FerroScheduler | None:
    """Return a scheduler's plugin; None: it has no part."""
    plugin = scheduler.plugins.get(NAME)
    return plugin if isinstance(plugin, FerroScheduler) else None


def part_of(scheduler: Scheduler, kind: type[P]) -> P | None:
    """Return a scheduler's part of a class; None: it is not on."""
    plugin = plugin_of(scheduler)
    part = None if plugin is None else plugin.parts.get(kind.name)
    return part if isinstance(part, kind) else None


async def put_on(part: Part, *, dask_scheduler: Scheduler) -> None:
    """Put a part on a scheduler, in place of one of its name unless that serves as well.

    If an error is raised, neither of them is on.
    """
    async with _turns.setdefault(dask_scheduler, asyncio.Lock()):
        plugin = plugin_of(dask_scheduler) or FerroScheduler(dask_scheduler)
        current = plugin.parts.get(part.name)
        if current is not None:
            if current.serves(part):
                return
            try:
                await current.give_way()
            finally:
                plugin.drop(current)
        try:
            await part.prepare(dask_scheduler)
            part.start(dask_scheduler)
            plugin.add(part)
            await part.ready()
        except BaseException:
            try:
                await part.stop()
            finally:
                plugin.drop(part)
            raise


async def take_off(name: str, *, dask_scheduler: Scheduler) -> None:
    """Take a part off a scheduler, unless somebody still needs it.  Idempotent."""
    async with _turns.setdefault(dask_scheduler, asyncio.Lock()):
        plugin = plugin_of(dask_scheduler)
        part = None if plugin is None else plugin.parts.get(name)
        if plugin is not None and part is not None and not part.is_needed:
            try:
                await part.stop()
            finally:
                plugin.drop(part)


def _seconds(spans: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the seconds of a task's newest run: a worker that ran it before sends that run too, as the first."""
    for span in reversed(spans):
        if span["action"] == "compute":
            return float(span["stop"] - span["start"])
    return None


def _weak_handler(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler that keeps no part alive: Dask keeps each one that it has called until the process ends."""
    reference = WeakMethod(method)

    def handler(**message: Any) -> Any:
        own = reference()
        return None if own is None else own(**message)

    return handler
