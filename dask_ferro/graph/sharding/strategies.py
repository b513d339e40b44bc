"""Derive strategies for a node on shards from the labels of its operator.

A label is split into equal parts of every dimension that has it, and of the things that attributes count.  A node
without labels, or with a shape that is not known, is computed whole on each rank, which is always correct.
Strategies are for one axis of a mesh, after the strategies of the axes before it; `redistribute` has the costs, and
`propagate` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import onnx_ir as ir

from dask_ferro.graph.ops.labels import Rule, TypedNode
from dask_ferro.graph.ops.table import rule
from dask_ferro.graph.sharding.placements import WHOLE, Partial, Placement, Shard
from dask_ferro.graph.sharding.requests import divides

# The number of parts into which earlier axes of a mesh split a label.
Parts: TypeAlias = Mapping[str, int]


class Strategy(NamedTuple):
    """A placement for each input and output; `once` has the inputs that only rank 0 adds, `label` the split label."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    once: tuple[int, ...] = ()
    label: str | None = None

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def strategies(o: TypedNode, ranks: int, parts: Parts = MappingProxyType({})) -> tuple[Strategy, ...]:
    """Return the correct strategies for a node of global shapes on `ranks` shards; the first is whole on each rank."""
    labels = rule(o) if ranks > 1 else None
    whole = Strategy((WHOLE,) * len(o.node.inputs), (WHOLE,) * len(o.node.outputs))
    if labels is None:
        return (whole,)
    return whole, *_by_label(o, labels, ranks, parts), *_by_linearity(o, labels)


def _by_label(o: TypedNode, labels: Rule, ranks: int, parts: Parts) -> Iterator[Strategy]:
    for label in dict.fromkeys(filter(None, chain.from_iterable(labels.inputs))):
        is_reduced = any(label not in dims for dims in labels.outputs)
        if is_reduced and labels.reduction is None:
            continue
        if not _divides(o, labels, label, ranks * parts.get(label, 1)):
            continue
        rest: Placement = Partial(labels.reduction) if labels.reduction else WHOLE
        inputs = [_shard(dims, label, WHOLE) for dims in labels.inputs][: len(o.node.inputs)]
        inputs += [WHOLE] * (len(o.node.inputs) - len(inputs))
        outputs = tuple(_shard(dims, label, rest) for dims in labels.outputs)
        yield Strategy(tuple(inputs), outputs, _single_axes(o, labels) if is_reduced else (), label)


def _shard(dims: tuple[str | None, ...], label: str, otherwise: Placement) -> Placement:
    return Shard(dims.index(label)) if label in dims else otherwise


def _by_linearity(o: TypedNode, labels: Rule) -> Iterator[Strategy]:
    for group in labels.linear:
        for reduction in labels.commutes:
            term = Partial(reduction)
            inputs = tuple(term if i in group else WHOLE for i in range(len(o.node.inputs)))
            # Every rank adds the summand of a mean; one rank adds the summand of a sum.
            once = _single_axes(o, labels) if reduction == "sum" else ()
            yield Strategy(inputs, (term,) * len(o.node.outputs), once)


def _single_axes(o: TypedNode, labels: Rule) -> tuple[int, ...]:
    return tuple(position for position in labels.once if o.has(position))


def _divides(o: TypedNode, labels: Rule, label: str, ranks: int) -> bool:
    """Return whether `ranks` divides every size with the label, and the attributes that count its parts."""
    operands = [(o.shape(i), dims) for i, dims in enumerate(labels.inputs)]
    results = [(o.out_shape(i), dims) for i, dims in enumerate(labels.outputs)]
    sizes = [shape[dims.index(label)] for shape, dims in operands + results if label in dims[: len(shape)]]
    sizes += [
        int(o.attribute(name, 1))
        for name, (position, dim) in labels.counts.items()
        if labels.inputs[position][dim] == label
    ]
    return all(divides(ranks, size) for size in sizes)


def operands(o: TypedNode) -> tuple[ir.Value | None, ...]:
    """Return the inputs that a node reads; None: omitted, or known from the types (a Reshape's shape)."""
    labels = rule(o)
    skipped = None if labels is None else labels.shape
    if o.node.op_type in ("Shape", "Size") and o.is_known:
        skipped = 0
    return tuple(
        None if value is None or not value.name or i == skipped else value
        for i, value in enumerate(o.node.inputs)
    )
