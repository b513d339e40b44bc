"""Operators that move elements and never change them (reshape, transpose, concatenate, slice, pad, tile).

Most return views.  Shapes, axes, starts and pads are attributes in old opsets and inputs in new ones (`reading`).

Operators without data inputs are here too: ranges, identity matrices, shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Fn, Kernel, Op, dtype, from_front, index_at, one_of, row, row_of
from dask_ferro.graph.ir.dtypes import BOOL, DTYPES, INDEX, NUMERIC, WIDE, D
from dask_ferro.graph.ir.nodes import attribute_of

Ints = tuple[int, ...]
_PAD_MODES = ("constant", "edge", "reflect", "wrap")


def _dropout(xp: Namespace, op: Op) -> Fn:
    # Before opset 10 the mask had the input's dtype.
    mask_dtype = xp.bool if op.opset >= 10 else None
    if op.outputs == 1:
        return lambda x, *_: x
    return lambda x, *_: (x, xp.ones_like(x, dtype=mask_dtype or x.dtype))


def _inference(node: ir.Node, opset: int) -> bool:
    """Return whether a Dropout drops nothing: it has no training mode, or one that is known to be off."""
    if opset < 12 or len(node.inputs) < 3 or node.inputs[2] is None or not node.inputs[2].name:
        return True
    mode = node.inputs[2].const_value
    return mode is not None and not bool(mode.numpy())


def _reshape(xp: Namespace, op: Op, shape: Ints) -> Fn:
    if op.get("allowzero", 0) or 0 not in shape:
        return lambda x, *_: xp.reshape(x, shape)

    def fn(x: Array, *_: Array) -> Array:
        sizes = [n or x.shape[i] for i, n in enumerate(shape)]
        # Inferred from the sizes that are not copied: numpy cannot infer it if a size is 0.
        if -1 in sizes:
            kept = {i for i, n in enumerate(shape) if n == 0}
            rest = math.prod(n for i, n in enumerate(sizes) if i not in kept and n != -1)
            whole = math.prod(n for i, n in enumerate(x.shape) if i not in kept)
            sizes[sizes.index(-1)] = whole // max(rest, 1)
        return xp.reshape(x, tuple(sizes))

    return fn


def _transpose(xp: Namespace, x: Array, perm: Ints | None) -> Array:
    return xp.permute_dims(x, tuple(perm if perm is not None else range(x.ndim)[::-1]))


def _flatten(xp: Namespace, x: Array, axis: int) -> Array:
    at = axis if axis >= 0 else axis + x.ndim
    return xp.reshape(x, (math.prod(x.shape[:at]), math.prod(x.shape[at:])))


def _squeeze(xp: Namespace, op: Op, axes: Ints | None) -> Fn:
    if axes is not None:
        return lambda x, *_: xp.squeeze(x, axis=tuple(axes))
    return lambda x, *_: xp.reshape(x, tuple(n for n in x.shape if n != 1))


def _unsqueeze(xp: Namespace, op: Op, axes: Ints) -> Fn:
    if len(axes) == 1:
        return lambda x, *_: xp.expand_dims(x, axis=axes[0])

    def fn(x: Array, *_: Array) -> Array:
        rank = x.ndim + len(axes)
        new, old = {from_front(a, rank) for a in axes}, iter(x.shape)
        return xp.reshape(x, tuple(1 if i in new else next(old) for i in range(rank)))

    return fn


def _split_kernel(xp: Namespace, op: Op, sizes: Ints | None) -> Fn:
    axis, parts = op.get("axis", 0), op.outputs

    def fn(x: Array, *_: Array) -> tuple[Array, ...]:
        at = from_front(axis, x.ndim)
        total = x.shape[at]
        # Equal parts; the last one may be shorter.
        part = -(-total // parts)
        ends = [min(total, part * (i + 1)) for i in range(parts)]
        ends = list(itertools.accumulate(sizes)) if sizes is not None else ends
        return tuple(x[index_at(at, slice(a, b))] for a, b in itertools.pairwise([0, *ends]))

    return fn


def _slice(
    xp: Namespace, op: Op, starts: Ints, ends: Ints, axes: Ints | None = None, steps: Ints | None = None
) -> Fn:
    bounds = map(slice, starts, ends, steps or itertools.repeat(None))
    cuts = list(zip(axes or range(len(starts)), bounds, strict=False))

    def fn(x: Array, *_: Array) -> Array:
        index = [slice(None)] * x.ndim
        # Bounds are clipped: the array API allows none beyond the array.
        for axis, cut in cuts:
            start, stop, step = cut.indices(x.shape[axis])
            # An empty slice must not keep a stop of -1: it would mean the last row, not the position before the
            # first.
            some = len(range(start, stop, step)) > 0
            index[axis] = slice(start, stop if stop >= 0 else None, step) if some else slice(0, 0)
        return x[tuple(index)]

    return fn


def _pad(xp: Namespace, op: Op, pads: Ints, axes: Ints | None = None) -> Fn:
    # An input since opset 11.
    mode, value = op.get("mode", "constant"), op.get("value", 0.0) if op.opset < 11 else None

    def fn(x: Array, _: Array = None, fill: Array = None, *__: Array) -> Array:
        widths = [(0, 0)] * x.ndim
        count = len(pads) // 2
        for axis, before, after in zip(axes or range(x.ndim), pads[:count], pads[count:], strict=False):
            widths[axis] = (before, after)
        return pad_array(xp, x, widths, mode, fill if value is None else value)

    return fn


def pad_array(
    xp: Namespace, x: Array, widths: Sequence[tuple[int, int]], mode: str = "constant", fill: Array = None
) -> Array:
    """Return `x` with `widths` (before, after) elements added along each axis; negative widths crop."""
    x = x[tuple(slice(max(-a, 0), n + min(b, 0)) for n, (a, b) in zip(x.shape, widths, strict=True))]
    widths = [(max(a, 0), max(b, 0)) for a, b in widths]
    if mode == "constant":
        shape = tuple(a + n + b for n, (a, b) in zip(x.shape, widths, strict=True))
        y = xp.zeros(shape, dtype=x.dtype)
        if fill is not None:
            y[...] = fill if isinstance(fill, (int, float)) else xp.reshape(fill, ())
        y[tuple(slice(a, a + n) for n, (a, _) in zip(x.shape, widths, strict=True))] = x
        return y
    # The other modes are a gather: numpy pads the positions, whatever namespace holds the elements.
    for axis, width in enumerate(widths):
        if any(width):
            source = np.pad(np.arange(x.shape[axis]), width, mode=mode)  # type: ignore[call-overload]
            x = xp.take(x, xp.asarray(source), axis=axis)
    return x


def _depth_to_space(xp: Namespace, x: Array, blocksize: int, mode: str) -> Array:
    (n, c, h, w), size = x.shape, blocksize
    c //= size * size
    if mode == "CRD":
        y = xp.permute_dims(xp.reshape(x, (n, c, size, size, h, w)), (0, 1, 4, 2, 5, 3))
    else:
        y = xp.permute_dims(xp.reshape(x, (n, size, size, c, h, w)), (0, 3, 4, 1, 5, 2))
    return xp.reshape(y, (n, c, h * size, w * size))


def _space_to_depth(xp: Namespace, x: Array, blocksize: int, mode: str) -> Array:
    (n, c, h, w), size = x.shape, blocksize
    blocks = xp.reshape(x, (n, c, h // size, size, w // size, size))
    y = xp.permute_dims(blocks, (0, 1, 3, 5, 2, 4) if mode == "CRD" else (0, 3, 5, 1, 2, 4))
    return xp.reshape(y, (n, c * size * size, h // size, w // size))


def _center_crop_pad(xp: Namespace, op: Op, shape: Ints) -> Fn:
    axes = op.get("axes")

    def fn(x: Array, _: Array) -> Array:
        widths = [(0, 0)] * x.ndim
        for axis, size in zip(axes or range(x.ndim), shape, strict=False):
            extra = size - x.shape[axis]
            # The larger half of an odd number is at the end, for padding and for cropping.
            before = extra // 2 if extra > 0 else -(-extra // 2)
            widths[axis] = (before, extra - before)
        return pad_array(xp, x, widths)

    return fn


def _constant_of_shape(xp: Namespace, op: Op, shape: Ints) -> Fn:
    tensor = op.get("value")
    value = np.zeros(1, np.float32) if tensor is None else tensor.numpy().reshape(-1)
    fill, kind = value[0].item(), getattr(xp, value.dtype.name)
    return lambda _: xp.full(shape, fill, dtype=kind)


def _plain_value(node: ir.Node, opset: int) -> bool:
    value = attribute_of(node, "value", None)
    return value is None or value.dtype in DTYPES


def _range(xp: Namespace, start: Array, limit: Array, delta: Array) -> Array:
    is_integer = xp.isdtype(start.dtype, "integral")
    number = int if is_integer else float
    first, last, step = (number(xp.reshape(a, ())) for a in (start, limit, delta))
    # The standard's formula: `arange` with a float step may return one element more.
    count = max(math.ceil((last - first) / step), 0)
    wide = xp.arange(count, dtype=xp.int64 if is_integer else xp.float64)
    return xp.astype(first + step * wide, start.dtype, copy=False)


def _shape(xp: Namespace, x: Array, start: int, end: int | None) -> Array:
    return xp.asarray(x.shape[start:end], dtype=xp.int64)


def _eye_like(xp: Namespace, x: Array, **attributes: int | None) -> Array:
    to = attributes["dtype"]
    kind = x.dtype if to is None else dtype(xp, to)
    return xp.eye(x.shape[0], x.shape[1], k=attributes["k"], dtype=kind)


TABLE: dict[str, Kernel] = {
    "Identity": row(lambda xp, x: x, DTYPES),
    "Dropout": Kernel(_dropout, (DTYPES, DTYPES, BOOL), when=_inference),
    "Reshape": row_of(_reshape, DTYPES, WIDE),
    "Transpose": row(_transpose, DTYPES, perm=None),
    "Flatten": row(_flatten, DTYPES, axis=1),
    "Squeeze": row_of(_squeeze, DTYPES, WIDE, since=13, attributes=("axes",)),
    "Unsqueeze": row_of(_unsqueeze, DTYPES, WIDE, since=13, attributes=("axes",)),
    "Concat": row(lambda xp, *xs, axis: xp.concat(xs, axis=axis), DTYPES, axis=None),
    "Split": row_of(_split_kernel, DTYPES, WIDE, since=13, attributes=("split",)),
    "Slice": row_of(_slice, DTYPES, INDEX, at=(1, 2, 3, 4), since=10, attributes=("starts", "ends", "axes")),
    # In both directions: ONNX also broadcasts the shape to the input.
    "Expand": row_of(
        lambda xp, op, to: lambda x, *_: xp.broadcast_to(x, np.broadcast_shapes(x.shape, to)), DTYPES, WIDE
    ),
    "Tile": row_of(lambda xp, op, repeats: lambda x, *_: xp.tile(x, repeats), DTYPES, WIDE),
    "Pad": row_of(
        _pad,
        *(DTYPES, WIDE, DTYPES, INDEX),
        at=(1, 3),
        since=11,
        attributes=("pads",),
        when=one_of("mode", _PAD_MODES, "constant"),
    ),
    "DepthToSpace": row(_depth_to_space, DTYPES, blocksize=None, mode="DCR"),
    "SpaceToDepth": row(_space_to_depth, DTYPES, blocksize=None, mode="DCR"),
    "CenterCropPad": row_of(_center_crop_pad, DTYPES, INDEX),
    "ConstantOfShape": row_of(_constant_of_shape, WIDE, at=(0,), when=_plain_value),
    "Range": row(_range, frozenset({D.FLOAT, D.DOUBLE, D.INT16, D.INT32, D.INT64})),
    "Shape": row(_shape, DTYPES, start=0, end=None),
    "Size": row(lambda xp, x: xp.asarray(math.prod(x.shape), dtype=xp.int64), DTYPES),
    "EyeLike": row(_eye_like, NUMERIC | BOOL, when=one_of("dtype", {*DTYPES, None}, None), k=0, dtype=None),
}
