"""`ModelArray`: one output of a model over the chunks of dask arrays; a dask array like any other.

Only `compute()` is its own.  Dask's array optimizer fuses what makes a chunk with the model that reads it, but
leaves a task under the old name beside each fused one, and puts the chunks together in one more task on one
worker.  On eight chunks of 40 ms those nine tasks are a twentieth of the time.  A fused task of Dask's also orders
what it holds at every run, which takes a millisecond; here that is done once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import dask.array as da
from dask._task_spec import GraphNode, Task, _execute_subgraph, resolve_aliases
from dask.array.optimization import optimize
from dask.base import get_scheduler, tokenize
from dask.core import flatten, reverse_dict, toposort
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_ferro.lower.layer import Key, LazyLayer


class FusedLayer(LazyLayer):
    """An array's whole graph, fused where it is written out: on the scheduler.

    Parameters
    ----------
    graph : HighLevelGraph
    names : mapping of key to key
        Of the array's chunks, what each is called here: it is another task than the chunk's own, and a cluster
        may still hold that one.
    """

    def __init__(self, graph: HighLevelGraph, names: Mapping[Key, Key]) -> None:
        super().__init__()
        self.graph = graph
        self.names = dict(names)

    def _write_out(self) -> Iterator[GraphNode]:
        fused = dict(optimize(self.graph, list(self.names)))
        readers = reverse_dict({key: node.dependencies for key, node in fused.items()})
        for key, node in resolve_aliases(fused, set(self.names), readers).items():
            yield _in_order(node.substitute(self.names, key=self.names.get(key, key)))

    def get_output_keys(self) -> set[Key]:
        """The array's chunks."""
        return set(self.names.values())


class Step(NamedTuple):
    """A node of a fused task, and the keys that nothing reads after it."""

    node: GraphNode
    done_with: tuple[Key, ...]


def run_steps(steps: Sequence[Step], out: Key, names: Sequence[Key], *values: Any) -> Any:
    """Return what the fused nodes make of the values of other tasks.

    Parameters
    ----------
    steps : sequence of Step
        Each after what it reads.
    out : key
        Of the node whose result is wanted.
    names : sequence of key
        Under which the nodes read the values.
    """
    at: dict[Key, Any] = dict(zip(names, values, strict=True))
    del values
    for node, done_with in steps:
        at[node.key] = node(at)
        for key in done_with:
            del at[key]
    return at[out]


def _in_order(node: GraphNode) -> GraphNode:
    """Return a fused task of Dask's as one that knows its order."""
    if not isinstance(node, Task) or node.func is not _execute_subgraph:
        return node
    inner, out, names, *others = node.args
    reads = {key: set(n.dependencies) for key, n in inner.items()} | {name: set() for name in names}
    order = [key for key in toposort(reads, dependencies=reads) if key in inner]
    last = {read: key for key in order for read in reads[key]}
    steps = (Step(inner[key], tuple(r for r in reads[key] if last[r] == key and r != out)) for key in order)
    return Task(node.key, run_steps, tuple(steps), out, tuple(names), *others)


class ModelArray(da.Array):
    """A dask array that computes to its value with one task a chunk, put together at the caller."""

    def compute(self, **kwargs: Any) -> Any:
        """Return the array's value.

        Parameters
        ----------
        **kwargs
            `scheduler`, `optimize_graph`, and what `dask.compute` takes.
        """
        if not kwargs.pop("optimize_graph", True):
            return super().compute(optimize_graph=False, **kwargs)
        schedule = get_scheduler(scheduler=kwargs.pop("scheduler", None), collections=[self])
        # The same array may come from a persisted one next time: other tasks, so other names.
        name = f"{self.name}-{tokenize([(n, _kind(layer)) for n, layer in self.dask.layers.items()])}"
        names = {key: (name, *key[1:]) for key in flatten(self.__dask_keys__())}
        graph = HighLevelGraph({name: FusedLayer(self.dask, names)}, {name: set()})
        results = schedule(graph, _renamed(self.__dask_keys__(), names), **kwargs)
        rebuild, arguments = self.__dask_postcompute__()
        return rebuild(results, *arguments)


def _kind(layer: Any) -> str:
    """Return the type of a layer, or of what it holds where that is tasks or futures in a dict."""
    held = next(iter(layer.mapping.values()), None) if isinstance(layer, MaterializedLayer) else layer
    return type(held).__name__


def _renamed(keys: Any, names: Mapping[Key, Key]) -> Any:
    return [_renamed(k, names) for k in keys] if isinstance(keys, list) else names[keys]
