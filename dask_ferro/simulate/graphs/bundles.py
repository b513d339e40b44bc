"""A task graph with bundles in place of tasks, chosen as `ff.bundle_tasks` chooses them on a cluster.

The scheduler of the simulation knows all seconds and bytes, as a real one does of a graph that ran before.  Results
without readers are taken for inputs of the client's one result, so that they share bundles too; and of ready bundles,
the projection of memory takes the first by number, not by Dask's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from dask_ferro.graph.bundling.partition import DASK, Dag
from dask_ferro.graph.bundling.tasks import TaskDag, bundle_tasks
from dask_ferro.simulate.graphs.taskgraph import Key, TaskGraph, TaskSpec

# Bytes of the results of one bundle's tasks at most, and of results in memory for each thread, as on a cluster.
_HOLDS = 32 * 2**20


def in_bundles(graph: TaskGraph, workers: int) -> TaskGraph:
    """Return a graph whose tasks are bundles of another one's tasks; those of a phase are bundled by themselves.

    Parameters
    ----------
    graph : TaskGraph
    workers : int
        Tasks that run at a time.
    """
    place: dict[Key, Key] = {}
    made: list[TaskSpec] = []
    phases = []
    for start, stop in zip([0, *graph.stops], graph.stops, strict=False):
        tasks = graph.tasks[start:stop]
        shares = [task.nbytes / _HOLDS for task in tasks]
        # Roots that start on one worker share no bundle with tasks that may run anywhere.
        kinds = [int(bool(graph.pinned) and not task.dependencies) for task in tasks]
        work = TaskDag(_dag(tasks), kinds, shares)
        bundles = bundle_tasks(work, workers=workers, allowance=workers * _HOLDS, overheads=DASK)
        before = len(made)
        for bundle in bundles:
            made += _bundle(graph, list(map(tasks.__getitem__, bundle)), place, len(made))
        phases.append(len(made) - before)
    return TaskGraph(graph.name, tuple(made), graph.pinned, tuple(phases) if graph.phases else ())


def _dag(tasks: Sequence[TaskSpec]) -> Dag:
    number = {task.key: i for i, task in enumerate(tasks)}
    edges: list[tuple[int, int, float]] = []
    for i, task in enumerate(tasks):
        # What an earlier phase made is there.
        sources = (number[key] for key in task.dependencies if key in number)
        edges += ((source, i, float(tasks[source].nbytes)) for source in sources)
    return Dag([task.seconds for task in tasks], edges)


def _bundle(graph: TaskGraph, tasks: list[TaskSpec], place: dict[Key, Key], number: int) -> list[TaskSpec]:
    """Return the bundle of some tasks, and a task that picks each of its results if others read several of them.

    `place` receives the keys under which readers of the tasks read them.
    """
    inside = {task.key for task in tasks}
    if len(tasks) == 1:
        key, prefix, group = tasks[0].key, tasks[0].prefix, tasks[0].group
    else:
        prefix = "bundle:" + "+".join(sorted({task.prefix for task in tasks}))
        group = f"{prefix}-{graph.name}"
        key = (group, number)
    read = dict.fromkeys(chain.from_iterable(task.dependencies for task in tasks))
    sources = dict.fromkeys(place[name] for name in read if name not in inside)
    after = graph.dependents
    outputs = [t for t in tasks if not after[t.key] or not inside.issuperset(after[t.key])]
    seconds = sum(task.seconds for task in tasks)
    # As the scheduler is told of a bundle's seconds; a single task is known by its prefix alone.
    annotated = tasks[0].annotated if len(tasks) == 1 else seconds
    nbytes = sum(task.nbytes for task in outputs)
    made = [TaskSpec(key, prefix, group, seconds, nbytes, tuple(sources), annotated)]
    place.update(dict.fromkeys(inside, key))
    if len(outputs) > 1:
        for task in outputs:
            place[task.key] = picked = (f"pick-{group}", number, task.key)
            made.append(TaskSpec(picked, "pick", f"pick-{group}", 0.0, task.nbytes, (key,), 0.0))
    return made
