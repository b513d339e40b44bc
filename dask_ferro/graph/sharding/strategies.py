"""Strategies for a node on shards, derived from the labels of its operator.

A label is split into unequal parts only if every dimension that has it has one size, so that all operands are cut in
the same places, if no attribute counts its parts, and if no mean is taken over it.  All other labels need equal parts.

A node without labels, or with a shape that is not known, is computed whole on each rank, which is always correct.
Strategies are for one axis of a mesh, after those of the axes before it; `redistribute` has the costs, and `propagate`
chooses.  `TermReaders` follows terms through linear nodes to the values at which they would have to be reduced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import onnx_ir as ir

from dask_ferro.graph.ir.nodes import Types, type_of, value_bytes
from dask_ferro.graph.ops.labels import Rule, TypedNode
from dask_ferro.graph.ops.lookup import rule
from dask_ferro.graph.sharding.node_placement import sequence_of
from dask_ferro.graph.sharding.placements import WHOLE, Partial, Placement, Shard
from dask_ferro.graph.sharding.redistribute import Layout, Mesh

# The number of parts into which earlier axes of a mesh split a label.
Parts: TypeAlias = Mapping[str, int]
_WHOLE_LABELS: Parts = MappingProxyType({})
# Stands for the label of a dimension that indices pick along, which has none.
_PICKED = "picked"


class Strategy(NamedTuple):
    """A placement for each input and output.

    Attributes
    ----------
    inputs, outputs : tuple of Placement
    once : tuple of int
        The inputs that rank 0 alone adds.
    label : str or None
        The label that is split; None if none is.
    is_even : bool
        Whether the parts of the label are equal.
    rounds : bool
        Whether each term of the result is rounded, as `Rule.rounds`.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    once: tuple[int, ...] = ()
    label: str | None = None
    is_even: bool = True
    rounds: bool = False

    @property
    def picks(self) -> bool:
        """Whether each rank picks, or adds, for the indices in its own range alone."""
        return self.label == _PICKED

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def strategies(o: TypedNode, ranks: int, parts: Parts = _WHOLE_LABELS) -> tuple[Strategy, ...]:
    """Return the correct strategies for a node on `ranks` shards; the first is whole on each rank.

    Parameters
    ----------
    o : TypedNode
        With the global shapes.
    ranks : int
        At least 1.
    parts : mapping of str to int, optional
        The number of parts into which earlier axes of the mesh split a label.
    """
    return strategies_of(o, rule(o) if ranks > 1 else None, ranks, parts)


def strategies_of(
    o: TypedNode, found: Rule | None, ranks: int, parts: Parts = _WHOLE_LABELS
) -> tuple[Strategy, ...]:
    """Return the correct strategies for a node with these labels."""
    whole = Strategy((WHOLE,) * len(o.node.inputs), (WHOLE,) * len(o.node.outputs))
    if found is None:
        return (whole,)
    by_label, by_pick = _by_label(o, found, ranks, parts), _by_pick(o, found, ranks, parts)
    return whole, *by_label, *by_pick, *_by_linearity(o, found)


def _by_label(o: TypedNode, found: Rule, ranks: int, parts: Parts) -> Iterator[Strategy]:
    for label in dict.fromkeys(filter(None, chain.from_iterable(found.inputs))):
        reduced = any(label not in dims for dims in found.outputs)
        count = ranks * parts.get(label, 1)
        is_even = _divides(o, found, label, count)
        if (reduced and found.reduction is None) or not (is_even or _is_cut_alike(o, found, label, count)):
            continue
        rest: Placement = Partial(found.reduction) if found.reduction else WHOLE
        inputs = [_placed(dims, label, WHOLE) for dims in found.inputs][: len(o.node.inputs)]
        inputs += [WHOLE] * (len(o.node.inputs) - len(inputs))
        outputs = tuple(_placed(dims, label, rest) for dims in found.outputs)
        once = _once(o, found) if reduced else ()
        yield Strategy(tuple(inputs), outputs, once, label=label, is_even=is_even)


def _placed(dims: tuple[str | None, ...], label: str, otherwise: Placement) -> Placement:
    return Shard(dims.index(label)) if label in dims else otherwise


def _by_pick(o: TypedNode, found: Rule, ranks: int, parts: Parts) -> Iterator[Strategy]:
    if (pick := found.pick) is None:
        return
    if o.shape(0)[pick.dim] >= ranks * parts.get(_PICKED, 1):
        data = Shard(pick.dim)
        others = (WHOLE,) * (len(o.node.inputs) - 1)
        # Parts may be unequal: of the operands the data alone is cut.
        yield Strategy((data, *others), (Partial() if pick.updates is None else data,), label=_PICKED)


