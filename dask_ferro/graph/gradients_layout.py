"""Gradients of ops that move elements: each moves the gradient back, and adds up what was read twice.

Elements that were not read get zeros.  What was read by indices goes back through a scatter that adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.array_api import concat, permute_dims, reshape, zeros_like
from dask_ferro.graph.gradient_rules import Call, Row, summed_to
from dask_ferro.graph.shapes import Dim
from dask_ferro.graph.tensor import Tensor, cast, constant_of, emit, emit_all
from dask_ferro.graph.tensor_dims import is_static, sizes
from dask_ferro.graph.tensor_layout import (
    expand_dims,
    ints,
    moveaxis,
    positions,
    reshape_like,
    size_of,
)
from dask_ferro.graph.tensor_origin import TensorType


def _reshaped(call: Call) -> Tensor:
    return reshape_like(call.g, call.x)


def _transposed(call: Call) -> Tensor:
    order = call.get("perm") or list(range(call.x.ndim))[::-1]
    return permute_dims(call.g, [int(i) for i in np.argsort(order)])


def _tiled(call: Call) -> Tensor:
    repeats = call.constant(1, "repeats")
    assert repeats is not None
    dims = [d for n, dim in zip(repeats, call.x.shape, strict=True) for d in (n, dim)]
    folded = emit("Reshape", [call.g, _pattern(dims, call)], tuple(dims))
    axes = ints(range(0, 2 * len(repeats), 2))
    return emit("ReduceSum", [folded, axes], call.x.shape, keepdims=0)


def _pattern(dims: Sequence[Dim], call: Call) -> Tensor:
    """A shape for Reshape, in which one dimension may be unknown."""
    unknown = sum(not isinstance(dim, int) for dim in dims)
    if unknown > 1:
        raise call.unsupported(f"{unknown} dimensions of {call.x!r} are not known, and at most one may be")
    return ints([dim if isinstance(dim, int) else -1 for dim in dims])


# Join and cut


def _joined(call: Call) -> Tensor:
    """The part of g that came from the input."""
    axis, parts = call.get("axis"), [x for x in call.node.inputs if x is not None]
    dims = [part.shape[axis] for part in parts]
    lengths = ints(sizes(dims)) if is_static(dims) else concat([size_of(p, axis % p.ndim) for p in parts])
    types = [TensorType(call.g.type.dtype, part.shape) for part in parts]
    return emit_all("Split", [call.g, lengths], types, axis=axis)[call.index]


def _cut_apart(call: Call) -> Tensor:
    """The gradients of the pieces, zeros where there is none."""
    found = enumerate(call.grads)
    pieces = [zeros_like(call.output(i)) if g is None else g for i, g in found]
    if len(pieces) == 1:
        return pieces[0]
    return emit("Concat", pieces, call.x.shape, axis=call.get("axis", 0))


def _sliced(call: Call) -> Tensor:
    starts, ends = call.constant(1, "starts"), call.constant(2, "ends")
    assert starts is not None
    assert ends is not None
    axes = call.constant(3, "axes") or tuple(range(len(starts)))
    steps = call.constant(4, "steps") or (1,) * len(starts)
    cuts = {a % call.x.ndim: (i, j, k) for a, i, j, k in zip(axes, starts, ends, steps, strict=True)}
    pads = _slice_pads(call.x, cuts)
    if pads is not None:
        return emit("Pad", [call.g, ints(pads)], call.x.shape)
    if len(cuts) == 1:
        ((axis, cut),) = cuts.items()
        return _scattered(call.x, axis, _cut_positions(call.x, axis, cut), call.g)
    return _uncut(call.x, list(cuts.items()), call.g)


def _uncut(x: Tensor, cuts: list[tuple[int, tuple[int, int, int]]], g: Tensor) -> Tensor:
    """Zeros like `x`, with g where the slices are: one axis after the other, the last cut first."""
    steps = [x]
    for axis, cut in cuts[:-1]:
        steps.append(_cut(steps[-1], axis, cut))
    for before, (axis, cut) in zip(reversed(steps), reversed(cuts), strict=True):
        g = _scattered(before, axis, _cut_positions(before, axis, cut), g)
    return g


def _cut(x: Tensor, axis: int, cut: tuple[int, int, int]) -> Tensor:
    start, end, step = cut
    shape = tuple(None if i == axis else dim for i, dim in enumerate(x.shape))
    return emit("Slice", [x, ints([start]), ints([end]), ints([axis]), ints([step])], shape)


def _slice_pads(x: Tensor, cuts: dict[int, tuple[int, int, int]]) -> list[int] | None:
    """The zeros before and after g on every axis, if steps are 1 and the sizes known."""
    before, after = [0] * x.ndim, [0] * x.ndim
    for axis, (start, end, step) in cuts.items():
        dim = x.shape[axis]
        if step != 1 or not isinstance(dim, int):
            return None
        first, last, _ = slice(start, end).indices(dim)
        before[axis], after[axis] = first, dim - max(first, last)
    return before + after


def _cut_positions(x: Tensor, axis: int, cut: tuple[int, int, int]) -> Tensor:
    """Which places of an axis a slice takes."""
    return _cut(positions(x, axis), 0, cut)


def _padded(call: Call) -> Tensor:
    """What was padded is cut off: a pad by less than nothing."""
    if call.get("mode", "constant") != "constant":
        raise call.unsupported(f"its mode is {call.get('mode')!r}; only 'constant' has one")
    pads, axes = -call.input(1), call.maybe(3)
    inputs = [call.g, pads] if axes is None else [call.g, pads, None, axes]
    return emit("Pad", inputs, call.x.shape)


def _pad_value(call: Call) -> Tensor:
    """The value is read in every place that is not the input's."""
    inside = _padded(Call(call.node, call.grads, 0))
    return reshape_like(call.g.sum() - inside.sum(), call.x)


