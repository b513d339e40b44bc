"""From a model to a plan: which nodes travel together, what each bundle reads, and what it is projected to cost.

A plan is data: bundles in topological order, each named by the values between which it lies, each value traced
to the bundle (or model input) that it comes from.  It knows nothing of engines, workers or Dask keys.

Nodes that depend on no input (weights made by ConstantOfShape, reshaped constants) are weights by another name:
each bundle that reads one computes it for itself, and they never travel between tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.graph.bundling.dag import dag, uses
from dask_ferro.graph.bundling.select import Dag, Granularity, Overheads, bundle, project
from dask_ferro.graph.cost.roofline import CPU, Cost, DeviceProfile, costs, seconds
from dask_ferro.graph.ir.inference import ValueType
from dask_ferro.graph.ir.nodes import nested
from dask_ferro.graph.ops.table import facts_of

MODEL_INPUT = -1


class ValueSource(NamedTuple):
    """Where a value comes from: output `place` of bundle `bundle`, or model input `place` (`MODEL_INPUT`)."""

    bundle: int
    place: int


@dataclass(frozen=True)
class Bundle:
    """Nodes that run as one task.

    Attributes
    ----------
    nodes : tuple of int
        Positions in the main graph, ascending.
    inputs, outputs : tuple of str
        Value names.
    sources : tuple of ValueSource
        Where each input comes from.
    ops : Counter
        Operator types.
    cost : Cost
        Summed over the nodes.
    seconds : float
        Projected on one thread of the profile.
    """

    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    sources: tuple[ValueSource, ...]
    outputs: tuple[str, ...]
    ops: Counter[str]
    cost: Cost
    seconds: float

    @property
    def flops(self) -> float:
        """Projected floating-point operations."""
        return self.cost.flops

    @property
    def bytes(self) -> float:
        """Projected bytes read and written by the nodes."""
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
    granularity: Granularity = "auto",
    workers: int = 1,
    profile: DeviceProfile = CPU,
    overheads: Overheads | None = None,
    each: Sequence[Cost] | None = None,
) -> Plan:
    """Return the plan of a loaded model.

    Parameters
    ----------
    model : onnx_ir.Model
        From `load`: sorted, no dead nodes.
    types : mapping
        Value types at the batch that is to be run.
    granularity : "auto", "op", "model" or float
        See `graph.bundling.select`.
    workers : int
        Threads that can run bundles at once.
    each : sequence of Cost, optional
        Of the nodes, where `costs` told them already.
    """
    overheads = overheads or Overheads()
    nodes = list(model.graph)
    each = each or costs(model, types)
    constant = _constants(model, nodes)
    work = _without(dag(model, types, profile, each), constant)
    cut = bundle(work, granularity, workers=workers, overheads=overheads)
    makespan = project(work, cut, workers=workers, overheads=overheads)
    pieces = _with_constants(nodes, cut, constant)
    times = [seconds(node, cost, profile) for node, cost in zip(nodes, each, strict=True)]
    bundles = tuple(_bundles(model, nodes, pieces, constant, each, times))
    bundles += tuple(_passed_on(model, bundles))
    made = _numbered(one.outputs for one in bundles)
    return Plan(bundles, tuple(made[v.name] for v in model.graph.outputs if v.name), makespan)


def _numbered(outputs: Iterable[Iterable[str]]) -> dict[str, ValueSource]:
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


def _passed_on(model: ir.Model, bundles: Sequence[Bundle]) -> Iterator[Bundle]:
    """Yield a bundle without nodes for each output that no node makes: an input, or a weight."""
    made = set(chain.from_iterable(one.outputs for one in bundles))
    inputs = {v.name: i for i, v in enumerate(model.graph.inputs)}
    for name in dict.fromkeys(v.name for v in model.graph.outputs if v.name and v.name not in made):
        taken = (name,) if name in inputs else ()
        sources = tuple(ValueSource(MODEL_INPUT, inputs[n]) for n in taken)
        yield Bundle((), taken, sources, (name,), Counter(), Cost(0.0, 0.0, 0.0, 0.0), 0.0)


def _constants(model: ir.Model, nodes: Sequence[ir.Node]) -> dict[int, tuple[int, ...]]:
    """Return the nodes that depend on no input and always give the same, with the constants that they read."""
    outputs = {v.name for v in model.graph.outputs}
    weights = set(model.graph.initializers)
    maker: dict[str, int] = {}
    found: dict[int, tuple[int, ...]] = {}
    for position, node in enumerate(nodes):
        if not all(name in weights or name in maker for name in uses(node)):
            continue
        if not _draws(node) and not any(v.name in outputs for v in node.outputs):
            found[position] = tuple(dict.fromkeys(maker[name] for name in uses(node) if name in maker))
            maker.update((v.name, position) for v in node.outputs if v.name)
    return found


def _draws(node: ir.Node) -> bool:
    """Whether a node or one in its bodies may draw random numbers."""
    return any(facts_of(inner).draws != "never" for inner in nested(node))


def _without(work: Dag, constant: Mapping[int, object]) -> Dag:
    """Return the graph with constants as free nodes that nothing waits for."""
    if not constant:
        return work
    kept = [row for row, (source, _, _) in enumerate(work.edges) if source not in constant]
    return Dag(
        [0.0 if i in constant else s for i, s in enumerate(work.seconds)],
        [work.edges[row] for row in kept],
        [pair for pair in work.glued if pair[0] not in constant],
        [work.values[row] for row in kept] if work.values else (),
    )


def _with_constants(
    nodes: Sequence[ir.Node], cut: Sequence[Sequence[int]], constant: Mapping[int, tuple[int, ...]]
) -> list[list[int]]:
    """Return the pieces, each with the constants that it reads; pieces of constants alone are gone."""
    if not constant:
        return [list(piece) for piece in cut]
    maker = _makers(nodes, constant)
    pieces = []
    for piece in cut:
        mine = [i for i in piece if i not in constant]
        wanted: set[int] = set()
        read = chain.from_iterable(uses(nodes[i]) for i in mine)
        stack = [maker[name] for name in read if name in maker]
        while stack:
            i = stack.pop()
            if i not in wanted:
                wanted.add(i)
                stack.extend(constant[i])
        if mine:
            pieces.append(sorted([*mine, *wanted]))
    return pieces


def _bundles(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    pieces: Sequence[Sequence[int]],
    constant: Mapping[int, object],
    each: Sequence[Cost],
    times: Sequence[float],
) -> Iterator[Bundle]:
    home: dict[int, int] = {}
    for number, piece in enumerate(pieces):
        home.update((i, number) for i in piece if i not in constant)
    maker = _makers(nodes, home)
    # Keys without values, for a set has no order: the order of outputs is part of a bundle's key.
    kept: list[dict[str, None]] = [{} for _ in pieces]
    reads: list[dict[str, None]] = [{} for _ in pieces]
    model_inputs = {v.name: i for i, v in enumerate(model.graph.inputs) if v.name}
    for i in sorted(home):
        for name in uses(nodes[i]):
            if name in model_inputs:
                reads[home[i]][name] = None
            elif name in maker and home[maker[name]] != home[i]:
                reads[home[i]][name] = None
                kept[home[maker[name]]][name] = None
    for value in model.graph.outputs:
        if value.name in maker:
            kept[home[maker[value.name]]][value.name] = None
    place = _numbered(kept)
    place.update((name, ValueSource(MODEL_INPUT, i)) for name, i in model_inputs.items())
    for number, piece in enumerate(pieces):
        yield Bundle(
            nodes=tuple(piece),
            inputs=tuple(reads[number]),
            sources=tuple(place[name] for name in reads[number]),
            outputs=tuple(kept[number]),
            ops=Counter(nodes[i].op_type for i in piece),
            cost=Cost(*map(sum, zip(*map(each.__getitem__, piece), strict=True))),
            seconds=sum(times[i] for i in piece),
        )
