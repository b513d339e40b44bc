"""A Dask graph with bundles in place of tasks.

    a bundle of            becomes
    one task               the task itself; a bundle of one, if it reads from the tuple of another bundle
    one result             a task of the result's key, if it is wanted; else of a key of its own
    several results        a task of a key of its own, whose result is a tuple

A bundle that reads some results of another one is sent the whole tuple, if that is little more; else a task of a key of
its own passes each result on, also where it is the error of a task.  For wanted keys, and for tasks by themselves, a
task of the result's key picks it: so these keys exist as they would without bundles.  A flow has as many parts as
members, each with a tuple, and its other members read none of these.

A key that the scheduler has already keeps the task that it has there, with all tasks behind it: the scheduler takes two
tasks of one key for a mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from numbers import Real
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
from dask.typing import Key

from dask_ferro.flow.costs import names_of
from dask_ferro.flow.member import ShareInput, is_ours, pass_on, pick, run_share
from dask_ferro.flow.run import MEMBER, InnerTask, Repeat, Share
from dask_ferro.flow.task_cost import FERRO
from dask_ferro.graph.bundling.partition import PICK_BYTES, Ints
from dask_ferro.lower.bundling.choice import (
    PLACING,
    Annotations,
    BundleChoice,
    CostFacts,
    Existing,
    FindResult,
    Graph,
    add_behind,
    annotation,
    choose,
    is_barrier,
    widen,
)
from dask_ferro.lower.portable import PortableTask
from dask_ferro.lower.repetition import RepeatedTasks
from dask_ferro.lower.upstream import GraphNode, TaskRef
from dask_ferro.trace import PART_ANNOTATION

# Words in the name of a bundle, and names in one graph: each is a prefix, over which Dask's scheduler iterates.
_WORDS, _NAMES = 3, 16
_PRIORITY = "priority"
# By how much a task that picks a result comes before others of its priority; users' priorities are integers.
SOONER = 0.5


class RewrittenGraph(NamedTuple):
    """A graph and the annotations of its tasks."""

    graph: dict[Key, GraphNode]
    annotations: dict[str, dict[Key, Any]]


def rewrite_graph(
    graph: Graph,
    wanted: Collection[Key],
    annotations: Annotations,
    facts: CostFacts,
    common: Mapping[str, object] | None = None,
) -> RewrittenGraph:
    """Return a graph in which cheap tasks run several at a time; arguments as of `choose`."""
    choice = choose(graph, wanted, annotations, facts, common)
    order, had = choice.tasks.order, choice.tasks.had
    if len(choice.bundles) == len(order) and MEMBER not in annotations:
        # To write 2,500 tasks as they are takes 15 ms.
        notes = {name: dict(by) for name, by in annotations.items()}
        return RewrittenGraph({key: graph[key] for key in order} | had, notes)
    return _BundleWriter(graph, choice, wanted, annotations, common or {}).written()


def rewrite_once(
    graph: Graph,
    wanted: Collection[Key],
    annotations: Annotations,
    facts: CostFacts,
    common: Mapping[str, object] | None,
    repeats: Sequence[RepeatedTasks],
) -> RewrittenGraph | None:
    """Return the flow or the bundle of a graph with the templates of `repeats`; None: some would be in neither."""
    choice = choose(graph, wanted, annotations, facts, common)
    parts = [part for part in choice.bundles if len(part) > 1]
    together = {*chain.from_iterable(parts), *chain.from_iterable(flow.tasks for flow in choice.flows)}
    if any(choice.tasks.number.get(key) not in together for one in repeats for key in one.template):
        return None
    return _BundleWriter(graph, choice, wanted, annotations, common or {}, repeats).written()


def reuse_bundles(
    graph: Graph, wanted: Iterable[Key], existing: Existing, held: FindResult
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
    """The tasks of a graph's bundles, being written; tasks have the numbers of the choice."""

    graph: Graph
    choice: BundleChoice
    wanted_keys: Collection[Key]
    annotations: Annotations
    common: Mapping[str, object]
    repeats: Sequence[RepeatedTasks] = ()
    result: RewrittenGraph = field(default_factory=lambda: RewrittenGraph({}, {}))

    def __post_init__(self) -> None:
        self.order, number = self.choice.tasks.order, self.choice.tasks.number
        self.wanted = frozenset(number[key] for key in self.wanted_keys if key in number)
        # The tasks of each bundle, and then of each member of the flows, whatever members a plan left without a task.
        self.parts: list[Sequence[int]] = [*self.choice.bundles]
        # By part, those of its flow; a bundle is a flow of one member.
        self.flow_of = [range(p, p + 1) for p in range(len(self.parts))]
        self.ranks: dict[int, float] = {}
        for flow in self.choice.flows:
            of_member: dict[int, list[int]] = {member: [] for member in sorted(set(flow.members))}
            for i, member in zip(flow.tasks, flow.members, strict=True):
                of_member[member].append(i)
            self.flow_of += [range(len(self.parts), len(self.parts) + len(of_member))] * len(of_member)
            self.parts += of_member.values()
            self.ranks.update(zip(flow.tasks, flow.ranks, strict=True))
        self.of_ranks = self.annotations.get(MEMBER, {})
        self.nbytes = [0.0 if cost is None else cost.nbytes for cost in self.choice.costs]
        self._read_edges()
        self._read_repeats()
        self._names: dict[str, int] = {}
        self._tokens: dict[str, str] = {}
        # By its first part.
        self.flow_names: dict[int, str] = {}
        # The key of each part, and the place of each task's result in its part's tuple; -1: it is all of it.
        self.keys: list[Key] = []
        self.place = [-1] * len(self.nbytes)
        self._name_parts()
        # Tasks whose results are picked, and those whose results pass from share to share, with the keys for that.
        self.picked: dict[int, None] = {}
        self.passed: dict[int, Key] = {}

    def _read_edges(self) -> None:
        """Find each part's results that others read or somebody asks for, and what it reads itself."""
        n, src, dst = len(self.order), *self.choice.edges[:, :2].T.astype(np.int64)
        tasks = np.fromiter(chain.from_iterable(self.parts), np.int64, n)
        part = np.empty(n, np.int64)
        part[tasks] = np.repeat(np.arange(len(self.parts)), [*map(len, self.parts)])
        first = np.asarray([flow.start for flow in self.flow_of], np.int64)[part]
        # Members of a flow send each other results.
        crosses = first[src] != first[dst]
        sent = ~crosses & (part[src] != part[dst])
        is_output = np.zeros(n, bool)
        is_output[src[crosses]] = True
        is_output[[*self.wanted]] = True
        outputs = is_output.tolist()
        self.outputs = [[i for i in own if outputs[i]] for own in self.parts]
        in_all = np.bincount(part[is_output], np.asarray(self.nbytes)[is_output], len(self.parts))
        self.part: list[int] = part.tolist()
        self.in_all: list[float] = in_all.tolist()
        self.readers = _by_first(src[sent], (part - first)[dst[sent]])
        self.inputs = _by_first(part[dst[crosses]], src[crosses])
        # Keys of inputs that are no tasks here.
        self.outside: dict[int, dict[Key, None]] = {}
        in_repeats = {key for one in self.repeats for key in one.inputs[0]}
        for i, keys in self.choice.outside.items():
            own = dict.fromkeys(key for key in keys if key not in in_repeats)
            self.outside.setdefault(self.part[i], {}).update(own)

    def _read_repeats(self) -> None:
        """Find how often each task runs, and the members that read its result in the next repeat."""
        number = self.choice.tasks.number
        self.times = {number[key]: len(one.inputs) for one in self.repeats for key in one.template}
        self.next_readers: dict[Key, set[int]] = {}
        for one in self.repeats:
            for key, task in one.template.items():
                member = self.part[number[key]]
                for source in map(one.carry.get, task.dependencies):
                    if source is not None and source in one.template and self.part[number[source]] != member:
                        self.next_readers.setdefault(source, set()).add(member - self.flow_of[member].start)

    def _name_parts(self) -> None:
        order = self.order
        for p, (tasks, outputs, flow) in enumerate(zip(self.parts, self.outputs, self.flow_of, strict=True)):
            if len(flow) > 1:
                if p == flow.start:
                    own, _ = self._own_key(sorted(chain.from_iterable(self.parts[q] for q in flow)))
                    label = own.removeprefix("bundle:").rpartition("-")[0]
                    self.flow_names[p] = f"flow:{label}-{uuid4().hex}"
                self.keys.append((self.flow_names[flow.start], p - flow.start))
            elif len(tasks) > 1 and (len(outputs) > 1 or outputs[0] not in self.wanted):
                self.keys.append(self._own_key(tasks))
            else:
                self.keys.append(order[outputs[0]])
            if len(outputs) > 1 or len(flow) > 1:
                for at, i in enumerate(outputs):
                    self.place[i] = at

    def _own_key(self, tasks: Sequence[int]) -> tuple[str, int]:
        """Return a key whose prefix tells the most frequent prefixes of a bundle's tasks."""
        first = self.order[tasks[0]]
        counts = Counter(names_of(self.order[i])[0] for i in tasks)
        words = sorted(counts, key=lambda word: (-counts[word], word))[:_WORDS]
        label = "bundle:" + "+".join(sorted(words))
        if label not in self._names and len(self._names) >= _NAMES:
            label = "bundle:mixed"
        number = self._names[label] = self._names.get(label, -1) + 1
        # Tasks of one group are of one span, which is an annotation.
        notes = repr([(name, widen(name, by.get(first))) for name, by in self.annotations.items()])
        return f"{label}-{self._tokens.setdefault(notes, uuid4().hex)}", number

    def written(self) -> RewrittenGraph:
        order, costs = self.order, self.choice.costs
        for p, tasks in enumerate(self.parts):
            first = order[tasks[0]]
            flow = self.flow_of[p]
            if len(tasks) == len(flow) == 1 and not self._reads_a_tuple(p):
                self._write(first, self._single(p), first)
            else:
                seconds = None
                if len(tasks) > 1:
                    times = self.times
                    seconds = sum(
                        cost.seconds * times.get(i, 1) for i in tasks if (cost := costs[i]) is not None
                    )
                self._write(self.keys[p], self._share(p), first, seconds)
            if first in self.of_ranks and len(flow) == 1 and not PLACING & self.common.keys():
                self.result.annotations.setdefault("workers", {})[self.keys[p]] = [
                    self.of_ranks[first].worker
                ]
                self.result.annotations.setdefault("allow_other_workers", {})[self.keys[p]] = True
        self.picked.update((i, None) for i in self.wanted if self.place[i] >= 0)
        picks = [(i, order[i], pick) for i in self.picked]
        passes = [(i, key, pass_on) for i, key in self.passed.items()]
        for i, key, function in [*picks, *passes]:
            p = self.part[i]
            # Members without results, which nobody would need: those that pick a result read their empty tuples.
            others = [self.keys[q] for q in self.flow_of[p] if not self.outputs[q]]
            task = PortableTask(key, function, TaskRef(self.keys[p]), self.place[i], *map(TaskRef, others))
            self._write(key, task, order[i], 0.0, is_quick=True)
        self.result.graph.update(self.choice.tasks.had)
        return self.result

    def _write(
        self, key: Key, task: GraphNode, first: Key, seconds: float | None = None, is_quick: bool = False
    ) -> None:
        """Write a task with the annotations of its first task, and its seconds, unless it is that one by itself."""
        self.result.graph[key] = task
        for name, values in self.annotations.items():
            value = values.get(first)
            if seconds is not None and not is_quick:
                value = widen(name, value)
            if value is not None:
                self.result.annotations.setdefault(name, {})[key] = value
        if seconds is not None:
            of_task = widen(FERRO, annotation(FERRO, key, {}, self.result.annotations, self.common)) or {}
            if isinstance(of_task, Mapping):
                self.result.annotations.setdefault(FERRO, {})[key] = {**of_task, "seconds": seconds}
        if is_quick:
            # At once: until then, a bundle's tuple keeps all results.
            before = annotation(_PRIORITY, key, 0, self.result.annotations, self.common)
            if isinstance(before, Real):
                self.result.annotations.setdefault(_PRIORITY, {})[key] = float(before) + SOONER

    def _reads_a_tuple(self, p: int) -> bool:
        """Return whether a task that is by itself reads from tuples, as a bundle of one task can."""
        task = self.graph[self.order[self.parts[p][0]]]
        if task.is_coro or is_barrier(task):
            return False
        return any(self.place[i] >= 0 for i in self.inputs.get(p, ()))

    def _single(self, p: int) -> GraphNode:
        """Return a task that is by itself, with the keys under which its inputs are found."""
        order = self.order
        renamed: dict[Key, Key | GraphNode] = {}
        for i in self.inputs.get(p, ()):
            if self.place[i] >= 0:
                self.picked[i] = None
            else:
                renamed[order[i]] = self.keys[self.part[i]]
        task = self.graph[order[self.parts[p][0]]]
        return task.substitute(renamed) if renamed else task

    def _share(self, p: int) -> GraphNode:
        """Return a bundle, or a member of the flow."""
        order, about, of_ranks = self.order, self.annotations.get(PART_ANNOTATION, {}), self.of_ranks
        numbers, flow = self.parts[p], self.flow_of[p]
        is_member = len(flow) > 1
        reads, arguments = self._reads(p)
        inner = []
        for at, i in enumerate(numbers):
            key = order[i]
            rank = self.ranks[i] if is_member else of_ranks[key].order if key in of_ranks else at
            readers = tuple(self.readers.get(i, ()))
            inner.append(InnerTask(key, self.graph[key], rank, readers, tuple(about.get(key) or ())))
        name = self.flow_names.get(flow.start, str(self.keys[p]))
        own = tuple(task for i, task in zip(numbers, inner, strict=True) if i not in self.times)
        repeats = tuple(filter(None, (_repeat(one, inner, self.next_readers) for one in self.repeats)))
        outputs = tuple(order[i] for i in self.outputs[p])
        # A task of a rank reads what is on its worker.
        steals = is_member and not of_ranks
        share = Share(name, p - flow.start, len(flow), own, outputs, repeats, steals)
        produces = not is_member and any(self.graph[order[i]].data_producer for i in numbers)
        return PortableTask(
            self.keys[p], run_share, share, tuple(reads), *map(TaskRef, arguments), _data_producer=produces
        )

    def _reads(self, p: int) -> tuple[list[ShareInput], list[Key]]:
        """Return where a bundle finds each input, and the keys of its arguments."""
        order, place, part = self.order, self.place, self.part
        of: dict[int, list[int]] = {}
        for i in self.inputs.get(p, ()):
            of.setdefault(part[i], []).append(i)
        reads: list[ShareInput] = []
        arguments: list[Key] = []
        for other, tasks in of.items():
            if place[tasks[0]] < 0 or self._is_read_whole(other, tasks):
                reads += [ShareInput(len(arguments), place[i], order[i]) for i in tasks]
                arguments.append(self.keys[other])
                continue
            # A part of several results has a key of its own: a name, and a number.
            key = self.keys[other]
            assert isinstance(key, tuple)
            name = str(key[0]).partition(":")[2]
            for i in tasks:
                reads.append(ShareInput(len(arguments), -1, order[i]))
                arguments.append(self.passed.setdefault(i, (f"pass:{name}", i)))
        for key in self.outside.get(p, ()):
            reads.append(ShareInput(len(arguments), -1, key))
            arguments.append(key)
        return reads, arguments

    def _is_read_whole(self, p: int, read: list[int]) -> bool:
        """Return whether a bundle that reads some results of another is sent all of them; of a member, it is not."""
        others = self.in_all[p] - sum(self.nbytes[i] for i in read)
        return len(self.flow_of[p]) == 1 and others <= PICK_BYTES * len(read)