def _center_cropped(call: Call) -> Tensor:
    wanted = call.constant(1, "sizes")
    axes = call.get("axes") or range(call.x.ndim)
    assert wanted is not None
    before, after = [0] * call.x.ndim, [0] * call.x.ndim
    for axis, size in zip(axes, wanted, strict=True):
        dim = call.x.shape[axis]
        if not isinstance(dim, int):
            raise call.unsupported(f"dimension {axis} of {call.x!r} is not known; give its size")
        less = dim - size
        before[axis] = less // 2 if less >= 0 else -(-less // 2)
        after[axis] = less - before[axis]
    return emit("Pad", [call.g, ints(before + after)], call.x.shape)


# Indices


def _scattered(x: Tensor, axis: int, indices: Tensor, g: Tensor) -> Tensor:
    """Zeros like `x`, and g added along an axis at `indices`, whose dimensions g has in the axis's place."""
    rank = indices.ndim
    order = [axis + i for i in range(rank)] + [i for i in range(g.ndim) if not axis <= i < axis + rank]
    rows = zeros_like(moveaxis(x, axis, 0)) if axis else zeros_like(x)
    at = expand_dims(indices, axis=rank)
    added = emit(
        "ScatterND", [rows, cast(at, ir.DataType.INT64), permute_dims(g, order)], rows.shape, reduction="add"
    )
    return moveaxis(added, 0, axis) if axis else added


def _gathered(call: Call) -> Tensor:
    return _scattered(call.x, call.get("axis", 0) % call.x.ndim, call.input(1), call.g)


def _gathered_elements(call: Call) -> Tensor:
    inputs = [zeros_like(call.x), call.input(1), call.g]
    return emit("ScatterElements", inputs, call.x.shape, axis=call.get("axis", 0), reduction="add")


def _gathered_nd(call: Call) -> Tensor:
    if call.get("batch_dims", 0):
        raise call.unsupported(
            "its batch_dims are not 0; gather along one axis, or with batches in the indices"
        )
    return emit("ScatterND", [zeros_like(call.x), call.input(1), call.g], call.x.shape, reduction="add")


def _top(call: Call) -> Tensor:
    inputs = [zeros_like(call.x), call.output(1), call.g]
    return emit("ScatterElements", inputs, call.x.shape, axis=call.get("axis", -1), reduction="add")


def _scatter_reduction(call: Call) -> str:
    reduction = str(call.get("reduction", "none"))
    if reduction not in ("none", "add"):
        raise call.unsupported(f"its reduction is {reduction!r}; 'none' and 'add' have one")
    return reduction


