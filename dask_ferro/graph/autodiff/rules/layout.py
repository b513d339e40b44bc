"""Gradients of ops that move elements, to places known beforehand or by indices: each moves the gradient back.

What was read twice is added up.  Elements that were not read get zeros.  Those that share a maximum or minimum share
its gradient evenly (PyTorch's `scatter_reduce`).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.autodiff.rule import GradientRequest, Row, summed_to
from dask_ferro.graph.tensor import manipulation as xp
from dask_ferro.graph.tensor.dims import is_static, sizes
from dask_ferro.graph.tensor.tensor import Tensor, TensorType, cast, constant_of, emit, emit_all


def _reshaped(call: GradientRequest) -> Tensor:
    return xp.reshape_like(call.g, call.x)


def _transposed(call: GradientRequest) -> Tensor:
    order = call.get("perm") or list(range(call.x.ndim))[::-1]
    return xp.permute_dims(call.g, [int(i) for i in np.argsort(order)])


def _joined(call: GradientRequest) -> Tensor:
    axis, parts = call.get("axis"), [x for x in call.node.inputs if x is not None]
    dims = [part.shape[axis] for part in parts]
    each = [xp.size_of(part, axis % part.ndim) for part in parts]
    lengths = xp.ints(sizes(dims)) if is_static(dims) else xp.concat(each)
    types = [TensorType(call.g.type.dtype, part.shape) for part in parts]
    return emit_all("Split", [call.g, lengths], types, axis=axis)[call.index]


def _cut_apart(call: GradientRequest) -> Tensor:
    pieces = [xp.zeros_like(call.output(i)) if g is None else g for i, g in enumerate(call.grads)]
    # A Split into one piece is the identity, and Concat of one piece would only copy.
    if len(pieces) == 1:
        return pieces[0]
    return emit("Concat", pieces, call.x.shape, axis=call.get("axis", 0))


def _sliced(call: GradientRequest) -> Tensor:
    starts, ends = call.constant(1, "starts"), call.constant(2, "ends")
    axes = call.constant(3, "axes") or tuple(range(len(starts)))
    steps = call.constant(4, "steps") or (1,) * len(starts)
    cuts = {a % call.x.ndim: slice(i, j, k) for a, i, j, k in zip(axes, starts, ends, steps, strict=True)}
    pads = _slice_pads(call.x, cuts)
    # One Pad is cheaper than a scatter, and needs no indices.
    if pads is not None:
        return emit("Pad", [call.g, xp.ints(pads)], call.x.shape)
    places = {axis: xp.sliced(xp.positions(call.x, axis), {0: cut}) for axis, cut in cuts.items()}
    return _read_back(call.x, places, call.g)


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


def _read_back(x: Tensor, places: dict[int, Tensor], g: Tensor) -> Tensor:
    """Return zeros like `x` with g added at the places that were read along each axis, one axis after the other."""
    steps = [x]
    for axis, at in places.items():
        steps.append(xp.take(steps[-1], at, axis=axis))
    for read, axis in zip(reversed(steps[:-1]), reversed(places), strict=True):
        g = _scattered(read, axis, places[axis], g)
    return g


def _padded(call: GradientRequest) -> Tensor:
    if call.get("mode", "constant") != "constant":
        return _unrepeated(call)
    pads, axes = -call.input(1), call.maybe(3)
    inputs = [call.g, pads] if axes is None else [call.g, pads, None, axes]
    return emit("Pad", inputs, call.x.shape)


def _unrepeated(call: GradientRequest) -> Tensor:
    """Return the gradient of a Pad that repeats elements: each gets the sum over its copies, axis after axis."""
    pads = call.constant(1, "pads")
    axes = [axis % call.x.ndim for axis in call.constant(3, "axes") or range(call.x.ndim)]
    widths = zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True)
    moved = {axis: (before, after) for axis, before, after in widths if before or after}
    places = {}
    for axis, (before, after) in moved.items():
        dim = call.x.shape[axis]
        if not isinstance(dim, int):
            raise call.unsupported(f"dimension {axis} of {call.x!r} is not known; give its size")
        left = np.arange(dim)[max(-before, 0) : dim + min(after, 0)]
        copied = np.pad(left, (max(before, 0), max(after, 0)), mode=call.get("mode"))
        places[axis] = xp.ints(copied.tolist())
    return _read_back(call.x, places, call.g)


def _pad_value(call: GradientRequest) -> Tensor:
    # Elements outside the input's place are the pad value: its gradient is the difference of two sums.
    inside = _padded(GradientRequest(call.node, call.grads, 0))
    return xp.reshape_like(call.g.sum() - inside.sum(), call.x)


def _center_cropped(call: GradientRequest) -> Tensor:
    """Return g cropped or padded back, which is the same operator to the sizes of the input."""
    axes, wanted = call.get("axes"), xp.shape_of(call.x)
    wanted = wanted if axes is None else xp.take(wanted, xp.ints(axes))
    return emit("CenterCropPad", [call.g, wanted], call.x.shape, axes=axes)


def _space_to_depth(call: GradientRequest) -> Tensor:
    """Return the inverse of DepthToSpace, in either order of its columns."""
    size = int(call.get("blocksize"))
    blocks = emit("SpaceToDepth", [call.g], call.x.shape, blocksize=size)
    if call.get("mode", "DCR") != "CRD":
        return blocks
    channels = call.x.shape[1]
    if not isinstance(channels, int):
        raise call.unsupported(f"the channels of {call.x!r} are not known; give them")
    parts = xp.fold(blocks, (0, size**2, channels // size**2, -1))
    return xp.reshape_like(xp.permute_dims(parts, (0, 2, 1, 3)), call.x)


def _dropped(call: GradientRequest) -> Tensor:
    mode = constant_of(call.maybe(2))
    if call.maybe(2) is not None and (mode is None or bool(mode)):
        raise call.unsupported("it is in training mode; multiply by a mask of your own instead")
    return call.g


# ---- reads and writes by indices: a read goes back through a scatter that adds ---------------------------------


def _scattered(x: Tensor, axis: int, indices: Tensor, g: Tensor) -> Tensor:
    """Return zeros like `x` with g added along an axis at `indices`, whose dimensions g has in place of the axis."""
    rank = indices.ndim
    order = [axis + i for i in range(rank)] + [i for i in range(g.ndim) if not axis <= i < axis + rank]
    rows = xp.zeros_like(xp.moveaxis(x, axis, 0)) if axis else xp.zeros_like(x)
    at = cast(xp.expand_dims(indices, axis=rank), ir.DataType.INT64)
    # Added, not written: an index that is read twice gets both gradients.
    added = emit("ScatterND", [rows, at, xp.permute_dims(g, order)], rows.shape, reduction="add")
    return xp.moveaxis(added, 0, axis) if axis else added


def _added(call: GradientRequest, places: Tensor, axis: int) -> Tensor:
    inputs = [xp.zeros_like(call.x), places, call.g]
    return emit("ScatterElements", inputs, call.x.shape, axis=axis, reduction="add")


def _gathered_nd(call: GradientRequest) -> Tensor:
    """Return the gradient of a GatherND; batch indices are added in front, since ScatterND has no batches."""
    indices = call.input(1)
    own = xp.sliced(indices, {indices.ndim - 1: slice(0, 1)})
    columns = []
    for axis in range(int(call.get("batch_dims", 0))):
        others = [i for i in range(indices.ndim) if i != axis]
        columns.append(xp.broadcast_like(xp.expand_dims(xp.positions(call.x, axis), axis=others), own))
    at = xp.concat([*columns, indices], axis=indices.ndim - 1)
    return emit("ScatterND", [xp.zeros_like(call.x), at, call.g], call.x.shape, reduction="add")


def _one_hot_values(call: GradientRequest) -> Tensor:
    ends = cast(xp.ints([0, 1]), call.x.type.dtype)
    inputs = [call.input(0), call.input(1), ends]
    hot = emit("OneHot", inputs, call.y.shape, call.x.type.dtype, axis=call.get("axis", -1))
    # Values of a OneHot are [off, on], and each was written in many places.
    on = (call.g * hot).sum()
    return xp.concat([xp.expand_dims(call.g.sum() - on, axis=0), xp.expand_dims(on, axis=0)])


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
        return _written(call, call.g, xp.zeros_like(call.input(2)))
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
    "Identity": (lambda c: c.g,),
    "Dropout": (_dropped, None),
    "Cast": (lambda c: cast(c.g, c.x.type.dtype),),
    "CastLike": (lambda c: cast(c.g, c.x.type.dtype), lambda c: xp.zeros_like(c.x)),
    "Reshape": (_reshaped, None),
    "Flatten": (_reshaped,),
    "Squeeze": (_reshaped, None),
    "Unsqueeze": (_reshaped, None),
    "Transpose": (_transposed,),
    "Expand": (lambda c: summed_to(c.g, c.x), None),
    "Concat": (_joined,),
    "Split": (_cut_apart, None),
    "Slice": (_sliced, None),
    "Pad": (_padded, None, _pad_value, None),
    "CenterCropPad": (_center_cropped, None),
    "Trilu": (lambda c: emit("Trilu", [c.g, c.maybe(1)], c.g.shape, upper=c.get("upper", 1)), None),
    "DepthToSpace": (_space_to_depth,),
    "SpaceToDepth": (lambda c: emit("DepthToSpace", [c.g], c.x.shape, blocksize=c.get("blocksize")),),
    "Gather": (lambda c: _scattered(c.x, c.get("axis", 0) % c.x.ndim, c.input(1), c.g), None),
    "GatherElements": (lambda c: _added(c, c.input(1), c.get("axis", 0)), None),
    "GatherND": (_gathered_nd, None),
    "OneHot": (None, None, _one_hot_values),
    "ScatterElements": (_scatter_data, None, _scatter_updates),
    "ScatterND": (_scatter_data, None, _scatter_updates),
    "TopK": (lambda c: _added(c, c.output(1), c.get("axis", -1)), None),
}
