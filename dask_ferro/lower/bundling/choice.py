"""Which tasks of a Dask graph run as one bundle, by what they are projected to cost.

    graph, wanted keys  ->  needed tasks, each before its readers  ->  seconds, bytes, kinds  ->  bundles

A task stays by itself if its cost is not known, if it is a coroutine, if it has retries (the tries of a bundle would be
those of all its tasks), or if Dask forbids to fuse it or what is next to it (the barrier of a shuffle).  Tasks with
different annotations are not bundled together, as a bundle has one, unless these say what a task costs or which region
it is of.  Nor are tasks whose large inputs are in the memory of different workers, as one of them would be sent.  Of
the tasks that are wanted, no two are in one bundle: each would need a task that picks its result.

Tasks of ranks say their members themselves, and all of them are one flow, or a bundle where they have one member.

Tasks that the scheduler has already are inputs, and so are their own inputs, which are not looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import Any, NamedTuple

import numpy as np
from dask.order import order
from dask.typing import Key
from distributed.sizeof import safe_sizeof

from dask_ferro.flow.costs import names_of
from dask_ferro.flow.cut import cut_graph, sort_tasks
from dask_ferro.flow.plan import peak_bytes, plan_flow
from dask_ferro.flow.run import MEMBER, MemberTask
from dask_ferro.flow.task_cost import FERRO, TaskCost, own_cost
from dask_ferro.graph.bundling.partition import DASK, FLOW, Bundles, Dag, Floats, Ints, finest
from dask_ferro.graph.bundling.tasks import SINGLETON, TaskDag, bundle_tasks, project
from dask_ferro.lower.bundling.recent import FLOW_STARTS, Flow, RecentChoices, Way
from dask_ferro.lower.portable import BundleTask
from dask_ferro.lower.upstream import Alias, DataNode, GraphNode, Task, TaskRef, references
from dask_ferro.trace import PART_ANNOTATION

# The seconds of a task whose cost is not known: it is by itself, and delays what waits for it.
UNKNOWN_S = 0.01
# The part of what a bundle may hold that a wanted task has: two do not fit.
WANTED_SHARE = 0.6
# Bytes of data in a graph that may be bundled with what reads it.
SMALL_DATA = 4096
# Annotations of all tasks with which none is in a flow, whose members the scheduler places.
PLACING = frozenset({"workers", "restrictions", "resources", "allow_other_workers", "loose_restrictions"})
# The annotation of how often a task is tried again.
_RETRIES = "retries"
# Parts of the annotation "ferro" that are about one task alone.
_OF_ONE_TASK = ("seconds", "flops", "bytes")
# Seconds that a flow may last, and those that flows of one graph last at least, on average; of the seconds of other
# ways, what flows are projected to gain; of the seconds of the tasks alone, with how many no bundles are sought.
FLOW_LASTS, FLOW_LEAST, FLOW_GAINS, FLOW_ENOUGH = 5.0, 0.2, 0.1, 2.0
# Inputs of so many bytes are sent to any worker in less time than a task costs.
LIGHT_INPUT = 1 << 20

Graph = Mapping[Key, GraphNode]
# Returns the specification of a task that the scheduler has, or None.
Existing = Callable[[Key], GraphNode | None]
# Returns where a result is in memory, or None if it is not.
FindResult = Callable[[Key], "HeldResult | None"]
# By annotation, its values by key.
Annotations = Mapping[str, Mapping[Key, Any]]


class HeldResult(NamedTuple):
    """The bytes of a result in memory, and the addresses of the workers that hold it."""

    nbytes: float
    workers: tuple[str, ...]


@dataclass(frozen=True)
class CostFacts:
    """The facts that a scheduler knows of tasks."""

    # Returns the projected cost of a task by its key, or None.
    cost: Callable[[Key], TaskCost | None]
    existing: Existing
    held: FindResult
    # Threads of all workers; 0: there is none yet, and nothing is bundled.
    workers: int
    # Bytes of the results of one bundle's tasks, at most.
    holds: float
    # Bytes; a graph whose tasks' results are more in all is left as it is.  A bundle of several results keeps all of
    # them until the last one was read, and so longer than single tasks would.
    memory: float
    # Bytes; the results of bundles may take so much at a time, though those of single tasks would take less.
    allowance: float = inf
    # Between two workers.
    bytes_per_s: float = DASK.bytes_per_s
    # Members of a flow at most: threads of workers that take part; 0 or 1: no flows are made.
    members: int = 0
    recent: RecentChoices = field(default_factory=RecentChoices)


class NeededTasks(NamedTuple):
    """The tasks that wanted keys need, each before its readers; those that the scheduler has, with all behind them.

    `number` has the place of each task in the order.
    """

    order: list[Key]
    had: dict[Key, GraphNode]
    number: dict[Key, int]


class BundleChoice(NamedTuple):
    """Needed tasks and their bundles by number; the flows, if any, whose tasks are in no bundle.

    No flow reads results of a later one.
    """

    tasks: NeededTasks
    costs: list[TaskCost | None]
    # Three columns: task, its reader, and bytes; those into one task are side by side.
    edges: Floats
    # By task, the keys of its inputs that are no needed tasks.
    outside: Mapping[int, list[Key]]
    bundles: Bundles
    flows: Sequence[Flow] = ()


def find_needed(graph: Graph, wanted: Iterable[Key], existing: Existing, held: FindResult) -> NeededTasks:
    """Return the tasks that wanted keys need, depth first, so that what is read together is computed together."""
    order: list[Key] = []
    had: dict[Key, GraphNode] = {}
    # -1: its inputs are on the stack.
    number: dict[Key, int] = {}
    # Those of which the scheduler has the result alone.
    results: set[Key] = set()
    stack = list(reversed(list(wanted)))
    while stack:
        key = stack.pop()
        if key in number:
            if number[key] < 0:
                number[key] = len(order)
                order.append(key)
            continue
        task = graph.get(key)
        if task is None or key in had or key in results:
            continue
        if (spec := existing(key)) is not None:
            results |= add_behind(key, spec, graph, existing, held, had)
            continue
        number[key] = -1
        stack.append(key)
        stack += [dep for dep in reversed(_list_reads(task)) if dep not in number]
    return NeededTasks(order, had, number)


def add_behind(
    key: Key, spec: GraphNode, graph: Graph, existing: Existing, held: FindResult, found: dict[Key, GraphNode]
) -> set[Key]:
    """Add a task that the scheduler has, and all that it needs, to those found; what is there was followed already.

    Others release tasks meanwhile: what the scheduler has forgotten since is taken from the graph, if it is there.  A
    task behind which something is gone cannot be submitted again, and is not added, as its result is there; such tasks
    are returned.
    """
    own = {key: spec}
    stack = list(spec.dependencies)
    gone: set[Key] = set()
    while stack:
        dep = stack.pop()
        if dep in found or dep in own:
            continue
        if (task := existing(dep) or graph.get(dep)) is not None:
            own[dep] = task
            stack += task.dependencies
        elif held(dep) is None:
            gone.add(dep)
    without: set[Key] = set()
    while fresh := {name for name, task in own.items() if not gone.isdisjoint(task.dependencies)} - without:
        without |= fresh
        gone |= fresh
    found.update((name, task) for name, task in own.items() if name not in without)
    return without


def _list_reads(task: GraphNode) -> list[Key]:
    """Return the keys that a task reads, in the order of its arguments, which is the same under any names."""
    if len(task.dependencies) < 2:
        return list(task.dependencies)
    read = dict.fromkeys(references(task))
    if len(read) < len(task.dependencies):
        read |= dict.fromkeys(sorted(task.dependencies - read.keys(), key=str))
    return list(read)


def choose(
    graph: Graph,
    wanted: Collection[Key],
    annotations: Annotations,
    facts: CostFacts,
    common: Mapping[str, object] | None = None,
) -> BundleChoice:
    """Return the bundles, or the flows, of the tasks that wanted keys need.

    `common` are the annotations of tasks without their own; a function is called with the key.
    """
    common = common or {}
    tasks = find_needed(graph, wanted, facts.existing, facts.held)
    number = tasks.number
    nodes = [graph[key] for key in tasks.order]
    costs = [
        _cost(key, task, facts, annotations, common) for key, task in zip(tasks.order, nodes, strict=True)
    ]
    sizes = [0.0 if cost is None else cost.nbytes for cost in costs]
    edges, outside = _edges(nodes, number, sizes)
    choice = BundleChoice(tasks, costs, edges, outside, tuple((i,) for i in range(len(nodes))))
    if of_ranks := annotations.get(MEMBER):
        # Dask follows such annotations of the call task by task.
        if any(common.get(name) for name in (*PLACING, _RETRIES)):
            return choice
        return _rank_choice(choice, of_ranks, facts.members > 0)
    # One task, as of `submit`: nothing to gain; without room, results go as early as they can.
    if len(nodes) < 2 or facts.workers < 1 or sum(sizes) > facts.memory:
        return choice
    seconds = [UNKNOWN_S if cost is None else cost.seconds for cost in costs]
    locations = _locations(graph, tasks.order, sizes, facts.held) if outside else [_Location()] * len(nodes)
    kinds = _by_annotations(tasks.order, annotations, locations)
    if _RETRIES in annotations or _RETRIES in common:
        for i, key in enumerate(tasks.order):
            if annotation(_RETRIES, key, 0, annotations, common):
                kinds[i] = SINGLETON
    work = TaskDag(
        Dag(seconds, edges, values=edges[:, 0].astype(np.int64)),
        _kinds(graph, nodes, number, edges, costs, kinds),
        _shares(sizes, locations, [number[key] for key in wanted if key in number], facts.holds),
        [UNKNOWN_S if cost is None else max(cost.seconds, cost.most) for cost in costs],
    )
    least = sum(seconds) / facts.workers
    is_known = any(cost is not None and cost.seconds for cost in costs)
    makes_flows = is_known and PLACING.isdisjoint(common)
    picked = frozenset(number[key] for key in wanted if key in number)
    plans = facts.recent.plans(
        work,
        (facts.workers, *(names_of(key)[0] for key in tasks.order)),
        (facts.holds, facts.allowance, makes_flows and facts.members),
        lambda: _flows(work, picked, facts) if makes_flows else (),
    )
    flows, starts_s = plans.flows, FLOW_STARTS * len(plans.flows)
    if flows:
        plans.projected["flow"] = (1 + FLOW_GAINS) * (starts_s + sum(flow.seconds for flow in flows))
    # Bundles take the least at best, and their search takes longer than a flow's plan.
    is_enough = bool(flows) and plans.seconds("flow") < starts_s + FLOW_ENOUGH * least
    if is_known and plans.bundles is None and not is_enough:
        overheads = replace(DASK, bytes_per_s=facts.bytes_per_s)
        plans.bundles = bundle_tasks(
            work, workers=facts.workers, allowance=facts.allowance, ranks=_ranks, overheads=overheads
        )
        ways: dict[Way, Bundles] = {"tasks": choice.bundles}
        if len(plans.bundles) < len(nodes):
            ways["bundles"] = plans.bundles
        for way, bundles in ways.items() if flows or len(ways) > 1 else ():
            plans.projected[way] = project(work.dag, bundles, workers=facts.workers, overheads=overheads)
    way = plans.way()
    facts.recent.choose(wanted, plans, way)
    if way == "flow":
        return choice._replace(bundles=_singletons(work, flows), flows=flows)
    return choice._replace(bundles=plans.bundles) if way == "bundles" and plans.bundles else choice


def _rank_choice(choice: BundleChoice, of_ranks: Mapping[Key, MemberTask], makes_flows: bool) -> BundleChoice:
    """Return the choice for a graph of ranks: one flow of their tasks, or a bundle where all are one member's."""
    order = choice.tasks.order
    inside = [i for i, key in enumerate(order) if key in of_ranks]
    alone = tuple((i,) for i, key in enumerate(order) if key not in of_ranks)
    if len(sort_tasks(choice.edges, [key in of_ranks for key in order])[1]) != 1:
        return choice
    places = [of_ranks[order[i]] for i in inside]
    members = {place: i for i, place in enumerate(sorted({(one.worker, one.lane) for one in places}))}
    if len(members) == 1:
        return choice._replace(bundles=(*alone, tuple(inside)))
    if not makes_flows:
        return choice
    flow = Flow(inside, [members[one.worker, one.lane] for one in places], [one.order for one in places], 0.0)
    return choice._replace(bundles=alone, flows=(flow,))


