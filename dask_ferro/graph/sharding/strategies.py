"""Strategies for a node on equal shards, derived from the labels of its operator.

A node without labels, or with a shape that is not known, is computed whole on each rank, which is always correct.
Strategies are for one axis of a mesh; `redistribute` has the costs, and `propagate` chooses.  `TermReaders` follows
terms through linear nodes to the values at which they would have to be reduced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.graph.ir.nodes import Types, type_of, value_bytes
from dask_ferro.graph.ops.labels import Rule, TypedNode
from dask_ferro.graph.ops.lookup import rule
from dask_ferro.graph.sharding.placements import WHOLE, Partial, Placement, Shard
from dask_ferro.graph.sharding.redistribute import Layout


class Strategy(NamedTuple):
    """A placement for each input and output, the inputs that rank 0 alone adds, and whether terms are rounded."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    once: tuple[int, ...] = ()
    rounds: bool = False

    @property
    def splits(self) -> bool:
        """Whether each rank does only a part of the work."""
        return any(isinstance(p, Shard) for p in self.inputs + self.outputs)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def strategies(o: TypedNode, ranks: int) -> tuple[Strategy, ...]:
    """Return the correct strategies for a node on `ranks` equal shards; the first is whole on each rank.

    Parameters
    ----------
    o : TypedNode
        With the global shapes.
    ranks : int
        At least 1.
    """
    return strategies_of(o, rule(o) if ranks > 1 else None, ranks)


def strategies_of(o: TypedNode, found: Rule | None, ranks: int) -> tuple[Strategy, ...]:
    """Return the correct strategies for a node with these labels."""
    whole = Strategy((WHOLE,) * len(o.node.inputs), (WHOLE,) * len(o.node.outputs))
    return (whole,) if found is None else (whole, *_by_label(o, found, ranks), *_by_linearity(o, found))


def _by_label(o: TypedNode, found: Rule, ranks: int) -> Iterator[Strategy]:
    for label in dict.fromkeys(filter(None, chain.from_iterable(found.inputs))):
        reduced = any(label not in dims for dims in found.outputs)
        if (reduced and found.reduction is None) or not _divides(o, found, label, ranks):
            continue
        rest: Placement = Partial(found.reduction) if found.reduction else WHOLE
        inputs = [_placed(dims, label, WHOLE) for dims in found.inputs][: len(o.node.inputs)]
        inputs += [WHOLE] * (len(o.node.inputs) - len(inputs))
        outputs = tuple(_placed(dims, label, rest) for dims in found.outputs)
        yield Strategy(tuple(inputs), outputs, _once(o, found) if reduced else ())


def _placed(dims: tuple[str | None, ...], label: str, otherwise: Placement) -> Placement:
    return Shard(dims.index(label)) if label in dims else otherwise


def _by_linearity(o: TypedNode, found: Rule) -> Iterator[Strategy]:
    for group in found.linear:
        for reduction in found.commutes:
            term = Partial(reduction)
            inputs = tuple(term if i in group else WHOLE for i in range(len(o.node.inputs)))
            # The summand of a mean is added by every rank, that of a sum by one.
            once = _once(o, found) if reduction == "sum" else ()
            yield Strategy(inputs, (term,) * len(o.node.outputs), once, found.rounds)


def _once(o: TypedNode, found: Rule) -> tuple[int, ...]:
    return tuple(position for position in found.once if o.has(position))


def _divides(o: TypedNode, found: Rule, label: str, ranks: int) -> bool:
    """Return whether `ranks` divides every size with the label, and the attributes that count its parts."""
    operands = [(o.shape(i), dims) for i, dims in enumerate(found.inputs)]
    results = [(o.out_shape(i), dims) for i, dims in enumerate(found.outputs)]
    sizes = [shape[dims.index(label)] for shape, dims in operands + results if label in dims[: len(shape)]]
    sizes += [
        int(o.attribute(name, 1))
        for name, (position, dim) in found.counts.items()
        if found.inputs[position][dim] == label
    ]
    return all(size >= ranks and size % ranks == 0 for size in sizes)


# Readers of terms.

# Terms that may be left to the caller, who adds them to others: those of a maximum cannot be added.
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
        complete = {i for i, value in read if any(form[axis] == WHOLE for form in self._forms.get(value, ()))}
        groups = (given.intersection(group) for group in found.linear)
        is_linear = any(mine <= group <= terms and given - group <= complete for group in groups)
        return found if is_linear else None

    def _is_terms(self, value: ir.Value, term: Partial, axis: int) -> bool:
        """Return whether a value has been computed in such terms, and has not been reduced since."""
        forms = self._forms.get(value, ())
        return bool(forms) and all(form[axis] == term for form in forms)

    def _bytes(self, value: ir.Value) -> float:
        return value_bytes(type_of(value, self._types))
