"""A task graph with bundles in place of tasks, chosen as `ff.bundle_tasks` chooses them on a cluster.

The scheduler of the simulation knows all seconds and bytes, as a real one does of a graph that ran before.  Results
without readers are taken for inputs of the client's one result, so that they share bundles too; and of ready bundles,
the projection of memory takes the first by number, not by Dask's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from dask_ferro.graph.bundling.partition import DASK, PICK_BYTES, Dag, Overheads
from dask_ferro.graph.bundling.tasks import TaskDag, bundle_tasks
from dask_ferro.simulate.graphs.taskgraph import Key, TaskGraph, TaskSpec

# Bytes of the results of one bundle's tasks at most, and of results in memory for each thread, as on a cluster.
_HOLDS = 32 * 2**20


def in_bundles(graph: TaskGraph, workers: int, overheads: Overheads = DASK) -> TaskGraph:
    """Return a graph whose tasks are bundles of another one's tasks; those of a phase are bundled by themselves.

    Parameters
    ----------
    graph : TaskGraph
    workers : int
        Tasks that run at a time.
    overheads : Overheads
    """
    made: list[TaskSpec] = []
    phases, is_changed = [], False
    writer = _Writer(graph)
    for start, stop in zip([0, *graph.stops], graph.stops, strict=False):
        tasks = graph.tasks[start:stop]
        shares = [task.nbytes / _HOLDS for task in tasks]
        # Roots that start on one worker share no bundle with tasks that may run anywhere.
        kinds = [int(bool(graph.pinned) and not task.dependencies) for task in tasks]
        work = TaskDag(_dag(tasks), kinds, shares)
        bundles = bundle_tasks(work, workers=workers, allowance=workers * _HOLDS, overheads=overheads)
        is_changed |= any(len(bundle) > 1 for bundle in bundles)
        written = [task for bundle in bundles for task in writer.write([tasks[i] for i in bundle])]
        made += written
        phases.append(len(written))
    if not is_changed:
        return graph
    return TaskGraph(graph.name, tuple(made), graph.pinned, tuple(phases) if graph.phases else ())


def _dag(tasks: Sequence[TaskSpec]) -> Dag:
    number = {task.key: i for i, task in enumerate(tasks)}
    edges: list[tuple[int, int, float]] = []
    for i, task in enumerate(tasks):
        # What an earlier phase made is there.
        sources = (number[key] for key in task.dependencies if key in number)
        edges += ((source, i, float(tasks[source].nbytes)) for source in sources)
    return Dag([task.seconds for task in tasks], edges)


class _Writer:
    """Bundles, written in a topological order: a bundle reads whole tuples, or results that a task passes on."""

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self._nbytes = {task.key: task.nbytes for task in graph.tasks}
        # The task that each result is found in, and the bytes of each tuple of several results.
        self._place: dict[Key, Key] = {}
        self._tuples: dict[Key, int] = {}
        self._passed: dict[Key, Key] = {}

    def write(self, tasks: Sequence[TaskSpec]) -> list[TaskSpec]:
        """Return the bundle of some tasks, after the tasks that pass on what it reads."""
        inside = {task.key for task in tasks}
        if len(tasks) == 1:
            key, prefix, group = tasks[0].key, tasks[0].prefix, tasks[0].group
        else:
            prefix = "bundle:" + "+".join(sorted({task.prefix for task in tasks}))
            group = f"{prefix}-{self._graph.name}"
            key = (group, len(self._place))
        read: dict[Key, list[Key]] = {}
        for name in dict.fromkeys(chain.from_iterable(task.dependencies for task in tasks)):
            if name not in inside:
                read.setdefault(self._place[name], []).append(name)
        made: list[TaskSpec] = []
        sources: list[Key] = []
        for source, names in read.items():
            others = self._tuples.get(source, 0) - sum(map(self._nbytes.__getitem__, names))
            if others <= PICK_BYTES * len(names):
                sources.append(source)
                continue
            for name in names:
                if name not in self._passed:
                    self._passed[name] = passed = (f"pass-{self._graph.name}", len(self._passed))
                    made.append(
                        TaskSpec(passed, "pass", str(passed[0]), 0.0, self._nbytes[name], (source,), 0.0)
                    )
                sources.append(self._passed[name])
        after = self._graph.dependents
        outputs = [t for t in tasks if not after[t.key] or not inside.issuperset(after[t.key])]
        seconds = sum(task.seconds for task in tasks)
        # As the scheduler is told of a bundle's seconds; a single task is known by its prefix alone.
        annotated = tasks[0].annotated if len(tasks) == 1 else seconds
        nbytes = sum(task.nbytes for task in outputs)
        self._place.update(dict.fromkeys(inside, key))
        if len(outputs) > 1:
            self._tuples[key] = nbytes
        return [*made, TaskSpec(key, prefix, group, seconds, nbytes, tuple(sources), annotated)]