def _singletons(work: TaskDag, flows: Iterable[Flow]) -> Bundles:
    """Return the tasks that are in no flow, each by itself."""
    inside = frozenset(chain.from_iterable(flow.tasks for flow in flows))
    return tuple((i,) for i in range(len(work.dag.seconds)) if i not in inside)


def _flows(work: TaskDag, wanted: frozenset[int], facts: CostFacts) -> Sequence[Flow]:
    """Return the flows of all tasks that may be bundled, one after another, if they may pay; else none.

    A flow begins with all of its inputs.  A task of Dask's picks each result that is wanted, or read outside its flow.
    """
    kinds, seconds = np.asarray(work.kinds, np.int64), np.asarray(work.dag.seconds, np.float64)
    inside, members = kinds == 0, facts.members
    if members < 2 or inside.sum() < 2 * members or (kinds > 0).any():
        return ()
    edges = np.asarray(work.dag.edges, np.float64).reshape(-1, 3)
    src, dst = edges[:, :2].T.astype(np.int64)
    if not (inside[src] & inside[dst]).any():
        return ()
    number = np.empty(len(kinds), np.int64)
    costs = replace(FLOW, bytes_per_s=facts.bytes_per_s)

    def plan(tasks: Ints, held: float) -> Flow | None:
        """Return the flow of some tasks, unless it takes too long or too many bytes."""
        lasts = FLOW_LASTS if len(tasks) > 1 else inf
        if held > facts.allowance or float(seconds[tasks].sum()) / members > lasts:
            return None
        number[:] = -1
        number[tasks] = np.arange(len(tasks))
        is_own, is_inner = number[src] >= 0, number[dst] >= 0
        picked = {*src[is_own & ~is_inner].tolist(), *wanted.intersection(tasks.tolist())}
        is_inner &= is_own
        rows = np.column_stack([number[src[is_inner]], number[dst[is_inner]], edges[is_inner, 2]])
        finest_tasks = finest(Dag(seconds[tasks].tolist(), rows))
        flow = plan_flow(finest_tasks, members, costs)
        if flow.seconds > lasts or held + peak_bytes(finest_tasks, flow) > facts.allowance:
            return None
        picks_s = len(picked) * DASK.task_s / facts.workers
        return Flow(tasks.tolist(), flow.members, flow.order, flow.seconds + picks_s)

    most = max(1, int(float(seconds[inside].sum()) / members / FLOW_LEAST))
    flows = cut_graph(seconds, edges, inside.tolist(), plan, most)
    # A flow of one member is a bundle.
    if all(len(set(flow.members)) < 2 for flow in flows):
        return ()
    # Tasks by themselves are projected as with bundles, roughly.
    others = float(seconds[~inside].sum()) / facts.workers / len(flows)
    return [flow._replace(seconds=flow.seconds + others) for flow in flows]


