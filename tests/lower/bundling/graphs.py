"""Random Dask graphs whose tasks tell their own results, so that a wrong value anywhere shows in the end."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from typing import Any
from zlib import crc32

from dask_ferro.flow.run import InnerTask, Share
from dask_ferro.flow.task_cost import TaskCost
from dask_ferro.lower.bundling.choice import CostFacts
from dask_ferro.lower.upstream import Alias, DataNode, GraphNode, List, Task, TaskRef

# For tests in which something happens while tasks run, in this process.
PAUSE_S = 0.0
NAMES = ("load", "add", "mean_chunk", "sum-partial", "rechunk merge")


def told(name: str, *values: Any, more: Any = ()) -> tuple[Any, ...]:
    """Return a value that contains what it was made of, after a pause."""
    if PAUSE_S:
        time.sleep(PAUSE_S)
    return (name, crc32(repr((values, list(more))).encode()))


def random_graph(rng: random.Random, most: int = 60) -> dict[Any, GraphNode]:
    """Return a graph of tasks, aliases and data, with keys of all kinds."""
    graph: dict[Any, GraphNode] = {}
    keys: list[Any] = []
    for i in range(rng.randint(1, most)):
        name = rng.choice(NAMES)
        key: Any = rng.choice([(f"{name}-1f2e3d4c", i), f"{name}-{i}", (name, i, 0)])
        deps = rng.sample(keys, min(len(keys), rng.choice([0, 1, 1, 2, 2, 3, 9])))
        kind = rng.random()
        if kind < 0.05 and deps:
            graph[key] = Alias(key, deps[0])
        elif kind < 0.1:
            graph[key] = DataNode(key, ("data", i))
        elif kind < 0.25:
            graph[key] = Task(key, told, name, more=List(*map(TaskRef, deps)))
        else:
            graph[key] = Task(key, told, name, *map(TaskRef, deps), _data_producer=not deps)
        keys.append(key)
    return graph


def share(tasks: Iterable[Task], outputs: Iterable[Any]) -> Share:
    """Return the share of a bundle of tasks, in their order."""
    inner = tuple(InnerTask(task.key, task, i) for i, task in enumerate(tasks))
    return Share("bundle", 0, 1, inner, tuple(outputs))


def random_wanted(rng: random.Random, graph: dict[Any, GraphNode]) -> list[Any]:
    """Return some keys of a graph, its last one among them."""
    keys = list(graph)
    return list(dict.fromkeys([*rng.sample(keys, rng.randint(0, min(len(keys), 5))), keys[-1]]))


def facts(
    rng: random.Random | None = None, *, seconds: float = 1e-3, workers: int = 2, **others: Any
) -> CostFacts:
    """Return facts of tasks that take about `seconds`; with `rng`, some have no known cost, and some large results."""

    def cost(key: Any) -> TaskCost | None:
        if rng is None:
            return TaskCost(seconds, 28)
        draw = random.Random(str(key)).random()
        return None if draw < 0.1 else TaskCost(seconds * draw, 1e8 if draw > 0.9 else 28)

    return CostFacts(
        cost,
        **{
            "existing": lambda key: None,
            "held": lambda key: None,
            "workers": workers,
            "holds": 1e9,
            "memory": 1e12,
            **others,
        },
    )
