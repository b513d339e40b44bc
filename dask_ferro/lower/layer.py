"""Tasks over the chunks of inputs, as one lazy layer of a Dask graph.

The layer takes a few hundred bytes per bundle, whatever the number of chunks: its tasks are generated where they are
needed, on the scheduler.  The key of bundle b of chunk c is ``(head..., c, tail...)``; the tail is the zeros that a
`dask.array` has after the chunk number, so that a bundle's result can itself be a block of the array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat, starmap
from operator import call
from typing import Any, NamedTuple

from dask.highlevelgraph import Layer

from dask_ferro.lower.portable import PortableTask, portable
from dask_ferro.lower.upstream import GraphNode, TaskRef

# A string or a tuple; Dask allows numbers too, so there is no narrower type.
Key = Any


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
    """Values of all chunks of which few differ, each with the number of chunks that it has in a row."""

    runs: tuple[tuple[Any, int], ...]

    def over(self, chunks: int) -> Iterator[Any]:
        """Yield the values of all chunks."""
        return chain.from_iterable(starmap(repeat, self.runs))


# One argument of the tasks of several chunks: a key for each chunk, or the value itself.
KeysOrValue = KeySeries | Literal


class TaskSeries(NamedTuple):
    """One task for each chunk: the keys, the function, and the sources of its arguments, by position and by name."""

    keys: KeySeries
    chunks: int
    function: Callable[..., Any]
    arguments: tuple[KeySeries | Literal, ...]
    named: Mapping[str, KeySeries | Literal | RunLengths] = {}

    def tasks(self, kind: type[PortableTask]) -> Iterator[PortableTask]:
        """Yield the tasks, in the order of the chunks."""
        columns = (source.over(self.chunks) for source in (*self.arguments, *self.named.values()))
        for chunk, values in enumerate(zip(*columns, strict=True)):
            positional, by_name = values[: len(self.arguments)], values[len(self.arguments) :]
            named = dict(zip(self.named, by_name, strict=True))
            yield kind(self.keys.at(chunk), self.function, *positional, **named)


class BundleTask(PortableTask):
    """The task of one of several bundles: Dask's optimizer would put together again what was cut."""

    __slots__ = ()
    block_fusion = True


class LazyLayer(Layer):
    """A layer whose tasks are generated on first access and are not serialized.

    A scheduler that cannot load it refuses the graph with a sentence that names what it lacks.
    """

    _tasks: dict[Key, GraphNode] | None = None

    def __init__(
        self,
        series: Sequence[TaskSeries],
        kind: type[PortableTask] = PortableTask,
        annotations: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(annotations=annotations)
        self.series, self.kind = tuple(series), kind

    @property
    def tasks(self) -> dict[Key, GraphNode]:
        """The generated tasks by key."""
        if self._tasks is None:
            made = chain.from_iterable(one.tasks(self.kind) for one in self.series)
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
        """Return every key, as another layer may read any result."""
        return {one.keys.at(chunk) for one in self.series for chunk in range(one.chunks)}

    def __getitem__(self, key: Key) -> GraphNode:
        return self.tasks[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return sum(one.chunks for one in self.series)