def annotation(
    name: str, key: Key, default: object, annotations: Annotations, common: Mapping[str, object]
) -> object:
    """Return an annotation of a task, its own or that of all."""
    value = common.get(name, default)
    return annotations.get(name, {}).get(key, value(key) if callable(value) else value)


def widen(name: str, value: object) -> object:
    """Return what an annotation of a task says of its bundle too, not its cost or region; None: nothing."""
    if name == PART_ANNOTATION:
        return None
    if name == FERRO and isinstance(value, Mapping):
        return {what: told for what, told in value.items() if what not in _OF_ONE_TASK} or None
    return value


def _edges(
    nodes: list[GraphNode], number: Mapping[Key, int], sizes: list[float]
) -> tuple[Floats, dict[int, list[Key]]]:
    """Return the edges between tasks, those into one task side by side; by task, its inputs that are none of them."""
    read = [task.dependencies for task in nodes]
    # An input that is no task here is not a number.
    src = np.asarray([*map(number.get, chain.from_iterable(read))], np.float64)
    dst = np.repeat(np.arange(len(nodes)), [*map(len, read)])
    inside = ~np.isnan(src)
    outside = {i: [key for key in read[i] if key not in number] for i in dst[~inside].tolist()}
    src, dst = src[inside], dst[inside]
    # A set of keys has another order under other names.
    by = np.lexsort((src, dst))
    src, dst = src[by], dst[by]
    return np.column_stack([src, dst, np.asarray(sizes)[src.astype(np.int64)]]), outside


