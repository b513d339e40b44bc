"""One call of a sharded graph, written out as tasks: what each reads, where it had best run, how urgent it is.

    inputs' parts --> segments --> (taken out of tuples) --> collectives --> segments --> outputs' parts

A key that holds a tuple is read by its own rank alone: what another rank or the caller reads is taken out first, so
nothing travels that is not asked for.  Where a rank goes on on another worker, in the next stage, the tuple travels
without what stays (`segment_run`).  Priorities are highest for what the first bucket waits for, and fall from there.
Workers and clients are not known here: a rank is a number, and a site what the plan says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir

from dask_ferro.engines.selection import Support, first_engines, route
from dask_ferro.graph.sharding.node_placement import UNPLACED, NodePlacement
from dask_ferro.graph.sharding.segments import Bucket, Cut, RankSegment, cut, is_collective
from dask_ferro.lower.annotations import about
from dask_ferro.lower.ranks.exchange import Key, Name, exchange
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.lower.worker.bundle_ref import BundleRef, ModelRef
from dask_ferro.lower.worker.segment_run import Chance, run_segment, taken
from dask_ferro.lower.worker.task import run_bundle
from dask_ferro.trace import About

# A session with threads costs their start: below this it has none.
_WORTH_THREADS_S = 1e-3


class PartPlace(NamedTuple):
    """Where a value is: a key, and the position in the tuple that it holds (-1: it holds the value itself)."""

    key: Key
    index: int = -1  # type: ignore[assignment]  # tuple has a method of that name


class PartReading(NamedTuple):
    """How a task reads values: which of its arguments they are, what was left behind, and the arguments."""

    picks: tuple[tuple[int, int], ...]
    chances: tuple[Chance, ...]
    reads: tuple[TaskRef, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Those of `taken`, behind the model."""
        return self.picks, self.chances, *self.reads


