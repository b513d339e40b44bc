"""Strategies for a node on equal shards, derived from the labels of its operator.

A node without labels, or with a shape that is not known, is computed whole on each rank, which is always correct.
Strategies are for one axis of a mesh, after those of the axes before it; `redistribute` has the costs, and `propagate`
chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from dask_ferro.graph.ops.labels import Rule, TypedNode
from dask_ferro.graph.ops.lookup import rule
from dask_ferro.graph.sharding.placements import WHOLE, Partial, Placement, Shard

# The number of parts into which earlier axes of a mesh split a label.
Parts: TypeAlias = Mapping[str, int]
_WHOLE_LABELS: Parts = MappingProxyType({})


class Strategy(NamedTuple):
    """A placement for each input and output, the optional inputs that rank 0 alone adds, and the split label."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    once: tuple[int, ...] = ()
    label: str | None = None

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def strategies(o: TypedNode, ranks: int, parts: Parts = _WHOLE_LABELS) -> tuple[Strategy, ...]:
    """Return the correct strategies for a node on `ranks` equal shards; the first is whole on each rank.

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
    return (
        (whole,) if found is None else (whole, *_by_label(o, found, ranks, parts), *_by_linearity(o, found))
    )


def _by_label(o: TypedNode, found: Rule, ranks: int, parts: Parts) -> Iterator[Strategy]:
    for label in dict.fromkeys(filter(None, chain.from_iterable(found.inputs))):
        reduced = any(label not in dims for dims in found.outputs)
        count = ranks * parts.get(label, 1)
        if (reduced and found.reduction is None) or not _divides(o, found, label, count):
            continue
        rest: Placement = Partial(found.reduction) if found.reduction else WHOLE
        inputs = [_placed(dims, label, WHOLE) for dims in found.inputs][: len(o.node.inputs)]
        inputs += [WHOLE] * (len(o.node.inputs) - len(inputs))
        outputs = tuple(_placed(dims, label, rest) for dims in found.outputs)
        yield Strategy(tuple(inputs), outputs, _once(o, found) if reduced else (), label)


def _placed(dims: tuple[str | None, ...], label: str, otherwise: Placement) -> Placement:
    return Shard(dims.index(label)) if label in dims else otherwise


def _by_linearity(o: TypedNode, found: Rule) -> Iterator[Strategy]:
    for group in found.linear:
        for reduction in found.commutes:
            term = Partial(reduction)
            inputs = tuple(term if i in group else WHOLE for i in range(len(o.node.inputs)))
            # The summand of a mean is added by every rank, that of a sum by one.
            once = _once(o, found) if reduction == "sum" else ()
            yield Strategy(inputs, (term,) * len(o.node.outputs), once)


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
