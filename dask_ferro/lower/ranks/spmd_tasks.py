"""One call of a sharded graph as tasks, each with its rank and its order.

    inputs' parts --> segments --> values --> collectives --> segments --> outputs' parts

Each value has a key of its own: a segment, or the result of a bucket, is a tuple from which its values are taken.  What
a bucket sends is one tuple for each rank.  Workers and clients are not known here: a rank is a number, and a site its
placement by the plan.  Of ready tasks of a rank, those run first that the first bucket waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import getitem
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.engines.selection import Support, first_engines, route
from dask_ferro.graph.pipeline.action import FORWARD, KIND_NAMES
from dask_ferro.graph.sharding.node_placement import UNPLACED, NodePlacement
from dask_ferro.graph.sharding.segments import Bucket, Cut, RankSegment, cut, is_collective
from dask_ferro.lower.annotations import about
from dask_ferro.lower.ranks.exchange import Key, Name, exchange
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.lower.worker.models import ModelRef
from dask_ferro.lower.worker.rank_functions import packed
from dask_ferro.lower.worker.task import WORTH_THREADS_S, BundleRef, run_bundle
from dask_ferro.trace import About

# A rank, and where it is.
Home: TypeAlias = tuple[int, NodePlacement]


@dataclass(frozen=True, eq=False)
class RankSource:
    """The graph that a call computes: its model, the model's reference and pieces, each node's engines and seconds.

    Attributes
    ----------
    segments, buckets : sequence of About
        The trace annotation of each piece.
    made : mapping of str to NodePlacement
        The site that makes each output of segments and buckets.
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
    made: dict[str, NodePlacement] = {}
    for segment in pieces.segments:
        made |= dict.fromkeys(segment.outputs, segment.site)
    for bucket in pieces.buckets:
        made |= dict.fromkeys(chain.from_iterable(bucket.makes), bucket.site)
    return RankSource(model, ref, pieces, support, seconds, segments, buckets, made, exact)


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
        The order of the first tasks.
    """

    def __init__(
        self, source: RankSource, token: str, extra: Mapping[str, Any] | None = None, first: int = 0
    ) -> None:
        self.source, self.token, self.extra, self.first = source, token, dict(extra or {}), first
        self.tasks: dict[Key, Task] = {}
        self.home: dict[Key, Home] = {}
        self.order: dict[Key, int] = {}
        self.about: dict[Key, tuple[Any, ...]] = {}
        # Tasks that compute nothing: inputs, and weights as they are.
        self.entries: set[Key] = set()
        # The key of each value, and of each rank's own copy of an input that several have.
        self.keys: dict[str, Key] = {}
        self._copies: dict[tuple[str, int], Key] = {}
        # Inputs without a task: they are inside the tasks that read them.
        self._inline: dict[str, np.ndarray] = {}

    def reader(self, name: str) -> NodePlacement:
        """Return the site of the first reader of a value."""
        return self.source.readers.get(name, UNPLACED)

    def give(self, name: str, array: np.ndarray, rank: int, *, inline: bool = False) -> None:
        """Add an input's part to the graph: as a task, or inside each task that reads it."""
        if inline:
            self._inline[name] = array
        else:
            self.keys[name] = self._entry("spmd-input", name, rank, same, array)

    def keep(self, parts: Sequence[str], keys: Sequence[Key], items: Sequence[int]) -> None:
        """Add an input whose parts are there: each rank's by the part's name, its key and its position there."""
        for rank, (name, key, item) in enumerate(zip(parts, keys, items, strict=True)):
            if item >= 0:
                key = self._entry("spmd-part", (name, rank), rank, getitem, TaskRef(key), item)
            self.keys.setdefault(name, key)
            self._copies[name, rank] = key

    def share(self, other: RankCall) -> None:
        """Use the inputs of another call of the same graph."""
        self.keys.update(other.keys)
        self._copies.update(other._copies)
        self._inline.update(other._inline)

    def write(self) -> None:
        """Build the tasks of all segments and buckets; every input must have its key."""
        pieces = self.source.pieces
        for number, segment in enumerate(pieces.segments):
            for name in segment.outputs:
                self.keys[name] = self._output_key(number, name)
        # In the order of buckets, of which one may read the results of others.
        for number, bucket in enumerate(pieces.buckets):
            self._bucket(number, bucket)
        for number, segment in enumerate(pieces.segments):
            self._segment(number, segment)

    def ends(self, holder: Mapping[str, int]) -> dict[str, Key]:
        """Return the key of each output, given the rank that has it."""
        found: dict[str, Key] = {}
        for name, rank in holder.items():
            value = self.value(name, rank)
            if isinstance(value, np.ndarray):
                value = self._entry("spmd-input", name, rank, same, value)
            found[name] = value
        return found

    def value(self, name: str, rank: int) -> Any:
        """Return the key of a value for a rank, or the value of an input that is inside its readers."""
        if name in self._inline:
            return self._inline[name]
        # A weight that is read as it is gets a task of its own.
        if name not in self.keys:
            bundle = self.source.bundle((), (name,), ())
            call = run_bundle, self.source.ref, bundle
            self.keys[name] = self._entry("spmd-weight", name, rank, *call, **self.extra)
        return self._copies.get((name, rank), self.keys[name])

    def arguments(self, names: Sequence[str], rank: int) -> list[Any]:
        """Return values as arguments of a task of a rank."""
        values = (self.value(name, rank) for name in names)
        return [value if isinstance(value, np.ndarray) else TaskRef(value) for value in values]

    # Pieces.

    def _segment(self, number: int, segment: RankSegment) -> None:
        key, home = self._segment_key(number), (segment.rank, segment.site)
        call = run_bundle, self.source.ref, self.source.bundles[number]
        self._task(
            key, home, segment.before, *call, *self.arguments(segment.inputs, segment.rank), **self.extra
        )
        self.about[key] = tuple(self.source.segments[number])
        if len(segment.outputs) > 1:
            self._items(key, home, segment.before, segment.outputs)

    def _bucket(self, number: int, bucket: Bucket) -> None:
        name = Name(bucket.kind.lower(), self.token, number)
        terms = []
        for i, (names, rank) in enumerate(zip(bucket.reads, bucket.ranks, strict=True)):
            terms.append(name.key("terms", i))
            self._task(terms[-1], (rank, bucket.site), number, packed, *self.arguments(names, rank))
        wanted = [not self.source.read.isdisjoint(names) for names in bucket.makes]
        steps, results = exchange(name, bucket, terms, wanted)
        for step in steps:
            home = step.rank, bucket.site
            self._task(step.key, home, number, step.call, *step.constants, *map(TaskRef, step.reads))
            self.about[step.key] = tuple(self.source.buckets[number])
        for key, rank, names, is_read in zip(results, bucket.ranks, bucket.makes, wanted, strict=True):
            if is_read:
                self._items(key, (rank, bucket.site), number, names)

    def _items(self, key: Key, home: Home, order: int, names: Sequence[str]) -> None:
        """Build the tasks that take values from a tuple."""
        for i, name in enumerate(names):
            if name in self.source.read:
                self.keys[name] = self._key("spmd-value", name)
                self._task(self.keys[name], home, order, getitem, TaskRef(key), i)

    # Tasks.

    def _segment_key(self, number: int) -> Key:
        # Dask learns durations by the name before the token: forwards and backwards take different times.
        action = self.source.pieces.segments[number].site.action
        return self._key("spmd-segment" if action is None else KIND_NAMES[action[-1]], number)

    def _output_key(self, number: int, name: str) -> Key:
        several = len(self.source.pieces.segments[number].outputs) > 1
        return self._key("spmd-value", name) if several else self._segment_key(number)

    def _key(self, what: str, which: Any) -> Key:
        # Values by their names: how many tasks a call has depends on how its inputs reach it.
        return (f"{what}-{self.token}", which)

    def _entry(
        self, what: str, which: Any, rank: int, call: Callable[..., Any], *of: Any, **by_name: Any
    ) -> Key:
        """Build a task that computes nothing, on the rank that reads its value first; return its key."""
        key, name = self._key(what, which), which[0] if isinstance(which, tuple) else which
        self._task(key, (rank, self.reader(name)), 0, call, *of, **by_name)
        self.entries.add(key)
        return key

    def _task(
        self, key: Key, home: Home, order: int, call: Callable[..., Any], *of: Any, **by_name: Any
    ) -> None:
        self.tasks[key] = Task(key, call, *of, **by_name)
        self.home[key], self.order[key] = home, self.first + order


def same(array: Any) -> Any:
    """Return an input's part."""
    return array
