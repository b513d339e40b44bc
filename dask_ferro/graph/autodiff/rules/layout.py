"""Gradients of ops that move elements to places known beforehand: each moves the gradient back.

What was read twice is added up.  Elements that were not read get zeros.
"""

from __future__ import annotations

import math
from itertools import chain

import numpy as np

from dask_ferro.graph.autodiff.rule import GradientRequest, Row, summed_to
from dask_ferro.graph.autodiff.rules.indexing import scattered
from dask_ferro.graph.tensor.dims import is_static, sizes
from dask_ferro.graph.tensor.manipulation import ints, positions, reshape_like, shape_of, size_of, sliced
from dask_ferro.graph.tensor.namespace import concat, permute_dims, take, zeros_like
from dask_ferro.graph.tensor.tensor import Tensor, TensorType, cast, constant_of, emit, emit_all


def _reshaped(call: GradientRequest) -> Tensor:
    return reshape_like(call.g, call.x)


def _transposed(call: GradientRequest) -> Tensor:
    order = call.get("perm") or list(range(call.x.ndim))[::-1]
    return permute_dims(call.g, [int(i) for i in np.argsort(order)])


def _tiled(call: GradientRequest) -> Tensor:
    repeats = call.constant(1, "repeats")
    dims = list(chain.from_iterable(zip(repeats, call.x.shape, strict=True)))
    # ONNX takes a 0 in a Reshape as "copy this dimension", not as a size of 0.
    if 0 in dims:
        return zeros_like(call.x)
    unknown = sum(not isinstance(dim, int) for dim in dims)
    if unknown > 1:
        raise call.unsupported(f"{unknown} dimensions of {call.x!r} are not known, and at most one may be")
    pattern = ints([dim if isinstance(dim, int) else -1 for dim in dims])
    folded = emit("Reshape", [call.g, pattern], tuple(dims))
    axes = ints(range(0, 2 * len(repeats), 2))
    return emit("ReduceSum", [folded, axes], call.x.shape, keepdims=0)


def _joined(call: GradientRequest) -> Tensor:
    axis, parts = call.get("axis"), [x for x in call.node.inputs if x is not None]
    dims = [part.shape[axis] for part in parts]
    lengths = ints(sizes(dims)) if is_static(dims) else concat([size_of(p, axis % p.ndim) for p in parts])
    types = [TensorType(call.g.type.dtype, part.shape) for part in parts]
    return emit_all("Split", [call.g, lengths], types, axis=axis)[call.index]


def _cut_apart(call: GradientRequest) -> Tensor:
    pieces = [zeros_like(call.output(i)) if g is None else g for i, g in enumerate(call.grads)]
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
        return emit("Pad", [call.g, ints(pads)], call.x.shape)
    places = {axis: sliced(positions(call.x, axis), {0: cut}) for axis, cut in cuts.items()}
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
        steps.append(take(steps[-1], at, axis=axis))
    for read, axis in zip(reversed(steps[:-1]), reversed(places), strict=True):
        g = scattered(read, axis, places[axis], g)
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
        places[axis] = ints(copied.tolist())
    return _read_back(call.x, places, call.g)


def _pad_value(call: GradientRequest) -> Tensor:
    # Elements outside the input's place are the pad value: its gradient is the difference of two sums.
    inside = _padded(GradientRequest(call.node, call.grads, 0))
    return reshape_like(call.g.sum() - inside.sum(), call.x)


def _center_cropped(call: GradientRequest) -> Tensor:
    """Return g cropped or padded back, which is the same operator to the sizes of the input."""
    axes = call.get("axes")
    wanted = (
        shape_of(call.x) if axes is None else concat([size_of(call.x, axis % call.x.ndim) for axis in axes])
    )
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
    area = math.prod(sizes(call.x.shape[2:])) if is_static(call.x.shape[2:]) else None
    shape = (call.x.shape[0], size**2, channels // size**2, area)
    parts = emit("Reshape", [blocks, ints([0, size**2, channels // size**2, -1])], shape)
    return reshape_like(permute_dims(parts, (0, 2, 1, 3)), call.x)


def _dropped(call: GradientRequest) -> Tensor:
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
    "Trilu": (lambda c: emit("Trilu", [c.g, c.maybe(1)], c.g.shape, upper=c.get("upper", 1)), None),
    "DepthToSpace": (_space_to_depth,),
    "SpaceToDepth": (lambda c: emit("DepthToSpace", [c.g], c.x.shape, blocksize=c.get("blocksize")),),
}
