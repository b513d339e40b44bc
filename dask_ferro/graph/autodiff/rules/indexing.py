"""Gradients of ops that read or write by indices: a read goes back through a scatter that adds.

Elements that share a maximum or minimum share its gradient evenly (PyTorch's `scatter_reduce`).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.autodiff.rule import GradientRequest, Row
from dask_ferro.graph.tensor.manipulation import broadcast_like, ints, positions, reshape_like, sliced
from dask_ferro.graph.tensor.namespace import concat, expand_dims, moveaxis, permute_dims, zeros_like
from dask_ferro.graph.tensor.tensor import Tensor, cast, constant_of, emit

_INT64 = ir.DataType.INT64


def scattered(x: Tensor, axis: int, indices: Tensor, g: Tensor) -> Tensor:
    """Return zeros like `x` with g added along an axis at `indices`, whose dimensions g has in place of the axis."""
    rank = indices.ndim
    order = [axis + i for i in range(rank)] + [i for i in range(g.ndim) if not axis <= i < axis + rank]
    rows = zeros_like(moveaxis(x, axis, 0)) if axis else zeros_like(x)
    at = cast(expand_dims(indices, axis=rank), _INT64)
    # Added, not written: an index that is read twice gets both gradients.
    added = emit("ScatterND", [rows, at, permute_dims(g, order)], rows.shape, reduction="add")
    return moveaxis(added, 0, axis) if axis else added


def _added(call: GradientRequest, places: Tensor, axis: int) -> Tensor:
    inputs = [zeros_like(call.x), places, call.g]
    return emit("ScatterElements", inputs, call.x.shape, axis=axis, reduction="add")


def _gathered_nd(call: GradientRequest) -> Tensor:
    """Return the gradient of a GatherND; batch indices are added in front, since ScatterND has no batches."""
    indices = call.input(1)
    own = sliced(indices, {indices.ndim - 1: slice(0, 1)})
    columns = []
    for axis in range(int(call.get("batch_dims", 0))):
        others = [i for i in range(indices.ndim) if i != axis]
        columns.append(broadcast_like(expand_dims(positions(call.x, axis), axis=others), own))
    at = concat([*columns, indices], axis=indices.ndim - 1)
    return emit("ScatterND", [zeros_like(call.x), at, call.g], call.x.shape, reduction="add")


def _compressed(call: GradientRequest) -> Tensor:
    """Return g at the places where the condition holds, along an axis or over all elements."""
    axis, chosen = call.get("axis"), _places(call.input(1))
    if axis is not None:
        return scattered(call.x, axis % call.x.ndim, chosen, call.g)
    row = emit("Reshape", [call.x, ints([-1])], (call.x.size,))
    return reshape_like(scattered(row, 0, chosen, call.g), call.x)


def _places(condition: Tensor) -> Tensor:
    """Return the positions at which a vector of bools is true."""
    # A constant condition has a known count, so that shapes behind it stay known.
    known = constant_of(condition)
    if known is not None:
        return ints(np.flatnonzero(known).tolist())
    return emit("Reshape", [emit("NonZero", [condition], (1, None), _INT64), ints([-1])], (None,))


def _one_hot_values(call: GradientRequest) -> Tensor:
    ends = cast(ints([0, 1]), call.x.type.dtype)
    inputs = [call.input(0), call.input(1), ends]
    hot = emit("OneHot", inputs, call.y.shape, call.x.type.dtype, axis=call.get("axis", -1))
    # Values of a OneHot are [off, on], and each was written in many places.
    on = (call.g * hot).sum()
    return concat([expand_dims(call.g.sum() - on, axis=0), expand_dims(on, axis=0)])


# Scatters: g belongs to the updates where they were written, and to the data elsewhere.


def _written(call: GradientRequest, data: Tensor, updates: Tensor, reduction: str = "none") -> Tensor:
    inputs = [data, call.input(1), updates]
    return emit(call.node.op_type, inputs, data.shape, reduction=reduction, axis=call.get("axis"))


def _read(call: GradientRequest, data: Tensor) -> Tensor:
    gather = call.node.op_type.replace("Scatter", "Gather")
    return emit(gather, [data, call.input(1)], call.input(2).shape, axis=call.get("axis"))


def _reduction(call: GradientRequest) -> str:
    reduction = str(call.get("reduction", "none"))
    # Its gradient would divide by factors that may be 0.
    if reduction == "mul":
        raise call.unsupported("its reduction is 'mul'; 'none', 'add', 'max' and 'min' have one")
    return reduction


def _scatter_data(call: GradientRequest) -> Tensor:
    reduction = _reduction(call)
    if reduction == "add":
        return call.g
    if reduction == "none":
        return _written(call, call.g, zeros_like(call.input(2)))
    own, _, share = _shares(call)
    return own * share


def _scatter_updates(call: GradientRequest) -> Tensor:
    if _reduction(call) in ("none", "add"):
        return _read(call, call.g)
    _, updates, share = _shares(call)
    return updates * _read(call, share)


def _shares(call: GradientRequest) -> tuple[Tensor, Tensor, Tensor]:
    """Return for a maximum or minimum 1 where data and updates attain it, and g over the number of ties."""
    dtype = call.g.type.dtype
    own = cast(call.input(0) == call.y, dtype)
    updates = cast(call.input(2) == _read(call, call.y), dtype)
    return own, updates, call.g / _written(call, own, updates, "add")


TABLE: dict[str, Row] = {
    "Gather": (lambda c: scattered(c.x, c.get("axis", 0) % c.x.ndim, c.input(1), c.g), None),
    "GatherElements": (lambda c: _added(c, c.input(1), c.get("axis", 0)), None),
    "GatherND": (_gathered_nd, None),
    "Compress": (_compressed, None),
    "OneHot": (None, None, _one_hot_values),
    "ScatterElements": (_scatter_data, None, _scatter_updates),
    "ScatterND": (_scatter_data, None, _scatter_updates),
    "TopK": (lambda c: _added(c, c.output(1), c.get("axis", -1)), None),
}
