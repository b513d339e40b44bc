"""Reassignment of stages and ranks: when a worker is lost, all tasks of its stages go to one other worker.

A stage must run on its worker alone, since stolen tasks would break the order of its list; so its tasks are restricted
to that worker, and Dask would let them wait for ever once it is lost.  This scheduler plugin gives all tasks of such a
stage to the worker with the fewest tasks of stages, and the step continues.  It checks when a worker joins or leaves,
and when a pipeline's graph arrives, whose client may not know yet which worker died.

Values that a stage keeps for itself are not sent, so of a result's replicas only that on its own worker is complete,
and Dask's active memory manager drops only those of other workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from dask.highlevelgraph import MaterializedLayer
from distributed import SchedulerPlugin

from dask_ferro.lower.replicas import put_rule
from dask_ferro.lower.stand_in import LACKS
from dask_ferro.lower.upstream import place_again
from dask_ferro.trace import ABOUT

if TYPE_CHECKING:
    from distributed import Client, Scheduler
    from distributed.scheduler import TaskState, WorkerState

    from dask_ferro.graph.sharding.node_placement import NodePlacement

STAGE = "ferro_stage"  # the annotation of a stage's tasks
# A rank, and where it is.
Home: TypeAlias = "tuple[int, NodePlacement]"
_has: WeakSet[Any] = WeakSet()


def placed(
    tasks: Mapping[Any, Any],
    priority: Mapping[Any, int],
    homes: Mapping[Any, Home],
    address: Callable[..., str] | None,
    told: Mapping[Any, tuple[Any, ...]],
    **others: Any,
) -> MaterializedLayer:
    """Return tasks as a layer annotated with workers and priorities, as functions of the key, which Dask expects.

    Parameters
    ----------
    priority, homes : mapping
        Values for each task, by its key.
    address : callable or None
        Returns the address of a home's worker; None: tasks run anywhere, and stages are not annotated.
    told : mapping
        The trace annotation of tasks, by key.
    **others
        Other annotations.
    """
    annotations: dict[str, Any] = {"priority": priority.__getitem__, ABOUT: told.get, **others}
    if address is not None:
        workers = {key: [address(*home)] for key, home in homes.items()}
        stages = {key: site.stage or 0 for key, (_, site) in homes.items()}
        annotations |= {"workers": workers.__getitem__, STAGE: stages.__getitem__}
    return MaterializedLayer(tasks, annotations=annotations)


class StageWorkers(SchedulerPlugin):
    """Moves stages from lost workers to others, and keeps the replica of a result that has all of it."""

    name = "ferro-stage-workers"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Let the active memory manager keep the replica on a stage's own worker."""
        put_rule(scheduler, self.name, lambda: _but_own)

    def update_graph(
        self, scheduler: Scheduler, *, annotations: Mapping[str, Any], stimulus_id: str, **kwargs: Any
    ) -> None:
        """Give stages whose worker is gone to other workers."""
        if any(_is_lost(scheduler, scheduler.tasks[key]) for key in annotations.get(STAGE, ())):
            rehome(scheduler, stimulus_id)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Give stages that still have no worker to one of the workers that are there now."""
        rehome(scheduler, f"ferro-stage-joined-{worker}")

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        """Give the stages of a lost worker to other workers."""
        rehome(scheduler, stimulus_id)


def _but_own(ts: TaskState, holders: set[WorkerState]) -> set[WorkerState]:
    """Return the holders that may drop a result: all but a stage's own worker."""
    own = ts.worker_restrictions or () if STAGE in (ts.annotations or {}) else ()
    return {ws for ws in holders if ws.address not in own}


def rehome(scheduler: Scheduler, stimulus_id: str) -> None:
    """Give the tasks of lost stages to workers that run, or to paused ones where none does; nothing without any."""
    # A paused worker continues once it has memory again; without it, tasks would wait for one that may never join.
    workers = scheduler.running or scheduler.workers.values()
    there = [ws.address for ws in workers if LACKS not in ws.metrics]
    if not there:
        return
    lost: dict[Any, list[TaskState]] = {}
    load: Counter[str] = Counter(dict.fromkeys(there, 0))
    for ts in scheduler.tasks.values():
        if STAGE not in (ts.annotations or {}):
            continue
        # By worker, not by stage: stages that shared a worker get the same other one.
        homes = frozenset(ts.worker_restrictions or ())
        if _is_lost(scheduler, ts):
            lost.setdefault(homes, []).append(ts)
        elif ts.state != "memory":
            load.update(homes & load.keys())
    for tasks in lost.values():
        home = min(load, key=lambda address: (load[address], address))
        load[home] += len(tasks)
        for ts in tasks:
            ts.worker_restrictions = {home}
        place_again(scheduler, [ts.key for ts in tasks if ts.state == "no-worker"], stimulus_id)


def workers_of(client: Client) -> dict[str, Any]:
    """Return Dask's facts of a client's workers by address, without those that lack dask_ferro."""
    known = client.scheduler_info(n_workers=-1)["workers"]
    return {address: facts for address, facts in known.items() if LACKS not in facts["metrics"]}


def _is_lost(scheduler: Scheduler, ts: TaskState) -> bool:
    """Whether a stage's task is restricted to workers that are all gone."""
    return bool(ts.worker_restrictions) and scheduler.workers.keys().isdisjoint(ts.worker_restrictions or ())


def watch_over(client: Client) -> None:
    """Register the plugin on the scheduler of a client that is not asynchronous, once per client."""
    if client not in _has:
        client.register_plugin(StageWorkers())
        _has.add(client)