def _ranks(sources: Sequence[Sequence[int]]) -> list[int]:
    """Return the order in which Dask runs the tasks of a graph, given those that each one waits for.

    Roots are last: Dask queues them until a worker has nothing else to run.
    """
    graph: dict[Key, GraphNode] = {i: Task(i, max, *map(TaskRef, before)) for i, before in enumerate(sources)}
    places = order(graph)
    return [places[i] + (0 if before else len(graph)) for i, before in enumerate(sources)]


def _cost(
    key: Key, task: GraphNode, facts: CostFacts, annotations: Annotations, common: Mapping[str, object]
) -> TaskCost | None:
    if isinstance(task, Alias):
        return TaskCost(0.0, 0.0)
    if isinstance(task, DataNode):
        # Data in the graph goes to whoever reads it: alone, or with its readers if it is small.
        nbytes = safe_sizeof(task.value)
        return TaskCost(0.0, nbytes) if nbytes <= SMALL_DATA else None
    # Measurements are nearer than what a task tells.
    if (cost := facts.cost(key) or own_cost(annotation(FERRO, key, None, annotations, common))) is not None:
        return cost
    return task.cost if isinstance(task, BundleTask) else None


class _Location(NamedTuple):
    """The worker that holds most bytes of a task's inputs, or ""; the bytes that others hold."""

    worker: str = ""
    elsewhere: float = 0.0


