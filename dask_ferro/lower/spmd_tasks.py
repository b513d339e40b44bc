"""One call of a sharded graph, written out as tasks: what each reads, where it had best run, how urgent it is.

    inputs' parts --> segments --> (taken out of tuples) --> collectives --> segments --> outputs' parts

A key that holds a tuple is read by its own rank alone: what another rank or the caller reads is taken out first, so
nothing travels that is not asked for.  Priorities are 0 for what the first bucket waits for, and fall from there.
Workers and clients are not known here: a rank is a number, and a site what the plan says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir
from dask._task_spec import Task, TaskRef

from dask_ferro.graph.segments import Bucket, Cut, Segment, cut, is_collective
from dask_ferro.graph.site import NOWHERE, Site
from dask_ferro.kernels.route import Support, route
from dask_ferro.lower.about import about
from dask_ferro.lower.exchange import Key, Name, exchange
from dask_ferro.lower.task import BundleRef, ModelRef, pick, run_bundle
from dask_ferro.trace import About

# A session with threads costs their start: below this it has none.
_WORTH_THREADS_S = 1e-3


class Place(NamedTuple):
    """Where a value is: a key, and the position in the tuple that it holds (-1: it holds the value itself)."""

    key: Key
    index: int = -1  # type: ignore[assignment]  # tuple has a method of that name


class Source(NamedTuple):
    """The graph that a call computes: its model as loaded, by name, in pieces; each node's engines and seconds.

    Attributes
    ----------
    segments, buckets : sequence of About
        What each piece is about.
    """

    model: ir.Model
    ref: ModelRef
    pieces: Cut
    support: Sequence[Support]
    seconds: Sequence[float]
    segments: Sequence[About]
    buckets: Sequence[About]


def source(model: ir.Model, ref: ModelRef, support: Sequence[Support], seconds: Sequence[float]) -> Source:
    """Return a sharded graph in its pieces."""
    pieces, nodes = cut(model), list(model.graph)
    makers = {v.name: node for node in nodes if is_collective(node) for v in node.outputs}
    segments = [
        about(nodes[position] for position in segment.nodes)._replace(stage=segment.site.stage)
        for segment in pieces.segments
    ]
    buckets = [
        about(makers[name] for name in bucket.makes[0])._replace(stage=bucket.site.stage)
        for bucket in pieces.buckets
    ]
    return Source(model, ref, pieces, support, seconds, segments, buckets)


class Call:
    """The tasks of one call.

    Parameters
    ----------
    source : Source
    token : str
        Of graph and inputs.
    extra : mapping, optional
        Keyword arguments of each bundle: the model's content where it has to travel.
    """

    def __init__(self, source: Source, token: str, extra: Mapping[str, Any] | None = None) -> None:
        self.source, self.token, self.extra = source, token, dict(extra or {})
        self.places: dict[str, Place] = {}
        self.tasks: dict[Key, Task] = {}
        self.rank: dict[Key, int] = {}
        self.site: dict[Key, Site] = {}
        self.priority: dict[Key, int] = {}
        self.about: dict[Key, tuple[Any, ...]] = {}
        pieces = source.pieces
        read = [(name, s.site) for s in pieces.segments for name in s.inputs]
        read += [(name, b.site) for b in pieces.buckets for row in b.reads for name in row]
        self._readers = dict(reversed(read))  # the first of each has the last word
        made = [(name, s.site) for s in pieces.segments for name in s.outputs]
        made += [(name, b.site) for b in pieces.buckets for row in b.makes for name in row]
        self._makers = dict(made)

    def reader(self, name: str) -> Site:
        """Return the site of the first that reads a value."""
        return self._readers.get(name, NOWHERE)

    def give(self, name: str, array: Any, rank: int) -> None:
        """Let an input's part travel in the graph."""
        key = self._key("spmd-input", len(self.tasks))
        self._task(key, (rank, self.reader(name)), 0, same, array)
        self.places[name] = Place(key)

    def write(self) -> None:
        """Write the tasks of all segments and buckets; every input has its place."""
        pieces = self.source.pieces
        for number, segment in enumerate(pieces.segments):
            many = len(segment.outputs) > 1
            for i, name in enumerate(segment.outputs):
                self.places[name] = Place(self._key("spmd-segment", number), i if many else -1)
        read = {name for s in pieces.segments for name in s.inputs}
        read |= {name for b in pieces.buckets for row in b.reads for name in row}
        read |= {value.name or "" for value in self.source.model.graph.outputs}
        for number, bucket in enumerate(pieces.buckets):
            self._bucket(number, bucket, read)
        for number, segment in enumerate(pieces.segments):
            self._segment(number, segment)

    def end(self, name: str, rank: int) -> Key:
        """Return the key that holds a value by itself, on the worker of a rank."""
        place = self._place(name, rank)
        if place.index < 0:
            return place.key
        key = self._key("spmd-output", len(self.tasks))
        lowest = min(self.priority.values(), default=0)
        self._task(
            key, (rank, self._makers.get(name, NOWHERE)), lowest, pick, TaskRef(place.key), place.index
        )
        self.places[name] = Place(key)
        return key

    # Pieces.

    def _segment(self, number: int, segment: Segment) -> None:
        home = (segment.rank, segment.site)
        places = [self._place(name, segment.rank) for name in segment.inputs]
        keys = list(dict.fromkeys(place.key for place in places))
        bundle = self._bundle(segment.inputs, segment.outputs, segment.nodes)
        bundle = bundle._replace(picks=tuple((keys.index(place.key), place.index) for place in places))
        key = self._key("spmd-segment", number)
        reads = map(TaskRef, keys)
        self._task(key, home, -segment.before, run_bundle, self.source.ref, bundle, *reads, **self.extra)
        self.about[key] = tuple(self.source.segments[number])

    def _bundle(self, inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[int]) -> BundleRef:
        rows = [self.source.support[position] for position in nodes]
        return BundleRef(
            tuple(inputs),
            tuple(outputs),
            route(self.source.support, nodes),
            (),
            parallel=sum(self.source.seconds[position] for position in nodes) > _WORTH_THREADS_S,
            title=", ".join(dict.fromkeys(row.op for row in rows)),
            down=tuple(range(len(outputs))),
        )

    def _bucket(self, number: int, bucket: Bucket, read: set[str]) -> None:
        name = Name(bucket.kind.lower(), self.token, number)
        pairs = zip(bucket.reads, bucket.ranks, strict=True)
        given = [
            self._given(name, i, names, (rank, bucket.site), -number) for i, (names, rank) in enumerate(pairs)
        ]
        wanted = [any(one in read for one in names) for names in bucket.makes]
        steps, results = exchange(name, bucket, given, wanted)
        for step in steps:
            home = (step.rank, bucket.site)
            self._task(step.key, home, -number, step.call, *step.constants, *map(TaskRef, step.reads))
            self.about[step.key] = tuple(self.source.buckets[number])
        for key, names in zip(results, bucket.makes, strict=True):
            self.places.update((one, Place(key, i)) for i, one in enumerate(names))

    def _given(
        self, name: Name, index: int, values: Sequence[str], home: tuple[int, Site], priority: int
    ) -> Key:
        """The key that holds what a rank gives to a bucket, and nothing else."""
        places = [self._place(value, home[0]) for value in values]
        if len(places) == 1 and places[0].index < 0:
            return places[0].key
        keys = list(dict.fromkeys(place.key for place in places))
        picks = tuple((keys.index(place.key), place.index) for place in places)
        key = name.key("given", index)
        self._task(key, home, priority, taken, picks, *map(TaskRef, keys))
        return key

    def _place(self, name: str, rank: int) -> Place:
        """Where a value is; a weight that is read as it is gets a task of its own."""
        if name not in self.places:
            key = self._key("spmd-weight", len(self.tasks))
            bundle = self._bundle((), (name,), ())
            self._task(key, (rank, self.reader(name)), 0, run_bundle, self.source.ref, bundle, **self.extra)
            self.places[name] = Place(key)
        return self.places[name]

    # Tasks.

    def _key(self, what: str, number: int) -> Key:
        return (f"{what}-{self.token}", number)

    def _task(
        self,
        key: Key,
        home: tuple[int, Site],
        priority: int,
        call: Callable[..., Any],
        *of: Any,
        **by_name: Any,
    ) -> None:
        self.tasks[key] = Task(key, call, *of, **by_name)
        (self.rank[key], self.site[key]), self.priority[key] = home, priority


def same(array: Any) -> Any:
    """Return an input's part."""
    return array


def taken(picks: Sequence[tuple[int, int]], *arguments: Any) -> tuple[Any, ...]:
    """Return values out of tuples: for each the argument, and the position in it (-1: the argument itself)."""
    return tuple(arguments[p] if i < 0 else arguments[p][i] for p, i in picks)
