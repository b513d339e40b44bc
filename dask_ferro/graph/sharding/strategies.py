"""Strategies for a node on shards, derived from the labels of its operator.

A label is split into unequal parts only if every dimension that has it has one size, so that all operands are cut in
the same places, if no attribute counts its parts, and if no mean is taken over it.  All other labels need equal parts.

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
# In place of a label, of which a dimension has none along which indices pick.
_PICKED = "picked"


class Strategy(NamedTuple):
    """A placement for each input and output, the optional inputs that rank 0 alone adds, and the split label."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    once: tuple[int, ...] = ()
    label: str | None = None
    is_even: bool = True

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
            yield Strategy(inputs, (term,) * len(o.node.outputs), once)


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
