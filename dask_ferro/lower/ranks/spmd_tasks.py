"""One call of a sharded graph as tasks, each with its inputs, its preferred rank and its priority.

    inputs' parts --> segments --> (values picked from tuples) --> collectives --> segments --> outputs' parts

Only requested values are sent.  A segment's tuple that another rank reads, or its rank on another worker in the next
stage, is sent without the values that stay (`segment_run`); otherwise values are picked from it first.  A collective
may be part of the tasks that read its results (`passing`).  Priorities are highest for the inputs of the first bucket,
and fall from there.  Workers and clients are not known here: a rank is a number, and a site its placement by the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import onnx_ir as ir

from dask_ferro.engines.selection import Support, first_engines, route
from dask_ferro.graph.pipeline.action import FORWARD, INPUT_GRAD, KIND_NAMES
from dask_ferro.graph.sharding.node_placement import UNPLACED, NodePlacement
from dask_ferro.graph.sharding.segments import Bucket, Cut, RankSegment, cut, is_collective
from dask_ferro.lower.annotations import about
from dask_ferro.lower.ranks.exchange import Key, Name, exchange
from dask_ferro.lower.ranks.passing import (
    Arguments,
    PartPlace,
    PartReading,
    Passing,
    Star,
    by_key,
    passings,
    sent_values,
)
from dask_ferro.lower.ranks.stage_workers import Home
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.lower.worker.models import ModelRef
from dask_ferro.lower.worker.segment_run import (
    Chance,
    Reading,
    Release,
    run_segment,
    taken,
)
from dask_ferro.lower.worker.task import WORTH_THREADS_S, BundleRef, run_bundle
from dask_ferro.trace import About


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
        Values that are read on other workers than those of the site where they are made, or by other ranks in the
        results of segments.
    passings : tuple of Passing
        How the values of each bucket pass between tasks.
    packed : frozenset of str
        Outputs that are inputs of the next call, without a task each.
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
    passings: tuple[Passing, ...]
    packed: frozenset[str]
    exact: bool

    @cached_property
    def bundles(self) -> tuple[BundleRef, ...]:
        """The bundle of each segment, which reads its inputs in order."""
        return tuple(self.bundle(s.inputs, s.outputs, s.nodes) for s in self.pieces.segments)

    def bundle(self, inputs: Sequence[str], outputs: Sequence[str], nodes: Sequence[int]) -> BundleRef:
        """Return the bundle of nodes, which reads its inputs in order."""
        long = sum(self.seconds[position] for position in nodes) > WORTH_THREADS_S
        return BundleRef(
            tuple(inputs),
            tuple(outputs),
            first_engines(self.support, nodes) if self.exact else route(self.support, nodes),
            tuple((i, -1) for i in range(len(inputs))),
            parallel=self.exact or long,
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
    packed: Collection[str] = (),
) -> RankSource:
    """Return a sharded graph cut into segments and buckets, with the facts that calls need."""
    pieces, nodes = cut(model, seconds=seconds), list(model.graph)
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
    how = passings(pieces, [value.name or "" for value in model.graph.outputs], packed)
    away = {name for name, site in _reads(pieces) if name in made and not site.is_with(made[name])}
    away |= sent_values(pieces, how)
    return RankSource(
        *(model, ref, pieces, support, seconds, segments, buckets, made),
        *(frozenset(away), how, frozenset(packed), exact),
    )


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
        # Of an input that several ranks have, the place of each rank's own copy.
        self._copies: dict[tuple[str, int], PartPlace] = {}
        self.tasks: dict[Key, Task] = {}
        self.home: dict[Key, Home] = {}
        self.priority: dict[Key, int] = {}
        self.about: dict[Key, tuple[Any, ...]] = {}
        # Tasks that compute nothing: inputs, and weights as they are.
        self.entries: set[Key] = set()
        # Inputs without a task: they are inside the tasks that read them.
        self.inline: dict[Key, np.ndarray] = {}
        self._recipes: dict[int, tuple[BundleRef, list[PartPlace]]] = {}
        # Results of collectives that their readers compute, by keys that no task has.
        self._stars: dict[Key, Star] = {}
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

    def keep(self, parts: Sequence[str], keys: Sequence[Key], items: Sequence[int]) -> None:
        """Add an input whose parts are there: each rank's by the part's name, its key and its position there."""
        for rank, (name, *at) in enumerate(zip(parts, keys, items, strict=True)):
            place = PartPlace(*at)
            self.places.setdefault(name, place)
            self._copies[name, rank] = place

    def share(self, other: RankCall) -> None:
        """Use the inputs of another call of the same graph."""
        self.places.update(other.places)
        self._copies.update(other._copies)
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
        lowest = min(self.priority.values(), default=self.first) - self.first
        key = self._end(name, (rank, self.source.made.get(name, UNPLACED)), one, [place], lowest)
        self.places[name] = PartPlace(key)
        return key

    def _end(
        self,
        what: str,
        home: Home,
        call: Callable[..., Any],
        places: Sequence[PartPlace],
        priority: int,
    ) -> Key:
        key = self._key("spmd-output", what)
        self._reading_task(key, home, priority, call, places)
        # A trace has the region of the sums that it computes.
        star = next((self._stars[place.key] for place in places if place.key in self._stars), None)
        if star is not None:
            self.about[key] = tuple(self.source.buckets[star.number])
        return key

    def ends(self, holder: Mapping[str, int]) -> dict[str, PartPlace]:
        """Return the place of each output, given the rank that has it.

        Packed outputs stay where they are made; without any, each output has a key, else those of a rank share one.
        """
        found: dict[str, PartPlace] = {}
        others: dict[Home, list[str]] = {}
        for name, rank in holder.items():
            place = self.place(name, rank)
            if name in self.source.packed and place.key in self.tasks:
                found[name] = place
            elif not self.source.packed:
                found[name] = PartPlace(self.end(name, rank))
            else:
                others.setdefault((rank, self.source.made.get(name, UNPLACED)), []).append(name)
        for home, names in others.items():
            # Before the tasks of the next call, which may be there already: the caller waits for these values.
            key = self._end(f"{home[0]}", home, taken, [self.place(name, home[0]) for name in names], 1)
            found |= {name: PartPlace(key, i) for i, name in enumerate(names)}
        return found

    def reading(self, places: Sequence[PartPlace], home: Home) -> PartReading:
        """Return how one more task, of a rank at a site, reads values: each call is another reader of them.

        It computes values again that were not sent, computes collectives that have no task, and removes values of
        which it is the last reader.
        """
        found = Arguments(self._stars)
        recipes: dict[Key, tuple[BundleRef, list[PartPlace]]] = {}

        def visit(places: Iterable[PartPlace]) -> None:
            needs = by_key(places)
            found.add(needs)
            for key, wanted in needs.items():
                if key not in self._readers_of or key in recipes:
                    continue
                number = self._segments[key]
                if not self._travel(number, wanted, home):
                    # Before the recursion, which may come here again.
                    recipes[key] = self._recipe(number)
                    visit(recipes[key][1])

        visit(places)
        own = by_key(places)
        at = found.positions
        chances = tuple(
            Chance(at[key], own.get(key, ()), bundle, found.picks(inputs))
            for key, (bundle, inputs) in recipes.items()
        )
        releases = [Release(at[key], self._read(key, wanted)) for key, wanted in own.items()]
        picks, combinations = found.picks(places), found.combinations()
        how = Reading(picks, chances, tuple(r for r in releases if r.values), combinations)
        return PartReading(how, tuple(map(self._argument, found.keys)))

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
        if self.source.trains and action is not None and action[-1] in (FORWARD, INPUT_GRAD):
            return True
        sent = sum(name in self.source.away for name in segment.outputs)
        # Packed outputs are read by the next call and by the client, which find all of them.
        if not self.source.packed.isdisjoint(segment.outputs):
            return False
        # Where all values are sent, nothing is left out.
        return 0 < sent < len(segment.outputs) or (sent > 1 and action is not None)

    def _travel(self, number: int, wanted: Iterable[int], home: Home) -> bool:
        """Whether the outputs of a segment that a task reads are among those that are sent."""
        segment = self.source.pieces.segments[number]
        if segment.rank != home[0] or not segment.site.is_with(home[1]):
            return True
        return all(segment.outputs[index] in self.source.away for index in wanted)

    def _recipe(self, number: int) -> tuple[BundleRef, list[PartPlace]]:
        """Return the bundle of a segment, and the places of its inputs."""
        # Each reader of a value that stays may have to compute its segment again, so a recipe has many readers.
        if number not in self._recipes:
            segment = self.source.pieces.segments[number]
            places = [self.place(name, segment.rank) for name in segment.inputs]
            self._recipes[number] = self.source.bundles[number], places
        return self._recipes[number]

    # Pieces.

    def _segment(self, number: int, segment: RankSegment) -> None:
        home = (segment.rank, segment.site)
        bundle, places = self._recipe(number)
        how, arguments = self.reading(places, home)
        key = self._segment_key(segment, number)
        # Most segments read their arguments as they are.
        call: tuple[Any, ...] = (run_bundle, self.source.ref, bundle._replace(picks=how.picks))
        if how.chances or how.releases or how.combinations or key in self._readers_of:
            sent = tuple(i for i, name in enumerate(segment.outputs) if name in self.source.away)
            call = (run_segment, self.source.ref, bundle, sent, self._readers_of.get(key), how)
        self._task(key, home, -segment.before, *call, *arguments, **self.extra)
        self.about[key] = tuple(self.source.segments[number])

    def _bucket(self, number: int, bucket: Bucket, read: set[str]) -> None:
        name = Name(bucket.kind.lower(), self.token, number)
        wanted = [not read.isdisjoint(names) for names in bucket.makes]
        if self.source.passings[number] != "given":
            self._star(name, bucket, wanted)
            return
        pairs = zip(bucket.reads, bucket.ranks, strict=True)
        given = [
            self._given(name, i, names, (rank, bucket.site), -number) for i, (names, rank) in enumerate(pairs)
        ]
        steps, results = exchange(name, bucket, given, wanted)
        for step in steps:
            home = (step.rank, bucket.site)
            self._task(step.key, home, -number, step.call, *step.constants, *map(self._argument, step.reads))
            self.about[step.key] = tuple(self.source.buckets[number])
        for key, names in zip(results, bucket.makes, strict=True):
            self.places.update((one, PartPlace(key, i)) for i, one in enumerate(names))

    def _star(self, name: Name, bucket: Bucket, wanted: Sequence[bool]) -> None:
        """Assign places to the results of a bucket whose terms are read in the results of segments."""
        # All terms are made by segments, which have their places.
        terms = tuple(tuple(map(self.places.__getitem__, names)) for names in bucket.reads)
        for i, (rank, names) in enumerate(zip(bucket.ranks, bucket.makes, strict=True)):
            key = name.key("terms", i)
            self._stars[key] = Star(name.number, bucket.kind, bucket.attributes, i, terms)
            places = [PartPlace(key, index) for index in range(len(names))]
            if self.source.passings[name.number] == "direct" and wanted[i]:
                key, home = name.key("sum", i), (rank, bucket.site)
                self._reading_task(key, home, -name.number, taken, places)
                self.about[key] = tuple(self.source.buckets[name.number])
                places = [PartPlace(key, index) for index in range(len(names))]
            self.places.update(zip(names, places, strict=True))

    def _given(self, name: Name, index: int, values: Sequence[str], home: Home, priority: int) -> Key:
        """Return the key that holds a rank's inputs of a bucket, and no other values."""
        places = [self.place(value, home[0]) for value in values]
        if len(places) == 1 and places[0].index < 0:
            return places[0].key
        key = name.key("given", index)
        self._reading_task(key, home, priority, taken, places)
        return key

    def place(self, name: str, rank: int) -> PartPlace:
        """Return the place of a value; a weight that is read as it is gets a task of its own."""
        if name not in self.places:
            key = self._key("spmd-weight", name)
            bundle = self.source.bundle((), (name,), ())
            self._task(key, (rank, self.reader(name)), 0, run_bundle, self.source.ref, bundle, **self.extra)
            self.entries.add(key)
            self.places[name] = PartPlace(key)
        return self._copies.get((name, rank), self.places[name])

    # Tasks.

    def _reading_task(
        self, key: Key, home: Home, priority: int, call: Callable[..., Any], places: Sequence[PartPlace]
    ) -> None:
        """Add a task that calls `taken`, or a function with its arguments, for values at some places."""
        reads = self.reading(places, home)
        arguments = (self.source.ref, reads.how, *reads.arguments)
        self._task(key, home, priority, call, *arguments, **self.extra_of(reads))

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
        home: Home,
        priority: int,
        call: Callable[..., Any],
        *of: Any,
        **by_name: Any,
    ) -> None:
        self.tasks[key] = Task(key, call, *of, **by_name)
        self.home[key], self.priority[key] = home, self.first + priority


def same(array: Any) -> Any:
    """Return an input's part."""
    return array


def one(model: ModelRef, *arguments: Any, **by_name: Any) -> Any:
    """Return the single value of `taken`."""
    return taken(model, *arguments, **by_name)[0]
