"""Strategies for a node on shards, derived from the labels of its operator.

A label is split into equal parts of every dimension that has it, and of what attributes count.  A node without labels,
or with a shape that is not known, is computed whole on each rank, which is always correct.  Strategies are for one axis
of a mesh, after those of the axes before it; `redistribute` has the costs, and `propagate` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import onnx_ir as ir

from dask_ferro.graph.ops.labels import Rule, TypedNode
from dask_ferro.graph.ops.table import rule
from dask_ferro.graph.sharding.given import divides
from dask_ferro.graph.sharding.placements import WHOLE, Partial, Placement, Shard

# The number of parts into which earlier axes of a mesh split a label.
Parts: TypeAlias = Mapping[str, int]
_WHOLE_LABELS: Parts = MappingProxyType({})


class Strategy(NamedTuple):
    """A placement for each input and output.

    Attributes
    ----------
    inputs, outputs : tuple of Placement
    once : tuple of int
        The inputs that rank 0 alone adds.
    label : str or None
        The label that is split; None if none is.
    rounds : bool
        Whether each term of the result is rounded, as `Rule.rounds`.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    once: tuple[int, ...] = ()
    label: str | None = None
    rounds: bool = False

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
    found = rule(o) if ranks > 1 else None
    whole = Strategy((WHOLE,) * len(o.node.inputs), (WHOLE,) * len(o.node.outputs))
    if found is None:
        return (whole,)
    return whole, *_by_label(o, found, ranks, parts), *_by_linearity(o, found)


def _by_label(o: TypedNode, found: Rule, ranks: int, parts: Parts) -> Iterator[Strategy]:
    for label in dict.fromkeys(filter(None, chain.from_iterable(found.inputs))):
        reduced = any(label not in dims for dims in found.outputs)
        is_split = _divides(o, found, label, ranks * parts.get(label, 1))
        if (reduced and found.reduction is None) or not is_split:
            continue
        rest: Placement = Partial(found.reduction) if found.reduction else WHOLE
        inputs = [_placed(dims, label, WHOLE) for dims in found.inputs][: len(o.node.inputs)]
        inputs += [WHOLE] * (len(o.node.inputs) - len(inputs))
        outputs = tuple(_placed(dims, label, rest) for dims in found.outputs)
        once = _once(o, found) if reduced else ()
        yield Strategy(tuple(inputs), outputs, once, label=label)


def _placed(dims: tuple[str | None, ...], label: str, otherwise: Placement) -> Placement:
    return Shard(dims.index(label)) if label in dims else otherwise


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
    operands = [(o.shape(i), dims) for i, dims in enumerate(found.inputs)]
    results = [(o.out_shape(i), dims) for i, dims in enumerate(found.outputs)]
    sizes = [shape[dims.index(label)] for shape, dims in operands + results if label in dims[: len(shape)]]
    sizes += [
        int(o.attribute(name, 1))
        for name, (position, dim) in found.counts.items()
        if found.inputs[position][dim] == label
    ]
    return all(divides(ranks, size) for size in sizes)


# What a node reads.


def taken(site: TypedNode) -> tuple[ir.Value | None, ...]:
    """Return the inputs that a node reads; None for one left out, or known from the types (a Reshape's shape)."""
    node, found = site.node, rule(site)
    skipped = None if found is None else found.shape
    if node.op_type in ("Shape", "Size") and site.is_known:
        skipped = 0
    return tuple(
        None if value is None or not value.name or i == skipped else value
        for i, value in enumerate(node.inputs)
    )
