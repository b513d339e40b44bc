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
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.engines.selection import Support, first_engines, route
from dask_ferro.graph.pipeline.action import FORWARD, KIND_NAMES
from dask_ferro.graph.sharding.node_placement import UNPLACED, NodePlacement
from dask_ferro.graph.sharding.parts import Array, Spmd
from dask_ferro.graph.sharding.segments import Bucket, Cut, RankSegment, cut, is_collective
from dask_ferro.lower.annotations import about
from dask_ferro.lower.layer import EMBED_BYTES
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.exchange import Key, Name, exchange
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.lower.worker.models import ModelRef
from dask_ferro.lower.worker.rank_functions import Picks, select_values
from dask_ferro.lower.worker.task import WORTH_THREADS_S, BundleRef, run_bundle

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

    With `exact`, bits do not depend on where the graph is cut.
    """

    model: ir.Model
    ref: ModelRef
    support: Sequence[Support]
    seconds: Sequence[float]
    exact: bool = False
    _bundles: dict[tuple[Any, ...], BundleRef] = field(default_factory=dict)

    @cached_property
    def pieces(self) -> Cut:
        """The graph's segments and buckets."""
        return cut(self.model, seconds=self.seconds)

    @cached_property
    def about(self) -> Mapping[tuple[str, ...], tuple[Any, ...]]:
        """The trace annotation of each piece, by what it makes."""
        nodes = list(self.model.graph)
        makers = {value.name: node for node in filter(is_collective, nodes) for value in node.outputs}
        made = [(s.outputs, map(nodes.__getitem__, s.nodes), s.site) for s in self.pieces.segments]
        made += [(b.makes[0], map(makers.__getitem__, b.makes[0]), b.site) for b in self.pieces.buckets]
        return {names: tuple(about(own)._replace(stage=site.stage)) for names, own, site in made}

    @cached_property
    def home(self) -> Mapping[str, Home]:
        """The rank and the site that make each output of segments and buckets."""
        made = [(s.outputs, (s.rank, s.site)) for s in self.pieces.segments]
        for b in self.pieces.buckets:
            made += [(names, (rank, b.site)) for rank, names in zip(b.ranks, b.makes, strict=True)]
        return {name: home for names, home in made for name in names}

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

    def bundle(
        self,
        outputs: tuple[str, ...],
        nodes: Sequence[int] = (),
        inputs: tuple[str, ...] = (),
        picks: Picks = (),
    ) -> BundleRef:
        """Return the bundle of nodes that finds its inputs at these places; the same object for the same ones."""
        key = inputs, outputs, picks
        if key not in self._bundles:
            long = sum(self.seconds[position] for position in nodes) > WORTH_THREADS_S
            engines = (first_engines if self.exact else route)(self.support, nodes)
            self._bundles[key] = BundleRef(
                inputs,
                outputs,
                engines,
                picks,
                parallel=self.exact or long,
                down=tuple(range(len(outputs))),
                exact=self.exact,
            )
        return self._bundles[key]


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

    def update(self, other: RankTasks, first: int = 0) -> None:
        """Add the tasks of another one, in its order from `first` on."""
        self.tasks |= other.tasks
        self.home |= other.home
        self.order |= {key: first + order for key, order in other.order.items()}
        self.about |= other.about


