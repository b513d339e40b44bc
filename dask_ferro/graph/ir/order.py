"""Topological order of a graph's nodes, or the cycle that prevents one.

ONNX wants nodes sorted, and files in the wild are not.  A node depends on its inputs and on every outer value
that its bodies (If, Loop, Scan) capture.  Order is stable: nodes keep their place in the file where they can.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

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


def order(nodes: Sequence[onnx.NodeProto]) -> tuple[list[int], list[int]]:
    """Return the indices of `nodes` in topological order, and those of one cycle, empty if there is none.

    Names that no node produces are taken as given.  With a cycle, the order lacks the nodes on and behind it.
    """
    producer: dict[str, int] = {}
    for i, node in enumerate(nodes):
        producer.update((name, i) for name in node.output if name)
    needs = [_producers(node, producer) for node in nodes]
    # Files are nearly always sorted, and this check is fast.
    if all(not need or max(need) < i for i, need in enumerate(needs)):
        return list(range(len(nodes))), []
    return _kahn(needs)


def _producers(node: onnx.NodeProto, producer: Mapping[str, int]) -> set[int]:
    return {producer[name] for name in uses(node) if name in producer}


def _kahn(needs: list[set[int]]) -> tuple[list[int], list[int]]:
    waiting = [len(need) for need in needs]
    dependents: list[list[int]] = [[] for _ in needs]
    for i, need in enumerate(needs):
        for j in need:
            dependents[j].append(i)
    # A heap of positions in the file: of the nodes that can run, the one written first runs first.
    ready = [i for i, count in enumerate(waiting) if count == 0]
    done: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        done.append(i)
        for j in dependents[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                heapq.heappush(ready, j)
    return done, _cycle(needs, {i for i, count in enumerate(waiting) if count})


def _cycle(needs: list[set[int]], stuck: set[int]) -> list[int]:
    """Return one cycle among nodes that each wait for another of them, in the order of the data."""
    if not stuck:
        return []
    path: dict[int, int] = {}
    at = min(stuck)
    while at not in path:
        path[at] = len(path)
        at = min(needs[at] & stuck)
    return list(path)[path[at] :][::-1]
