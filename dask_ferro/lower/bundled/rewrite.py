"""A Dask graph with bundles in place of tasks.

    a bundle of            becomes
    one task               the task itself; a bundle of one, if it reads from the tuple of another bundle
    one result             a task of the result's key, if it is wanted; else of a key of its own
    several results        a task of a key of its own, whose result is a tuple

A bundle that reads some results of another one is sent the whole tuple, if that is little more; else, as for wanted
keys, a task of the result's key picks it.  So wanted keys, and keys that other tasks read, exist as they would without
bundles.

A key that the scheduler has already keeps the task that it has there, with all tasks behind it: the scheduler takes two
tasks of one key for a mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple
from uuid import uuid4

from dask.typing import Key

from dask_ferro.graph.bundling.partition import MORE
from dask_ferro.lower.bundled.choice import (
    Annotations,
    BundleChoice,
    CostFacts,
    Existing,
    Graph,
    add_behind,
    annotation,
    choose,
)
from dask_ferro.lower.bundled.costs import names_of
from dask_ferro.lower.bundled.run import Read, TaskProgram, is_ours, pick, run_tasks
from dask_ferro.lower.portable import PortableTask
from dask_ferro.lower.upstream import GraphNode, TaskRef

# Words in the name of a bundle, and names in one graph: each is a prefix, over which Dask's scheduler iterates.
_WORDS, _NAMES = 3, 16
# The annotation of projected seconds, which placement and stealing read.
_FERRO = "ferro"
_PRIORITY = "priority"
# By how much a task that picks a result comes before others of its priority; users' priorities are integers.
SOONER = 0.5
_OF_ONE_TASK = ("seconds", "flops", "bytes")


class Rewritten(NamedTuple):
    """A graph and the annotations of its tasks."""

    graph: dict[Key, GraphNode]
    annotations: dict[str, dict[Key, Any]]


class _Place(NamedTuple):
    """Where the result of a task is: the key of a bundle, and the place in its tuple; -1: it is all of it."""

    key: Key
    at: int


def rewritten(
    graph: Graph,
    wanted: Collection[Key],
    annotations: Annotations,
    facts: CostFacts,
    common: Mapping[str, object] | None = None,
) -> Rewritten:
    """Return a graph in which cheap tasks run several at a time.

    Parameters
    ----------
    graph : mapping of key to task
    wanted : collection of keys
        Their results are asked for by somebody.
    annotations : mapping
        By annotation, the values by key.
    facts : CostFacts
    common : mapping, optional
        The annotations of tasks without their own; a function is called with the key.
    """
    choice, needed = choose(graph, wanted, annotations, facts, common)
    made = _BundleWriter(graph, choice, frozenset(wanted), annotations, common or {}).written()
    made.graph.update(needed.had)
    return made


def reused(graph: Graph, wanted: Iterable[Key], existing: Existing) -> dict[Key, GraphNode] | None:
    """Return a graph in which keys that bundles compute keep these; None: there are none."""
    ours: dict[Key, GraphNode] = {}
    seen = set(wanted)
    stack = list(seen)
    while stack:
        key = stack.pop()
        spec = existing(key)
        if spec is not None and (is_ours(spec) or any(is_ours(existing(dep)) for dep in spec.dependencies)):
            add_behind(key, spec, graph, existing, ours)
            continue
        fresh = [dep for dep in (graph[key].dependencies if key in graph else ()) if dep not in seen]
        seen.update(fresh)
        stack += fresh
    if not ours:
        return None
    return {key: task for key, task in graph.items() if key in seen} | ours


@dataclass
class _BundleWriter:
    """The tasks of a graph's bundles, being written."""

    graph: Graph
    choice: BundleChoice
    wanted: frozenset[Key]
    annotations: Annotations
    common: Mapping[str, object]
    made: Rewritten = field(default_factory=lambda: Rewritten({}, {}))

    def __post_init__(self) -> None:
        order = self.choice.order
        self.members = [list(map(order.__getitem__, bundle)) for bundle in self.choice.bundles]
        self.bundle_of: dict[Key, int] = {}
        for b, keys in enumerate(self.members):
            self.bundle_of.update(dict.fromkeys(keys, b))
        self.costs = dict(zip(order, self.choice.costs, strict=True))
        self.outputs = self._outputs()
        self._names: dict[str, int] = {}
        self._tokens: dict[str, str] = {}
        self.place: dict[Key, _Place] = {}
        for keys, outputs in zip(self.members, self.outputs, strict=True):
            self.place.update(self._places(keys, outputs))
        self.picked: dict[Key, _Place] = {}

    def _outputs(self) -> list[list[Key]]:
        """Return, for each bundle, the results that other bundles read, or somebody asks for."""
        read = set(self.wanted)
        for b, keys in enumerate(self.members):
            for key in keys:
                read.update(dep for dep in self.graph[key].dependencies if self.bundle_of.get(dep, b) != b)
        return [list(filter(read.__contains__, keys)) for keys in self.members]

    def _places(self, keys: list[Key], outputs: list[Key]) -> list[tuple[Key, _Place]]:
        if len(keys) == 1:
            return [(keys[0], _Place(keys[0], -1))]
        if len(outputs) == 1:
            name = outputs[0] if outputs[0] in self.wanted else self._own_key(keys)
            return [(outputs[0], _Place(name, -1))]
        name = self._own_key(keys)
        return [(key, _Place(name, i)) for i, key in enumerate(outputs)]

    def _own_key(self, keys: list[Key]) -> tuple[str, int]:
        """Return a key whose prefix tells the most frequent prefixes of a bundle's tasks."""
        counts = Counter(names_of(key)[0] for key in keys)
        words = sorted(counts, key=lambda word: (-counts[word], word))[:_WORDS]
        label = "bundle:" + "+".join(sorted(words))
        if label not in self._names and len(self._names) >= _NAMES:
            label = "bundle:mixed"
        number = self._names[label] = self._names.get(label, -1) + 1
        # Tasks of one group are of one span, which is an annotation.
        notes = repr([(name, by[keys[0]]) for name, by in self.annotations.items() if keys[0] in by])
        return f"{label}-{self._tokens.setdefault(notes, uuid4().hex)}", number

    def written(self) -> Rewritten:
        """Return the graph."""
        for b, keys in enumerate(self.members):
            if len(keys) == 1 and not self._reads_a_tuple(self.graph[keys[0]]):
                self._write(keys[0], self._single(self.graph[keys[0]]), keys)
            else:
                self._write(self.place[self.outputs[b][0]].key, self._bundle(b), keys)
        for key in self.wanted:
            if self._place(key).at >= 0:
                self.picked[key] = self._place(key)
        for key, place in self.picked.items():
            self._write(key, PortableTask(key, pick, TaskRef(place.key), place.at), [key], is_quick=True)
        return self.made

    def _write(self, key: Key, task: GraphNode, members: list[Key], is_quick: bool = False) -> None:
        self.made.graph[key] = task
        for name, values in self.annotations.items():
            if members[0] in values:
                self.made.annotations.setdefault(name, {})[key] = values[members[0]]
        if len(members) > 1 or is_quick:
            costs = (self.costs[member] for member in members)
            seconds = 0.0 if is_quick else sum(cost.seconds for cost in costs if cost is not None)
            told = annotation(_FERRO, key, {}, self.made.annotations, self.common)
            if isinstance(told, Mapping):
                # The user's own estimates are of one task.
                kept = {name: value for name, value in told.items() if name not in _OF_ONE_TASK}
                self.made.annotations.setdefault(_FERRO, {})[key] = {**kept, "seconds": seconds}
        if is_quick:
            # At once: until then, a bundle's tuple keeps all results.
            before = annotation(_PRIORITY, key, 0, self.made.annotations, self.common)
            if isinstance(before, Real):
                self.made.annotations.setdefault(_PRIORITY, {})[key] = float(before) + SOONER

    def _reads_a_tuple(self, task: GraphNode) -> bool:
        """Return whether a task that is by itself reads from tuples, as a bundle of one task can."""
        if task.is_coro or task.block_fusion:
            return False
        return any(self._place(key).at >= 0 for key in task.dependencies)

    def _place(self, key: Key) -> _Place:
        return self.place.get(key, _Place(key, -1))

    def _single(self, task: GraphNode) -> GraphNode:
        """Return a task that is by itself, with the keys under which its inputs are found."""
        renamed: dict[Key, Key | GraphNode] = {}
        for dep in task.dependencies:
            place = self._place(dep)
            if place.at >= 0:
                self.picked[dep] = place
            elif place.key != dep:
                renamed[dep] = place.key
        return task.substitute(renamed) if renamed else task

    def _bundle(self, b: int) -> GraphNode:
        keys = self.members[b]
        tasks = tuple(self.graph[key] for key in keys)
        read = dict.fromkeys(chain.from_iterable(task.dependencies for task in tasks))
        reads, arguments = self._reads(key for key in read if self.bundle_of.get(key) != b)
        program = TaskProgram(tasks, tuple(reads), tuple(self.outputs[b]), tuple(keys))
        produces = any(task.data_producer for task in tasks)
        name = self.place[self.outputs[b][0]].key
        return PortableTask(name, run_tasks, program, *map(TaskRef, arguments), _data_producer=produces)

    def _reads(self, inputs: Iterable[Key]) -> tuple[list[Read], list[Key]]:
        """Return where a bundle finds each input, and the keys of its arguments."""
        of: dict[Key, list[Key]] = {}
        for key in inputs:
            of.setdefault(self._place(key).key, []).append(key)
        reads: list[Read] = []
        arguments: list[Key] = []
        for name, keys in of.items():
            if self._place(keys[0]).at < 0 or self._is_read_whole(keys):
                reads += [Read(len(arguments), self._place(key).at, key) for key in keys]
                arguments.append(name)
            else:
                for key in keys:
                    self.picked[key] = self._place(key)
                    reads.append(Read(len(arguments), -1, key))
                    arguments.append(key)
        return reads, arguments

    def _is_read_whole(self, keys: list[Key]) -> bool:
        """Return whether a bundle that reads some results of another is sent all of them."""
        outputs = self.outputs[self.bundle_of[keys[0]]]
        read = frozenset(keys)
        costs = (self.costs[key] for key in outputs if key not in read)
        return sum(cost.nbytes for cost in costs if cost is not None) <= MORE * len(keys)
