"""Iterated tile algorithms on a cluster; their tasks sleep.

GEMM adds to the tiles of C of the previous iteration; tiles of A and B stay on the cluster.  Cholesky factors the same
matrix each time, and the first task that reads a tile creates it: between two iterations the cluster holds only the
last results, which no task reads.  Durations are seconds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dask._task_spec import List, Task, TaskRef
from dask.highlevelgraph import HighLevelGraph
from distributed import Client, Future, wait
from emulated import workload_kernels
from simulated.tiled_linalg import cholesky, gemm

from dask_ferro.simulate.graphs.taskgraph import Key, TaskGraph


class Tiles(NamedTuple):
    """An iterated workload: the tiles that stay on the cluster, and the graph of one iteration.

    Attributes
    ----------
    roots : mapping of key to bytes
        Tiles that are created once and stay.
    graph : TaskGraph
        One iteration; its tasks may read roots, and tiles of the iteration before.
    carried : mapping of task to task
        Maps a task to the task whose result of the previous iteration it reads.
    """

    name: str
    roots: Mapping[Key, int]
    graph: TaskGraph
    carried: Mapping[Key, Key]


def tiles(name: str, toy: bool) -> Tiles:
    """Return the workload: repeated C += A B, or repeated factorization of the same A."""
    seconds = 0.02 if toy else 0.06
    size = 64 * 1024
    if name == "gemm":
        graph = gemm(3 if toy else 8, seconds, size)
        roots = {t.key: t.nbytes for t in graph.tasks if t.kernel == "tile"}
        products = [t for t in graph.tasks if t.key not in roots]
        ends = {t.key[1:3]: t.key for t in products}  # the last of each chain
        firsts = {
            t.key: ends[t.key[1:3]] for t in products if not any(d not in roots for d in t.dependencies)
        }
        return Tiles(name, roots, TaskGraph(name, tuple(products)), firsts)
    graph = cholesky(4 if toy else 12, seconds, size)
    return Tiles(name, {}, graph, {})


class Iterated:
    """A workload on a client: each iteration is persisted, and the previous one released."""

    def __init__(self, client: Client, work: Tiles) -> None:
        self.client, self.work = client, work
        self._number = 0
        self._roots: dict[Key, Future] = {}
        self._tiles: dict[Key, Future] = {}
        if work.roots:
            made = {
                ("root", *key): Task(("root", *key), workload_kernels.sleep, 0.002, size, None, List())
                for key, size in work.roots.items()
            }
            futures = self._get(made, list(made))
            self._roots = dict(zip(work.roots, futures, strict=True))
            wait(futures)

    def start(self) -> Callable[[], float]:
        """Submit the next iteration; return a function that waits for it and returns its seconds."""
        self._number += 1
        work, number = self.work, self._number
        held: dict[Key, Any] = {f.key: f for f in (*self._roots.values(), *self._tiles.values())}
        tasks: dict[Key, Any] = {}
        for spec in work.graph.tasks:
            reads = [
                self._roots[d].key if d in self._roots else (d[0], number, *d[1:]) for d in spec.dependencies
            ]
            if number > 1 and spec.key in work.carried:
                reads.append(self._tiles[work.carried[spec.key]].key)
            key = (spec.key[0], number, *spec.key[1:])
            tasks[key] = Task(
                key, workload_kernels.sleep, spec.seconds, spec.nbytes, None, List(*map(TaskRef, reads))
            )
        outputs = self._outputs()
        gc.collect()  # outside the iteration's time: a pause of 0.1 to 0.2 s of the scheduler, every few iterations
        began = time.perf_counter()
        futures = self._get(held | tasks, [(k[0], number, *k[1:]) for k in outputs])
        before, self._tiles = self._tiles, dict(zip(outputs, futures, strict=True))

        def finish() -> float:
            wait(futures)
            seconds = time.perf_counter() - began
            before.clear()
            return seconds

        return finish

    def _outputs(self) -> list[Key]:
        graph = self.work.graph
        return list(self.work.carried.values()) or [
            key for key, after in graph.dependents.items() if not after
        ]

    def _get(self, tasks: Mapping[Key, Any], outputs: Sequence[Key]) -> list[Future]:
        found: list[Future] = self.client.get(
            HighLevelGraph.from_collections(self.work.name, dict(tasks), []), list(outputs), sync=False
        )
        return found

    def release(self) -> None:
        """Release all results."""
        self._tiles.clear()
        self._roots.clear()
