"""A pipeline's stages outlive their workers: tasks of a stage whose worker is gone get another one, together.

A stage must run on its worker alone, since work that wanders leaves the order of its list; so its tasks are
restricted to it, and Dask would let them wait for ever once it is lost.  This plugin, on the scheduler, gives all
tasks of such a stage to the worker that has the fewest of them, and the step goes on.  It looks when a worker goes
or comes, and never else.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from distributed import SchedulerPlugin

if TYPE_CHECKING:
    from distributed import Client, Scheduler
    from distributed.scheduler import TaskState

STAGE = "ferro_stage"  # the annotation of a stage's tasks
_has: WeakSet[Any] = WeakSet()


class StageWorkers(SchedulerPlugin):
    """Keeps stages of pipelines on workers that are there."""

    name = "ferro-stage-workers"
    idempotent = True

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Give it the stages that nobody could take."""
        rehome(scheduler, f"ferro-stage-joined-{worker}")

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        """Give its stages to others."""
        rehome(scheduler, stimulus_id)


def rehome(scheduler: Scheduler, stimulus_id: str) -> None:
    """Give the tasks of lost stages to workers that run; nothing if there are none."""
    if not scheduler.running:
        return
    lost: dict[Any, list[TaskState]] = {}
    load: Counter[str] = Counter({ws.address: 0 for ws in scheduler.running})
    for ts in scheduler.tasks.values():
        if STAGE not in (ts.annotations or {}):
            continue
        homes = frozenset(ts.worker_restrictions or ())
        if homes and homes.isdisjoint(scheduler.workers):
            lost.setdefault(homes, []).append(ts)
        elif ts.state != "memory":
            load.update(homes & load.keys())
    for tasks in lost.values():
        home = min(load, key=lambda address: (load[address], address))
        load[home] += len(tasks)
        for ts in tasks:
            ts.worker_restrictions = {home}
        stuck: dict[Any, Any] = {ts.key: "processing" for ts in tasks if ts.state == "no-worker"}
        scheduler.transitions(stuck, stimulus_id)


def watch_over(client: Client) -> None:
    """Put the plugin on the scheduler of a client that is not asynchronous; once."""
    if client not in _has:
        client.register_plugin(StageWorkers())
        _has.add(client)