def _locations(graph: Graph, order: list[Key], sizes: list[float], held: FindResult) -> list[_Location]:
    """Return where the inputs of each task are, as far as results in memory decide it.

    A result is where its own inputs are.  Inputs of up to `LIGHT_INPUT` bytes in all decide nothing.
    """
    found: dict[Key, tuple[_Location, float]] = {}
    for key, nbytes in zip(order, sizes, strict=True):
        at: Counter[str] = Counter()
        for dep in graph[key].dependencies:
            if dep in found:
                location, size = found[dep]
                at[location.worker] += int(size)
            elif (result := held(dep)) is not None:
                at[min(result.workers, default="")] += int(result.nbytes)
        del at[""]
        total = sum(at.values())
        worker = max(at, key=lambda address: (at[address], address)) if total > LIGHT_INPUT else ""
        found[key] = _Location(worker, total - at[worker] if worker else 0.0), nbytes
    return [found[key][0] for key in order]


def _shares(sizes: list[float], locations: list[_Location], wanted: list[int], holds: float) -> Floats:
    """Return each task's part of what a bundle may hold: its result, and inputs that are sent for it."""
    elsewhere = np.fromiter((location.elsewhere for location in locations), np.float64, len(locations))
    shares = (np.asarray(sizes, np.float64) + elsewhere) / holds
    shares[wanted] = np.maximum(shares[wanted], WANTED_SHARE)
    return shares


def _kinds(
    graph: Graph,
    nodes: list[GraphNode],
    number: Mapping[Key, int],
    edges: Floats,
    costs: list[TaskCost | None],
    kinds: list[int],
) -> list[int]:
    """Return the kind of each task, or `SINGLETON`.

    A task that reads a result of unknown size is by itself, too: several might not fit.
    """
    is_alone = np.asarray([cost is None for cost in costs], bool)
    src, dst = edges[:, :2].astype(np.int64).T
    is_alone[dst[is_alone[src]]] = True
    found = np.where(is_alone, SINGLETON, kinds).tolist()
    # Dask asks each task whether its function is a coroutine; a graph has few functions.
    of_function = {id(getattr(task, "func", None)): task for task in nodes}
    coroutines = {function for function, task in of_function.items() if task.is_coro}
    barriers = {key for key, task in graph.items() if is_barrier(task)}
    # Most graphs have neither, and barriers are sought behind each task.
    for i, task in enumerate(nodes) if coroutines or barriers else ():
        read = [source for dep in task.dependencies for source in _resolve(dep, graph)] if barriers else []
        if id(getattr(task, "func", None)) in coroutines or is_barrier(task) or not barriers.isdisjoint(read):
            found[i] = SINGLETON
        if is_barrier(task):
            for source in number.keys() & read:
                found[number[source]] = SINGLETON
    return found


def is_barrier(task: GraphNode) -> bool:
    """Return whether a task has to stay by itself; the tasks of a model are kept apart from Dask's optimizer alone."""
    return bool(task.block_fusion) and not isinstance(task, BundleTask)


def _resolve(key: Key, graph: Graph) -> Iterator[Key]:
    """Yield the key of a task of the graph, and those that it is an alias of."""
    while key in graph:
        yield key
        task = graph[key]
        if not isinstance(task, Alias):
            return
        key = task.target


def _by_annotations(order: list[Key], annotations: Annotations, locations: list[_Location]) -> list[int]:
    """Return a number for each set of annotations and each worker that holds inputs."""
    of: dict[Key, str] = {}
    for name, by in sorted(annotations.items()):
        for key, value in by.items():
            if (shared := widen(name, value)) is not None:
                of[key] = f"{of.get(key, '')}{name}={shared!r};"
    # Most tasks have none: they are of kind 0.
    kinds = {("", ""): 0}
    texts = ((of.get(key, ""), where.worker) for key, where in zip(order, locations, strict=True))
    return [kinds.setdefault(text, len(kinds)) for text in texts]
