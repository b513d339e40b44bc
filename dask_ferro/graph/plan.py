"""From a model to a plan: which nodes travel together, what each bundle reads, and what it is projected to cost.

A plan is data: bundles in topological order, each named by the values between which it lies, each value traced
to the bundle (or model input) that it comes from.  It knows nothing of engines, workers or Dask keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.graph.bundle import Granularity, Overheads, bundle, project
from dask_ferro.graph.cost import CPU, Cost, DeviceProfile, costs, seconds
from dask_ferro.graph.dag import dag, uses
from dask_ferro.graph.shapes import ValueType

MODEL_INPUT = -1


class Source(NamedTuple):
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
    sources : tuple of Source
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
    sources: tuple[Source, ...]
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
    outputs: tuple[Source, ...]
    makespan: float


def plan(
    model: ir.Model,
    types: Mapping[str, ValueType],
    *,
    granularity: Granularity = "auto",
    workers: int = 1,
    profile: DeviceProfile = CPU,
    overheads: Overheads | None = None,
) -> Plan:
    """Return the plan of a loaded model.

    Parameters
    ----------
    model : onnx_ir.Model
        From `load`: sorted, no dead nodes.
    types : mapping
        Value types at the batch that is to be run.
    granularity : "auto", "op", "model" or float
        See `graph.bundle`.
    workers : int
        Threads that can run bundles at once.
    """
    overheads = overheads or Overheads()
    work = dag(model, types, profile)
    pieces = bundle(work, granularity, workers=workers, overheads=overheads)
    nodes = list(model.graph)
    each = costs(model, types)
    times = [seconds(node, cost, profile) for node, cost in zip(nodes, each, strict=True)]
    makespan = project(work, pieces, workers=workers, overheads=overheads)
    bundles = tuple(_bundles(model, nodes, pieces, each, times))
    made = _makers(bundles)
    inputs = {v.name: i for i, v in enumerate(model.graph.inputs)}
    outputs = tuple(
        made[v.name] if v.name in made else Source(MODEL_INPUT, inputs[v.name]) for v in model.graph.outputs
    )
    return Plan(bundles, outputs, makespan)


def _bundles(
    model: ir.Model,
    nodes: Sequence[ir.Node],
    pieces: Sequence[Sequence[int]],
    each: Sequence[Cost],
    times: Sequence[float],
) -> Iterator[Bundle]:
    home = {i: number for number, piece in enumerate(pieces) for i in piece}
    maker = {v.name: i for i, node in enumerate(nodes) for v in node.outputs if v.name}
    kept: list[dict[str, None]] = [{} for _ in pieces]  # what leaves each bundle, in order
    reads: list[dict[str, None]] = [{} for _ in pieces]
    model_inputs = {v.name: i for i, v in enumerate(model.graph.inputs) if v.name}
    for i, node in enumerate(nodes):
        for name in uses(node):
            if name in model_inputs:
                reads[home[i]][name] = None
            elif name in maker and home[maker[name]] != home[i]:
                reads[home[i]][name] = None
                kept[home[maker[name]]][name] = None
    for value in model.graph.outputs:
        if value.name in maker:
            kept[home[maker[value.name]]][value.name] = None
    place = {name: Source(b, k) for b, names in enumerate(kept) for k, name in enumerate(names)}
    place.update({name: Source(MODEL_INPUT, i) for name, i in model_inputs.items()})
    for number, piece in enumerate(pieces):
        yield Bundle(
            nodes=tuple(piece),
            inputs=tuple(reads[number]),
            sources=tuple(place[name] for name in reads[number]),
            outputs=tuple(kept[number]),
            ops=Counter(nodes[i].op_type for i in piece),
            cost=Cost(*(sum(column) for column in zip(*(each[i] for i in piece), strict=True))),
            seconds=sum(times[i] for i in piece),
        )


def _makers(bundles: Sequence[Bundle]) -> dict[str, Source]:
    return {name: Source(b, k) for b, one in enumerate(bundles) for k, name in enumerate(one.outputs)}
