"""Write one call of a sharded graph as tasks, each with its rank and its order.

    inputs' parts --> segments --> collectives --> segments --> outputs' parts

The result of a segment with several values is a tuple; a bucket sends a tuple for each rank.  A task reads values
from the tuples of its own rank.  A value from another rank's tuple is picked there by a task of its own, because a
tuple would be sent whole.  Workers and clients are not known here: a rank is a number, and a site is its placement in
the plan.  Of ready tasks of a rank, those run first that the first bucket waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import getitem
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.engines.selection import Support, first_engines, route
from dask_ferro.graph.pipeline.action import KIND_NAMES
from dask_ferro.graph.sharding.node_placement import NO_PLACE, NodePlacement
from dask_ferro.graph.sharding.parts import Array, Port, Spmd, holders_of
from dask_ferro.graph.sharding.segments import Bucket, GraphCut, RankSegment, cut_segments, is_collective
from dask_ferro.lower.annotations import task_annotation
from dask_ferro.lower.layer import EMBED_BYTES
from dask_ferro.lower.ranks.exchange import Key, Name, exchange
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.lower.worker.rank_functions import Picks, select_values
from dask_ferro.lower.worker.sessions import ModelRef
from dask_ferro.lower.worker.task import WORTH_THREADS_S, BundleRef, run_bundle

# A rank, and its placement.
Home: TypeAlias = tuple[int, NodePlacement]


class PartPlace(NamedTuple):
    """The place of a value: a key, the position in the tuple that it holds (-1: it holds the value), and its home."""

    key: Key
    index: int  # type: ignore[assignment]  # tuple has a method of that name
    home: Home


# The place of each rank's part, by output.
Places: TypeAlias = Mapping[str, Sequence[PartPlace]]


@dataclass(frozen=True, eq=False)
class RankSource:
    """The graph that a call computes: its model, the model's reference, each node's engines and seconds.

    If `exact` is set, bits do not depend on the places at which the graph is cut.
    """

    model: ir.Model
    ref: ModelRef
    support: Sequence[Support]
    seconds: Sequence[float]
    exact: bool = False
    _bundles: dict[tuple[Any, ...], BundleRef] = field(default_factory=dict)

    @cached_property
    def pieces(self) -> GraphCut:
        """The graph's segments and buckets."""
        return cut_segments(self.model, seconds=self.seconds)

    @cached_property
    def about(self) -> Mapping[tuple[str, ...], tuple[Any, ...]]:
        """The trace annotation of each piece, by its results."""
        nodes = list(self.model.graph)
        makers = {value.name: node for node in filter(is_collective, nodes) for value in node.outputs}
        pieces = [(s.outputs, map(nodes.__getitem__, s.nodes), s.site) for s in self.pieces.segments]
        pieces += [(b.makes[0], map(makers.__getitem__, b.makes[0]), b.site) for b in self.pieces.buckets]
        return {names: tuple(task_annotation(own)._replace(stage=site.stage)) for names, own, site in pieces}

    @cached_property
    def readers(self) -> Mapping[str, NodePlacement]:
        """The site of the first reader of each value."""
        reads = [(name, s.site) for s in self.pieces.segments for name in s.inputs]
        reads += [(name, b.site) for b in self.pieces.buckets for name in chain.from_iterable(b.reads)]
        return dict(reversed(reads))

    @cached_property
    def read(self) -> frozenset[str]:
        """The values with readers, outputs of the graph included."""
        return frozenset(self.readers).union(value.name or "" for value in self.model.graph.outputs)

    def bundle(
        self,
        outputs: tuple[str, ...],
        nodes: Sequence[int] = (),
        inputs: tuple[str, ...] = (),
        picks: Picks = (),
    ) -> BundleRef:
        """Return the bundle of nodes that reads its inputs at these places; the same object for the same places."""
        key = inputs, outputs, picks
        if key not in self._bundles:
            is_long = sum(self.seconds[position] for position in nodes) > WORTH_THREADS_S
            engines = (first_engines if self.exact else route)(self.support, nodes)
            self._bundles[key] = BundleRef(
                inputs,
                outputs,
                engines,
                picks,
                parallel=self.exact or is_long,
                down=tuple(range(len(outputs))),
                exact=self.exact,
            )
        return self._bundles[key]


