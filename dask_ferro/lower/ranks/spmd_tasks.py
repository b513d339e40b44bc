"""One call of a sharded graph as tasks, each with its rank and its order.

    inputs' parts --> segments --> collectives --> segments --> outputs' parts

A segment with several results is a tuple; what a bucket sends is a tuple for each rank.  A task reads values from the
tuples of its own rank; those that it reads from another one are taken there, each by a task, as a tuple would be sent
whole.  Workers and clients are not known here: a rank is a number, and a site its placement by the plan.  Of ready
tasks of a rank, those run first that the first bucket waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import getitem
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import onnx_ir as ir

from dask_ferro.engines.selection import Support, first_engines, route
from dask_ferro.graph.pipeline.action import FORWARD, KIND_NAMES
from dask_ferro.graph.sharding.node_placement import UNPLACED, NodePlacement
from dask_ferro.graph.sharding.parts import Port
from dask_ferro.graph.sharding.segments import Bucket, Cut, RankSegment, cut, is_collective
from dask_ferro.lower.annotations import about
from dask_ferro.lower.ranks.exchange import Key, Name, exchange
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.lower.worker.models import ModelRef
from dask_ferro.lower.worker.rank_functions import Picks, select_values
from dask_ferro.lower.worker.task import WORTH_THREADS_S, BundleRef, run_bundle
from dask_ferro.trace import About

G = TypeVar("G")
# A rank, and where it is.
Home: TypeAlias = tuple[int, NodePlacement]


class PartPlace(NamedTuple):
    """The place of a value: a key, and the position in the tuple that it holds (-1: it holds the value itself)."""

    key: Key
    index: int = -1  # type: ignore[assignment]  # tuple has a method of that name


@dataclass(frozen=True, eq=False)
class RankSource:
    """The graph that a call computes: its model, the model's reference and pieces, each node's engines and seconds.

    Attributes
    ----------
    segments, buckets : sequence of About
        The trace annotation of each piece.
    home : mapping of str to (int, NodePlacement)
        The rank and the site that make each output of segments and buckets.
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
    home: Mapping[str, Home]
    exact: bool
    _bundles: dict[tuple[int, Picks], BundleRef] = field(default_factory=dict)

    def segment_bundle(self, number: int, picks: Picks) -> BundleRef:
        """Return the bundle of a segment that finds its inputs at these places; the same object for the same ones."""
        found = self._bundles.get((number, picks))
        if found is None:
            segment = self.pieces.segments[number]
            found = self.bundle(segment.inputs, segment.outputs, segment.nodes)._replace(picks=picks)
            self._bundles[number, picks] = found
        return found

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

    @cached_property
    def readers(self) -> Mapping[str, NodePlacement]:
        """The site of the first reader of each value."""
        reads = [(name, s.site) for s in self.pieces.segments for name in s.inputs]
        reads += [(name, b.site) for b in self.pieces.buckets for name in chain.from_iterable(b.reads)]
        return dict(reversed(reads))

    @cached_property
    def read(self) -> frozenset[str]:
        """The values that anything reads, outputs of the graph included."""
        return frozenset(self.readers).union(value.name or "" for value in self.model.graph.outputs)


