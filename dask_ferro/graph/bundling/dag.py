"""A model as a `Dag`: seconds of its nodes, bytes of its values, and what must not be cut.

Only nodes of the main graph are nodes here; what the body of an If, Loop or Scan captures is read by the node
that owns the body.  Weights and graph inputs are no edges: nothing has to run before them.  Sequences,
optionals, maps and sparse tensors do not travel between tasks, so the nodes at both ends of one are glued; so are
those at both ends of a value whose type nobody tells (what operators of other domains give): a piece that is cut
there would take an input of no type, which no engine loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from dask_ferro.graph.bundling.select import Dag
from dask_ferro.graph.cost.roofline import CPU, Cost, DeviceProfile, node_cost, seconds
from dask_ferro.graph.ir.inference import ValueType
from dask_ferro.graph.ir.nested import with_bodies
from dask_ferro.graph.ir.nodes import reads, type_of, uses, value_bytes

__all__ = ["dag", "uses"]

# Kinds of values that Dask cannot be given: no engine takes them apart from the node that made them.
GLUED = frozenset({"sequence", "optional", "map", "sparse"})


def dag(
    model: ir.Model,
    types: Mapping[str, ValueType],
    profile: DeviceProfile = CPU,
    each: Sequence[Cost] | None = None,
) -> Dag:
    """Return the main graph of a loaded model as integers, seconds and bytes.

    Parameters
    ----------
    model : onnx_ir.Model
        Sorted; node `i` of the result is its i-th node.
    types : mapping of str to ValueType
        At the batch that is to be run.
    profile : DeviceProfile
    each : sequence of Cost, optional
        Of the nodes, where `costs` told them already.
    """
    nodes = list(model.graph)
    makers: dict[ir.Value, int] = {}
    for position, node in enumerate(nodes):
        makers.update(dict.fromkeys(node.outputs, position))
    numbers = {value: number for number, value in enumerate(makers)}
    edges, values, glued = [], [], []
    for position, node in enumerate(nodes):
        for value in dict.fromkeys(v for v in reads(node) if v in makers):
            type_ = type_of(value, types)
            edges.append((makers[value], position, float(value_bytes(type_))))
            values.append(numbers[value])
            if type_.kind in GLUED or type_.dtype is None:
                glued.append((makers[value], position))
    known = with_bodies(model, types)
    each = each or [node_cost(node, known) for node in nodes]
    times = [seconds(node, cost, profile, types=known) for node, cost in zip(nodes, each, strict=True)]
    return Dag(times, edges, glued, values)