def _by_linearity(o: TypedNode, found: Rule) -> Iterator[Strategy]:
    for group in found.linear:
        for reduction in found.commutes:
            term = Partial(reduction)
            inputs = tuple(term if i in group else WHOLE for i in range(len(o.node.inputs)))
            # The summand of a mean is added by every rank, that of a sum by one.
            once = _once(o, found) if reduction == "sum" else ()
            yield Strategy(inputs, (term,) * len(o.node.outputs), once, rounds=found.rounds)


def _once(o: TypedNode, found: Rule) -> tuple[int, ...]:
    return tuple(position for position in found.once if o.has(position))


def _divides(o: TypedNode, found: Rule, label: str, ranks: int) -> bool:
    """Return whether `ranks` divides every size with the label, and the attributes that count its parts."""
    sizes = [*_sizes(o, found, label), *_counts(o, found, label)]
    return all(size >= ranks and size % ranks == 0 for size in sizes)


def _is_cut_alike(o: TypedNode, found: Rule, label: str, ranks: int) -> bool:
    """Return whether unequal parts of a label are in the same places everywhere, and may be reduced."""
    # The mean of the means of unequal parts is another number.
    averaged = found.reduction == "mean" and any(label not in dims for dims in found.outputs)
    sizes = set(_sizes(o, found, label))
    return not averaged and not _counts(o, found, label) and len(sizes) == 1 and min(sizes) >= ranks


def _sizes(o: TypedNode, found: Rule, label: str) -> list[int]:
    """Return the size of every dimension with a label."""
    operands = [(o.shape(i), dims) for i, dims in enumerate(found.inputs)]
    results = [(o.out_shape(i), dims) for i, dims in enumerate(found.outputs)]
    return [shape[dims.index(label)] for shape, dims in operands + results if label in dims[: len(shape)]]


def _counts(o: TypedNode, found: Rule, label: str) -> list[int]:
    """Return the attributes that count parts of a label."""
    return [
        int(o.attribute(name, 1))
        for name, (position, dim) in found.counts.items()
        if found.inputs[position][dim] == label
    ]


# What a node reads.


def taken(node: ir.Node, types: Types, opset: int) -> tuple[ir.Value | None, ...]:
    """Return the inputs that a node reads; None for one left out, or known from the types (a Reshape's shape)."""
    site = TypedNode(node, types, opset)
    found = rule(site)
    skipped = None if found is None else found.shape
    if node.op_type in ("Shape", "Size") and site.is_known():
        skipped = 0
    return tuple(
        None if value is None or not value.name or i == skipped else value
        for i, value in enumerate(node.inputs)
    )


def sequence_shards(
    nodes: Sequence[ir.Node],
    read: Mapping[ir.Node, Sequence[ir.Value | None]],
    wanted: Mapping[str, Layout],
    mesh: Mesh,
) -> dict[ir.Value, frozenset[int]]:
    """Return the axes along which each value of a sequence parallel region is read in shards there alone."""
    found: dict[ir.Value, frozenset[int]] = {}
    for node in nodes:
        marks = sequence_of(node)
        split = [(i, Shard(marks[axis])) for i, axis in enumerate(mesh.axes) if axis in marks]
        for value in (*read[node], *node.outputs) if split else ():
            layout = None if value is None else wanted.get(value.name or "")
            if value is not None and layout is not None:
                axes = {i for i, placement in split if layout[i] == placement}
                found[value] = found.get(value, frozenset()) | axes
    return found


# Readers of terms.

# The terms that may be left to the caller, who adds them to others; terms of a maximum cannot be added.
SUMS = (Partial("sum"), Partial("mean"))
# The most linear nodes that terms are followed through: a sum of residuals or of tied gradients is a few.
_FAR = 64


class _Way(NamedTuple):
    """The values that linear nodes make of terms, and those where these have to be reduced.

    Where a node rounds terms, or makes larger ones than it reads, they are reduced before it unless they are left.
    """

    values: frozenset[ir.Value]
    ends: frozenset[ir.Value]
    is_direct: bool


