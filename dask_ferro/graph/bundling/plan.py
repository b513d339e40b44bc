"""Plans of models: the nodes of each bundle, what it reads, and its projected cost.

A plan is data: bundles in topological order, each named by the values between which it lies, each value traced
to the bundle (or model input) that it comes from.  It knows nothing of engines, workers or Dask keys.

Every node is in exactly one bundle, and bundles are convex: the graph between them has no cycle.  The same graph gives
the same bundles, everywhere.  Nodes that depend on no input (weights made by ConstantOfShape, reshaped constants)
count as weights: each bundle that reads one computes it for itself, and they never travel between tasks.

What is cut is a `Dag` of the main graph's nodes: what a body (If, Loop, Scan) captures is read by its node,
and weights and graph inputs are no edges, since nothing has to run before them.  Sequences, optionals, maps and sparse
tensors do not travel between tasks, so the nodes at both ends of one are glued; so are those at both ends of a value of
unknown type (an output of another domain's operator): a piece cut there would take an input of no type, which no
engine loads.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.bundling.coarsen import SMALL, Limits, coarsen, series
from dask_ferro.graph.bundling.partition import (
    DASK,
    FREE,
    Dag,
    Quotient,
    finest,
    lower_bound,
    merge,
    schedule,
)
from dask_ferro.graph.cost.roofline import NO_COST, Cost, ModelCost
from dask_ferro.graph.ir.inference import ValueType
from dask_ferro.graph.ir.nodes import nodes_and_bodies, reads, type_of, value_bytes
from dask_ferro.graph.ops.table import facts_of

Granularity: TypeAlias = Literal["auto", "op", "model"] | float

MODEL_INPUT = -1
# Kinds of values that do not travel between tasks: no engine takes them as inputs from outside.
UNSENT_KINDS = frozenset({"sequence", "optional", "map", "sparse"})


class ValueSource(NamedTuple):
    """The origin of a value: output `place` of bundle `bundle`, or model input `place` (`MODEL_INPUT`)."""

    bundle: int
    place: int


@dataclass(frozen=True)
class Bundle:
    """Nodes that run as one task."""

    # Positions in the main graph, ascending.
    nodes: tuple[int, ...]
    # Names of values, and where each input comes from.
    inputs: tuple[str, ...]
    sources: tuple[ValueSource, ...]
    outputs: tuple[str, ...]
    ops: Counter[str]
    # Summed over the nodes; seconds on one thread of the profile.
    cost: Cost
    seconds: float

    @property
    def flops(self) -> float:
        return self.cost.flops

    @property
    def bytes(self) -> float:
        return self.cost.read_bytes + self.cost.write_bytes


@dataclass(frozen=True)
class Plan:
    """Bundles in topological order, the source of each model output, and the projected makespan in seconds."""

    bundles: tuple[Bundle, ...]
    outputs: tuple[ValueSource, ...]
    makespan: float


def plan(
    model: ir.Model,
    types: Mapping[str, ValueType],
    *,
    cost: ModelCost,
    granularity: Granularity = "auto",
    workers: int = 1,
) -> Plan:
    """Return the plan of a model from `load` (sorted, no dead nodes), with types and costs at the batch that is run.

    `workers` are threads that can run bundles at once.
    """
    nodes = list(model.graph)
    read = [tuple(value.name for value in reads(node) if value.name) for node in nodes]
    constant = _constants(model, nodes, read)
    work = dag(model, types, cost.seconds, constant)
    cut = choose(work, granularity, workers=workers)
    pieces = _with_constants(nodes, read, cut.bundles(), constant)
    bundles = tuple(_bundles(model, read, pieces, constant, cost))
    bundles += tuple(_pass_values(model, bundles))
    made = _number_outputs(one.outputs for one in bundles)
    makespan = schedule(cut, workers=workers, overheads=DASK).seconds
    return Plan(bundles, tuple(made[v.name] for v in model.graph.outputs if v.name), makespan)


def dag(
    model: ir.Model,
    types: Mapping[str, ValueType],
    seconds: Sequence[float],
    constant: Collection[int] = (),
) -> Dag:
    """Return the main graph of a loaded model as integers, seconds (of `model_cost`) and bytes.

    Node `i` of the result is the model's i-th node.  Nothing waits for `constant` nodes, which take no time.
    """
    nodes = list(model.graph)
    makers: dict[ir.Value, int] = {}
    for position, node in enumerate(nodes):
        if position not in constant:
            makers.update(dict.fromkeys(node.outputs, position))
    numbers = {value: number for number, value in enumerate(makers)}
    edges, values, glued = [], [], []
    for position, node in enumerate(nodes):
        # A value that a node reads twice crosses to it once.
        for value in dict.fromkeys(v for v in reads(node) if v in makers):
            type_ = type_of(value, types)
            edges.append((makers[value], position, float(value_bytes(type_))))
            values.append(numbers[value])
            if type_.kind in UNSENT_KINDS or type_.dtype is None:
                glued.append((makers[value], position))
    return Dag([0.0 if i in constant else s for i, s in enumerate(seconds)], edges, glued, values)


def _number_outputs(outputs: Iterable[Iterable[str]]) -> dict[str, ValueSource]:
    """Return the source of each bundle's outputs, by value."""
    found: dict[str, ValueSource] = {}
    for number, names in enumerate(outputs):
        found.update((name, ValueSource(number, place)) for place, name in enumerate(names))
    return found