class RankTasks:
    """Tasks with their homes, their orders, and their annotations for traces, by key, and their inputs.

    `below` has the graphs that they read from, by the last layer of each, and `later` the inputs that each repeat of
    them has: the keys of parts, the graph that they are parts for, and the rows that are read.
    """

    def __init__(self) -> None:
        self.tasks: dict[Key, Task] = {}
        self.home: dict[Key, Home] = {}
        self.order: dict[Key, int] = {}
        self.about: dict[Key, tuple[Any, ...]] = {}
        self.below: dict[str, HighLevelGraph] = {}
        self.later: list[tuple[Mapping[str, Key], Spmd, slice | None]] = []

    def add(
        self, key: Key, home: Home, order: int, call: Callable[..., Any], *values: Any, **by_name: Any
    ) -> PartPlace:
        """Add a task; return the place of its result."""
        self.tasks[key] = Task(key, call, *values, **by_name)
        self.home[key], self.order[key] = home, order
        return PartPlace(key, -1, home)

    def update(self, other: RankTasks, first: int = 0) -> None:
        """Add the tasks of another graph; the order of its first task is `first`."""
        self.tasks |= other.tasks
        self.home |= other.home
        self.order |= {key: first + order for key, order in other.order.items()}
        self.about |= other.about
        self.below |= other.below
        self.later += other.later

    def parts(self, arrays: Mapping[str, Array]) -> dict[Key, Array]:
        """Return the parts of the inputs of one repeat, by the keys that the tasks have for them."""
        parts: dict[Key, Array] = {}
        for keys, spmd, rows in self.later:
            own = spmd.split({port.name: take_rows(arrays[port.name], rows) for port in spmd.inputs})
            parts |= {keys[name]: part for name, part in own.items()}
        return parts

    def pack(self, name: str, places: Places, apart: Collection[str] = (), times: int = 1) -> list[Places]:
        """Add a task for each home, whose tuple has the values there; return their places in each repeat's part of it.

        Values of outputs in `apart` are in tuples of their own.
        """
        groups: dict[tuple[bool, Home], dict[PartPlace, int]] = {}
        at: dict[str, list[tuple[tuple[bool, Home], int]]] = {}
        for output, own in places.items():
            at[output] = []
            for place in own:
                rank, site = place.home
                # By rank and site, whichever action computes them.
                group = output in apart, (rank, site._replace(action=None))
                members = groups.setdefault(group, {})
                at[output].append((group, members.setdefault(place, len(members))))
        keys: dict[tuple[bool, Home], Key] = {}
        for number, (group, members) in enumerate(groups.items()):
            reads = {key: i for i, key in enumerate(dict.fromkeys(place.key for place in members))}
            picks = tuple((reads[place.key], place.index) for place in members)
            refs = map(TaskRef, reads)
            keys[group] = self.add((name, number), group[1], 0, select_values, picks, *refs).key
        return [
            {
                output: [
                    PartPlace(keys[group], number * len(groups[group]) + index, group[1])
                    for group, index in own
                ]
                for output, own in at.items()
            }
            for number in range(times)
        ]


