"""Linear quantization to 8 and 16 bit integers, per tensor or per axis, and the integer matrix product.

Values are rounded half to even and saturate.  Scales per block, and 4-bit and float8 targets, are left to other
engines.
"""

from __future__ import annotations

import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Fn, Kernel, Op, axis_shape, dtype, from_front, listed
from dask_ferro.graph.ir.dtypes import FLOAT, D
from dask_ferro.graph.ir.nodes import attribute_of

_BYTES = frozenset({D.INT8, D.UINT8})
_NARROW = _BYTES | {D.INT16, D.UINT16}


def _along(xp: Namespace, values: Array, x: Array, axis: int) -> Array:
    """Return a vector laid along an axis of `x`; a scalar unchanged."""
    if values.ndim == 0 or values.shape == (1,):
        return xp.reshape(values, ())
    return xp.reshape(values, axis_shape(from_front(axis, x.ndim), x.ndim))


def _saturated(xp: Namespace, x: Array, to: object) -> Array:
    limits = xp.iinfo(to)
    # Clipped before the cast, which is undefined beyond the range of the integers.
    return xp.astype(xp.minimum(xp.maximum(x, float(limits.min)), float(limits.max)), to)


def _quantize(xp: Namespace, op: Op) -> Fn:
    axis, target = op.get("axis", 1), op.get("output_dtype") or int(D.UINT8)

    def fn(x: Array, scale: Array, zero: Array = None) -> Array:
        y = xp.round(x / _along(xp, scale, x, axis))
        if zero is None:
            return _saturated(xp, y, dtype(xp, target))
        # In float32: an integer beyond 2^24 saturates, so its last digits do not matter.
        y = xp.astype(y, xp.float32, copy=False) + xp.astype(_along(xp, zero, x, axis), xp.float32)
        return _saturated(xp, y, zero.dtype)

    return fn


def _dequantize(xp: Namespace, op: Op) -> Fn:
    axis = op.get("axis", 1)

    def fn(x: Array, scale: Array, zero: Array = None) -> Array:
        # In int32, since a difference of two bytes takes nine bits.
        wide = xp.astype(x, xp.int32, copy=False)
        if zero is not None:
            wide = wide - xp.astype(_along(xp, zero, x, axis), xp.int32)
        y = xp.astype(wide, xp.float32) * xp.astype(_along(xp, scale, x, axis), xp.float32, copy=False)
        return xp.astype(y, scale.dtype, copy=False)

    return fn


def _by_axis(node: ir.Node, opset: int) -> bool:
    """Return whether there is a scale per tensor or axis (not per block), in the default precision."""
    if attribute_of(node, "block_size", 0) or attribute_of(node, "precision", 0):
        return False
    target = attribute_of(node, "output_dtype", 0)
    return target == 0 or (node.op_type == "QuantizeLinear" and target in _NARROW)


def _dynamic(xp: Namespace, op: Op) -> Fn:
    def fn(x: Array) -> tuple[Array, Array, Array]:
        # The range has to include 0, the value of padding.
        low = xp.minimum(xp.min(x), xp.zeros((), dtype=x.dtype))
        high = xp.maximum(xp.max(x), xp.zeros((), dtype=x.dtype))
        scale = (high - low) / 255
        # For zeros alone, every scale but 0 is correct.
        scale = xp.where(scale == 0, xp.ones_like(scale), scale)
        zero = _saturated(xp, xp.round(-low / scale), xp.uint8)
        y = _saturated(xp, xp.round(x / scale) + xp.astype(zero, x.dtype), xp.uint8)
        return y, scale, zero

    return listed(op, fn)


def _matmul_integer(xp: Namespace, op: Op) -> Fn:
    def shifted(x: Array, zero: Array, rows: bool) -> Array:
        x = xp.astype(x, xp.int32)
        if zero is None:
            return x
        zero = xp.astype(zero, xp.int32)
        return x - (xp.expand_dims(zero, axis=-1) if rows and zero.ndim == 1 and zero.shape[0] > 1 else zero)

    def fn(a: Array, b: Array, a_zero: Array = None, b_zero: Array = None) -> Array:
        return xp.matmul(shifted(a, a_zero, rows=True), shifted(b, b_zero, rows=False))

    return fn


TABLE: dict[str, Kernel] = {
    "QuantizeLinear": Kernel(
        _quantize, (frozenset({D.FLOAT}), frozenset({D.FLOAT}), _NARROW), range(10, 29), _by_axis
    ),
    "DequantizeLinear": Kernel(
        _dequantize, (_NARROW | {D.INT32}, FLOAT, _NARROW | {D.INT32}), range(10, 29), _by_axis
    ),
    "DynamicQuantizeLinear": Kernel(_dynamic, (frozenset({D.FLOAT}),), range(11, 29)),
    "MatMulInteger": Kernel(_matmul_integer, (_BYTES,), range(10, 29)),
}
