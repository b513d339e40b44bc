"""A model as a `Dag`: seconds of its nodes, bytes of its values, and what must not be cut.

Sequences, optionals and maps do not travel between tasks, so the nodes at both ends of one are glued.  A value
that a body captures is read by the node that owns the body.  Weights are no edges: they do not depend on anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from dask_ferro.graph.bundle import Dag
from dask_ferro.graph.cost import CPU, DeviceProfile, costs, seconds, value_bytes
from dask_ferro.graph.shapes import ValueType

_GLUED = frozenset({"sequence", "optional", "map"})


def uses(node: ir.Node) -> Iterator[str]:
    """Yield the names that a node reads, those that its bodies read or give back included."""
    yield from (v.name for v in node.inputs if v is not None and v.name)
    for attribute in node.attributes.values():
        if not attribute.is_ref() and attribute.type == ir.AttributeType.GRAPH:
            body = attribute.as_graph()
            for inner in body:
                yield from uses(inner)
            yield from (v.name for v in body.outputs if v.name)


def dag(model: ir.Model, types: Mapping[str, ValueType], profile: DeviceProfile = CPU) -> Dag:
    """Return the main graph of a loaded model as integers, seconds and bytes.

    Parameters
    ----------
    model : onnx_ir.Model
        Sorted.
    types : mapping of str to ValueType
        At the batch that is to be run.
    """
    nodes = list(model.graph)
    makers: dict[str, tuple[int, int]] = {}
    for position, node in enumerate(nodes):
        for value in node.outputs:
            if value.name:
                makers[value.name] = (position, len(makers))
    edges: list[tuple[int, int, float]] = []
    values: list[int] = []
    glued: list[tuple[int, int]] = []
    for position, node in enumerate(nodes):
        for name in dict.fromkeys(uses(node)):
            if name not in makers:
                continue
            maker, value_id = makers[name]
            kind = types.get(name)
            edges.append((maker, position, float(value_bytes(kind)) if kind is not None else 0.0))
            values.append(value_id)
            if kind is not None and kind.kind in _GLUED:
                glued.append((maker, position))
    times = [seconds(n, c, profile) for n, c in zip(nodes, costs(model, types), strict=True)]
    return Dag(times, edges, glued, values)