class RankCall(RankTasks):
    """The tasks of one call, with a token in their keys.

    `extra` has keyword arguments of each bundle: the model's content, if workers cannot see its path.
    """

    def __init__(self, source: RankSource, token: str) -> None:
        super().__init__()
        self.source, self.token = source, token
        self.extra: dict[str, Any] = {}
        # Tasks that compute nothing: inputs, and weights as they are.
        self.entries: set[Key] = set()
        # The place of each value by the ranks that have a copy, or an input that is inside the tasks that read it.
        self.values: dict[str, dict[int, PartPlace] | Array] = {}

    def give(self, name: str, array: Array, rank: int) -> None:
        """Add an input's part to the graph: inside each task that reads it, or as a task if it is large."""
        is_small = array.nbytes <= EMBED_BYTES
        self.values[name] = (
            array if is_small else {rank: self._entry("spmd-input", name, rank, identity, array)}
        )

    def expect(self, spmd: Spmd, rows: slice | None) -> None:
        """Let the parts of a graph's inputs be the inputs of each repeat, with these rows."""
        parts = holders_of(spmd.inputs)
        keys = {name: self._key("spmd-input", name) for name in parts}
        self.values |= {name: {rank: self.at_reader(keys[name], name, rank)} for name, rank in parts.items()}
        self.later.append((keys, spmd, rows))

    def keep(self, parts: Sequence[str], places: Sequence[PartPlace]) -> None:
        """Add an input with existing parts: the name of each rank's part, and its place."""
        # A part that ranks share is with the lowest of them.
        holders: dict[tuple[Key, int], int] = {}
        copies: dict[str, dict[int, PartPlace]] = {}
        for rank, (name, place) in enumerate(zip(parts, places, strict=True)):
            holder = holders.setdefault((place.key, place.index), rank)
            home = self.at_reader(place.key, name, holder).home
            copies.setdefault(name, {})[rank] = place._replace(home=home)
        self.values |= copies

    def at_reader(self, key: Key, name: str, rank: int) -> PartPlace:
        """Return the place of an input with a key of its own, at its first reader."""
        return PartPlace(key, -1, (rank, self.source.readers.get(name, NO_PLACE)))

    def write(self) -> None:
        """Build the tasks of all segments and buckets; every input must have its place."""
        pieces, keys = self.source.pieces, []
        for number, segment in enumerate(pieces.segments):
            # Dask learns durations by the name before the token: forwards and backwards take different times.
            action = segment.site.action
            keys.append(self._key("spmd-segment" if action is None else KIND_NAMES[action[-1]], number))
            is_tuple = len(segment.outputs) > 1
            for i, name in enumerate(segment.outputs):
                place = PartPlace(keys[-1], i if is_tuple else -1, (segment.rank, segment.site))
                self.values[name] = {segment.rank: place}
        # In the order of buckets, of which one may read the results of others.
        for number, bucket in enumerate(pieces.buckets):
            self._bucket(number, bucket)
        for key, segment in zip(keys, pieces.segments, strict=True):
            self._segment(key, segment)

    def ends(self, ports: Sequence[Port], packed: Collection[str] = ()) -> dict[str, list[PartPlace]]:
        """Return the places of outputs; a part has a key of its own unless it is packed."""
        ends: dict[str, PartPlace] = {}
        for name, rank in holders_of(ports).items():
            value = self._value(name, rank)
            if isinstance(value, np.ndarray):
                value = self._entry("spmd-input", name, rank, identity, value)
            elif value.index >= 0 and (name not in packed or value.key not in self.tasks):
                value = self._alone(name, value)
            ends[name] = value
        # Ranks with the same part of an output share its key.
        return {port.name: [ends[name] for name in port.parts] for port in ports}

    def reads(self, names: Sequence[str], home: Home) -> tuple[Picks, list[Any]]:
        """Return how a task at a home reads values: the place of each in its arguments, and the arguments."""
        arguments: list[Any] = []
        at: dict[Key, int] = {}
        picks = []
        for name in names:
            value = self._value(name, home[0])
            if isinstance(value, np.ndarray):
                picks.append((len(arguments), -1))
                arguments.append(value)
                continue
            if value.index >= 0 and not _is_with(value.home, home):
                value = self._alone(name, value)
            if value.key not in at:
                at[value.key] = len(arguments)
                arguments.append(TaskRef(value.key))
            picks.append((at[value.key], value.index))
        return tuple(picks), arguments

    def _value(self, name: str, rank: int) -> Any:
        """Return a rank's copy of a value, else the first one, or an input that is inside its readers."""
        if name not in self.values:
            # A weight that is read directly.
            call = run_bundle, self.source.ref, self.source.bundle((name,))
            self.values[name] = {rank: self._entry("spmd-weight", name, rank, *call, **self.extra)}
        value = self.values[name]
        return value if isinstance(value, np.ndarray) else value.get(rank) or next(iter(value.values()))

    def _alone(self, name: str, place: PartPlace) -> PartPlace:
        """Return the place of a single value, which a task picks from its tuple at the tuple's home."""
        key, order = self._key("spmd-value", name), self.order.get(place.key, 0)
        return self.add(key, place.home, order, getitem, TaskRef(place.key), place.index)

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
            terms.append(self.add(name.key("terms", i), home, number, select_values, picks, *arguments).key)
        are_read = [not self.source.read.isdisjoint(names) for names in bucket.makes]
        steps, results = exchange(name, bucket, terms, are_read)
        for step in steps:
            home = step.rank, bucket.site
            self.add(step.key, home, number, step.call, *step.constants, *map(TaskRef, step.reads))
            self.about[step.key] = self.source.about[bucket.makes[0]]
        for key, rank, names in zip(results, bucket.ranks, bucket.makes, strict=True):
            home = rank, bucket.site
            self.values |= {value: {rank: PartPlace(key, i, home)} for i, value in enumerate(names)}

    # Keys.

    def _key(self, what: str, which: int | str) -> Key:
        # Values by their names: the number of tasks of a call depends on the form of its inputs.
        return (f"{what}-{self.token}", which)

    def _entry(
        self, what: str, name: str, rank: int, call: Callable[..., Any], *values: Any, **by_name: Any
    ) -> PartPlace:
        """Add a task that computes nothing, at the home of its value's first reader; return the place of the value."""
        key, _, home = self.at_reader(self._key(what, name), name, rank)
        self.entries.add(key)
        return self.add(key, home, 0, call, *values, **by_name)


def identity(array: Any) -> Any:
    """Return an input's part."""
    return array


def take_rows(array: Any, rows: slice | None) -> Any:
    """Return rows of an array; all of it if they are None."""
    return array if rows is None else array[rows]


def _is_with(one: Home, other: Home) -> bool:
    """Return whether two homes are one member: the same rank, on the same workers."""
    return one[0] == other[0] and one[1].is_with(other[1])
