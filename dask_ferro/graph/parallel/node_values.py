"""Find the values that a plan places at a node: by name, in equal parts.

A weight or input that is read through casts (half precision casts parameters outside of all regions) counts as the
weight or input itself: the plan places it, and its cast follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import onnx_ir as ir

from dask_ferro.graph.ir.inference import ValueType, infer
from dask_ferro.graph.sharding.placements import WHOLE, Placement, Shard
from dask_ferro.graph.sharding.redistribute import ByAxis, Mesh
from dask_ferro.graph.sharding.requests import divides, from_front, ranks_by_dim

Size: TypeAlias = int | str | ir.SymbolicDim | None


def read_sources(node: ir.Node) -> list[ir.Value]:
    """Return the weights and graph inputs that a node reads, also through casts."""
    read = [_skip_casts(v) for v in node.inputs if v is not None]
    return [v for v in read if v.name and (v.is_initializer() or v.is_graph_input())]


def _skip_casts(value: ir.Value) -> ir.Value:
    while (node := value.producer()) is not None and node.op_type == "Cast" and node.domain == "":
        read = node.inputs[0]
        if read is None:
            break
        value = read
    return value


def find_values(node: ir.Node, key: str) -> list[ir.Value]:
    """Return a node's weights, graph inputs and outputs that a key matches."""
    values = dict.fromkeys((*read_sources(node), *(v for v in node.outputs if v.name)))
    return [value for value in values if _matches(key, value.name or "")]


def _matches(key: str, name: str) -> bool:
    return key == name or key == name.replace("/", ".").rsplit(".", 1)[-1] or fnmatchcase(name, key)


def front_dims(placed: ByAxis, value: ir.Value) -> dict[str, Placement]:
    """Return a placement of a value with its dimensions counted from the front, if the value's rank is known."""
    rank = 0 if value.shape is None else len(value.shape)
    return {axis: from_front(p, rank) for axis, p in placed.items()}


def split_or_whole(placed: ByAxis, value: ir.Value, mesh: Mesh) -> dict[str, Placement]:
    """Return a placement of a value; whole if it lacks a dimension, or has one that the ranks do not divide.

    An open size counts as divided: `place_rows` decides once it is known.
    """
    own = front_dims(placed, value)
    return own if _has_parts(own, value.shape, mesh) else dict.fromkeys(own, WHOLE)


def split_dims(placed: ByAxis) -> dict[str, int]:
    """Return the dimension that each axis splits, without axes that split none."""
    return {axis: p.dim for axis, p in placed.items() if isinstance(p, Shard)}


def place_rows(
    placements: Mapping[str, ByAxis], model: ir.Model, types: Mapping[str, ValueType], mesh: Mesh
) -> dict[str, ByAxis]:
    """Return placements for known sizes: an input whose open size, such as its rows, ranks do not divide is whole."""
    sized = dict(placements)
    for value in model.graph.inputs:
        name, shape = value.name or "", value.shape or ()
        placed = placements.get(name, {})
        dims = [dim for dim in ranks_by_dim(placed, mesh) if dim < len(shape)]
        if any(not isinstance(shape[d], int) for d in dims) and not _has_parts(
            placed, types[name].shape, mesh
        ):
            sized[name] = dict.fromkeys(placed, WHOLE)
    return sized


def _has_parts(placed: ByAxis, shape: ir.Shape | Sequence[Size] | None, mesh: Mesh) -> bool:
    """Return whether a shape is known, has the dimensions that are split, and ranks divide their known sizes."""
    return shape is not None and all(
        0 <= dim < len(shape) and (not isinstance(shape[dim], int) or divides(ranks, shape[dim]))
        for dim, ranks in ranks_by_dim(placed, mesh).items()
    )


def infer_types(model: ir.Model, dims: Mapping[str, int] | None = None) -> Mapping[str, ValueType]:
    """Return the types of a model's values: declared types, or inferred types if a size is open."""
    types = infer(model, dims=dims)
    if not all(map(_is_known, types.values())):
        inferred = infer(model, dims=dims, trusts_declared=False)
        types |= {n: inferred[n] for n, t in types.items() if not _is_known(t) and _is_known(inferred[n])}
    return types


def _is_known(type_: ValueType) -> bool:
    return type_.shape is not None and all(isinstance(size, int) for size in type_.shape)