def _repeat(
    one: RepeatedTasks, tasks: Iterable[InnerTask], next_readers: Mapping[Key, set[int]]
) -> Repeat | None:
    """Return what repeats of a member's tasks; None: nothing does."""
    own = tuple(task for task in tasks if task.key in one.template)
    read = set(chain.from_iterable(task.call.dependencies for task in own))
    carry = {key: source for key, source in one.carry.items() if key in read}
    inputs = [{key: value for key, value in values.items() if key in read} for values in one.inputs]
    passed = {task.key: tuple(next_readers[task.key]) for task in own if task.key in next_readers}
    return Repeat(one.name, own, carry, inputs, passed) if own else None


def _by_first(a: Ints, b: Ints) -> dict[int, list[int]]:
    """Return the distinct numbers of `b`, in order, beside each number of `a`."""
    n = int(b.max(initial=0)) + 1
    # `np.unique` would take as long as all else for one task (a call of `submit`), and import `numpy.ma` for 30 ms.
    both = np.sort(a * n + b)
    first, second = np.divmod(both[np.diff(both, prepend=-1) > 0], n)
    starts = np.flatnonzero(np.diff(first, prepend=-1))
    numbers = second.tolist()
    bounds = [*starts.tolist(), len(numbers)]
    return {u: numbers[at:end] for u, (at, end) in zip(first[starts].tolist(), pairwise(bounds), strict=True)}
