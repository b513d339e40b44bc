"""Check a graph before sharding, and the placements that are requested for its values."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from dask_ferro.errors import InputError, UnsupportedOpError
from dask_ferro.graph.ir.domain import OWN_DOMAIN
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.ir.nodes import Types, bodies, type_of
from dask_ferro.graph.ops.table import facts_of
from dask_ferro.graph.sharding.placements import Placement, Shard
from dask_ferro.graph.sharding.redistribute import COLLECTIVES, ByAxis, Mesh, layout_of, text


def refuse(model: ir.Model) -> None:
    """Raise `UnsupportedOpError` for a graph that cannot be sharded, listing every node that prevents it."""
    problems: list[str] = []
    for node in model.graph:
        problems += [f"node {node.name!r} ({node.op_type}) {why}" for why in _faults(node)]
    if model.functions:
        problems.append(f"the model has {len(model.functions)} local functions; load it with `load`")
    if problems:
        raise UnsupportedOpError("cannot shard the graph", problems)


def _faults(node: ir.Node) -> Iterator[str]:
    if bodies(node):
        yield "has bodies; only graphs without control flow are sharded"
    elif node.domain == OWN_DOMAIN and node.op_type in COLLECTIVES:
        yield "is a collective: the graph is sharded already; shard the original graph"
    # Ranks with the same part have to draw the same numbers, or replicas would differ.
    elif facts_of(node).draws == "always" and "seed" not in node.attributes:
        yield "draws random numbers, different ones on each rank; give it the attribute `seed`"
    elif facts_of(node).draws == "in training" and _trains(node):
        yield "drops random elements, different ones on each rank; set its training_mode to false"


def _trains(node: ir.Node) -> bool:
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    tensor = None if mode is None else ir.convenience.get_const_tensor(mode)
    return mode is not None and (tensor is None or bool(tensor.numpy().any()))


def check(
    requests: Mapping[str, ByAxis], values: Mapping[str, ir.Value], types: Types, mesh: Mesh, argument: str
) -> dict[str, ByAxis]:
    """Return requests with dimensions from the front, without axes of one rank; or raise with all impossible ones."""
    checked: dict[str, ByAxis] = {}
    problems: list[str] = []
    for name, placed in requests.items():
        if name not in values:
            close = difflib.get_close_matches(name, values, 1) or sorted(values)[:8]
            problems.append(f"{name!r}: no such value in the model; it has {', '.join(map(repr, close))}")
            continue
        if unknown := [axis for axis in placed if axis not in mesh.axes]:
            problems.append(f"{name!r}: the mesh has no axis {unknown}; its axes are {[*mesh.axes]}")
            continue
        shape = type_of(values[name], types).shape
        placed = {axis: from_front(p, len(shape or ())) for axis, p in placed.items()}
        for dim, ranks in ranks_by_dim(placed, mesh).items():
            if problem := split_problem(dim, shape, ranks):
                problems.append(f"{name!r} as {text(layout_of(placed, mesh))}: {problem}")
        checked[name] = {axis: p for axis, p in placed.items() if mesh.axes[axis] > 1}
    if problems:
        raise InputError("\n".join([f"{argument}: impossible placements:", *(f"  - {p}" for p in problems)]))
    return checked


def from_front(placement: Placement, rank: int) -> Placement:
    """Return a placement with its dimension counted from the front; a dimension that does not exist is unchanged."""
    if isinstance(placement, Shard) and -rank <= placement.dim < 0:
        return Shard(placement.dim + rank)
    return placement


def ranks_by_dim(placed: ByAxis, mesh: Mesh) -> dict[int, int]:
    """Return the number of parts of each dimension that a placement splits."""
    ranks: Counter[int] = Counter()
    for axis, placement in placed.items():
        if isinstance(placement, Shard):
            ranks[placement.dim] = (ranks[placement.dim] or 1) * mesh.axes[axis]
    return dict(ranks)


def split_problem(dim: int, shape: Sequence[Dim] | None, ranks: int) -> str:
    """Return why ranks have no equal parts of a dimension, with a remedy; "" if they have."""
    if shape is None or not 0 <= dim < len(shape):
        return f"its shape is {shape}, so there is no dimension {dim}"
    if not isinstance(shape[dim], int):
        return f"its dimension {dim} is {shape[dim]!r}; give it a size, as in dims={{{shape[dim]!r}: {8 * ranks}}}"
    if not divides(ranks, shape[dim]):
        return f"its dimension {dim} is {shape[dim]}, which {ranks} ranks do not divide; pad it, or leave it whole"
    return ""


def divides(ranks: int, size: object) -> bool:
    """Return whether a size is known, and ranks have equal parts of it."""
    return isinstance(size, int) and size >= ranks and size % ranks == 0