class TermReaders:
    """The readers of each value, and how far linear nodes pass its terms on.

    Parameters
    ----------
    nodes : sequence of onnx_ir.Node
        In topological order.
    taken : mapping of onnx_ir.Node to sequence of onnx_ir.Value
        The values that each node reads; None for an operand left out.
    outputs : sequence of onnx_ir.Value
        Each counts as a reader of its value.
    types, opset
        As `TypedNode` takes them.
    forms : mapping of onnx_ir.Value to sequence of Layout
        The layouts that each value has, as they are found.

    Attributes
    ----------
    left : dict of onnx_ir.Value to frozenset of int
        The axes along which an output may stay in terms.
    """

    def __init__(
        self,
        nodes: Sequence[ir.Node],
        taken: Mapping[ir.Node, Sequence[ir.Value | None]],
        outputs: Sequence[ir.Value],
        types: Types,
        opset: int,
        forms: Mapping[ir.Value, Sequence[Layout]],
    ) -> None:
        self._taken, self._outputs, self._types, self._opset = taken, set(outputs), types, opset
        self._nodes, self._forms = nodes, forms
        self._count: Counter[ir.Value | None] = Counter(outputs)
        # Positions, which sort in the order of the graph.
        self._of: dict[ir.Value | None, list[int]] = {}
        for position, node in enumerate(nodes):
            read = set(taken[node])
            self._count.update(read)
            for value in read:
                self._of.setdefault(value, []).append(position)
        self._ways: dict[tuple[ir.Value, Partial, int, bool], _Way] = {}
        self.left: dict[ir.Value, frozenset[int]] = {}

    def pass_on(self, value: ir.Value, term: Partial, axis: int) -> bool:
        """Return whether readers may take a value in terms: no more is reduced then than the value, once."""
        if self._count[value] == 1:
            return True
        way, most = self._way(value, term, axis), self._bytes(value)
        meet = len(way.ends) == 1 and value not in way.ends and way.is_direct
        return not way.ends or (meet and all(self._bytes(v) <= most for v in way.values))

    def leave(self, value: ir.Value, term: Partial, axis: int) -> bool:
        """Return whether all that linear nodes make of a value's terms is left in terms to the caller."""
        return bool(self.left) and term in SUMS and not self._way(value, term, axis).ends

    def _way(self, value: ir.Value, term: Partial, axis: int) -> _Way:
        # Before a value is computed, the others that are added to it may not be there yet.
        key = value, term, axis, self._is_terms(value, term, axis)
        if key not in self._ways:
            self._ways[key] = self._followed(value, term, axis)
        return self._ways[key]

    def _followed(self, value: ir.Value, term: Partial, axis: int) -> _Way:
        held, ends, seen, is_direct = {value}, set[ir.Value](), set[int](), True
        waiting = list(self._of.get(value, ()))
        while waiting:
            position = heappop(waiting)
            if position in seen:
                continue
            seen.add(position)
            node = self._nodes[position]
            found = self._passing(node, held, term, axis) if len(seen) <= _FAR else None
            if found is None:
                ends.update(held.intersection(self._taken[node]))
                continue
            read = {
                v for v in self._taken[node] if v is not None and (v in held or self._is_terms(v, term, axis))
            }
            made = sum(map(self._bytes, node.outputs))
            is_direct &= not found.rounds and made <= sum(map(self._bytes, read))
            # Terms that are added to others stay in terms with them, so their readers count, too.
            new = {*read, *node.outputs} - held
            held |= new
            for reader in chain.from_iterable(self._of.get(value, ()) for value in new):
                heappush(waiting, reader)
        ends |= {v for v in held & self._outputs if axis not in self.left.get(v, ())}
        return _Way(frozenset(held), frozenset(ends), is_direct)

    def _passing(self, node: ir.Node, held: set[ir.Value], term: Partial, axis: int) -> Rule | None:
        """Return the labels of a node that makes terms of its operands in `held` and others that are terms.

        All other operands have to be there complete, or reading terms would cost moving them.
        """
        found = rule(TypedNode(node, self._types, self._opset))
        if found is None or term.reduction not in found.commutes:
            return None
        read = [(i, value) for i, value in enumerate(self._taken[node]) if value is not None]
        mine = {i for i, value in read if value in held}
        terms = mine | {i for i, value in read if self._is_terms(value, term, axis)}
        given = {i for i, _ in read}
        complete = {i for i, value in read if self._is_complete(value, axis)}
        groups = (given.intersection(group) for group in found.linear)
        is_linear = any(mine <= group <= terms and given - group <= complete for group in groups)
        return found if is_linear else None

    def _is_complete(self, value: ir.Value, axis: int) -> bool:
        return any(form[axis] == WHOLE for form in self._forms.get(value, ()))

    def _is_terms(self, value: ir.Value, term: Partial, axis: int) -> bool:
        """Return whether a value has been computed in such terms, and has not been reduced since."""
        forms = self._forms.get(value, ())
        return bool(forms) and all(form[axis] == term for form in forms)

    def _bytes(self, value: ir.Value) -> float:
        return value_bytes(type_of(value, self._types))
