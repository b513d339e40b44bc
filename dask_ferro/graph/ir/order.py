"""The order in which a graph's nodes can run, or the cycle that prevents one.

ONNX wants nodes sorted, and files in the wild are not.  A node depends on its inputs and on every outer value
that its bodies (If, Loop, Scan) capture.  Order is stable: nodes keep their place in the file where they can.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import onnx


def bodies(node: onnx.NodeProto) -> Sequence[onnx.GraphProto]:
    """The graphs in the attributes of `node`."""
    found: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        if attribute.HasField("g"):
            found.append(attribute.g)
        found += attribute.graphs
    return found


def captured(node: onnx.NodeProto) -> set[str]:
    """The names that the bodies of `node` take from outside."""
    names: set[str] = set()
    for body in bodies(node):
        names |= free(body)
    return names


def free(graph: onnx.GraphProto) -> set[str]:
    """The names that `graph`, a body, uses and does not define."""
    defined = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    defined.update(sparse.values.name for sparse in graph.sparse_initializer)
    used = {info.name for info in graph.output}
    for node in graph.node:
        defined.update(node.output)
        used.update(uses(node))
    return used - defined - {""}


def uses(node: onnx.NodeProto) -> Sequence[str] | set[str]:
    """All names that `node` needs before it can run."""
    inner = captured(node) if any(a.type in _GRAPHS for a in node.attribute) else None
    return inner.union(node.input) if inner else node.input


_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def order(nodes: Sequence[onnx.NodeProto]) -> tuple[list[int], list[int]]:
    """Indices of `nodes` in an order in which they can run, and those of one cycle (empty if there is none).

    Names that no node produces are taken as given.  With a cycle, the order lacks the nodes on and behind it.
    """
    producer: dict[str, int] = {}
    for i, node in enumerate(nodes):
        producer.update((name, i) for name in node.output if name)
    needs = [_producers(node, producer) for node in nodes]
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
    """One cycle among nodes that each wait for another of them, in the order of the data."""
    if not stuck:
        return []
    path: dict[int, int] = {}
    at = min(stuck)
    while at not in path:
        path[at] = len(path)
        at = min(needs[at] & stuck)
    return list(path)[path[at] :][::-1]