def source(
    model: ir.Model,
    ref: ModelRef,
    support: Sequence[Support],
    seconds: Sequence[float],
    *,
    exact: bool = False,
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
    home: dict[str, Home] = {}
    for segment in pieces.segments:
        home |= dict.fromkeys(segment.outputs, (segment.rank, segment.site))
    for bucket in pieces.buckets:
        for rank, names in zip(bucket.ranks, bucket.makes, strict=True):
            home |= dict.fromkeys(names, (rank, bucket.site))
    return RankSource(model, ref, pieces, support, seconds, segments, buckets, home, exact)


class RankTasks:
    """Tasks with their ranks and sites, their orders, and their annotations for traces, by key."""

    def __init__(self) -> None:
        self.tasks: dict[Key, Task] = {}
        self.home: dict[Key, Home] = {}
        self.order: dict[Key, int] = {}
        self.about: dict[Key, tuple[Any, ...]] = {}

    def add(
        self, key: Key, home: Home, order: int, call: Callable[..., Any], *of: Any, **by_name: Any
    ) -> Key:
        """Add a task; return its key."""
        self.tasks[key] = Task(key, call, *of, **by_name)
        self.home[key], self.order[key] = home, order
        return key

    def update(self, other: RankTasks) -> None:
        """Add the tasks of another one."""
        self.tasks |= other.tasks
        self.home |= other.home
        self.order |= other.order
        self.about |= other.about

    def collect(self, key: Key, home: Home, places: Sequence[PartPlace]) -> Key:
        """Add a task that has values of one home as a tuple; return its key."""
        return self.add(key, home, 0, select_values, *picked(places))


class RankCall(RankTasks):
    """The tasks of one call.

    Parameters
    ----------
    source : RankSource
    token : str
        The hash of graph and inputs.
    extra : mapping, optional
        Keyword arguments of each bundle: the model's content, where workers cannot see its path.
    first : int, optional
        The order of the first tasks.
    """

    def __init__(
        self, source: RankSource, token: str, extra: Mapping[str, Any] | None = None, first: int = 0
    ) -> None:
        super().__init__()
        self.source, self.token, self.extra, self.first = source, token, dict(extra or {}), first
        # Tasks that compute nothing: inputs, and weights as they are.
        self.entries: set[Key] = set()
        # The place of each value, and of each rank's own copy of an input that several have.
        self.places: dict[str, PartPlace] = {}
        self._copies: dict[tuple[str, int], PartPlace] = {}
        # The lowest rank of those that have a part of an input at one place.
        self._holders: dict[tuple[str, PartPlace], int] = {}
        # The key of each value of a tuple that has one by itself.
        self._taken: dict[str, Key] = {}
        # Inputs without a task: they are inside the tasks that read them.
        self._inline: dict[str, np.ndarray] = {}
        # Inputs that are given when the tasks run.
        self.later: list[Port] = []

    def reader(self, name: str) -> NodePlacement:
        """Return the site of the first reader of a value."""
        return self.source.readers.get(name, UNPLACED)

    def give(self, name: str, array: np.ndarray, rank: int, *, inline: bool = False) -> None:
        """Add an input's part to the graph: as a task, or inside each task that reads it."""
        if inline:
            self._inline[name] = array
        else:
            self.places[name] = PartPlace(self._entry("spmd-input", name, rank, same, array))

    def expect(self, port: Port) -> None:
        """Let the parts of an input be what is given when the tasks run, under the keys of their places."""
        self.later.append(port)
        self.places.update((name, PartPlace(self._key("spmd-input", name))) for name in port.parts)

    def keep(self, parts: Sequence[str], keys: Sequence[Key], items: Sequence[int]) -> None:
        """Add an input whose parts are there: each rank's by the part's name, its key and its position there."""
        for rank, (name, *at) in enumerate(zip(parts, keys, items, strict=True)):
            place = PartPlace(*at)
            self.places.setdefault(name, place)
            self._copies[name, rank] = place
            self._holders.setdefault((name, place), rank)

    def share(self, other: RankCall) -> None:
        """Use the inputs of another call of the same graph."""
        self.places.update(other.places)
        self._copies.update(other._copies)
        self._holders.update(other._holders)
        self._inline.update(other._inline)

    def write(self) -> None:
        """Build the tasks of all segments and buckets; every input must have its place."""
        pieces = self.source.pieces
        for number, segment in enumerate(pieces.segments):
            several = len(segment.outputs) > 1
            key = self._segment_key(number)
            for i, name in enumerate(segment.outputs):
                self.places[name] = PartPlace(key, i if several else -1)
        # In the order of buckets, of which one may read the results of others.
        for number, bucket in enumerate(pieces.buckets):
            self._bucket(number, bucket)
        for number, segment in enumerate(pieces.segments):
            self._segment(number, segment)

    def ends(self, holder: Mapping[str, int], packed: Collection[str] = ()) -> dict[str, PartPlace]:
        """Return the place of each output, given the rank that has it: a key of its own, but where it is packed."""
        found: dict[str, PartPlace] = {}
        for name, rank in holder.items():
            value = self._value(name, rank)
            if isinstance(value, np.ndarray):
                found[name] = PartPlace(self._entry("spmd-input", name, rank, same, value))
            elif value.index < 0 or (name in packed and value.key in self.tasks):
                found[name] = value
            else:
                home = self._home(name, value, (rank, UNPLACED))
                found[name] = PartPlace(self._by_itself(name, value, home))
        return found

    def reads(self, names: Sequence[str], home: Home) -> tuple[Picks, list[Any]]:
        """Return how a task of a rank at a site reads values: where each is in its arguments, and these."""
        arguments: list[Any] = []
        at: dict[Key, int] = {}
        picks = []
        for name in names:
            value = self._value(name, home[0])
            if isinstance(value, np.ndarray):
                picks.append((len(arguments), -1))
                arguments.append(value)
                continue
            if value.index >= 0 and not _is_with(there := self._home(name, value, home), home):
                value = PartPlace(self._by_itself(name, value, there))
            if value.key not in at:
                at[value.key] = len(arguments)
                arguments.append(TaskRef(value.key))
            picks.append((at[value.key], value.index))
        return tuple(picks), arguments

    def _value(self, name: str, rank: int) -> Any:
        """Return the place of a value for a rank, or the value of an input that is inside its readers."""
        if name in self._inline:
            return self._inline[name]
        # A weight that is read as it is gets a task of its own.
        if name not in self.places:
            bundle = self.source.bundle((), (name,), ())
            call = run_bundle, self.source.ref, bundle
            self.places[name] = PartPlace(self._entry("spmd-weight", name, rank, *call, **self.extra))
        return self._copies.get((name, rank), self.places[name])

    def _home(self, name: str, place: PartPlace, reader: Home) -> Home:
        """Return where a value is: an input is with its first reader, of the lowest rank that has the same part."""
        return self.source.home.get(name) or (
            self._holders.get((name, place), reader[0]),
            self.reader(name),
        )

    def _by_itself(self, name: str, place: PartPlace, home: Home) -> Key:
        """Return the key of a value of a tuple by itself, which a task takes from it where the tuple is."""
        if name not in self._taken:
            key = self._taken[name] = self._key("spmd-value", name)
            order = self.order.get(place.key, self.first) - self.first
            self._task(key, home, order, getitem, TaskRef(place.key), place.index)
        return self._taken[name]

    # Pieces.

    def _segment(self, number: int, segment: RankSegment) -> None:
        key, home = self._segment_key(number), (segment.rank, segment.site)
        picks, arguments = self.reads(segment.inputs, home)
        bundle = self.source.segment_bundle(number, picks)
        self._task(key, home, segment.before, run_bundle, self.source.ref, bundle, *arguments, **self.extra)
        self.about[key] = tuple(self.source.segments[number])

    def _bucket(self, number: int, bucket: Bucket) -> None:
        name = Name(bucket.kind.lower(), self.token, number)
        terms = []
        for i, (names, rank) in enumerate(zip(bucket.reads, bucket.ranks, strict=True)):
            home = rank, bucket.site
            picks, arguments = self.reads(names, home)
            terms.append(name.key("terms", i))
            self._task(terms[-1], home, number, select_values, picks, *arguments)
        are_read = [not self.source.read.isdisjoint(names) for names in bucket.makes]
        steps, results = exchange(name, bucket, terms, are_read)
        for step in steps:
            home = step.rank, bucket.site
            self._task(step.key, home, number, step.call, *step.constants, *map(TaskRef, step.reads))
            self.about[step.key] = tuple(self.source.buckets[number])
        for key, names in zip(results, bucket.makes, strict=True):
            self.places.update((one, PartPlace(key, i)) for i, one in enumerate(names))

    # Tasks.

    def _segment_key(self, number: int) -> Key:
        # Dask learns durations by the name before the token: forwards and backwards take different times.
        action = self.source.pieces.segments[number].site.action
        return self._key("spmd-segment" if action is None else KIND_NAMES[action[-1]], number)

    def _key(self, what: str, which: int | str) -> Key:
        # Values by their names: how many tasks a call has depends on how its inputs reach it.
        return (f"{what}-{self.token}", which)

    def _entry(
        self, what: str, name: str, rank: int, call: Callable[..., Any], *of: Any, **by_name: Any
    ) -> Key:
        """Build a task that computes nothing, on the rank that reads its value first; return its key."""
        key = self._key(what, name)
        self._task(key, (rank, self.reader(name)), 0, call, *of, **by_name)
        self.entries.add(key)
        return key

    def _task(
        self, key: Key, home: Home, order: int, call: Callable[..., Any], *of: Any, **by_name: Any
    ) -> None:
        self.add(key, home, self.first + order, call, *of, **by_name)


def picked(places: Sequence[PartPlace]) -> tuple[Any, ...]:
    """Return the arguments of `select_values` that give the values of places."""
    at = {read: i for i, read in enumerate(dict.fromkeys(place.key for place in places))}
    return tuple((at[place.key], place.index) for place in places), *map(TaskRef, at)


def grouped(of: Mapping[str, Sequence[tuple[G, PartPlace]]]) -> dict[G, dict[PartPlace, int]]:
    """Return the places of values by group, each with its position in the tuple of the group."""
    groups: dict[G, dict[PartPlace, int]] = {}
    for group, place in chain.from_iterable(of.values()):
        own = groups.setdefault(group, {})
        own.setdefault(place, len(own))
    return groups


def same(array: Any) -> Any:
    """Return an input's part."""
    return array


def _is_with(one: Home, other: Home) -> bool:
    """Return whether two homes are one member: the same rank, on the same workers."""
    return one[0] == other[0] and one[1].is_with(other[1])
