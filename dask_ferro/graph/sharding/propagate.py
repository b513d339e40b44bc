"""Propagate placements through a graph: plan the layout of each value, and the redistributions.

The caller places some values, mostly inputs and weights; `propagate` walks the nodes in order and chooses for each,
along one axis of the mesh after the other, one strategy of the placement table:

1. a strategy uses at least one operand in its current layout, computes a result in the requested layout, or is whole:
nothing is split without a request;
2. strategies without communication come first, except those whose Partial result is larger than the Partial they read;
3. then the least projected seconds: of moving the operands along this axis, of the node itself, and of the all-reduce
   that a Partial result will need; the first in the table breaks ties.

A Partial is passed on to a single reader; with several readers the first one's all-reduce serves all.  Graph outputs
are never Partial unless that is requested.

Nothing is computed here, and weights are not read; the sizes of split dimensions have to be known.  Durations are
seconds, sizes bytes, both projected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf, prod
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.bundling.partition import FLOW_LINK
from dask_ferro.graph.cost.roofline import CPU, DeviceProfile, node_cost, seconds
from dask_ferro.graph.ir.inference import values
from dask_ferro.graph.ir.nodes import Types, type_of, value_bytes
from dask_ferro.graph.ops.labels import TypedNode
from dask_ferro.graph.sharding.placements import WHOLE, Partial, Placement, Shard
from dask_ferro.graph.sharding.plan import Compute, Entry, LayoutChange, Numbers, Sharding, select_nodes
from dask_ferro.graph.sharding.redistribute import (
    ByAxis,
    Layout,
    Mesh,
    is_reachable,
    layout_of,
    price,
    price_steps,
    steps,
    text,
)
from dask_ferro.graph.sharding.requests import check, refuse
from dask_ferro.graph.sharding.strategies import Strategy, operands, strategies
from dask_ferro.policy.estimates import Link

_NO_AXES: Mapping[str, ByAxis] = MappingProxyType({})


def propagate(
    model: ir.Model,
    types: Types,
    mesh: Mesh,
    placed: Mapping[str, ByAxis],
    *,
    outputs: Mapping[str, ByAxis] = _NO_AXES,
    starts: Mapping[str, ByAxis] = _NO_AXES,
    sequences: Mapping[str, ByAxis] = _NO_AXES,
    link: Link = FLOW_LINK,
    profile: DeviceProfile = CPU,
) -> Sharding:
    """Return the plan of a model, in a topological order and without local functions, on a mesh.

    Graph inputs and initializers are `placed` from the start, and the result of a node immediately; along axes
    without a name, inputs are whole and results are unchanged.  An input in `starts` begins in another layout.  Graph
    outputs are placed at the end.  If a Partial is requested, an output may be a sum or a mean of terms, which are
    left to the caller, if no node needs it complete.  `sequences` has the shards of activations that the nodes of
    sequence parallel regions, by name, read and compute; no other node reads these.  The placements are DTensor's
    (docs.pytorch.org/docs/stable/distributed.tensor.html); column- and row-parallel layers (Shoeybi and others 2019,
    arXiv:1909.08053) are ``Shard(1)`` and ``Shard(0)`` on a weight.

    Raises
    ------
    InputError
        If values cannot have their placements; the message lists all of them.
    UnsupportedOpError
        If random results of nodes would differ between ranks, there is control flow, or the graph is already sharded.
    """
    refuse(model)
    graph = model.graph
    by_name = {value.name: value for value in values(graph) if value.name}
    ends = {value.name: value for value in graph.outputs if value.name}
    requests = check(placed, by_name, types, mesh, "placed")
    outputs = check(outputs, ends, types, mesh, "outputs")
    starts = check(starts, by_name, types, mesh, "starts")
    walk = _Propagation(model, types, mesh, requests, outputs, sequences, link, profile)
    for name, start in starts.items():
        walk.begin(by_name[name], layout_of(start, mesh))
    for node in walk.nodes:
        walk.add(node)
    layouts = tuple(walk.end(value) for value in graph.outputs)
    return Sharding(model, types, mesh, walk.sources, layouts, tuple(walk.entries), walk.known)


# The terms that may be left to the caller, who adds them to others; terms of a maximum cannot be added.
_SUMS = (Partial("sum"), Partial("mean"))


def _complete(layout: Layout) -> Layout:
    return tuple(WHOLE if isinstance(p, Partial) else p for p in layout)


class _Propagation:
    """The layouts that each value has so far, and the entries of the plan."""

    def __init__(
        self,
        model: ir.Model,
        types: Types,
        mesh: Mesh,
        requests: Mapping[str, ByAxis],
        outputs: Mapping[str, ByAxis],
        sequences: Mapping[str, ByAxis],
        link: Link,
        profile: DeviceProfile,
    ) -> None:
        self.types, self.mesh, self.requests, self.link, self.profile = types, mesh, requests, link, profile
        self.axes, self.sequences = list(mesh.axes), sequences
        # The layout in which each graph output is requested.
        self.ends = {
            v: layout_of(outputs[v.name], mesh) for v in model.graph.outputs if v.name and v.name in outputs
        }
        opset = model.opset_imports.get("", 0) or 0
        self.typed = {node: TypedNode(node, types, opset) for node in model.graph}
        self.reads = {node: operands(typed) for node, typed in self.typed.items()}
        self.nodes = select_nodes(self.reads, model.graph.outputs)
        sources = dict.fromkeys((*model.graph.inputs, *model.graph.initializers.values()))
        self.sources = {v.name or "": layout_of(requests.get(v.name or "", {}), mesh) for v in sources}
        # Later readers may start from any of a value's layouts; the first is the layout of its producer.
        self.layouts: dict[ir.Value, list[Layout]] = {v: [self.sources[v.name or ""]] for v in sources}
        # A graph output counts as a reader of its value.
        self.readers = Counter[ir.Value | None](model.graph.outputs)
        for node in self.nodes:
            self.readers.update(set(self.reads[node]))
        self.entries: list[Entry] = []
        self.known: dict[ir.Value, Numbers] = {}
        # The values that sequence parallel regions read or compute in shards, with the axis.
        self.shards = {
            (value, axis)
            for node in self.nodes
            for axis, shard in sequences.get(node.name or "", {}).items()
            for value in (*self.reads[node], *node.outputs)
            if value is not None and self._request(value).get(axis) == shard
        }

    def _request(self, value: ir.Value) -> ByAxis:
        return self.requests.get(value.name or "", {})

    def begin(self, value: ir.Value, start: Layout) -> None:
        """Redistribute a graph input that begins in another layout than the requested layout."""
        layout, self.sources[value.name or ""] = self.sources[value.name or ""], start
        self.layouts[value] = [start]
        self._settle(value, layout)

    def add(self, node: ir.Node) -> None:
        """Place one node, redistribute its operands, and its results if the caller placed them."""
        if node.op_type in ("Shape", "Size") and self.reads[node] == (None,):
            self._fold(node)
        else:
            self._place(node)
        for value in node.outputs:
            if request := self._request(value):
                pairs = zip(self.axes, self.layouts[value][0], strict=True)
                self._settle(value, tuple(request.get(axis, now) for axis, now in pairs))

    def _settle(self, value: ir.Value, layout: Layout) -> None:
        """Redistribute a value to a layout, from which its readers start, and not from an earlier one."""
        self._redistribute(value, layout)
        self.layouts[value] = [layout]

    def end(self, value: ir.Value) -> Layout:
        """Return the layout of a graph output: the requested one, else the last one that is not Partial.

        A requested Partial is unchanged, unless it was already reduced for another reader.
        """
        layouts, layout = self.layouts[value], self.ends.get(value)
        if layout is None:
            # The last complete layout is the readers' and needs no further redistribution.
            complete = [now for now in layouts if now == _complete(now)]
            layout = complete[-1] if complete else _complete(layouts[0])
        elif _complete(layout) in layouts:
            layout = _complete(layout)
        else:
            pairs = zip(layouts[0], layout, strict=True)
            layout = tuple((p if p in _SUMS else WHOLE) if isinstance(q, Partial) else q for p, q in pairs)
        self._redistribute(value, layout)
        return layout

    def _place(self, node: ir.Node) -> None:
        work = seconds(node, node_cost(node, self.types), self.profile, types=self.types)
        chosen: list[Strategy] = []
        for axis in range(len(self.axes)):
            # Chosen axis by axis: all combinations would be strategies ** axes, too many for a mesh of three.
            chosen.append(self._best(node, axis, chosen, work))
        # The placements of each operand by axis become the operand's layout.
        pairs = zip(self.reads[node], zip(*(s.inputs for s in chosen), strict=True), strict=True)
        inputs = tuple(None if value is None else layout for value, layout in pairs)
        outputs = tuple(zip(*(s.outputs for s in chosen), strict=True))
        for value, layout in zip(self.reads[node], inputs, strict=True):
            if value is not None and layout is not None:
                self._redistribute(value, layout)
        once = frozenset((axis, i) for axis, strategy in enumerate(chosen) for i in strategy.once)
        # Only axes that split a label divide the work: along the others every rank computes the same.
        share = prod(size for size, s in zip(self.mesh.sizes, chosen, strict=True) if s.label)
        self.entries.append(Compute(node, inputs, outputs, once, work / share))
        self.layouts.update((v, [layout]) for v, layout in zip(node.outputs, outputs, strict=True))

    def _fold(self, node: ir.Node) -> None:
        typed, value = self.typed[node], node.outputs[0]
        if node.op_type == "Size":
            array = np.array(typed.size(0), np.int64)
        else:
            dims = slice(typed.attribute("start", 0), typed.attribute("end", None))
            array = np.array(typed.shape(0)[dims], np.int64)
        self.layouts[value] = [self.mesh.whole]
        self.known[value] = array

    def _redistribute(self, value: ir.Value, target: Layout) -> None:
        layouts = self.layouts[value]
        if target in layouts:
            return
        nbytes = value_bytes(type_of(value, self.types))
        paths = [(layout, steps(layout, target)) for layout in layouts if is_reachable(layout, target)]
        if not paths:
            raise InputError(
                f"{value.name!r} is {text(layouts[0])} and wanted as {text(target)}: a complete value is not"
                " split into terms; request Replicate() or Shard(dim)"
            )
        priced = [
            (price_steps(path, start, nbytes, self.mesh, self.link), start, path) for start, path in paths
        ]
        cost, source, path = min(priced, key=lambda one: (one[0].seconds, one[0].bytes))
        self.entries.append(LayoutChange(value, source, path, cost))
        for step in path:
            source = step.after(source)
            if source not in layouts:
                layouts.append(source)

    # One axis.

    def _best(self, node: ir.Node, axis: int, chosen: Sequence[Strategy], work: float) -> Strategy:
        # The number of parts into which the axes chosen so far split each label.
        parts: dict[str, int] = {}
        for strategy, size in zip(chosen, self.mesh.sizes, strict=False):
            if strategy.label:
                parts[strategy.label] = parts.get(strategy.label, 1) * size
        ranked: list[tuple[bool, float, int, Strategy]] = []
        for strategy in strategies(self.typed[node], self.mesh.sizes[axis], parts):
            if not self._is_candidate(node, strategy, axis):
                continue
            # An operand that is read twice in one placement is redistributed once.
            read = dict.fromkeys(zip(self.reads[node], strategy.inputs, strict=True))
            moves = [self._move_seconds(value, p, axis) for value, p in read if value is not None]
            if inf in moves:
                continue
            # A Partial result still needs an all-reduce; without this term it would always be cheapest.
            later = self._reduce_seconds(zip(node.outputs, strategy.outputs, strict=True), axis)
            now = self._reduce_seconds(zip(self.reads[node], strategy.inputs, strict=True), axis)
            is_free = not any(moves) and not (0 < now < later)
            share = self.mesh.sizes[axis] if strategy.label else 1
            # The position in the table breaks ties, so that strategies themselves are never compared.
            ranked.append((not is_free, sum(moves) + work / share + later, len(ranked), strategy))
        return min(ranked)[-1]

    def _is_candidate(self, node: ir.Node, strategy: Strategy, axis: int) -> bool:
        """Return whether a strategy is whole, or follows from a layout of an operand or from a request for a result."""
        name = self.axes[axis]
        pairs = zip(self.reads[node], strategy.inputs, strict=True)
        read = [(v, p) for v, p in pairs if v is not None and p != WHOLE]
        if not read:
            return True
        results = zip(node.outputs, strategy.outputs, strict=True)
        has_operand = any(layout[axis] == p for v, p in read for layout in self.layouts[v])
        is_requested = any(isinstance(p, Shard) and self._request(v).get(name) == p for v, p in results)
        # Terms that others need complete are reduced for all of them.
        has_own_terms = all(self.readers[v] == 1 for v, p in read if isinstance(p, Partial))
        # The shards of a sequence parallel region are for its own nodes.
        is_foreign = name not in self.sequences.get(node.name or "", {}) and any(
            (v, name) in self.shards and self._request(v).get(name) == p for v, p in read
        )
        return (has_operand or is_requested) and has_own_terms and not is_foreign

    def _move_seconds(self, value: ir.Value, placement: Placement, axis: int) -> float:
        """Return the least seconds of placing a value along an axis, while it stays along the others; or infinity."""
        nbytes = value_bytes(type_of(value, self.types))
        pairs = ((now, (*now[:axis], placement, *now[axis + 1 :])) for now in self.layouts[value])
        return min(
            (
                price_steps(steps(now, target), now, nbytes, self.mesh, self.link).seconds
                for now, target in pairs
                if is_reachable(now, target)
            ),
            default=inf,
        )

    def _reduce_seconds(self, pairs: Iterable[tuple[ir.Value | None, Placement]], axis: int) -> float:
        """Return the seconds of the all-reduces that Partial values still need, without those left to the caller."""
        return sum(
            price("AllReduce", value_bytes(type_of(v, self.types)), self.mesh.sizes[axis], self.link).seconds
            for v, p in pairs
            if v is not None and isinstance(p, Partial) and not self._is_left(v, p, axis)
        )

    def _is_left(self, value: ir.Value, term: Partial, axis: int) -> bool:
        return term in _SUMS and value in self.ends and isinstance(self.ends[value][axis], Partial)