def _makers(nodes: Sequence[ir.Node], positions: Iterable[int]) -> dict[str, int]:
    """Return the position of the node that makes each value, of the nodes at `positions`."""
    found: dict[str, int] = {}
    for i in positions:
        found.update((value.name, i) for value in nodes[i].outputs if value.name)
    return found


def _pass_values(model: ir.Model, bundles: Sequence[Bundle]) -> Iterator[Bundle]:
    """Yield a bundle without nodes for each output that no node makes: an input, or a weight."""
    made = set(chain.from_iterable(one.outputs for one in bundles))
    inputs = {v.name: i for i, v in enumerate(model.graph.inputs)}
    # Without such a bundle an output that passes through would have no task.
    for name in dict.fromkeys(v.name for v in model.graph.outputs if v.name and v.name not in made):
        taken = (name,) if name in inputs else ()
        sources = tuple(ValueSource(MODEL_INPUT, inputs[n]) for n in taken)
        yield Bundle((), taken, sources, (name,), Counter(), NO_COST, 0.0)


def _constants(
    model: ir.Model, nodes: Sequence[ir.Node], read: Sequence[Sequence[str]]
) -> dict[int, set[int]]:
    """Return the nodes whose results never change, as they depend on no input, with the constants that they read."""
    outputs = {v.name for v in model.graph.outputs}
    weights = set(model.graph.initializers)
    maker: dict[str, int] = {}
    found: dict[int, set[int]] = {}
    for position, node in enumerate(nodes):
        if not all(name in weights or name in maker for name in read[position]):
            continue
        # An output has to come from one task, so its node stays where it is.
        if not _draws(node) and not any(v.name in outputs for v in node.outputs):
            found[position] = {maker[n] for n in read[position] if n in maker}
            maker.update((v.name, position) for v in node.outputs if v.name)
    return found


def _draws(node: ir.Node) -> bool:
    """Return whether a node, or one in its bodies, may draw random numbers."""
    return any(facts_of(inner).draws != "never" for inner in nodes_and_bodies(node))


def _with_constants(
    nodes: Sequence[ir.Node],
    read: Sequence[Sequence[str]],
    cut: Sequence[Sequence[int]],
    constant: Mapping[int, set[int]],
) -> list[list[int]]:
    """Return the pieces, each with the constants that it reads; pieces of constants alone are gone."""
    maker = _makers(nodes, constant)
    pieces = []
    for piece in cut:
        mine = [i for i in piece if i not in constant]
        made = {maker[name] for i in mine for name in read[i] if name in maker}
        left = list(made)
        while left:
            more = constant[left.pop()] - made
            made |= more
            left += more
        if mine:
            pieces.append(sorted([*mine, *made]))
    return pieces


def _bundles(
    model: ir.Model,
    read: Sequence[Sequence[str]],
    pieces: Sequence[Sequence[int]],
    constant: Mapping[int, object],
    cost: ModelCost,
) -> Iterator[Bundle]:
    nodes = list(model.graph)
    home: dict[int, int] = {}
    for number, piece in enumerate(pieces):
        home.update((i, number) for i in piece if i not in constant)
    maker = _makers(nodes, home)
    # A dict without values, since a set has no order, and the order of outputs is part of a bundle's key.
    kept: list[dict[str, None]] = [{} for _ in pieces]
    taken: list[dict[str, None]] = [{} for _ in pieces]
    model_inputs = {v.name: i for i, v in enumerate(model.graph.inputs) if v.name}
    # In the order of nodes, so that inputs and outputs of a bundle have one order in every process.
    for i in sorted(home):
        for name in read[i]:
            if name in model_inputs:
                taken[home[i]][name] = None
            elif name in maker and home[maker[name]] != home[i]:
                taken[home[i]][name] = None
                kept[home[maker[name]]][name] = None
    for value in model.graph.outputs:
        if value.name in maker:
            kept[home[maker[value.name]]][value.name] = None
    place = _number_outputs(kept)
    place.update((name, ValueSource(MODEL_INPUT, i)) for name, i in model_inputs.items())
    for number, piece in enumerate(pieces):
        yield Bundle(
            nodes=tuple(piece),
            inputs=tuple(taken[number]),
            sources=tuple(place[name] for name in taken[number]),
            outputs=tuple(kept[number]),
            ops=Counter(nodes[i].op_type for i in piece),
            cost=Cost(*map(sum, zip(*map(cost.nodes.__getitem__, piece), strict=True))),
            seconds=sum(cost.seconds[i] for i in piece),
        )


