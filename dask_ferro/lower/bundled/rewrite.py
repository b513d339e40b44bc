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
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple
from uuid import uuid4

from dask.typing import Key

from dask_ferro.flow.costs import names_of
from dask_ferro.flow.member import Read, is_ours, pick, run_share
from dask_ferro.flow.run import MEMBER, InnerTask, Share
from dask_ferro.graph.bundling.partition import MORE
from dask_ferro.lower.bundled.choice import (
    Annotations,
    BundleChoice,
    CostFacts,
    Existing,
    Graph,
    Held,
    add_behind,
    annotation,
    choose,
)
from dask_ferro.lower.portable import PortableTask
from dask_ferro.lower.upstream import GraphNode, TaskRef
from dask_ferro.trace import ABOUT

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


def reused(
    graph: Graph, wanted: Iterable[Key], existing: Existing, held: Held
) -> dict[Key, GraphNode] | None:
    """Return a graph in which keys that bundles compute keep these; None: there are none."""
    ours: dict[Key, GraphNode] = {}
    # Those of which the scheduler has the result alone.
    results: set[Key] = set()
    seen = set(wanted)
    stack = list(seen)
    while stack:
        key = stack.pop()
        spec = existing(key)
        if spec is not None and (is_ours(spec) or any(is_ours(existing(dep)) for dep in spec.dependencies)):
            results |= add_behind(key, spec, graph, existing, held, ours)
            continue
        fresh = [dep for dep in (graph[key].dependencies if key in graph else ()) if dep not in seen]
        seen.update(fresh)
        stack += fresh
    if not ours and not results:
        return None
    return {key: task for key, task in graph.items() if key in seen and key not in results} | ours


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
        flow = self.choice.flow
        # The number of the flow, which is written like a bundle of several tasks of Dask's.
        self.flow = len(self.members) if flow is not None else -1
        if flow is not None:
            self.members.append(list(map(order.__getitem__, flow.tasks)))
        self.bundle_of: dict[Key, int] = {}
        for b, keys in enumerate(self.members):
            self.bundle_of.update(dict.fromkeys(keys, b))
        self.costs = dict(zip(order, self.choice.costs, strict=True))
        self.of_ranks = self.annotations.get(MEMBER, {})
        self.outputs = self._outputs()
        self._names: dict[str, int] = {}
        self._tokens: dict[str, str] = {}
        self.place: dict[Key, _Place] = {}
        for b, (keys, outputs) in enumerate(zip(self.members, self.outputs, strict=True)):
            self.place.update(self._member_places(outputs) if b == self.flow else self._places(keys, outputs))
        self.picked: dict[Key, _Place] = {}

    def _outputs(self) -> list[list[Key]]:
        """Return, for each bundle, the results that other bundles read, or somebody asks for."""
        read = set(self.wanted)
        for b, keys in enumerate(self.members):
            for key in keys:
                read.update(dep for dep in self.graph[key].dependencies if self.bundle_of.get(dep, b) != b)
        return [list(filter(read.__contains__, keys)) for keys in self.members]

    def _member_places(self, outputs: list[Key]) -> Iterator[tuple[Key, _Place]]:
        """Yield where the results of the flow are: in the tuples of its members."""
        flow, keys = self.choice.flow, self.members[self.flow]
        assert flow is not None
        self.owner = dict(zip(keys, flow.members, strict=True))
        self.flow_key = f"flow:{self._own_key(keys)[0].removeprefix('bundle:')}"
        of_member: dict[int, list[Key]] = {member: [] for member in sorted(set(flow.members))}
        for key in outputs:
            of_member[self.owner[key]].append(key)
        # Members are numbered without gaps, whatever the plan left without a task.
        for i, own in enumerate(of_member.values()):
            yield from ((key, _Place((self.flow_key, i), at)) for at, key in enumerate(own))
        self.member_outputs = list(of_member.values())
        # Members without results, which nobody would need: those that pick a result read their empty tuples.
        self.silent = [(self.flow_key, i) for i, own in enumerate(self.member_outputs) if not own]
        number = {member: i for i, member in enumerate(of_member)}
        self.owner = {key: number[member] for key, member in self.owner.items()}

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
            if b == self.flow:
                self._write_flow()
            elif len(keys) == 1 and not self._reads_a_tuple(self.graph[keys[0]]):
                self._write(keys[0], self._single(self.graph[keys[0]]), keys)
            else:
                name = self.place[self.outputs[b][0]].key
                self._write(name, self._bundle(b), keys)
                if keys[0] in self.of_ranks:
                    self.made.annotations.setdefault("workers", {})[name] = [self.of_ranks[keys[0]].worker]
                    self.made.annotations.setdefault("allow_other_workers", {})[name] = True
        for key in self.wanted:
            if self._place(key).at >= 0:
                self.picked[key] = self._place(key)
        for key, place in self.picked.items():
            silent = self.silent if self.bundle_of.get(key) == self.flow else ()
            task = PortableTask(key, pick, TaskRef(place.key), place.at, *map(TaskRef, silent))
            self._write(key, task, [key], is_quick=True)
        return self.made

    def _write(self, key: Key, task: GraphNode, members: list[Key], is_quick: bool = False) -> None:
        self.made.graph[key] = task
        for name, values in self.annotations.items():
            # Tasks of ranks that run as one are of many regions.
            if members[0] in values and (
                name != ABOUT or len(members) == 1 or members[0] not in self.of_ranks
            ):
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

    def _write_flow(self) -> None:
        """Write the members of the flow, each with the tasks that it computes and the members that read them."""
        flow, keys = self.choice.flow, self.members[self.flow]
        assert flow is not None
        readers: dict[Key, set[int]] = {key: set() for key in keys}
        for key in keys:
            for dep in self.graph[key].dependencies:
                if dep in readers and self.owner[dep] != self.owner[key]:
                    readers[dep].add(self.owner[key])
        tasks: list[list[InnerTask]] = [[] for _ in self.member_outputs]
        for key, rank in zip(keys, flow.ranks, strict=True):
            tasks[self.owner[key]].append(InnerTask(key, self.graph[key], rank, tuple(sorted(readers[key]))))
        for i, (own, outputs) in enumerate(zip(tasks, self.member_outputs, strict=True)):
            name = self.flow_key, i
            share = Share(*name, len(tasks), tuple(own), tuple(outputs))
            self._write(name, self._task(name, self.flow, share), [task.key for task in own])

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
        own = tuple(
            InnerTask(key, self.graph[key], self.of_ranks[key].order if key in self.of_ranks else i)
            for i, key in enumerate(keys)
        )
        name = self.place[self.outputs[b][0]].key
        produces = any(self.graph[key].data_producer for key in keys)
        return self._task(name, b, Share(str(name), 0, 1, own, tuple(self.outputs[b])), produces)

    def _task(self, name: Key, b: int, share: Share, produces: bool = False) -> PortableTask:
        """Return the task of a share, which reads what its own tasks do not make."""
        read = dict.fromkeys(chain.from_iterable(task.call.dependencies for task in share.tasks))
        reads, arguments = self._reads(key for key in read if self.bundle_of.get(key) != b)
        return PortableTask(
            name, run_share, share, tuple(reads), *map(TaskRef, arguments), _data_producer=produces
        )

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
        if self.bundle_of[keys[0]] == self.flow:
            return False
        outputs = self.outputs[self.bundle_of[keys[0]]]
        read = frozenset(keys)
        costs = (self.costs[key] for key in outputs if key not in read)
        return sum(cost.nbytes for cost in costs if cost is not None) <= MORE * len(keys)