class RankCall(RankTasks):
    """The tasks of one call.

    Parameters
    ----------
    source : RankSource
    token : str
        The hash of graph and inputs.

    Attributes
    ----------
    below : mapping of str to HighLevelGraph
        The graphs that the tasks read from, by the last layer of each.
    extra : mapping of str to TaskRef
        Keyword arguments of each bundle: the model's content, where workers cannot see its path.
    """

    def __init__(self, source: RankSource, token: str) -> None:
        super().__init__()
        self.source, self.token = source, token
        self.below: dict[str, HighLevelGraph] = {}
        self.extra: dict[str, Any] = {}
        # Tasks that compute nothing: inputs, and weights as they are.
        self.entries: set[Key] = set()
        # The place of each value, and by rank of the copies of an input's part.
        self.places: dict[str, PartPlace] = {}
        self._copies: dict[str, dict[int, PartPlace]] = {}
        # The key of each value of a tuple that has one by itself.
        self._taken: dict[str, Key] = {}
        # Inputs without a task: they are inside the tasks that read them.
        self._inline: dict[str, Array] = {}
        # Inputs that are given when the tasks run, and their rows that are read.
        self._later: list[tuple[Spmd, slice | None]] = []

    def reader(self, name: str) -> NodePlacement:
        """Return the site of the first reader of a value."""
        return self.source.readers.get(name, UNPLACED)

    def give(self, name: str, array: Array, rank: int) -> None:
        """Add an input's part to the graph: inside each task that reads it, or as a task if it is large."""
        if array.nbytes <= EMBED_BYTES:
            self._inline[name] = array
        else:
            self.places[name] = PartPlace(self._entry("spmd-input", name, rank, same, array))

    def expect(self, spmd: Spmd, rows: slice | None) -> None:
        """Let the parts of a graph's inputs be what is given when the tasks run, of these rows."""
        self._later.append((spmd, rows))
        for name in chain.from_iterable(port.parts for port in spmd.inputs):
            self.places[name] = PartPlace(self._key("spmd-input", name))

    def parts(self, arrays: Arrays) -> dict[Key, Array]:
        """Return the parts of expected inputs, by the keys that the tasks have for them."""
        found: dict[Key, Array] = {}
        for spmd, rows in self._later:
            parts = spmd.split({port.name: take_rows(arrays[port.name], rows) for port in spmd.inputs})
            found |= {self.places[name].key: value for name, value in parts.items()}
        return found

    def keep(self, parts: Sequence[str], places: Sequence[PartPlace]) -> None:
        """Add an input whose parts are there: each rank's by the part's name, and its place."""
        for rank, (name, place) in enumerate(zip(parts, places, strict=True)):
            self.places.setdefault(name, place)
            self._copies.setdefault(name, {})[rank] = place

    def share(self, other: RankCall) -> None:
        """Use the inputs of another call of the same graph."""
        self.places.update(other.places)
        self._copies.update(other._copies)
        self._inline.update(other._inline)

    def write(self) -> None:
        """Build the tasks of all segments and buckets; every input must have its place."""
        pieces, keys = self.source.pieces, []
        for number, segment in enumerate(pieces.segments):
            # Dask learns durations by the name before the token: forwards and backwards take different times.
            action = segment.site.action
            keys.append(self._key("spmd-segment" if action is None else KIND_NAMES[action[-1]], number))
            several = len(segment.outputs) > 1
            for i, name in enumerate(segment.outputs):
                self.places[name] = PartPlace(keys[-1], i if several else -1)
        # In the order of buckets, of which one may read the results of others.
        for number, bucket in enumerate(pieces.buckets):
            self._bucket(number, bucket)
        for key, segment in zip(keys, pieces.segments, strict=True):
            self._segment(key, segment)

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
            bundle = self.source.bundle((name,))
            call = run_bundle, self.source.ref, bundle
            self.places[name] = PartPlace(self._entry("spmd-weight", name, rank, *call, **self.extra))
        return self._copies.get(name, {}).get(rank, self.places[name])

    def _home(self, name: str, place: PartPlace, reader: Home) -> Home:
        """Return where a value is: an input is with its first reader, of the lowest rank that has the same part."""
        if name in self.source.home:
            return self.source.home[name]
        ranks = (rank for rank, at in self._copies.get(name, {}).items() if at == place)
        return next(ranks, reader[0]), self.reader(name)

    def _by_itself(self, name: str, place: PartPlace, home: Home) -> Key:
        """Return the key of a value of a tuple by itself, which a task takes from it where the tuple is."""
        if name not in self._taken:
            key = self._taken[name] = self._key("spmd-value", name)
            self.add(key, home, self.order.get(place.key, 0), getitem, TaskRef(place.key), place.index)
        return self._taken[name]

    # Pieces.

    def _segment(self, key: Key, segment: RankSegment) -> None:
        home = segment.rank, segment.site
        picks, arguments = self.reads(segment.inputs, home)
        bundle = self.source.bundle(segment.outputs, segment.nodes, segment.inputs, picks)
        self.add(key, home, segment.before, run_bundle, self.source.ref, bundle, *arguments, **self.extra)
        self.about[key] = self.source.about[segment.outputs]

    def _bucket(self, number: int, bucket: Bucket) -> None:
        name = Name(bucket.kind.lower(), self.token, number)
        terms = []
        for i, (names, rank) in enumerate(zip(bucket.reads, bucket.ranks, strict=True)):
            home = rank, bucket.site
            picks, arguments = self.reads(names, home)
            terms.append(self.add(name.key("terms", i), home, number, select_values, picks, *arguments))
        are_read = [not self.source.read.isdisjoint(names) for names in bucket.makes]
        steps, results = exchange(name, bucket, terms, are_read)
        for step in steps:
            home = step.rank, bucket.site
            self.add(step.key, home, number, step.call, *step.constants, *map(TaskRef, step.reads))
            self.about[step.key] = self.source.about[bucket.makes[0]]
        for key, names in zip(results, bucket.makes, strict=True):
            self.places.update((one, PartPlace(key, i)) for i, one in enumerate(names))

    # Keys.

    def _key(self, what: str, which: int | str) -> Key:
        # Values by their names: how many tasks a call has depends on how its inputs reach it.
        return (f"{what}-{self.token}", which)

    def _entry(
        self, what: str, name: str, rank: int, call: Callable[..., Any], *of: Any, **by_name: Any
    ) -> Key:
        """Add a task that computes nothing, on the rank that reads its value first; return its key."""
        key = self.add(self._key(what, name), (rank, self.reader(name)), 0, call, *of, **by_name)
        self.entries.add(key)
        return key


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


def take_rows(array: Any, rows: slice | None) -> Any:
    """Return rows of an array; all of it if they are None."""
    return array if rows is None else array[rows]


def _is_with(one: Home, other: Home) -> bool:
    """Return whether two homes are one member: the same rank, on the same workers."""
    return one[0] == other[0] and one[1].is_with(other[1])
