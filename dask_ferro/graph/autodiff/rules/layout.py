"""Gradients of ops that move elements, to places known beforehand or by indices: each moves the gradient back.

Gradients of an element that is read twice are added; an element that is not read has a gradient of zero.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.autodiff.rule import GradientRequest, Row, multiply_along, sum_to
from dask_ferro.graph.tensor import manipulation as xp
from dask_ferro.graph.tensor.dims import is_static, sizes
from dask_ferro.graph.tensor.tensor import Tensor, TensorType, asarray, cast, constant_of, emit, emit_all


def _reshape(call: GradientRequest) -> Tensor:
    return xp.reshape_like(call.g, call.x)


def _transpose(call: GradientRequest) -> Tensor:
    order = call.get("perm") or list(range(call.x.ndim))[::-1]
    return xp.permute_dims(call.g, [int(i) for i in np.argsort(order)])


def _concat(call: GradientRequest) -> Tensor:
    axis, parts = call.get("axis"), [x for x in call.node.inputs if x is not None]
    dims = [part.shape[axis] for part in parts]
    each = [xp.size_of(part, axis % part.ndim) for part in parts]
    lengths = xp.ints(sizes(dims)) if is_static(dims) else xp.concat(each)
    types = [TensorType(call.g.type.dtype, part.shape) for part in parts]
    return emit_all("Split", [call.g, lengths], types, axis=axis)[call.index]


def _split_gradient(call: GradientRequest) -> Tensor:
    pieces = [xp.zeros_like(call.output(i)) if g is None else g for i, g in enumerate(call.grads)]
    # A Split into one piece is the identity, and Concat of one piece would only copy.
    if len(pieces) == 1:
        return pieces[0]
    return emit("Concat", pieces, call.x.shape, axis=call.get("axis", 0))


def _slice(call: GradientRequest) -> Tensor:
    x, starts, ends = call.x, call.constant(1, "starts"), call.constant(2, "ends")
    axes = call.constant(3, "axes") or tuple(range(len(starts)))
    steps = call.constant(4, "steps") or (1,) * len(starts)
    cuts = {a % x.ndim: slice(i, j, k) for a, i, j, k in zip(axes, starts, ends, steps, strict=True)}
    # One Pad is cheaper than a scatter, and needs no indices.
    if (pads := _slice_pads(x, cuts)) is not None:
        return emit("Pad", [call.g, xp.ints(pads)], x.shape)
    places = {axis: xp.slice_dims(xp.positions(x, axis), {0: cut}) for axis, cut in cuts.items()}
    reads = [x]
    for axis, at in places.items():
        reads.append(xp.take(reads[-1], at, axis=axis))
    g = call.g
    for read, axis in zip(reversed(reads[:-1]), reversed(places), strict=True):
        g = _scatter(read, axis, places[axis], g)
    return g


def _slice_pads(x: Tensor, cuts: dict[int, slice]) -> list[int] | None:
    """Return the zeros before and after g on every axis, if steps are 1 and the sizes known."""
    before, after = [0] * x.ndim, [0] * x.ndim
    for axis, cut in cuts.items():
        dim = x.shape[axis]
        if cut.step != 1 or not isinstance(dim, int):
            return None
        first, last, _ = cut.indices(dim)
        before[axis], after[axis] = first, dim - max(first, last)
    return before + after


def _pad(call: GradientRequest) -> Tensor:
    if call.get("mode", "constant") != "constant":
        return _pad_copies(call)
    pads, axes = -call.input(1), call.maybe(3)
    inputs = [call.g, pads] if axes is None else [call.g, pads, None, axes]
    return emit("Pad", inputs, call.x.shape)


def _pad_copies(call: GradientRequest) -> Tensor:
    """Return the gradient of a Pad that repeats elements: a product with the matrix of the copies, along each axis."""
    x, g, pads = call.x, call.g, call.constant(1, "pads")
    axes = [axis % x.ndim for axis in call.constant(3, "axes") or range(x.ndim)]
    for axis, *widths in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        size = x.shape[axis]
        if not any(widths):
            continue
        if not isinstance(size, int) or min(widths) < 0:
            raise call.unsupported(
                f"its width is below 0, or dimension {axis} of {x!r} is not known; give its size"
            )
        copies = np.pad(np.eye(size, dtype=g.dtype), [(0, 0), tuple(widths)], mode=call.get("mode"))
        g = multiply_along(g, axis, asarray(copies.T))
    return g


def _space_to_depth(call: GradientRequest) -> Tensor:
    size = int(call.get("blocksize"))
    if call.get("mode", "DCR") != "CRD":
        return emit("SpaceToDepth", [call.g], call.x.shape, blocksize=size)
    # In this order the blocks of a channel are contiguous, so each channel is an image of its own.
    planes = xp.fold(call.g, (-1, 1, 0, 0))
    blocks = emit("SpaceToDepth", [planes], (planes.shape[0], size**2, *call.x.shape[2:]), blocksize=size)
    return xp.reshape_like(blocks, call.x)


def _dropout(call: GradientRequest) -> Tensor:
    mode = constant_of(call.maybe(2))
    if call.maybe(2) is not None and (mode is None or bool(mode)):
        raise call.unsupported("it is in training mode; multiply by a mask of your own instead")
    return call.g


# ---- reads and writes by indices: a read goes back through a scatter that adds ---------------------------------


def _scatter(x: Tensor, axis: int, indices: Tensor, g: Tensor) -> Tensor:
    """Return zeros like `x` with g added at `indices` of an axis; g has the dimensions of `indices` in its place."""
    rank = indices.ndim
    order = [axis + i for i in range(rank)] + [i for i in range(g.ndim) if not axis <= i < axis + rank]
    rows = xp.zeros_like(xp.moveaxis(x, axis, 0)) if axis else xp.zeros_like(x)
    at = cast(xp.expand_dims(indices, axis=rank), ir.DataType.INT64)
    added = emit("ScatterND", [rows, at, xp.permute_dims(g, order)], rows.shape, reduction="add")
    return xp.moveaxis(added, 0, axis) if axis else added


def _scatter_elements(call: GradientRequest, places: Tensor, axis: int) -> Tensor:
    inputs = [xp.zeros_like(call.x), places, call.g]
    return emit("ScatterElements", inputs, call.x.shape, axis=axis, reduction="add")


def _gather_nd(call: GradientRequest) -> Tensor:
    if call.get("batch_dims", 0):
        raise call.unsupported("it has batch_dims; write them as indices")
    inputs = [xp.zeros_like(call.x), call.input(1), call.g]
    return emit("ScatterND", inputs, call.x.shape, reduction="add")


# Scatters: g belongs to the updates at the written places, and to the data at all others.


def _adds(call: GradientRequest) -> bool:
    """Return whether a scatter adds its updates to the data; otherwise it writes them."""
    reduction = str(call.get("reduction", "none"))
    if reduction not in ("none", "add"):
        raise call.unsupported(f"its reduction is {reduction!r}; 'none' and 'add' have one")
    return reduction == "add"


def _scatter_data(call: GradientRequest) -> Tensor:
    if _adds(call):
        return call.g
    inputs = [call.g, call.input(1), xp.zeros_like(call.input(2))]
    return emit(call.node.op_type, inputs, call.x.shape, axis=call.get("axis"))


def _scatter_updates(call: GradientRequest) -> Tensor:
    _adds(call)
    gather = call.node.op_type.replace("Scatter", "Gather")
    return emit(gather, [call.g, call.input(1)], call.x.shape, axis=call.get("axis"))


TABLE: dict[str, Row] = {
    "Identity": (lambda c: c.g,),
    "Dropout": (_dropout, None),
    "Cast": (lambda c: cast(c.g, c.x.type.dtype),),
    "CastLike": (lambda c: cast(c.g, c.x.type.dtype), lambda c: xp.zeros_like(c.x)),
    "Reshape": (_reshape, None),
    "Flatten": (_reshape,),
    "Squeeze": (_reshape, None),
    "Unsqueeze": (_reshape, None),
    "Transpose": (_transpose,),
    "Expand": (lambda c: sum_to(c.g, c.x), None),
    "Concat": (_concat,),
    "Split": (_split_gradient, None),
    "Slice": (_slice, None),
    "Pad": (_pad, None),
    "DepthToSpace": (_space_to_depth,),
    "SpaceToDepth": (lambda c: emit("DepthToSpace", [c.g], c.x.shape, blocksize=c.get("blocksize")),),
    "Trilu": (lambda c: emit("Trilu", [c.g, c.maybe(1)], c.g.shape, upper=c.get("upper", 1)), None),
    "Gather": (lambda c: _scatter(c.x, c.get("axis", 0) % c.x.ndim, c.input(1), c.g), None),
    "GatherElements": (lambda c: _scatter_elements(c, c.input(1), c.get("axis", 0)), None),
    "GatherND": (_gather_nd, None),
    "ScatterElements": (_scatter_data, None, _scatter_updates),
    "ScatterND": (_scatter_data, None, _scatter_updates),
    "TopK": (lambda c: _scatter_elements(c, c.output(1), c.get("axis", -1)), None),
}
