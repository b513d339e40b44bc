"""What a node of ONNX's messages depends on: its inputs, and every outer value that its bodies capture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx


def bodies(node: onnx.NodeProto) -> Sequence[onnx.GraphProto]:
    """Return the bodies of `node`: the graphs in its attributes."""
    attributes = node.attribute
    # Most nodes have none; every step of loading calls this for every node.
    if not attributes:
        return ()
    found: list[onnx.GraphProto] = []
    for attribute in attributes:
        if attribute.HasField("g"):
            found.append(attribute.g)
        found += attribute.graphs
    return found


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes and those of their bodies, at any depth."""
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from all_nodes(body.node)


def captured(node: onnx.NodeProto) -> set[str]:
    """Return the names that the bodies of `node` capture."""
    names: set[str] = set()
    for body in bodies(node):
        names |= free(body)
    return names


def free(graph: onnx.GraphProto) -> set[str]:
    """Return the free names of `graph`, a body: those it uses and does not define."""
    defined = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    defined.update(sparse.values.name for sparse in graph.sparse_initializer)
    used = {info.name for info in graph.output}
    for node in graph.node:
        defined.update(node.output)
        used.update(uses(node))
    return used - defined - {""}


def uses(node: onnx.NodeProto) -> Sequence[str] | set[str]:
    """Return the names that `node` reads, those captured by its bodies included."""
    # Few nodes have bodies; for the others no set is built.
    inner = captured(node) if any(a.type in _GRAPHS for a in node.attribute) else None
    return inner.union(node.input) if inner else node.input


_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