# The choice of bundles: few, and as many as keep the workers busy.  A task costs about 2.3 ms of CPU and a hop between
# tasks 6 ms, so a bundle has to be worth many of those.  "auto" does not guess how many: it merges the graph at a
# series of grains, projects the makespan of each partition by list scheduling, and keeps the one that ends first; what
# is within `TOLERANCE` or one hop of it counts as equal, and then the fewest bundles win.

# Projections are less exact than this: the durations of a kernel spread more.
TOLERANCE = 0.03


def choose(dag: Dag, granularity: Granularity = "auto", *, workers: int) -> Quotient:
    """Return the partition of `dag` into bundles, of which so many `workers` run at a time.

    "op" is one node a bundle (glued ones together), "model" one bundle, a number pieces of about that many seconds;
    "auto" is the least projected makespan.  Two branches worth a task each, then a join:

    >>> dag = Dag([0.0, 0.1, 0.1, 0.0], [(0, 1, 8.0), (0, 2, 8.0), (1, 3, 8.0), (2, 3, 8.0)])
    >>> choose(dag, workers=2).bundles()
    ((0,), (1,), (2,), (3,))
    >>> choose(dag, workers=1).bundles()
    ((0, 1, 2, 3),)
    """
    if workers < 1:
        raise InputError(f"workers: got {workers}, wanted 1 or more")
    base = finest(dag)
    if granularity == "model":
        return _merge_all(base)
    if granularity == "op" or len(base) < 2:
        return base
    if granularity == "auto":
        return _auto(base, workers)
    if isinstance(granularity, str) or not granularity > 0:
        raise InputError(
            f"granularity: got {granularity!r}, wanted 'auto', 'op', 'model' or a positive number of seconds"
        )
    grain = float(granularity)
    if sum(dag.seconds) <= grain:
        return _merge_all(base)
    return coarsen(base, grain, Limits(budget=grain, cap=grain))


def _merge_all(base: Quotient) -> Quotient:
    return merge(base, np.zeros(len(base), np.int64))


def _auto(base: Quotient, workers: int) -> Quotient:
    """Return the partition of least projected makespan."""
    whole = _merge_all(base)
    alone = best = schedule(whole, workers=workers, overheads=DASK).seconds
    bound = lower_bound(base, workers=workers, overheads=FREE) + DASK.task_s + DASK.dispatch_s
    if alone <= _enough(bound):
        return whole
    how = Limits(budget=DASK.task_s)
    candidates = [(alone, whole)]
    # The coarsest is projected fastest, and what it takes rules finer ones out.
    for partition in reversed([base, *series(base, _grains(base, workers), how)]):
        if lower_bound(partition, workers=workers, overheads=DASK, enough=_enough(best)) <= _enough(best):
            projected = schedule(partition, workers=workers, overheads=DASK).seconds
            candidates.append((projected, partition))
            best = min(best, projected)
    enough = _enough(best)
    return min((partition for seconds, partition in candidates if seconds <= enough), key=len)


def _enough(best: float) -> float:
    """Return the seconds up to which a projection is no worse than `best`, as far as it can tell."""
    return best + max(TOLERANCE * best, DASK.hop_s)


def _grains(base: Quotient, workers: int) -> list[float]:
    """Return the grains to try, in seconds: a worker's share of the work by powers of two, above a hop."""
    work = float(base.seconds.sum())
    least = DASK.task_s + DASK.hop_s
    if len(base) > SMALL:
        least = max(least, work / len(base))
    grain = work / workers
    while grain / 2 >= least:
        grain /= 2
    grains = []
    while grain < work:
        grains.append(grain)
        grain *= 2
    return grains
