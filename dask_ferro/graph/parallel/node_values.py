"""The values that a plan places at a node: found by name, with dimensions from the front, in equal parts.

A weight or input that is read through casts (half precision casts parameters outside of all regions) is the weight or
input itself: it is what is placed, and its cast follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

import onnx_ir as ir

from dask_ferro.graph.ir.inference import ValueType, infer
from dask_ferro.graph.sharding.given import divides, from_front
from dask_ferro.graph.sharding.placements import WHOLE, Placement, Shard
from dask_ferro.graph.sharding.redistribute import Mesh

# The placement of a value on each axis of the mesh that is named.  Along all others weights and inputs are whole, and
# results of nodes stay as they are.
Placed: TypeAlias = Mapping[str, Placement]
Size: TypeAlias = int | str | ir.SymbolicDim | None


def sources(node: ir.Node) -> list[ir.Value]:
    """Return the weights and graph inputs that a node reads, also through casts."""
    read = [_before_casts(v) for v in node.inputs if v is not None]
    return [v for v in read if v.name and (v.is_initializer() or v.is_graph_input())]


def _before_casts(value: ir.Value) -> ir.Value:
    while (node := value.producer()) is not None and node.op_type == "Cast" and node.domain == "":
        read = node.inputs[0]
        if read is None:
            break
        value = read
    return value


def named(node: ir.Node, key: str) -> list[ir.Value]:
    """Return a node's weights, graph inputs and outputs that a key matches."""
    made = [v for v in node.outputs if v.name]
    return [value for value in dict.fromkeys((*sources(node), *made)) if _means(key, value.name or "")]


def _means(key: str, name: str) -> bool:
    return key == name or key == name.replace("/", ".").rsplit(".", 1)[-1] or fnmatchcase(name, key)


def front_dims(placed: Placed, value: ir.Value) -> dict[str, Placement]:
    """Return a placement of a value with its dimensions counted from the front, where the value's rank is known."""
    rank = 0 if value.shape is None else len(value.shape)
    return {axis: from_front(p, rank) for axis, p in placed.items()}


def split_or_whole(placed: Placed, value: ir.Value, mesh: Mesh) -> dict[str, Placement]:
    """Return a placement of a value; whole if it lacks a dimension, or has one that the ranks do not divide.

    An open size counts as divided: `with_rows` decides once it is known.
    """
    own = front_dims(placed, value)
    return own if _has_parts(own, value.shape, mesh) else dict.fromkeys(own, WHOLE)


def split_dims(placed: Placed) -> dict[str, int]:
    """Return the dimension that each axis splits, without the axes that split none."""
    return {axis: p.dim for axis, p in placed.items() if isinstance(p, Shard)}


def ranks_along(placed: Placed, mesh: Mesh) -> dict[int, int]:
    """Return the number of parts of each dimension that a placement splits."""
    found: dict[int, int] = {}
    for axis, dim in split_dims(placed).items():
        found[dim] = found.get(dim, 1) * mesh.axes[axis]
    return found


def with_rows(
    given: Mapping[str, Placed], model: ir.Model, types: Mapping[str, ValueType], mesh: Mesh
) -> dict[str, Placed]:
    """Return placements for known sizes: an input whose open size, such as its rows, ranks do not divide is whole."""
    found = dict(given)
    for value in model.graph.inputs:
        placed, shape = given.get(value.name or "", {}), types[value.name or ""].shape
        dims = [
            dim for dim in ranks_along(placed, mesh) if value.shape is not None and dim < len(value.shape)
        ]
        is_open = any(not isinstance(value.shape[dim], int) for dim in dims if value.shape is not None)
        if is_open and not _has_parts(placed, shape, mesh):
            found[value.name or ""] = dict.fromkeys(placed, WHOLE)
    return found


def _has_parts(placed: Placed, shape: ir.Shape | Sequence[Size] | None, mesh: Mesh) -> bool:
    """Return whether a shape is known, has the dimensions that are split, and ranks divide those of known size."""
    split = ranks_along(placed, mesh).items()
    return shape is not None and all(
        0 <= dim < len(shape) and (not isinstance(shape[dim], int) or divides(ranks, shape[dim]))
        for dim, ranks in split
    )


def shown(placed: Placed) -> str:
    """Return a placement in the form of a plan."""
    return str(split_dims(placed) or "whole")


def sized(model: ir.Model, dims: Mapping[str, int] | None = None) -> Mapping[str, ValueType]:
    """Return the types of a model's values: the declared ones, or the inferred one where a size is left open."""
    found = infer(model, dims=dims)
    if not all(map(_is_known, found.values())):
        inferred = infer(model, dims=dims, trusts_declared=False)
        found |= {n: inferred[n] for n, t in found.items() if not _is_known(t) and _is_known(inferred[n])}
    return found


def _is_known(found: ValueType) -> bool:
    return found.shape is not None and all(isinstance(size, int) for size in found.shape)
