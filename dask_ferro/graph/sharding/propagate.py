"""Propagation of placements through a graph: a plan of the layout of each value, and of the redistributions.

The caller places some values, mostly inputs and weights; `propagate` walks the nodes in order and chooses for each,
along each axis of the mesh, one strategy of the placement table:

1. a strategy has to use at least one operand in its current layout, give a result in the layout that it is given, or
   be whole: nothing is split without a request; axes are taken in the order of the mesh, and a later one may split the
   parts of earlier ones again;
2. strategies without communication come first, except those whose Partial result is larger than the Partial they read;
3. then the least projected seconds: of moving the operands along this axis, of the node itself, and of the all-reduce
   that a Partial result will need; the first in the table breaks ties.

A Partial is passed on to a single reader; with several readers the first one's all-reduce serves all.  Graph outputs
are never Partial unless asked for.  The shards of a sequence parallel region (`node_placement.SEQUENCE`)
are read by its own nodes alone; all others read them whole.

Nothing is computed here, and weights are not read; the sizes of split dimensions have to be known.  Durations are
seconds, sizes bytes, both projected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf, prod

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundling.partition import FLOW_LINK
from dask_ferro.graph.cost.roofline import CPU, DeviceProfile, node_cost, seconds
from dask_ferro.graph.ir.inference import values
from dask_ferro.graph.ir.nodes import Types, type_of, value_bytes
from dask_ferro.graph.ops.labels import TypedNode
from dask_ferro.graph.ops.table import rule
from dask_ferro.graph.sharding.given import Placed, Request, layouts, refuse
from dask_ferro.graph.sharding.node_placement import sequence_of
from dask_ferro.graph.sharding.placements import WHOLE, Partial, Placement, Shard
from dask_ferro.graph.sharding.plan import Compute, Entry, LayoutChange, Numbers, Sharding, needed
from dask_ferro.graph.sharding.redistribute import (
    Layout,
    Mesh,
    kind,
    leads,
    price,
    shards,
    steps,
    text,
    total,
)
from dask_ferro.graph.sharding.strategies import Strategy, strategies, taken
from dask_ferro.policy.estimates import Link


def propagate(
    model: ir.Model,
    types: Types,
    mesh: Mesh,
    given: Mapping[str, Placed],
    *,
    outputs: Mapping[str, Placed] | None = None,
    starts: Mapping[str, Placed] | None = None,
    terms: Collection[str] = (),
    link: Link = FLOW_LINK,
    profile: DeviceProfile = CPU,
) -> Sharding:
    """Return the plan of a model sharded on a mesh.

    Parameters
    ----------
    model : onnx_ir.Model
        In a topological order, without local functions; it is not changed.
    types : mapping of str to ValueType
        From `inference.infer`, with a size for every dimension.
    mesh : Mesh
    given : mapping
        Value name to placement: one placement for a mesh of one axis, a sequence with one for each axis, or a
        mapping from axis name to placement, all other axes being `Replicate`.  Graph inputs and initializers
        start in it; the result of a node is redistributed to it at once, and stays as it is along axes that a mapping
        does not name.  All other inputs are whole.
    outputs : mapping, optional
        The same for graph outputs, as the caller wants them.
    starts : mapping, optional
        The same for graph inputs that come in another layout than the given one, and are redistributed at once.
    terms : collection of str, optional
        Graph outputs whose all-reduces are left to the caller: along an axis on which such an output is not wanted
        split, it may be a Partial sum or mean, if no node needs it complete.
    link : Link
        Between two ranks.
    profile : DeviceProfile
        The speed of a rank.

    Raises
    ------
    ConfigError
        Placements that their values cannot have, all of them.
    UnsupportedOp
        Nodes with random results that differ between ranks, control flow, or a graph that is already sharded.

    Notes
    -----
    The placements are DTensor's (docs.pytorch.org/docs/stable/distributed.tensor.html); column- and row-parallel
    layers (Shoeybi and others 2019, arXiv:1909.08053) are ``Shard(1)`` and ``Shard(0)`` on a weight.
    """
    refuse(model)
    graph, known = model.graph, {value.name: value for value in values(model.graph) if value.name}
    of_inputs, of_outputs = ({v.name: v for v in ends if v.name} for ends in (graph.inputs, graph.outputs))
    wanted = layouts(known, types, mesh, given, "given")
    wanted_out = _fill(layouts(of_outputs, types, mesh, outputs or {}, "outputs"))
    wanted_in = _fill(layouts(of_inputs, types, mesh, starts or {}, "starts"))
    walk = _Propagation(model, types, mesh, wanted, link, profile)
    walk.leave(terms, wanted_out)
    walk.begin(wanted_in)
    for node in walk.nodes:
        walk.take(node)
    ends = tuple(walk.end(value, wanted_out.get(value.name or "")) for value in graph.outputs)
    return Sharding(model, types, mesh, walk.start, ends, tuple(walk.entries), walk.known)


def _fill(wanted: Mapping[str, Request]) -> dict[str, Layout]:
    """Return layouts that are whole along axes that none was asked for."""
    return {name: tuple(p or WHOLE for p in layout) for name, layout in wanted.items()}


# The walk.

# The terms that may be left to the caller, who adds them to others; terms of a maximum cannot be added.
_SUMS = (Partial("sum"), Partial("mean"))


class _Propagation:
    """The layouts that each value has so far, and the entries of the plan."""

    def __init__(
        self,
        model: ir.Model,
        types: Types,
        mesh: Mesh,
        wanted: Mapping[str, Request],
        link: Link,
        profile: DeviceProfile,
    ) -> None:
        self.types, self.mesh, self.wanted, self.link, self.profile = types, mesh, wanted, link, profile
        self.graph = model.graph
        opset = model.opset_imports.get("", 0) or 0
        self.sites = {node: TypedNode(node, types, opset) for node in model.graph}
        self.taken = {node: taken(site) for node, site in self.sites.items()}
        self.nodes = needed(self.taken, model.graph.outputs)
        sources = dict.fromkeys((*model.graph.inputs, *model.graph.initializers.values()))
        closed = _fill(wanted)
        self.start = {v.name or "": closed.get(v.name or "", mesh.whole) for v in sources}
        self.forms: dict[ir.Value, list[Layout]] = {v: [self.start[v.name or ""]] for v in sources}
        # A graph output counts as a reader of its value.
        self.readers = Counter[ir.Value | None](model.graph.outputs)
        for node in self.nodes:
            self.readers.update(set(self.taken[node]))
        # The axes along which an output may stay in terms.
        self.left: dict[ir.Value, frozenset[int]] = {}
        self.entries: list[Entry] = []
        self.known: dict[ir.Value, Numbers] = {}
        # The values that sequence parallel regions read or make in shards, with the axis.
        self.shards = {
            (value, axis)
            for node in self.nodes
            for axis, name in enumerate(mesh.axes)
            for value in ((*self.taken[node], *node.outputs) if name in sequence_of(node) else ())
            if value is not None and self._request(value, axis) == Shard(sequence_of(node)[name])
        }

    def _request(self, value: ir.Value, axis: int) -> Placement | None:
        """Return the placement that the caller gives a value along an axis."""
        layout = self.wanted.get(value.name or "")
        return None if layout is None else layout[axis]

    def leave(self, terms: Collection[str], wanted: Mapping[str, Layout]) -> None:
        """Leave outputs in terms along the axes on which they are not wanted split, or are wanted in terms."""
        for value in self.graph.outputs:
            layout = wanted.get(value.name or "", self.mesh.whole)
            may = (isinstance(p, Partial) or (p == WHOLE and value.name in terms) for p in layout)
            if left := frozenset(axis for axis, is_left in enumerate(may) if is_left):
                self.left[value] = left
        # So may a value of which one linear node makes such an output: a gradient that is widened at last.
        for node in reversed(self.nodes):
            axes = self.left.get(node.outputs[0], frozenset())
            found = rule(self.sites[node]) if axes else None
            for group in () if found is None else found.linear:
                operand = self.taken[node][group[0]]
                if len(group) == 1 and operand is not None and self.readers[operand] == 1:
                    self.left.setdefault(operand, axes)

    def begin(self, starts: Mapping[str, Layout]) -> None:
        """Redistribute the graph inputs that come in other layouts than the given ones."""
        for value in self.graph.inputs:
            if (layout := starts.get(value.name or "")) is not None:
                given, self.start[value.name or ""] = self.start[value.name or ""], layout
                self.forms[value] = [layout]
                self._settle(value, given)

    def take(self, node: ir.Node) -> None:
        """Place one node, redistribute its inputs, and its outputs if the caller placed them."""
        if node.op_type in ("Shape", "Size") and self.taken[node] == (None,):
            self._fold(node)
        else:
            self._place(node)
        for value in node.outputs:
            if (asked := self.wanted.get(value.name or "")) is not None:
                made = self.forms[value][0]
                self._settle(
                    value, tuple(now if p is None else p for now, p in zip(made, asked, strict=True))
                )

    def _settle(self, value: ir.Value, layout: Layout) -> None:
        """Redistribute a value to a layout, from which its readers start, and not from an earlier one."""
        self._bring(value, layout)
        self.forms[value] = [layout]

    def end(self, value: ir.Value, wanted: Layout | None) -> Layout:
        """Return the layout of a graph output: the requested one, else the last one that is not Partial.

        An output that is left in terms keeps them, unless another reader had them reduced already.
        """
        forms = self.forms[value]
        if wanted is None:
            # The last complete layout is the readers' and needs no further redistribution.
            complete = [form for form in forms if not any(isinstance(p, Partial) for p in form)]
            reduced = tuple(WHOLE if isinstance(p, Partial) else p for p in forms[0])
            wanted = complete[-1] if complete else reduced
        if wanted not in forms:
            left = self.left.get(value, frozenset())
            pairs = enumerate(zip(forms[0], wanted, strict=True))
            wanted = tuple(p if i in left and w == WHOLE and p in _SUMS else w for i, (p, w) in pairs)
        self._bring(value, wanted)
        return wanted

    def _place(self, node: ir.Node) -> None:
        work = seconds(node, node_cost(node, self.types), self.profile, types=self.types)
        chosen: list[Strategy] = []
        for axis in range(len(self.mesh.axes)):
            # Chosen axis by axis: all combinations would be strategies ** axes, too many for a mesh of three.
            chosen.append(self._best(node, axis, chosen, work))
        # The placements of each operand by axis become the operand's layout.
        read = zip(*(strategy.inputs for strategy in chosen), strict=True)
        inputs = tuple(
            None if v is None else layout for v, layout in zip(self.taken[node], read, strict=True)
        )
        outputs = tuple(zip(*(strategy.outputs for strategy in chosen), strict=True))
        for value, layout in zip(self.taken[node], inputs, strict=True):
            if value is not None and layout is not None:
                self._bring(value, layout)
        once: set[tuple[int, int]] = set()
        for axis, strategy in enumerate(chosen):
            once.update((axis, i) for i in strategy.once)
        # Only axes that split a label divide the work: along the others every rank computes the same.
        share = prod(size for size, s in zip(self.mesh.sizes, chosen, strict=True) if s.label)
        self.entries.append(Compute(node, inputs, outputs, frozenset(once), work / share))
        self.forms.update((v, [layout]) for v, layout in zip(node.outputs, outputs, strict=True))

    def _fold(self, node: ir.Node) -> None:
        site = self.sites[node]
        if node.op_type == "Size":
            array = np.array(site.size(0), np.int64)
        else:
            cut = slice(site.attribute("start", 0), site.attribute("end", None))
            array = np.array(site.shape(0)[cut], np.int64)
        self.forms[node.outputs[0]] = [self.mesh.whole]
        self.known[node.outputs[0]] = array

    def _bring(self, value: ir.Value, target: Layout) -> None:
        forms = self.forms[value]
        if target in forms:
            return
        nbytes = value_bytes(type_of(value, self.types))
        routes = [(form, steps(form, target)) for form in forms if leads(form, target)]
        if not routes:
            raise ConfigError(
                f"{value.name!r} is {text(forms[0])} and wanted as {text(target)}: a complete value is not "
                "split into terms; want Replicate() or Shard(dim)"
            )
        priced = [(total(way, form, nbytes, self.mesh, self.link), form, way) for form, way in routes]
        cost, source, way = min(priced, key=lambda one: (one[0].seconds, one[0].bytes))
        self.entries.append(LayoutChange(value, source, target, way, cost))
        now = source
        # Later readers may start from the intermediate layouts too.
        for step in way:
            now = step.after(now)
            if now not in forms:
                forms.append(now)

    # One axis.

    def _best(self, node: ir.Node, axis: int, chosen: Sequence[Strategy], work: float) -> Strategy:
        ranked: list[tuple[bool, float, int, Strategy]] = []
        for strategy in strategies(self.sites[node], self.mesh.sizes[axis], self._parts(chosen)):
            if not self._is_meant(node, strategy, axis):
                continue
            # An operand that is read twice in one placement is redistributed once.
            operands = dict.fromkeys(zip(self.taken[node], strategy.inputs, strict=True))
            moved = [self._moved(value, p, axis) for value, p in operands if value is not None]
            if inf in moved:
                continue
            # A Partial result still needs an all-reduce; without this term it would always be cheapest.
            owed = self._owed(zip(node.outputs, strategy.outputs, strict=True), axis)
            held = self._owed(zip(self.taken[node], strategy.inputs, strict=True), axis)
            is_free = not any(moved) and not (0 < held < owed)
            share = self.mesh.sizes[axis] if strategy.label else 1
            # The position in the table breaks ties, so that strategies themselves are never compared.
            ranked.append((not is_free, sum(moved) + work / share + owed, len(ranked), strategy))
        return min(ranked)[-1]

    def _parts(self, chosen: Sequence[Strategy]) -> dict[str, int]:
        """Return the number of parts into which the axes chosen so far split each label."""
        parts: dict[str, int] = {}
        for strategy, size in zip(chosen, self.mesh.sizes, strict=False):
            if strategy.label:
                parts[strategy.label] = parts.get(strategy.label, 1) * size
        return parts

    def _is_meant(self, node: ir.Node, strategy: Strategy, axis: int) -> bool:
        """Return whether a strategy is whole, or what was asked for: by a layout of an operand, or by a result's."""
        pairs = zip(self.taken[node], strategy.inputs, strict=True)
        read = [(v, p) for v, p in pairs if v is not None and p != WHOLE]
        if not read:
            return True
        made = list(zip(node.outputs, strategy.outputs, strict=True))
        lies = any(form[axis] == p for v, p in read for form in self.forms[v])
        asked = any(isinstance(p, Shard) and self._request(v, axis) == p for v, p in made)
        # Terms that others need complete are reduced for all of them.
        passed = all(self.readers[v] == 1 for v, p in read if isinstance(p, Partial))
        # Terms that are rounded are added without another rounding only where that is left to the caller.
        rounded = strategy.rounds and self._owed(made, axis) > 0
        # The shards of a sequence parallel region are for its own nodes.
        marked = any((v, axis) in self.shards and self._request(v, axis) == p for v, p in read)
        foreign = marked and list(self.mesh.axes)[axis] not in sequence_of(node)
        return (lies or asked) and passed and not rounded and not foreign

    def _moved(self, value: ir.Value, wanted: Placement, axis: int) -> float:
        """Return the least seconds of placing a value along an axis, while it stays along the others; or infinity."""
        nbytes, ranks = value_bytes(type_of(value, self.types)), self.mesh.sizes[axis]
        ways = ((kind(form[axis], wanted), form) for form in self.forms[value])
        return min(
            (
                price(found, nbytes / shards(form, self.mesh, without=(axis,)), ranks, self.link).seconds
                for found, form in ways
                if found is not None
            ),
            default=inf,
        )

    def _owed(self, pairs: Iterable[tuple[ir.Value | None, Placement]], axis: int) -> float:
        """Return the seconds of the all-reduces that Partial values still need, but those left to the caller."""
        return sum(
            price("AllReduce", value_bytes(type_of(v, self.types)), self.mesh.sizes[axis], self.link).seconds
            for v, p in pairs
            if v is not None and isinstance(p, Partial) and not (p in _SUMS and axis in self.left.get(v, ()))
        )
