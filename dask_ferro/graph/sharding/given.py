"""Checks of a sharding's inputs: of the graph, and of the placements asked for its values.

The checked layouts have one form: a placement for each axis of the mesh, dimensions counted from the front, and
`Replicate` on axes of one rank.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from dask_ferro.errors import ConfigError, UnsupportedOp
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.ir.inference import values
from dask_ferro.graph.ir.nodes import Types, bodies, type_of
from dask_ferro.graph.ops.labels import REDUCTIONS
from dask_ferro.graph.ops.table import facts_of
from dask_ferro.graph.sharding.placements import WHOLE, Partial, Placement, Replicate, Shard
from dask_ferro.graph.sharding.redistribute import COLLECTIVES, Layout, Mesh, text

Placed: TypeAlias = Placement | Sequence[Placement] | Mapping[str, Placement]


def refuse(model: ir.Model) -> None:
    """Raise `UnsupportedOp` for a graph that cannot be sharded, listing every node that prevents it."""
    problems: list[str] = []
    for node in model.graph:
        problems += [f"node {node.name!r} ({node.op_type}) {why}" for why in _faults(node)]
    if model.functions:
        problems.append(f"the model has {len(model.functions)} local functions; load it with `load`")
    if problems:
        raise UnsupportedOp("cannot shard the graph", problems)


def _faults(node: ir.Node) -> Iterator[str]:
    if bodies(node):
        yield "has bodies; only graphs without control flow are sharded"
    elif node.domain == OWN_DOMAIN and node.op_type in COLLECTIVES:
        yield "is a collective: the graph is sharded already; shard the one that it was made from"
    # Ranks with the same part have to draw the same numbers, or replicas would differ.
    elif facts_of(node).draws == "always" and "seed" not in node.attributes:
        yield "draws random numbers, different ones on each rank; give it the attribute `seed`"
    elif facts_of(node).draws == "in training" and _trains(node):
        yield "drops random elements, different ones on each rank; set its training_mode to false"


def _trains(node: ir.Node) -> bool:
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    tensor = None if mode is None else ir.convenience.get_const_tensor(mode)
    return mode is not None and (tensor is None or bool(tensor.numpy().any()))


def layouts(
    model: ir.Model, types: Types, mesh: Mesh, asked: Mapping[str, Placed], what: str
) -> dict[str, Layout]:
    """Return the requested layouts by value name, or raise `ConfigError` with all impossible ones.

    `what` is "given", for any value of the graph, "starts", for its inputs, or "outputs", for its outputs alone.
    """
    known = {value.name: value for value in values(model.graph) if value.name}
    ends = {value.name or "" for value in model.graph.outputs}
    found: dict[str, Layout] = {}
    problems: list[str] = []
    for name, placed in asked.items():
        if name not in known or (what == "outputs" and name not in ends):
            choices = sorted(ends if what == "outputs" else known)
            close = difflib.get_close_matches(name, choices, 1) or choices[:8]
            problems.append(f"{name!r}: no such value in the model; it has {', '.join(map(repr, close))}")
            continue
        rank = len(type_of(known[name], types).shape or ())
        layout, wrong = _layout(placed, mesh, rank)
        may_be_partial = what == "outputs" or known[name].is_graph_input()
        wrong = wrong or list(_misfits(layout, types, known[name], mesh, may_be_partial))
        shown = text(layout) if layout else repr(placed)
        problems += [f"{name!r} as {shown}: {each}" for each in wrong]
        if not wrong:
            found[name] = tuple(WHOLE if n == 1 else p for p, n in zip(layout, mesh.sizes, strict=True))
    if problems:
        raise ConfigError("\n".join([f"{what}: impossible placements:", *(f"  - {p}" for p in problems)]))
    return found


def _layout(placed: Placed, mesh: Mesh, rank: int) -> tuple[Layout, list[str]]:
    names = ", ".join(mesh.axes)
    if isinstance(placed, Mapping):
        unknown = [repr(axis) for axis in placed if axis not in mesh.axes]
        if unknown:
            return (), [f"the mesh has no axis {', '.join(unknown)}; its axes are {names}"]
        layout = tuple(placed.get(axis, WHOLE) for axis in mesh.axes)
    elif isinstance(placed, Sequence):
        layout = tuple(placed)
    else:
        layout = (placed,)
    if not all(isinstance(p, Replicate | Shard | Partial) for p in layout):
        return (), ["a placement is Replicate(), Shard(dim) or Partial()"]
    if len(layout) != len(mesh.axes):
        return (), [
            f"want one placement for each axis of the mesh ({names}), or a mapping from axis to placement"
        ]
    return tuple(from_front(p, rank) for p in layout), []


def _misfits(
    layout: Layout, types: Types, value: ir.Value, mesh: Mesh, may_be_partial: bool
) -> Iterator[str]:
    shape = type_of(value, types).shape
    kinds = {p.reduction for p in layout if isinstance(p, Partial)}
    # With different reductions the result would depend on which axis is reduced first.
    if len(kinds) > 1 and kinds != {"sum", "mean"}:
        yield f"terms of {' and '.join(sorted(kinds))} do not mix; want one reduction on all axes"
    ranks: Counter[int] = Counter()
    for placement, size in zip(layout, mesh.sizes, strict=True):
        if isinstance(placement, Partial):
            if placement.reduction not in REDUCTIONS:
                yield f"no reduction {placement.reduction!r}; want one of {', '.join(REDUCTIONS)}"
            if not may_be_partial:
                yield "only inputs and outputs of the graph may be Partial"
        elif isinstance(placement, Shard):
            ranks[placement.dim] = (ranks[placement.dim] or 1) * size
    for dim, count in ranks.items():
        yield from _unsplit(dim, shape, count)


def from_front(placement: Placement, rank: int) -> Placement:
    """Return a placement with its dimension counted from the front; one that it does not have is left as it is."""
    if isinstance(placement, Shard) and -rank <= placement.dim < 0:
        return Shard(placement.dim + rank)
    return placement


def _unsplit(dim: int, shape: Sequence[int | str | None] | None, ranks: int) -> Iterator[str]:
    if shape is None or not 0 <= dim < len(shape):
        yield f"its shape is {shape}, so there is no dimension {dim}"
    elif not isinstance(shape[dim], int):
        yield f"its dimension {dim} is {shape[dim]!r}; give it a size, as in dims={{{shape[dim]!r}: {8 * ranks}}}"
    elif not divides(ranks, shape[dim]):
        yield f"its dimension {dim} is {shape[dim]}, which {ranks} ranks do not divide; pad it, or leave it whole"


def divides(ranks: int, size: object) -> bool:
    """Return whether a size is known, and ranks have equal parts of it."""
    return isinstance(size, int) and size >= ranks and size % ranks == 0


def unnamed_axes(mesh: Mesh, asked: Mapping[str, Placed]) -> dict[str, frozenset[int]]:
    """Return the axes that are not named where a value is placed by axis, by the value's name."""
    found: dict[str, frozenset[int]] = {}
    for name, placed in asked.items():
        if isinstance(placed, Mapping):
            found[name] = frozenset(i for i, axis in enumerate(mesh.axes) if axis not in placed)
    return found
