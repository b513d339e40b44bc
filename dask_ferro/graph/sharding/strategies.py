"""The right ways of computing a node on equal shards, by the labels of its operator.

What has no labels, or a shape that is not known, is computed whole on each rank, which is always right.  This
speaks of one axis of a mesh; what moving costs is `redistribute`'s, and which strategy is taken `propagate`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from dask_ferro.graph.ops.labels import Rule, TypedNode
from dask_ferro.graph.ops.lookup import rule
from dask_ferro.graph.sharding.placements import WHOLE, Partial, Placement, Shard


class Strategy(NamedTuple):
    """One right way: a placement for each input and output, and the optional inputs that rank 0 alone adds."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    once: tuple[int, ...] = ()

    @property
    def splits(self) -> bool:
        """Whether each rank does a part of the work."""
        return any(isinstance(p, Shard) for p in self.inputs + self.outputs)

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def strategies(o: TypedNode, ranks: int) -> tuple[Strategy, ...]:
    """Return the right ways of computing a node on `ranks` equal shards; the first is whole on each rank.

    Parameters
    ----------
    o : TypedNode
        With the global shapes.
    ranks : int
        At least 1.
    """
    whole = Strategy((WHOLE,) * len(o.node.inputs), (WHOLE,) * len(o.node.outputs))
    found = rule(o) if ranks > 1 else None
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
            # Each rank adds what is to be added to a mean; to a sum, one of them does.
            once = _once(o, found) if reduction == "sum" else ()
            yield Strategy(inputs, (term,) * len(o.node.outputs), once)


def _once(o: TypedNode, found: Rule) -> tuple[int, ...]:
    return tuple(position for position in found.once if o.has(position))


def _divides(o: TypedNode, found: Rule, label: str, ranks: int) -> bool:
    """Whether `ranks` divides every size that has the label, and what counts parts of it."""
    operands = [(o.shape(i), dims) for i, dims in enumerate(found.inputs)]
    results = [(o.out_shape(i), dims) for i, dims in enumerate(found.outputs)]
    sizes = [shape[dims.index(label)] for shape, dims in operands + results if label in dims[: len(shape)]]
    sizes += [
        int(o.attribute(name, 1))
        for name, (position, dim) in found.counts.items()
        if found.inputs[position][dim] == label
    ]
    return all(size >= ranks and size % ranks == 0 for size in sizes)
