"""Linear quantization to 8 and 16 bit integers, per tensor or per axis, and the integer matrix product.

Values are rounded half to even and saturate.  Scales per block, and 4-bit and float8 targets, are left to other
engines.
"""

from __future__ import annotations

import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Kernel, axis_shape, dtype, from_front, row
from dask_ferro.graph.ir.dtypes import FLOAT, D
from dask_ferro.graph.ir.nodes import attribute_of

_BYTES = frozenset({D.INT8, D.UINT8})
_NARROW = _BYTES | {D.INT16, D.UINT16}


def _lay_along(xp: Namespace, values: Array, x: Array, axis: int) -> Array:
    """Return a vector laid along an axis of `x`; a scalar unchanged."""
    if values.ndim == 0 or values.shape == (1,):
        return xp.reshape(values, ())
    return xp.reshape(values, axis_shape(from_front(axis, x.ndim), x.ndim))


def _saturate(xp: Namespace, x: Array, to: object) -> Array:
    limits = xp.iinfo(to)
    # Clipped before the cast, which is undefined beyond the range of the integers.
    return xp.astype(xp.minimum(xp.maximum(x, float(limits.min)), float(limits.max)), to)


def _quantize(
    xp: Namespace, x: Array, scale: Array, zero: Array = None, *, axis: int, output_dtype: int
) -> Array:
    y = xp.round(x / _lay_along(xp, scale, x, axis))
    if zero is None:
        return _saturate(xp, y, dtype(xp, output_dtype or D.UINT8))
    # In float32: an integer beyond 2^24 saturates, so its last digits do not matter.
    y = xp.astype(y, xp.float32, copy=False) + xp.astype(_lay_along(xp, zero, x, axis), xp.float32)
    return _saturate(xp, y, zero.dtype)


def _dequantize(xp: Namespace, x: Array, scale: Array, zero: Array = None, *, axis: int) -> Array:
    # In int32, since a difference of two bytes takes nine bits.
    wide = xp.astype(x, xp.int32, copy=False)
    if zero is not None:
        wide = wide - xp.astype(_lay_along(xp, zero, x, axis), xp.int32)
    y = xp.astype(wide, xp.float32) * xp.astype(_lay_along(xp, scale, x, axis), xp.float32, copy=False)
    return xp.astype(y, scale.dtype, copy=False)


def _by_axis(node: ir.Node, opset: int) -> bool:
    """Return whether there is a scale per tensor or axis (not per block), in the default precision."""
    if attribute_of(node, "block_size", 0) or attribute_of(node, "precision", 0):
        return False
    target = attribute_of(node, "output_dtype", 0)
    return target == 0 or (node.op_type == "QuantizeLinear" and target in _NARROW)


def _dynamic(xp: Namespace, x: Array) -> tuple[Array, Array, Array]:
    # The range has to include 0, the value of padding.
    low = xp.minimum(xp.min(x), xp.zeros((), dtype=x.dtype))
    high = xp.maximum(xp.max(x), xp.zeros((), dtype=x.dtype))
    scale = (high - low) / 255
    # For only zeros, every scale except 0 is correct.
    scale = xp.where(scale == 0, xp.ones_like(scale), scale)
    zero = _saturate(xp, xp.round(-low / scale), xp.uint8)
    y = _saturate(xp, xp.round(x / scale) + xp.astype(zero, x.dtype), xp.uint8)
    return y, scale, zero


def _matmul_integer(xp: Namespace, a: Array, b: Array, a_zero: Array = None, b_zero: Array = None) -> Array:
    # A vector has a zero point for each row of `a`, or each column of `b`.
    if a_zero is not None and a_zero.ndim == 1 and a_zero.shape[0] > 1:
        a_zero = xp.expand_dims(a_zero, axis=-1)
    a, b = (
        xp.astype(x, xp.int32) - (0 if zero is None else xp.astype(zero, xp.int32))
        for x, zero in ((a, a_zero), (b, b_zero))
    )
    return xp.matmul(a, b)


TABLE: dict[str, Kernel] = {
    "QuantizeLinear": row(
        _quantize,
        *(frozenset({D.FLOAT}), frozenset({D.FLOAT}), _NARROW),
        opsets=range(10, 29),
        when=_by_axis,
        axis=1,
        output_dtype=0,
    ),
    "DequantizeLinear": row(
        _dequantize,
        *(_NARROW | {D.INT32}, FLOAT, _NARROW | {D.INT32}),
        opsets=range(10, 29),
        when=_by_axis,
        axis=1,
    ),
    "DynamicQuantizeLinear": row(_dynamic, frozenset({D.FLOAT}), opsets=range(11, 29)),
    "MatMulInteger": row(_matmul_integer, _BYTES, opsets=range(10, 29)),
}
