"""Which tasks of a Dask graph run as one bundle, by what they are projected to cost.

    graph, wanted keys  ->  needed tasks, each before its readers  ->  seconds, bytes, kinds  ->  bundles

A task stays by itself if its cost is not known, if it is a coroutine, or if Dask forbids to fuse it or what is next
to it (the barrier of a shuffle).  Tasks with different annotations are not bundled together, as a bundle has one.  Of
the tasks that are wanted, no two are in one bundle: each would need a task that picks its result.

Tasks that the scheduler has already are inputs, and so are their own inputs, which are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dask.typing import Key

from dask_ferro.graph.bundling.makespan import DASK, Overheads
from dask_ferro.graph.bundling.partition import Bundles, Dag
from dask_ferro.graph.bundling.tasks import ALONE, TaskDag, bundle_tasks
from dask_ferro.lower.bundled.costs import TaskCost
from dask_ferro.lower.upstream import Alias, DataNode, GraphNode

# The seconds of a task whose cost is not known: it is by itself, and delays what waits for it.
UNKNOWN_S = 0.01
# Of what a bundle may hold, the part of a task that is wanted: two do not fit.
WANTED_SHARE = 0.6

Graph = Mapping[Key, GraphNode]
# By annotation, its values by key.
Annotations = Mapping[str, Mapping[Key, Any]]
FREE = TaskCost(0.0, 0.0)


@dataclass(frozen=True)
class CostFacts:
    """What a scheduler knows of tasks.

    Parameters
    ----------
    cost : callable
        Returns the projected cost of a task by its key, or None.
    existing : callable
        Returns the specification of a task that the scheduler has, or None.
    workers : int
        Threads of all workers; 0: there is none yet, and nothing is bundled.
    holds : float
        Bytes of the results of one bundle's tasks, at most.
    overheads : Overheads
        What a task costs beside its own seconds.
    """

    cost: Callable[[Key], TaskCost | None]
    existing: Callable[[Key], GraphNode | None]
    workers: int
    holds: float
    overheads: Overheads = DASK


class Needed(NamedTuple):
    """The tasks that wanted keys need, each before its readers; the keys that the scheduler has already."""

    order: list[Key]
    had: set[Key]


class BundleChoice(NamedTuple):
    """Needed tasks and their bundles by number; projected costs of tasks in the same order."""

    order: list[Key]
    bundles: Bundles
    costs: list[TaskCost | None]


def needed(graph: Graph, wanted: Iterable[Key], existing: Callable[[Key], GraphNode | None]) -> Needed:
    """Return the tasks that wanted keys need, depth first, so that what is read together is computed together."""
    order: list[Key] = []
    had: set[Key] = set()
    # 1: its inputs are on the stack; 2: it is in the order.
    state: dict[Key, int] = {}
    stack = list(reversed(list(wanted)))
    while stack:
        key = stack.pop()
        seen = state.get(key, 0)
        if seen == 1:
            state[key] = 2
            order.append(key)
        if seen or key not in graph or key in had:
            continue
        if existing(key) is not None:
            had.add(key)
            continue
        state[key] = 1
        stack.append(key)
        stack += (dep for dep in reversed(_sorted(graph[key].dependencies)) if dep not in state)
    return Needed(order, had)


def _sorted(keys: Collection[Key]) -> list[Key]:
    """Return keys in an order that has neighbours side by side; sets of strings have another in each process."""
    if len(keys) < 2:
        return list(keys)
    try:
        return sorted(keys)
    except TypeError:
        return sorted(keys, key=str)


def choose(
    graph: Graph, wanted: Collection[Key], annotations: Annotations, facts: CostFacts
) -> tuple[BundleChoice, Needed]:
    """Return the bundles of the tasks that wanted keys need.

    Parameters
    ----------
    graph : mapping of key to task
    wanted : collection of keys
        Their results are asked for by somebody.
    annotations : mapping
        By annotation, the values by key.
    facts : CostFacts
    """
    tasks = needed(graph, wanted, facts.existing)
    number = {key: i for i, key in enumerate(tasks.order)}
    costs = [FREE if _is_free(graph[key]) else facts.cost(key) for key in tasks.order]
    sizes = [0.0 if cost is None else cost.nbytes for cost in costs]
    edges: list[tuple[int, int, float]] = []
    for i, key in enumerate(tasks.order):
        sources = (number[dep] for dep in graph[key].dependencies if dep in number)
        edges += ((source, i, sizes[source]) for source in sources)
    seconds = [UNKNOWN_S if cost is None else cost.seconds for cost in costs]
    work = TaskDag(
        # A row's value is its source: a task has one result.
        Dag(seconds, edges, values=[source for source, _, _ in edges]),
        _kinds(graph, tasks.order, number, costs, annotations),
        _shares(tasks.order, costs, frozenset(wanted), facts.holds),
    )
    if facts.workers < 1:
        return BundleChoice(tasks.order, tuple((i,) for i in range(len(tasks.order))), costs), tasks
    bundles = bundle_tasks(work, workers=facts.workers, overheads=facts.overheads)
    return BundleChoice(tasks.order, bundles, costs), tasks


def _is_free(task: GraphNode) -> bool:
    return isinstance(task, Alias | DataNode)


def _shares(
    order: list[Key], costs: list[TaskCost | None], wanted: frozenset[Key], holds: float
) -> list[float]:
    shares = [cost.nbytes / holds if cost is not None else 0.0 for cost in costs]
    return [
        max(share, WANTED_SHARE) if key in wanted else share for key, share in zip(order, shares, strict=True)
    ]


def _kinds(
    graph: Graph,
    order: list[Key],
    number: Mapping[Key, int],
    costs: list[TaskCost | None],
    annotations: Annotations,
) -> list[int]:
    """Return the kind of each task: a number for each set of annotations, or `ALONE`."""
    kinds = [
        ALONE if cost is None or graph[key].is_coro else 0 for key, cost in zip(order, costs, strict=True)
    ]
    for i, kind in enumerate(_by_annotations(order, annotations)):
        kinds[i] = ALONE if kinds[i] == ALONE else kind
    for i, key in enumerate(order):
        near = graph[key].dependencies
        if graph[key].block_fusion or any(graph[dep].block_fusion for dep in near if dep in graph):
            for alone in (i, *(number[dep] for dep in near if dep in number)):
                kinds[alone] = ALONE
    return kinds


def _by_annotations(order: list[Key], annotations: Annotations) -> list[int]:
    of: dict[Key, str] = {}
    for name, by in sorted(annotations.items()):
        for key, value in by.items():
            of[key] = f"{of.get(key, '')}{name}={value!r};"
    # Most tasks have none: they are of kind 0.
    kinds = {"": 0}
    return [kinds.setdefault(of.get(key, ""), len(kinds)) for key in order]
