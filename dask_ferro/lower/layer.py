"""One lazy layer of a Dask graph with the tasks over the chunks of inputs.

The layer takes a few hundred bytes per bundle, whatever the number of chunks: its tasks are generated on the
scheduler, which needs them.  The key of bundle b of chunk c is ``(head..., c, tail...)``; the tail is the zeros that
a `dask.array` has after the chunk number, so that a bundle's result can itself be a block of the array.

Small arrays are part of the tasks, and large arrays are part of the graph, chunk by chunk, as in
`dask.array.from_array`: the scheduler still has them if a worker is lost.  Workers of the same host map large arrays
instead (`shared`).  Dask arrays, delayed values and futures keep their own keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat, starmap
from operator import call
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.base import is_dask_collection, tokenize
from dask.highlevelgraph import HighLevelGraph, Layer

from dask_ferro.errors import InputError
from dask_ferro.flow.task_cost import TaskCost
from dask_ferro.lower.portable import BundleTask, PortableTask, portable
from dask_ferro.lower.shared_memory import share_array
from dask_ferro.lower.signature import is_dask_array, is_future
from dask_ferro.lower.upstream import GraphNode, TaskRef

# A string or a tuple; Dask allows numbers too, so there is no narrower type.
Key = Any
# Bytes of a task's own description: an input that adds no more to each task does not change a graph's size much.
_TASK_BYTES = 1024
# An array up to this size is part of each task that reads it; a larger one is one value for all of them.
EMBED_BYTES = 64 << 10


class KeySeries(NamedTuple):
    """The keys of all chunks: ``(*head, c, *tail)``, or one key for all chunks."""

    head: tuple[Any, ...] = ()
    tail: tuple[int, ...] = ()
    one: Key | None = None

    def at(self, chunk: int) -> Key:
        """Return the key of a chunk."""
        return (*self.head, chunk, *self.tail) if self.one is None else self.one

    def over(self, chunks: int) -> Iterator[TaskRef]:
        """Yield references to the results of all chunks."""
        return map(TaskRef, map(self.at, range(chunks)))


class Literal(NamedTuple):
    """Values that are small enough to be embedded in the tasks: one for all chunks, or one for each."""

    values: tuple[Any, ...]

    def at(self, chunk: int) -> Any:
        """Return the value of a chunk."""
        return self.values[0] if len(self.values) == 1 else self.values[chunk]

    def over(self, chunks: int) -> Iterator[Any]:
        """Yield the values of all chunks."""
        return map(self.at, range(chunks))


class RunLengths(NamedTuple):
    """Values of all chunks that rarely change, each with the number of consecutive chunks that have it."""

    runs: tuple[tuple[Any, int], ...]

    def over(self, chunks: int) -> Iterator[Any]:
        """Yield the values of all chunks."""
        return chain.from_iterable(starmap(repeat, self.runs))


# One argument of the tasks of several chunks: a key for each chunk, or the value itself.
KeysOrValue = KeySeries | Literal


class TaskSeries(NamedTuple):
    """One task for each chunk: the keys, the function, and the sources of its arguments, by position and by name.

    If `cost` is set, these are tasks of one of several bundles.
    """

    keys: KeySeries
    chunks: int
    function: Callable[..., Any]
    arguments: tuple[KeySeries | Literal, ...]
    named: Mapping[str, KeySeries | Literal | RunLengths] = {}
    cost: TaskCost | None = None

    def tasks(self) -> Iterator[PortableTask]:
        """Yield the tasks, in the order of the chunks."""
        kind = PortableTask if self.cost is None else partial(BundleTask, cost=self.cost)
        columns = (source.over(self.chunks) for source in (*self.arguments, *self.named.values()))
        for chunk, values in enumerate(zip(*columns, strict=True)):
            positional, by_name = values[: len(self.arguments)], values[len(self.arguments) :]
            named = dict(zip(self.named, by_name, strict=True))
            yield kind(self.keys.at(chunk), self.function, *positional, **named)


class LazyLayer(Layer):
    """A layer whose tasks are generated on first access and are not serialized.

    A scheduler that cannot load it refuses the graph with an error that names the missing package.
    """

    _tasks: dict[Key, GraphNode] | None = None

    def __init__(self, series: Sequence[TaskSeries], annotations: dict[str, Any] | None = None) -> None:
        super().__init__(annotations=annotations)
        self.series = tuple(series)

    @property
    def tasks(self) -> dict[Key, GraphNode]:
        """The generated tasks by key."""
        if self._tasks is None:
            made = chain.from_iterable(one.tasks() for one in self.series)
            self._tasks = {task.key: task for task in made}
        return self._tasks

    def __getstate__(self) -> dict[str, Any]:
        kept = {k: v for k, v in self.__dict__.items() if k not in ("_tasks", "has_legacy_tasks")}
        # Dask draws graphs from these; they list each chunk of a dask array, and would be serialized.
        return {**kept, "collection_annotations": None}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return portable(self, call) or super().__reduce_ex__(protocol)

    def is_materialized(self) -> bool:
        """Whether the tasks have been generated."""
        return self._tasks is not None

    def get_output_keys(self) -> set[Key]:
        """Return every key, because another layer may read any result."""
        return {one.keys.at(chunk) for one in self.series for chunk in range(one.chunks)}

    def __getitem__(self, key: Key) -> GraphNode:
        return self.tasks[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return sum(one.chunks for one in self.series)


# ---- inputs of tasks ---------------------------------------------------------------------------------------


class TaskInput(NamedTuple):
    """One input as tasks read it: keys or values, the layers that it adds to the graph, and the last of these."""

    source: KeysOrValue
    layers: Mapping[str, Any]
    dependencies: Mapping[str, set[str]]
    top: str | None = None


def task_input(name: str, value: Any, chunks: Sequence[int] | None, token: str, client: Any) -> TaskInput:
    """Return an input as tasks of a client's workers read it.

    `chunks` are the rows of each chunk if the value is cut along axis 0; None: each task reads all of it.
    """
    if is_dask_collection(value):
        return _collection(name, value, chunks)
    if not isinstance(value, np.ndarray) and is_future(value):
        return future_input(value)
    cut = _chunk_rows(value, chunks)
    if not isinstance(value, np.ndarray) or value.nbytes <= EMBED_BYTES + _TASK_BYTES * len(cut or "1"):
        return embed_input(name, value, chunks)
    if (mapped := share_array(value, client)) is not None:
        return embed_input(name, mapped, chunks)
    import dask.array as da

    label = f"ferro-input-{name}-{token}{'' if cut is None else f'-{tokenize(cut)[:8]}'}"
    rest = tuple((size,) for size in value.shape[1:])
    lazy = da.from_array(value, ((len(value),) if cut is None else cut, *rest), name=label)
    return _collection(name, lazy, cut)


def embed_input(name: str, value: Any, chunks: Sequence[int] | None) -> TaskInput:
    """Return an input as a part of the tasks that read it; the arguments are the same as in `task_input`."""
    cut = _chunk_rows(value, chunks)
    return TaskInput(
        Literal((value,) if cut is None else tuple(np.split(value, np.cumsum(cut)[:-1]))), {}, {}
    )


def _chunk_rows(value: Any, chunks: Sequence[int] | None) -> tuple[int, ...] | None:
    # One row serves every chunk.
    return None if chunks is None or len(value) == 1 else tuple(chunks)


def future_input(future: Any) -> TaskInput:
    """Return the value of a future as tasks read it."""
    return TaskInput(
        KeySeries(one=future.key), {future.key: {future.key: future}}, {future.key: set()}, future.key
    )


def _collection(name: str, value: Any, chunks: Sequence[int] | None) -> TaskInput:
    graph, top = layers_of(name, value)
    if chunks is not None:
        series = KeySeries((value.name,), (0,) * (value.ndim - 1))
        return TaskInput(series, graph.layers, graph.dependencies, top)
    keys = list(dask.core.flatten(value.__dask_keys__()))
    if len(keys) != 1:
        is_array = is_dask_array(value)
        remedy = "one chunk with .rechunk(-1)" if is_array else "without batch_size=, or compute it first"
        raise InputError(f"input {name!r} is read whole and has {len(keys)} chunks; make it {remedy}")
    return TaskInput(KeySeries(one=keys[0]), graph.layers, graph.dependencies, top)


def layers_of(name: str, value: Any) -> tuple[HighLevelGraph, str]:
    """Return the graph of an input that is a collection, and the layer that holds its keys."""
    if isinstance(value, Mapping):
        raise InputError(f"input {name!r} is the outputs of a model: pass one of them")
    graph = value.__dask_graph__()
    if not isinstance(graph, HighLevelGraph):
        graph = HighLevelGraph.from_collections(f"ferro-{id(value)}", graph, dependencies=[])
    own = [layer for layer in getattr(value, "__dask_layers__", tuple)() if layer in graph.layers]
    return graph, next(iter(own), list(graph.layers)[-1])
