"""`ModelArray`: one output of a model over the chunks of dask arrays; a dask array like any other.

Only `compute()` differs.  Dask's array optimizer fuses what makes a chunk with the model that reads it, but
leaves a task under the old name beside each fused one, and puts the chunks together in one more task on one
worker.  On eight chunks of 40 ms those nine tasks are a twentieth of the time.  A fused task of Dask's also orders
what it holds at every run, which takes a millisecond; here that is done once.  A task takes several short chunks
(`groups`), and workers of the caller's host write into its memory (`shared_buffer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, chain, islice
from math import prod
from typing import Any, NamedTuple

import dask.array as da
from dask.array.optimization import optimize
from dask.base import get_scheduler, tokenize
from dask.core import flatten, reverse_dict, toposort
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_ferro.lower.client import slots
from dask_ferro.lower.layer import Key, LazyLayer
from dask_ferro.lower.model.groups import BufferSlot, are_chains, grouped, sizes
from dask_ferro.lower.model.joining import rebuilt
from dask_ferro.lower.model.shared_buffer import Landing, SharedBuffer, opened
from dask_ferro.lower.portable import PortableCall, PortableTask
from dask_ferro.lower.upstream import GraphNode, Task, execute_subgraph, resolve_aliases

# Results of fewer bytes are sent: the workers' other messages take as long.
_WORTH_LANDING = 2**20


class FusedLayer(LazyLayer):
    """An array's graph, fused when it is written out (on the scheduler), with one task for each group of chunks.

    Parameters
    ----------
    graph : HighLevelGraph
    groups : sequence of (key, chunks)
        The key of each task, which is none of a chunk, as a cluster may still hold those; and the
        keys of its chunks.
    targets : mapping of key to BufferSlot, optional
        Where chunks go; the others are in the tasks' results.
    """

    def __init__(
        self,
        graph: HighLevelGraph,
        groups: Sequence[tuple[Key, Sequence[Key]]],
        targets: Mapping[Key, BufferSlot] | None = None,
    ) -> None:
        super().__init__()
        self.graph = graph
        self.groups = tuple(groups)
        self.targets = dict(targets or {})

    def _write_out(self) -> Iterator[GraphNode]:
        wanted = list(chain.from_iterable(chunks for _, chunks in self.groups))
        fused = dict(optimize(self.graph, wanted))
        readers = reverse_dict({key: node.dependencies for key, node in fused.items()})
        nodes = resolve_aliases(fused, set(wanted), readers)
        for name, chunks in self.groups:
            mine = [_in_order(nodes.pop(key)) for key in chunks]
            yield grouped(name, mine, [self.targets.get(key) for key in chunks])
        yield from map(_in_order, nodes.values())

    def get_output_keys(self) -> set[Key]:
        """Return the keys of the groups."""
        return {name for name, _ in self.groups}


class FusedNode(NamedTuple):
    """A node of a fused task, and the keys that nothing reads after it."""

    node: GraphNode
    done_with: tuple[Key, ...]


def run_steps(steps: Sequence[FusedNode], out: Key, names: Sequence[Key], *values: Any) -> Any:
    """Return the value of a fused task's last node, computed from the values of other tasks.

    Parameters
    ----------
    steps : sequence of FusedNode
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
    """Return a fused task of Dask's with its nodes in topological order."""
    if not isinstance(node, Task) or node.func is not execute_subgraph:
        return node
    inner, out, names, *others = node.args
    reads = {key: set(n.dependencies) for key, n in inner.items()} | {name: set() for name in names}
    order = [key for key in toposort(reads, dependencies=reads) if key in inner]
    last: dict[Key, Key] = {}
    for key in order:
        last |= dict.fromkeys(reads[key], key)
    steps: list[FusedNode] = []
    for key in order:
        done_with = tuple(r for r in reads[key] if last[r] == key and r != out)
        steps.append(FusedNode(inner[key], done_with))
    return PortableTask(node.key, run_steps, tuple(steps), out, tuple(names), *others)


class ModelArray(da.Array):
    """A dask array that computes to its value with one task for some chunks, put together at the caller.

    Attributes
    ----------
    seconds : float
        Projected seconds of one chunk; 0 if not known.
    model, output : str
        Names, for an error; "" of an array that Dask made of another.
    """

    seconds: float = 0.0
    model: str = ""
    output: str = ""

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        rebuild, arguments = super().__dask_postcompute__()
        return PortableCall(rebuilt, (rebuild, arguments, self.model, self.output)), ()

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
        # A client's `get`, or one of Dask's own functions, which run in this process.
        client = getattr(schedule, "__self__", None)
        client = client if hasattr(client, "scatter") else None
        landing = self._landing() if client is not None else None
        with landing or nullcontext():
            targets = {} if landing is None else self._targets(landing.place)
            groups = self._groups(client, landing)
            name = groups[0][0][0]
            graph = HighLevelGraph({name: FusedLayer(self.dask, groups, targets)}, {name: set()})
            results = schedule(graph, [key for key, _ in groups], **kwargs)
            parts = dict(zip(self._chunk_keys(), chain.from_iterable(results), strict=True))
            missing = [key for key, part in parts.items() if part is None]
            if missing and landing is not None:
                whole = landing.array(self.shape, self.dtype)
                if len(missing) == len(parts):
                    return whole
                for key in missing:
                    start = targets[key].start
                    parts[key] = whole[start : start + targets[key].shape[0]]
        rebuild, arguments = self.__dask_postcompute__()
        return rebuild(_nested(self.__dask_keys__(), parts), *arguments)

    def _chunk_keys(self) -> list[Key]:
        """Return the chunks' keys in the order of their rows."""
        return list(flatten(self.__dask_keys__()))

    def _groups(self, client: Any, landing: Landing | None) -> list[tuple[Key, list[Key]]]:
        """Return the key and the chunks of each task."""
        keys = self._chunk_keys()
        if client is not None and self.seconds and are_chains(self.dask):
            counts = sizes(len(keys), self.seconds, slots(client))
        else:
            counts = (1,) * len(keys)
        # The same array may come from a persisted one next time: other tasks, so other names.
        kinds = [(name, _kind(layer)) for name, layer in self.dask.layers.items()]
        name = f"{self.name}-{tokenize(kinds, counts, landing and landing.place.name)}"
        rest = iter(keys)
        return [((name, i), list(islice(rest, count))) for i, count in enumerate(counts)]

    def _landing(self) -> Landing | None:
        """Return memory for the result; None if its size is not known, it is small, or it holds no numbers."""
        if self.dtype.kind not in "biufc" or not self.nbytes >= _WORTH_LANDING:
            return None
        return opened(int(self.nbytes))

    def _targets(self, place: SharedBuffer) -> dict[Key, BufferSlot]:
        rest = self.shape[1:]
        row = prod(rest) * self.dtype.itemsize
        starts = accumulate(self.chunks[0], initial=0)
        return {
            key: BufferSlot(place, start, start * row, (rows, *rest), self.dtype)
            for key, start, rows in zip(self._chunk_keys(), starts, self.chunks[0], strict=False)
        }


def _kind(layer: Any) -> str:
    """Return the type of a layer, or of what it holds where that is tasks or futures in a dict."""
    held = next(iter(layer.mapping.values()), None) if isinstance(layer, MaterializedLayer) else layer
    return type(held).__name__


def _nested(keys: Any, parts: Mapping[Key, Any]) -> Any:
    """Return the parts as lists in lists, as their keys are."""
    return [_nested(k, parts) for k in keys] if isinstance(keys, list) else parts[keys]
