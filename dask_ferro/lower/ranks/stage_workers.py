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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from dask.highlevelgraph import MaterializedLayer
from distributed import SchedulerPlugin

from dask_ferro.errors import ConfigError
from dask_ferro.lower.replicas import put_rule
from dask_ferro.lower.stand_in import LACKS
from dask_ferro.lower.upstream import place_again
from dask_ferro.trace import ABOUT

if TYPE_CHECKING:
    from distributed import Client, Scheduler
    from distributed.scheduler import TaskState, WorkerState

STAGE = "ferro_stage"  # the annotation of a stage's tasks
_has: WeakSet[Any] = WeakSet()


def placed(
    tasks: Mapping[Any, Any],
    priority: Mapping[Any, int],
    stage: Mapping[Any, int],
    workers: Mapping[Any, str],
    told: Mapping[Any, tuple[Any, ...]] | None = None,
    **others: Any,
) -> MaterializedLayer:
    """Return tasks as a layer annotated with workers and priorities, as functions of the key, which Dask expects.

    Parameters
    ----------
    priority, stage, workers : mapping
        Values for each task, by its key; without workers tasks run anywhere, and stages are not annotated.
    told : mapping, optional
        The trace annotation of tasks, by key.
    **others
        Other annotations.
    """
    annotations: dict[str, Any] = {"priority": priority.__getitem__, **others}
    if told is not None:
        annotations[ABOUT] = told.get
    if workers:
        one = {key: [address] for key, address in workers.items()}
        annotations |= {"workers": one.__getitem__, STAGE: stage.__getitem__}
    return MaterializedLayer(tasks, annotations=annotations)


class StageHomes:
    """The worker of each stage, or of each rank of all stages, looked up at each call.

    Workers that the user named are kept while the client is the same: if one dies, the scheduler plugin gives its tasks
    to another.

    Parameters
    ----------
    wanted, stages, what
        As `stage_workers` takes them.
    """

    def __init__(self, wanted: Sequence[str | int] | None, stages: int, what: str = "stages") -> None:
        self._wanted, self._stages, self._what = wanted, stages, what
        self._found: list[str] = []
        self._client: str | None = None

    def of(self, client: Client | None) -> list[str]:
        """Return their addresses; none without a client, or while it has no workers."""
        if client is None:
            return []
        if self._wanted is None or not self._found or client.id != self._client:
            self._found = stage_workers(client, self._wanted, self._stages, what=self._what)
            self._client = client.id
        return self._found


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


def stage_workers(
    client: Client, wanted: Sequence[str | int] | None, stages: int, *, what: str = "stages"
) -> list[str]:
    """Return the address of each stage's worker; in a cluster with fewer workers, stages share workers.

    Workers are in the order of addresses, so that neighbouring stages are on one host where possible.

    Parameters
    ----------
    wanted : sequence of str or int, optional
        The address or name of each, or its number in the order of names.
    what : str, optional
        The noun for the stages in error messages.

    Raises
    ------
    ConfigError
        Another number of workers than stages, or a worker that the cluster does not have.
    """
    if wanted is not None and len(wanted) != stages:
        raise ConfigError(f"parallel: workers: got {len(wanted)}, wanted one for each of the {stages} {what}")
    watch_over(client)
    known = workers_of(client)
    if wanted is None:
        there = sorted(known)
        return [there[stage % len(there)] for stage in range(stages)] if there else []
    order = sorted(known, key=lambda a: (isinstance(known[a]["name"], str), known[a]["name"]))
    by_name: dict[str | int, str] = dict(enumerate(order))
    by_name |= {known[address]["name"]: address for address in order} | {a: a for a in order}
    if missing := [worker for worker in wanted if worker not in by_name]:
        has = ", ".join(f"{facts['name']!r} at {address}" for address, facts in sorted(known.items()))
        raise ConfigError(f"parallel: workers: the cluster has no {missing}; it has {has or 'none'}")
    return [by_name[worker] for worker in wanted]
