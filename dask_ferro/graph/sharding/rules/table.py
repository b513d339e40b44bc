"""The placement table: for each kind of operator, the right ways of computing it on equal shards.

What has no row, or a shape that is not known, is computed whole on each rank, which is always right.  This
speaks of one axis of a mesh; what moving costs is `redistribute`'s, and which strategy is taken `propagate`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.sharding.placements import WHOLE, Partial, Placement, Row, Rule, Shard, Site
from dask_ferro.graph.sharding.rules import layout, math

TABLE: Mapping[str, Row] = {**math.TABLE, **layout.TABLE}


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


def rule(o: Site) -> Rule | None:
    """Return what the table says of a node; None if there is no row, or a shape is not known."""
    row = TABLE.get(o.node.op_type) if o.node.domain in STANDARD_DOMAINS else None
    return row(o) if row is not None and o.is_known() else None


def strategies(o: Site, ranks: int) -> tuple[Strategy, ...]:
    """Return the right ways of computing a node on `ranks` equal shards; the first is whole on each rank.

    Parameters
    ----------
    o : Site
        With the global shapes.
    ranks : int
        At least 1.
    """
    whole = Strategy((WHOLE,) * len(o.node.inputs), (WHOLE,) * len(o.node.outputs))
    found = rule(o) if ranks > 1 else None
    return (whole,) if found is None else (whole, *_by_label(o, found, ranks), *_by_linearity(o, found))


def _by_label(o: Site, found: Rule, ranks: int) -> Iterator[Strategy]:
    for label in dict.fromkeys(x for dims in found.inputs for x in dims if x is not None):
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


def _by_linearity(o: Site, found: Rule) -> Iterator[Strategy]:
    for group in found.linear:
        for reduction in found.commutes:
            term = Partial(reduction)
            inputs = tuple(term if i in group else WHOLE for i in range(len(o.node.inputs)))
            # Each rank adds what is to be added to a mean; to a sum, one of them does.
            once = _once(o, found) if reduction == "sum" else ()
            yield Strategy(inputs, (term,) * len(o.node.outputs), once)


def _once(o: Site, found: Rule) -> tuple[int, ...]:
    return tuple(position for position in found.once if o.has(position))


def _divides(o: Site, found: Rule, label: str, ranks: int) -> bool:
    """Whether `ranks` divides every size that has the label, and what counts parts of it."""
    sides = ((o.shape, found.inputs), (o.out_shape, found.outputs))
    sizes = [
        size
        for shape_of, operands in sides
        for position, dims in enumerate(operands)
        for size, name in zip(shape_of(position), dims, strict=False)
        if name == label
    ]
    sizes += [
        int(o.attribute(name, 1))
        for name, (position, dim) in found.counts.items()
        if found.inputs[position][dim] == label
    ]
    return all(size >= ranks and size % ranks == 0 for size in sizes)