def _scatter_data(call: Call) -> Tensor:
    """g, but zeros where an element was replaced."""
    if _scatter_reduction(call) == "add":
        return call.g
    axis = {"axis": call.get("axis", 0)} if call.node.op_type == "ScatterElements" else {}
    inputs = [call.g, call.input(1), zeros_like(call.input(2))]
    return emit(call.node.op_type, inputs, call.g.shape, **axis)


def _scatter_elements_updates(call: Call) -> Tensor:
    _scatter_reduction(call)
    return emit("GatherElements", [call.g, call.input(1)], call.x.shape, axis=call.get("axis", 0))


def _scatter_nd_updates(call: Call) -> Tensor:
    _scatter_reduction(call)
    return emit("GatherND", [call.g, call.input(1)], call.x.shape)


# Blocks and dtypes


def _space_to_depth(x: Tensor, call: Call) -> Tensor:
    """The inverse of DepthToSpace, in either order of its columns."""
    size, crd = int(call.get("blocksize")), call.get("mode", "DCR") == "CRD"
    c, h, w = _block_sizes(x, call)
    parts = reshape(x, (-1, c, h // size, size, w // size, size))
    moved = permute_dims(parts, (0, 1, 3, 5, 2, 4) if crd else (0, 3, 5, 1, 2, 4))
    return reshape(moved, (-1, c * size * size, h // size, w // size))


def _depth_to_space(x: Tensor, call: Call) -> Tensor:
    """The inverse of SpaceToDepth, in either order of its columns."""
    size, crd = int(call.get("blocksize")), call.get("mode", "DCR") == "CRD"
    c, h, w = _block_sizes(x, call)
    c //= size * size
    if crd:
        moved = permute_dims(reshape(x, (-1, c, size, size, h, w)), (0, 1, 4, 2, 5, 3))
    else:
        moved = permute_dims(reshape(x, (-1, size, size, c, h, w)), (0, 3, 4, 1, 5, 2))
    return reshape(moved, (-1, c, h * size, w * size))


def _block_sizes(x: Tensor, call: Call) -> tuple[int, int, int]:
    _, c, h, w = x.shape
    if not (isinstance(c, int) and isinstance(h, int) and isinstance(w, int)):
        raise call.unsupported(f"channels and sizes of {x!r} are not all known; give them")
    return c, h, w


def _triangle(call: Call) -> Tensor:
    inputs = [call.g] if call.maybe(1) is None else [call.g, call.input(1)]
    return emit("Trilu", inputs, call.g.shape, upper=call.get("upper", 1))


def _dropped(call: Call) -> Tensor:
    mode = constant_of(call.maybe(2))
    if call.maybe(2) is not None and (mode is None or bool(mode)):
        raise call.unsupported("it is in training mode; multiply by a mask of your own instead")
    return call.g


TABLE: dict[str, Row] = {
    "Identity": (lambda c: c.g,),
    "Dropout": (_dropped, None),
    "Cast": (lambda c: cast(c.g, c.x.type.dtype),),
    "CastLike": (lambda c: cast(c.g, c.x.type.dtype), None),
    "Reshape": (_reshaped, None),
    "Flatten": (_reshaped,),
    "Squeeze": (_reshaped, None),
    "Unsqueeze": (_reshaped, None),
    "Transpose": (_transposed,),
    "Expand": (lambda c: summed_to(c.g, c.x), None),
    "Tile": (_tiled, None),
    "Concat": (_joined,),
    "Split": (_cut_apart, None),
    "Slice": (_sliced, None),
    "Pad": (_padded, None, _pad_value, None),
    "CenterCropPad": (_center_cropped, None),
    "Gather": (_gathered, None),
    "GatherElements": (_gathered_elements, None),
    "GatherND": (_gathered_nd, None),
    "ScatterElements": (_scatter_data, None, _scatter_elements_updates),
    "ScatterND": (_scatter_data, None, _scatter_nd_updates),
    "TopK": (_top, None),
    "Trilu": (_triangle, None),
    "DepthToSpace": (lambda c: reshape_like(_space_to_depth(c.g, c), c.x),),
    "SpaceToDepth": (lambda c: reshape_like(_depth_to_space(c.g, c), c.x),),
}