class RankSource(NamedTuple):
    """The graph that a call computes: its model as loaded, by name, in pieces; each node's engines and seconds.

    Attributes
    ----------
    segments, buckets : sequence of About
        What each piece is about.
    made : mapping of str to NodePlacement
        Where each value is made that segments and buckets give.
    away : frozenset of str
        Those that are read on other workers than those of the site where they are made.
    exact : bool
        Whether bits may not depend on where the graph is cut.
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


def source(
    model: ir.Model,
    ref: ModelRef,
    support: Sequence[Support],
    seconds: Sequence[float],
    *,
    exact: bool = False,
) -> RankSource:
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
    made = {name: s.site for s in pieces.segments for name in s.outputs}
    made |= {name: b.site for b in pieces.buckets for row in b.makes for name in row}
    away = frozenset(name for name, site in _reads(pieces) if name in made and not site.is_with(made[name]))
    return RankSource(model, ref, pieces, support, seconds, segments, buckets, made, away, exact)


def _reads(pieces: Cut) -> list[tuple[str, NodePlacement]]:
    """What is read, and where, in the order of pieces."""
    read = [(name, s.site) for s in pieces.segments for name in s.inputs]
    return read + [(name, b.site) for b in pieces.buckets for row in b.reads for name in row]


class RankCall:
    """The tasks of one call.

    Parameters
    ----------
    source : RankSource
    token : str
        Of graph and inputs.
    extra : mapping, optional
        Keyword arguments of each bundle: the model's content where it has to travel.
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
        self.entries: set[Key] = set()  # what computes nothing: inputs, and weights as they are
        self._readers = dict(reversed(_reads(source.pieces)))  # the first of each has the last word
        self._parted: dict[Key, int] = {}  # the number of each segment of which a part travels

    def reader(self, name: str) -> NodePlacement:
        """Return the site of the first that reads a value."""
        return self._readers.get(name, UNPLACED)

    def give(self, name: str, array: Any, rank: int) -> None:
        """Let an input's part travel in the graph."""
        key = self._key("spmd-input", len(self.tasks))
        self._task(key, (rank, self.reader(name)), 0, same, array)
        self.entries.add(key)
        self.places[name] = PartPlace(key)

    def write(self) -> None:
        """Write the tasks of all segments and buckets; every input has its place."""
        pieces = self.source.pieces
        for number, segment in enumerate(pieces.segments):
            many, key = len(segment.outputs) > 1, self._key("spmd-segment", number)
            for i, name in enumerate(segment.outputs):
                self.places[name] = PartPlace(key, i if many else -1)
            if many and not self.source.away.isdisjoint(segment.outputs):
                self._parted[key] = number
        read = {name for name, _ in _reads(pieces)}
        read |= {value.name or "" for value in self.source.model.graph.outputs}
        for number, bucket in enumerate(pieces.buckets):
            self._bucket(number, bucket, read)
        for number, segment in enumerate(pieces.segments):
            self._segment(number, segment)

    def end(self, name: str, rank: int) -> Key:
        """Return the key that holds a value by itself, on the worker of a rank."""
        place = self.place(name, rank)
        if place.index < 0:
            return place.key
        key = self._key("spmd-output", len(self.tasks))
        lowest = min(self.priority.values(), default=self.first) - self.first
        home = (rank, self.source.made.get(name, UNPLACED))
        reads = self.reading([place], home)
        self._task(key, home, lowest, one, self.source.ref, *reads.arguments, **self._extra_of(reads))
        self.places[name] = PartPlace(key)
        return key

    def reading(self, places: Sequence[PartPlace], home: tuple[int, NodePlacement]) -> PartReading:
        """Return how a task of a rank at a site reads values, and computes again what did not travel with them."""
        keys = list(dict.fromkeys(place.key for place in places))
        picks = tuple((keys.index(place.key), place.index) for place in places)
        chances: dict[Key, Chance] = {}

        def mend(key: Key, wanted: Iterable[int]) -> None:
            number = self._parted.get(key)
            if number is None or key in chances or self._travel(number, wanted, home):
                return
            bundle, places = self._recipe(number)
            for source in dict.fromkeys(place.key for place in places):
                if source not in keys:  # before it is mended itself, which looks it up
                    keys.append(source)
                mend(source, [place.index for place in places if place.key == source])
            reads = dict.fromkeys(keys.index(place.key) for place in places)
            chances[key] = Chance(keys.index(key), bundle, tuple(reads))

        for key in list(keys):
            mend(key, [place.index for place in places if place.key == key])
        return PartReading(picks, tuple(chances.values()), tuple(map(TaskRef, keys)))

    def _travel(self, number: int, wanted: Iterable[int], home: tuple[int, NodePlacement]) -> bool:
        """Whether a segment's outputs are sent wherever it is sent, or are read where somebody else is meant to."""
        segment = self.source.pieces.segments[number]
        if segment.rank != home[0] or not segment.site.is_with(home[1]):
            return True
        return all(segment.outputs[index] in self.source.away for index in wanted)

    def _recipe(self, number: int) -> tuple[BundleRef, list[PartPlace]]:
        """The bundle of a segment, and what it reads."""
        segment = self.source.pieces.segments[number]
        places = [self.place(name, segment.rank) for name in segment.inputs]
        keys = list(dict.fromkeys(place.key for place in places))
        picks = tuple((keys.index(place.key), place.index) for place in places)
        return self._bundle(segment.inputs, segment.outputs, segment.nodes)._replace(picks=picks), places

    # Pieces.

    def _segment(self, number: int, segment: RankSegment) -> None:
        home = (segment.rank, segment.site)
        bundle, places = self._recipe(number)
        _, chances, reads = self.reading(places, home)
        key = self._key("spmd-segment", number)
        sent = [i for i, name in enumerate(segment.outputs) if name in self.source.away]
        call = (run_bundle, self.source.ref, bundle)
        if chances or key in self._parted:
            parted = tuple(sent) if key in self._parted else ()
            call = (run_segment, self.source.ref, bundle, parted, chances)  # type: ignore[assignment]
        self._task(key, home, -segment.before, *call, *reads, **self.extra)
        self.about[key] = tuple(self.source.segments[number])

    def _bundle(self, inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[int]) -> BundleRef:
        rows, exact = [self.source.support[position] for position in nodes], self.source.exact
        long = sum(self.source.seconds[position] for position in nodes) > _WORTH_THREADS_S
        return BundleRef(
            tuple(inputs),
            tuple(outputs),
            first_engines(self.source.support, nodes) if exact else route(self.source.support, nodes),
            (),
            parallel=exact or long,
            title=", ".join(dict.fromkeys(row.op for row in rows)),
            down=tuple(range(len(outputs))),
            exact=exact,
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
            self.places.update((one, PartPlace(key, i)) for i, one in enumerate(names))

    def _given(
        self, name: Name, index: int, values: Sequence[str], home: tuple[int, NodePlacement], priority: int
    ) -> Key:
        """The key that holds what a rank gives to a bucket, and nothing else."""
        places = [self.place(value, home[0]) for value in values]
        if len(places) == 1 and places[0].index < 0:
            return places[0].key
        key, reads = name.key("given", index), self.reading(places, home)
        self._task(key, home, priority, taken, self.source.ref, *reads.arguments, **self._extra_of(reads))
        return key

    def place(self, name: str, rank: int) -> PartPlace:
        """Return where a value is; a weight that is read as it is gets a task of its own."""
        if name not in self.places:
            key = self._key("spmd-weight", len(self.tasks))
            bundle = self._bundle((), (name,), ())
            self._task(key, (rank, self.reader(name)), 0, run_bundle, self.source.ref, bundle, **self.extra)
            self.entries.add(key)
            self.places[name] = PartPlace(key)
        return self.places[name]

    # Tasks.

    def _extra_of(self, reads: PartReading) -> Mapping[str, Any]:
        """The model's content, for a task that may have to compute something again."""
        return self.extra if reads.chances else {}

    def _key(self, what: str, number: int) -> Key:
        return (f"{what}-{self.token}", number)

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


def same(array: Any) -> Any:
    """Return an input's part."""
    return array


def one(model: ModelRef, picks: Any, chances: Any, *arguments: Any, **by_name: Any) -> Any:
    """Return what `taken` does, where that is one value."""
    return taken(model, picks, chances, *arguments, **by_name)[0]
