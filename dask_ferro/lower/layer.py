"""A plan over the chunks of its inputs, as one lazy layer of a Dask graph.

The layer takes a few hundred bytes per bundle, whatever the number of chunks: its tasks are generated where they are
needed, on the scheduler.  The key of bundle b of chunk c is ``(head..., c, tail...)``; the tail is the zeros that a
`dask.array` has after the chunk number, so that a bundle's result can itself be a block of the array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby, repeat, starmap
from operator import call
from typing import Any, NamedTuple

from dask.highlevelgraph import Layer

from dask_ferro.lower.portable import PortableTask, portable
from dask_ferro.lower.upstream import GraphNode, TaskRef
from dask_ferro.lower.worker.models import ModelRef
from dask_ferro.lower.worker.outputs import pick, shape_at
from dask_ferro.lower.worker.task import BundleRef, run_bundle

# A string or a tuple; Dask allows numbers too, so there is no narrower type.
Key = Any


class KeySeries(NamedTuple):
    """The keys of all chunks: ``(*head, c, *tail)``, or one key for all chunks.

    Without a tail (None) the head is the one key: that of a dask array of no axes.
    """

    head: tuple[Any, ...] = ()
    tail: tuple[int, ...] | None = ()
    one: Key | None = None

    def at(self, chunk: int) -> Key:
        """Return the key of a chunk."""
        if self.one is not None:
            return self.one
        return self.head if self.tail is None else (*self.head, chunk, *self.tail)


class Literal(NamedTuple):
    """Values that are small enough to be embedded in the tasks: one for all chunks, or one for each."""

    values: tuple[Any, ...]

    def at(self, chunk: int) -> Any:
        """Return the value of a chunk."""
        return self.values[0] if len(self.values) == 1 else self.values[chunk]


# One argument of the tasks of several chunks: a key for each chunk, or the value itself.
KeysOrValue = KeySeries | Literal


class BundleTasks(NamedTuple):
    """One bundle over all chunks: its reference, its keys, and the sources of its arguments."""

    ref: BundleRef
    keys: KeySeries
    arguments: tuple[KeysOrValue, ...]


def _is_counted(bundle: BundleTasks) -> bool:
    """Return whether a bundle's tasks are told how many rows their chunk has."""
    return bundle.ref.check is not None and bundle.ref.check.is_cut


class LazyLayer(Layer):
    """A layer whose tasks are generated on first access and are not serialized.

    A scheduler that cannot load it refuses the graph with a sentence that names what it lacks.
    """

    _tasks: dict[Key, GraphNode] | None = None

    def _write_out(self) -> Iterator[GraphNode]:
        raise NotImplementedError

    @property
    def tasks(self) -> dict[Key, GraphNode]:
        """The generated tasks by key."""
        if self._tasks is None:
            self._tasks = {task.key: task for task in self._write_out()}
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

    def __getitem__(self, key: Key) -> GraphNode:
        return self.tasks[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


class BundleTask(PortableTask):
    """The task of one of several bundles: Dask's optimizer would put together again what was cut."""

    __slots__ = ()

    @property
    def block_fusion(self) -> bool:
        """True: it stays by itself."""
        return True


class BundleLayer(LazyLayer):
    """A layer with one task for each bundle of a plan and each chunk.

    Parameters
    ----------
    model : ModelRef
    bundles : sequence of BundleTasks
    chunks : int
    copy : key, optional
        Key of the model file's content, where workers cannot read the file.
    rows : sequence of int, optional
        Rows of each chunk, for bundles whose outputs are checked; nan: not known.
    """

    def __init__(
        self,
        model: ModelRef,
        bundles: Sequence[BundleTasks],
        chunks: int,
        copy: Key | None = None,
        annotations: dict[str, Any] | None = None,
        rows: Sequence[float] | None = None,
    ) -> None:
        super().__init__(annotations=annotations)
        is_counted = any(_is_counted(b) for b in bundles)
        # Run-length encoded, so that the layer stays small whatever the number of chunks.
        self.rows = [(n, len(list(same))) for n, same in groupby(rows or ())] if is_counted else []
        self.model = model
        self.bundles = tuple(bundles)
        self.chunks = chunks
        self.copy = copy

    def _write_out(self) -> Iterator[GraphNode]:
        extra: dict[str, Any] = {} if self.copy is None else {"copy": TaskRef(self.copy)}
        rows = list(chain.from_iterable(starmap(repeat, self.rows)))
        kind = PortableTask if len(self.bundles) == 1 else BundleTask
        for bundle in self.bundles:
            counted = rows if _is_counted(bundle) else []
            for chunk in range(self.chunks):
                arguments = (
                    TaskRef(a.at(chunk)) if isinstance(a, KeySeries) else a.at(chunk)
                    for a in bundle.arguments
                )
                key, more = bundle.keys.at(chunk), extra
                if counted and counted[chunk] == counted[chunk]:
                    more = {**extra, "rows": int(counted[chunk])}
                yield kind(key, run_bundle, self.model, bundle.ref, *arguments, **more)

    def get_output_keys(self) -> set[Key]:
        """Return every key, as another layer may read any bundle's result."""
        return set().union(*(map(b.keys.at, range(self.chunks)) for b in self.bundles))

    def __len__(self) -> int:
        return len(self.bundles) * self.chunks


class PickLayer(LazyLayer):
    """A layer with one task per chunk, which picks one output of a bundle.

    Parameters
    ----------
    series : KeySeries
        Keys of the picked outputs.
    source : KeySeries
        Keys of the bundle's results.
    place : int or None
        Position of the output among the bundle's outputs; None: it is the only one.
    chunks : int
    alike : (model, output), optional
        Their names, where the chunks have to agree with the first one in all but their rows.
    """

    def __init__(
        self,
        series: KeySeries,
        source: KeySeries,
        place: int | None,
        chunks: int,
        alike: tuple[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.series = series
        self.source = source
        self.place = place
        self.chunks = chunks
        self.alike = alike

    def _write_out(self) -> Iterator[GraphNode]:
        shape = f"{self.series.head[0]}-shape"
        if self.alike is not None:
            yield PortableTask(shape, shape_at, TaskRef(self.source.at(0)), self.place)
        rest = () if self.alike is None else (TaskRef(shape), *self.alike)
        for chunk in range(self.chunks):
            yield PortableTask(self.series.at(chunk), pick, TaskRef(self.source.at(chunk)), self.place, *rest)

    def get_output_keys(self) -> set[Key]:
        """Return the keys of the output's chunks."""
        return {self.series.at(c) for c in range(self.chunks)}

    def __len__(self) -> int:
        return self.chunks + (self.alike is not None)
