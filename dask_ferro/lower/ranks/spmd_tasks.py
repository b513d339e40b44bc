"""One call of a sharded graph as tasks, each with its inputs, its preferred rank and its priority.

    inputs' parts --> segments --> (values picked from tuples) --> collectives --> segments --> outputs' parts

A key that holds a tuple is read by its own rank alone: values that another rank or the caller reads are picked from it
first, so only requested values are sent.  Where a rank continues on another worker, in the next stage, the tuple is
sent without the values that stay (`segment_run`).  Priorities are highest for the inputs of the first bucket, and fall
from there.  Workers and clients are not known here: a rank is a number, and a site its placement by the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from dask_ferro.engines.selection import Support, first_engines, route
from dask_ferro.graph.pipeline.action import FORWARD, INPUT_GRAD, KIND_NAMES
from dask_ferro.graph.sharding.node_placement import UNPLACED, NodePlacement
from dask_ferro.graph.sharding.segments import Bucket, Cut, RankSegment, cut, is_collective
from dask_ferro.lower.annotations import about
from dask_ferro.lower.ranks.exchange import Key, Name, exchange
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.lower.worker.bundle_ref import BundleRef, ModelRef
from dask_ferro.lower.worker.segment_run import Chance, Reading, Release, SegmentRef, run_segment, taken
from dask_ferro.lower.worker.task import run_bundle
from dask_ferro.lower.worker.threads import WORTH_THREADS_S
from dask_ferro.trace import About


class PartPlace(NamedTuple):
    """The place of a value: a key, and the position in the tuple that it holds (-1: it holds the value itself)."""

    key: Key
    index: int = -1  # type: ignore[assignment]  # tuple has a method of that name


class PartReading(NamedTuple):
    """How a task reads values, and its arguments that hold them."""

    how: Reading
    arguments: tuple[TaskRef | np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class RankSource:
    """The graph that a call computes: its model, the model's reference and pieces, each node's engines and seconds.

    Attributes
    ----------
    segments, buckets : sequence of About
        The trace annotation of each piece.
    made : mapping of str to NodePlacement
        The site that makes each output of segments and buckets.
    away : frozenset of str
        Values that are read on other workers than those of the site where they are made.
    exact : bool
        Whether bits must not depend on where the graph is cut.
    """

    model: ir.Model
    ref: ModelRef
    pieces: Cut
    support: Sequence[Support]
    seconds: Sequence[float]
    segments: Sequence[About]
    buckets: Sequence[About]
    made: Mapping[str, NodePlacement]
    away: frozenset[str]
    exact: bool

    @cached_property
    def bundles(self) -> tuple[BundleRef, ...]:
        """The bundle of each segment, without the places of its inputs."""
        return tuple(self.bundle(s.inputs, s.outputs, s.nodes) for s in self.pieces.segments)

    def bundle(self, inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[int]) -> BundleRef:
        """Return the bundle of nodes, without the places of its inputs."""
        rows = [self.support[position] for position in nodes]
        long = sum(self.seconds[position] for position in nodes) > WORTH_THREADS_S
        return BundleRef(
            tuple(inputs),
            tuple(outputs),
            first_engines(self.support, nodes) if self.exact else route(self.support, nodes),
            (),
            parallel=self.exact or long,
            title=", ".join(dict.fromkeys(row.op for row in rows)),
            down=tuple(range(len(outputs))),
            exact=self.exact,
        )

    @cached_property
    def trains(self) -> bool:
        """Whether it has actions of a pipeline other than forwards."""
        return any(s.site.action is not None and s.site.action[-1] != FORWARD for s in self.pieces.segments)


def source(
    model: ir.Model,
    ref: ModelRef,
    support: Sequence[Support],
    seconds: Sequence[float],
    *,
    exact: bool = False,
) -> RankSource:
    """Return a sharded graph cut into segments and buckets, with the facts that calls need."""
    pieces, nodes = cut(model), list(model.graph)
    makers: dict[str | None, ir.Node] = {}
    for node in filter(is_collective, nodes):
        makers |= {value.name: node for value in node.outputs}
    segments = [
        about(map(nodes.__getitem__, segment.nodes))._replace(stage=segment.site.stage)
        for segment in pieces.segments
    ]
    buckets = [
        about(map(makers.__getitem__, bucket.makes[0]))._replace(stage=bucket.site.stage)
        for bucket in pieces.buckets
    ]
    made: dict[str, NodePlacement] = {}
    for segment in pieces.segments:
        made |= dict.fromkeys(segment.outputs, segment.site)
    for bucket in pieces.buckets:
        made |= dict.fromkeys(chain.from_iterable(bucket.makes), bucket.site)
    away = frozenset(name for name, site in _reads(pieces) if name in made and not site.is_with(made[name]))
    return RankSource(model, ref, pieces, support, seconds, segments, buckets, made, away, exact)


def _reads(pieces: Cut) -> list[tuple[str, NodePlacement]]:
    """Return each value that is read, with the site of its reader, in the order of pieces."""
    read: list[tuple[str, NodePlacement]] = []
    for segment in pieces.segments:
        read += ((name, segment.site) for name in segment.inputs)
    for bucket in pieces.buckets:
        read += ((name, bucket.site) for name in chain.from_iterable(bucket.reads))
    return read


class RankCall:
    """The tasks of one call.

    Parameters
    ----------
    source : RankSource
    token : str
        The hash of graph and inputs.
    extra : mapping, optional
        Keyword arguments of each bundle: the model's content, where workers cannot see its path.
    first : int, optional
        The priority of the first tasks.
    """

    def __init__(
        self, source: RankSource, token: str, extra: Mapping[str, Any] | None = None, first: int = 0
    ) -> None:
        self.source, self.token, self.extra, self.first = source, token, dict(extra or {}), first
        self.places: dict[str, PartPlace] = {}
        self.tasks: dict[Key, Task] = {}
        self.rank: dict[Key, int] = {}
        self.site: dict[Key, NodePlacement] = {}
        self.priority: dict[Key, int] = {}
        self.about: dict[Key, tuple[Any, ...]] = {}
        # Tasks that compute nothing: inputs, and weights as they are.
        self.entries: set[Key] = set()
        # Inputs without a task: they are inside the tasks that read them.
        self.inline: dict[Key, np.ndarray] = {}
        self._trains = source.trains
        self._recipes: dict[int, tuple[BundleRef, list[PartPlace]]] = {}
        self._readers = dict(reversed(_reads(source.pieces)))  # reversed: the first reader of each
        # The number of each segment, to compute values again that were not sent.
        self._segments: dict[Key, int] = {}
        # For segments whose result is a `SegmentValues`: the number of readers of each value that stays.
        self._readers_of: dict[Key, dict[int, int]] = {}

    def reader(self, name: str) -> NodePlacement:
        """Return the site of the first reader of a value."""
        return self._readers.get(name, UNPLACED)

    def give(self, name: str, array: np.ndarray, rank: int, *, inline: bool = False) -> None:
        """Add an input's part to the graph: as a task, or inside each task that reads it."""
        key = self._key("spmd-input", name)
        if inline:
            self.inline[key] = array
        else:
            self._task(key, (rank, self.reader(name)), 0, same, array)
            self.entries.add(key)
        self.places[name] = PartPlace(key)

    def share(self, other: RankCall) -> None:
        """Use the inputs of another call of the same graph."""
        self.places.update(other.places)
        self.inline.update(other.inline)

    def write(self) -> None:
        """Build the tasks of all segments and buckets; every input must have its place."""
        pieces = self.source.pieces
        for number, segment in enumerate(pieces.segments):
            key = self._segment_key(segment, number)
            self._segments[key] = number
            parted = self._is_parted(segment)
            for i, name in enumerate(segment.outputs):
                self.places[name] = PartPlace(key, i if parted or len(segment.outputs) > 1 else -1)
            if parted:
                # The segment's task holds this dict: the readers are known when all tasks are built.
                self._readers_of[key] = {
                    i: 0 for i, name in enumerate(segment.outputs) if name not in self.source.away
                }
        read = {name for name, _ in _reads(pieces)}
        read |= {value.name or "" for value in self.source.model.graph.outputs}
        for number, bucket in enumerate(pieces.buckets):
            self._bucket(number, bucket, read)
        for number, segment in enumerate(pieces.segments):
            self._segment(number, segment)

    def end(self, name: str, rank: int) -> Key:
        """Return the key that holds a value by itself, on the worker of a rank."""
        place = self.place(name, rank)
        if place.index < 0 and place.key not in self.inline:
            return place.key
        key = self._key("spmd-output", name)
        lowest = min(self.priority.values(), default=self.first) - self.first
        home = (rank, self.source.made.get(name, UNPLACED))
        reads = self.reading([place], home)
        self._task(
            key, home, lowest, one, self.source.ref, reads.how, *reads.arguments, **self.extra_of(reads)
        )
        self.places[name] = PartPlace(key)
        return key

    def values_for_end(self, name: str) -> tuple[Key, tuple[str, ...]] | None:
        """Return the key of the segment that makes a value, and all values that it makes.

        None without a segment, and where a task of the graph reads any of these values.
        """
        place = self.places.get(name)
        number = None if place is None else self._segments.get(place.key)
        if place is None or number is None:
            return None
        made = self.source.pieces.segments[number].outputs
        return (place.key, made) if self._readers.keys().isdisjoint(made) else None

    def reading(self, places: Sequence[PartPlace], home: tuple[int, NodePlacement]) -> PartReading:
        """Return how one more task, of a rank at a site, reads values: each call is another reader of them.

        It computes values again that were not sent, and removes those of which it is the last reader.
        """
        keys = list(dict.fromkeys(place.key for place in places))
        picks = tuple((keys.index(place.key), place.index) for place in places)
        own = _by_key(places)
        chances: dict[Key, Chance] = {}

        def mend(key: Key, wanted: Sequence[int]) -> None:
            if key not in self._readers_of or key in chances:
                return
            number = self._segments[key]
            if self._travel(number, wanted, home):
                return
            bundle, places = self._recipe(number)
            needs = _by_key(places)
            # Before the recursion, which looks up their positions.
            keys.extend(source for source in needs if source not in keys)
            reads = tuple((keys.index(source), indices) for source, indices in needs.items())
            chances[key] = Chance(keys.index(key), own.get(key, ()), bundle, reads)
            for source, indices in needs.items():
                mend(source, indices)

        for key, wanted in own.items():
            mend(key, wanted)
        releases = [Release(i, self._read(key, own[key])) for i, key in enumerate(keys) if key in own]
        how = Reading(picks, tuple(chances.values()), tuple(r for r in releases if r.values))
        return PartReading(how, tuple(map(self._argument, keys)))

    def _read(self, key: Key, wanted: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Count one more reader of a segment's values; return its number for each value that is removed when read."""
        readers, found = self._readers_of.get(key, {}), []
        for index in dict.fromkeys(wanted):
            # Values that are sent are not removed; Dask forgets them with their key.
            if index in readers:
                found.append((index, readers[index]))
                readers[index] += 1
        return tuple(found)

    def _is_parted(self, segment: RankSegment) -> bool:
        """Return whether values of a segment are not sent, or are removed before its key is forgotten."""
        # Tasks that may compute a backward again depend on a forward's key longer than the backward itself does.
        action = segment.site.action
        if self._trains and action is not None and action[-1] in (FORWARD, INPUT_GRAD):
            return True
        return len(segment.outputs) > 1 and not self.source.away.isdisjoint(segment.outputs)

    def _travel(self, number: int, wanted: Iterable[int], home: tuple[int, NodePlacement]) -> bool:
        """Whether the outputs of a segment that a task reads are among those that are sent."""
        segment = self.source.pieces.segments[number]
        if segment.rank != home[0] or not segment.site.is_with(home[1]):
            return True
        return all(segment.outputs[index] in self.source.away for index in wanted)

    def _recipe(self, number: int) -> tuple[BundleRef, list[PartPlace]]:
        """Return the bundle of a segment, and the places of its inputs."""
        # Each reader of a value that stays may have to compute its segment again, so a recipe has many readers.
        if number in self._recipes:
            return self._recipes[number]
        segment = self.source.pieces.segments[number]
        places = [self.place(name, segment.rank) for name in segment.inputs]
        keys = list(dict.fromkeys(place.key for place in places))
        picks = tuple((keys.index(place.key), place.index) for place in places)
        self._recipes[number] = self.source.bundles[number]._replace(picks=picks), places
        return self._recipes[number]

    # Pieces.

    def _segment(self, number: int, segment: RankSegment) -> None:
        home = (segment.rank, segment.site)
        bundle, places = self._recipe(number)
        how, arguments = self.reading(places, home)
        key = self._segment_key(segment, number)
        call: tuple[Any, ...] = (run_bundle, self.source.ref, bundle)
        if how.chances or how.releases or key in self._readers_of:
            sent = tuple(i for i, name in enumerate(segment.outputs) if name in self.source.away)
            ref = SegmentRef(bundle, sent, self._readers_of.get(key))
            call = (run_segment, self.source.ref, ref, how)
        self._task(key, home, -segment.before, *call, *arguments, **self.extra)
        self.about[key] = tuple(self.source.segments[number])

    def _bucket(self, number: int, bucket: Bucket, read: set[str]) -> None:
        name = Name(bucket.kind.lower(), self.token, number)
        pairs = zip(bucket.reads, bucket.ranks, strict=True)
        given = [
            self._given(name, i, names, (rank, bucket.site), -number) for i, (names, rank) in enumerate(pairs)
        ]
        wanted = [not read.isdisjoint(names) for names in bucket.makes]
        steps, results = exchange(name, bucket, given, wanted)
        for step in steps:
            home = (step.rank, bucket.site)
            self._task(step.key, home, -number, step.call, *step.constants, *map(self._argument, step.reads))
            self.about[step.key] = tuple(self.source.buckets[number])
        for key, names in zip(results, bucket.makes, strict=True):
            self.places.update((one, PartPlace(key, i)) for i, one in enumerate(names))

    def _given(
        self, name: Name, index: int, values: Sequence[str], home: tuple[int, NodePlacement], priority: int
    ) -> Key:
        """Return the key that holds a rank's inputs of a bucket, and no other values."""
        places = [self.place(value, home[0]) for value in values]
        if len(places) == 1 and places[0].index < 0:
            return places[0].key
        key, reads = name.key("given", index), self.reading(places, home)
        self._task(
            key, home, priority, taken, self.source.ref, reads.how, *reads.arguments, **self.extra_of(reads)
        )
        return key

    def place(self, name: str, rank: int) -> PartPlace:
        """Return the place of a value; a weight that is read as it is gets a task of its own."""
        if name not in self.places:
            key = self._key("spmd-weight", name)
            bundle = self.source.bundle((), (name,), ())
            self._task(key, (rank, self.reader(name)), 0, run_bundle, self.source.ref, bundle, **self.extra)
            self.entries.add(key)
            self.places[name] = PartPlace(key)
        return self.places[name]

    # Tasks.

    def extra_of(self, reads: PartReading) -> Mapping[str, Any]:
        """Return the model's content, for a task that may have to compute values again."""
        return self.extra if reads.how.chances else {}

    def _argument(self, key: Key) -> TaskRef | np.ndarray:
        """Return an argument of a task: the result of another, or an input in its place."""
        return self.inline[key] if key in self.inline else TaskRef(key)

    def _segment_key(self, segment: RankSegment, number: int) -> Key:
        # Dask learns durations by the name before the token: forwards and backwards take different times.
        action = segment.site.action
        return self._key("spmd-segment" if action is None else KIND_NAMES[action[-1]], number)

    def _key(self, what: str, which: int | str) -> Key:
        # Values by their names: how many tasks a call has depends on how its inputs reach it.
        return (f"{what}-{self.token}", which)

    def _task(
        self,
        key: Key,
        home: tuple[int, NodePlacement],
        priority: int,
        call: Callable[..., Any],
        *of: Any,
        **by_name: Any,
    ) -> None:
        self.tasks[key] = Task(key, call, *of, **by_name)
        (self.rank[key], self.site[key]), self.priority[key] = home, self.first + priority


def _by_key(places: Iterable[PartPlace]) -> dict[Key, tuple[int, ...]]:
    """Return the positions of values in each key's result."""
    found: dict[Key, tuple[int, ...]] = {}
    for key, index in places:
        found[key] = (*found.get(key, ()), index)
    return found


def same(array: Any) -> Any:
    """Return an input's part."""
    return array


def one(model: ModelRef, *arguments: Any, **by_name: Any) -> Any:
    """Return the single value of `taken`."""
    return taken(model, *arguments, **by_name)[0]
