"""Arrays out of nothing, or out of a shape: constants, ranges, identity matrices, shapes themselves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from dask_ferro.engines.array.kernel import ANY, NUMERIC, WIDE, Array, D, Fn, Kernel, Op, dtype, late

_VALUES = ("value", "value_float", "value_floats", "value_int", "value_ints")


def _constant(xp: Any, op: Op) -> Fn:
    (name,) = (n for n in _VALUES if n in op.attributes)
    value = op.attributes[name]
    if name == "value":
        known = np.array(value.numpy())
    else:
        known = np.array(value, np.float32 if "float" in name else np.int64)
    known.flags.writeable = False  # every call gives the same array
    array = xp.asarray(known)
    return lambda: array


def _plain_constant(node: ir.Node, opset: int) -> bool:
    """Whether the value is a tensor of a dtype that every namespace has, and not a string or sparse."""
    names = set(node.attributes) & {*_VALUES, "sparse_value", "value_string", "value_strings"}
    if len(names) != 1 or not names <= set(_VALUES):
        return False
    return names != {"value"} or node.attributes["value"].as_tensor().dtype in ANY


def _constant_of_shape(xp: Any, op: Op) -> Fn:
    tensor = op.get("value")
    value = np.zeros(1, np.float32) if tensor is None else tensor.numpy().reshape(-1)
    fill, kind = value[0].item(), getattr(xp, value.dtype.name)

    def make(shape: tuple[int, ...]) -> Fn:
        return lambda _: xp.full(shape, fill, dtype=kind)

    return late(op, make, 0)


def _plain_value(node: ir.Node, opset: int) -> bool:
    value = node.attributes.get("value")
    return value is None or value.as_tensor().dtype in ANY


def _range(xp: Any, op: Op) -> Fn:
    integer = {getattr(xp, n) for n in ("int16", "int32", "int64")}

    def fn(start: Array, limit: Array, delta: Array) -> Array:
        kind = start.dtype
        number = int if any(kind == d for d in integer) else float
        first, last, step = (number(xp.reshape(a, ())) for a in (start, limit, delta))
        count = max(math.ceil((last - first) / step), 0)
        if number is int:
            return xp.astype(first + step * xp.arange(count, dtype=xp.int64), kind, copy=False)
        return xp.astype(first + step * xp.arange(count, dtype=xp.float64), kind, copy=False)

    return fn


def _shape(xp: Any, op: Op) -> Fn:
    cut = slice(op.get("start", 0), op.get("end"))
    return lambda x: xp.asarray(x.shape[cut], dtype=xp.int64)


def _size(xp: Any, op: Op) -> Fn:
    return lambda x: xp.asarray(math.prod(x.shape), dtype=xp.int64)


def _eye_like(xp: Any, op: Op) -> Fn:
    k, to = op.get("k", 0), op.get("dtype")
    kind = None if to is None else dtype(xp, to)
    return lambda x: xp.eye(x.shape[0], x.shape[1], k=k, dtype=kind or x.dtype)


def _plain_dtype(node: ir.Node, opset: int) -> bool:
    to = node.attributes.get("dtype")
    return to is None or to.as_int() in {int(d) for d in ANY}


TABLE: dict[str, Kernel] = {
    "Constant": Kernel(_constant, (ANY,), when=_plain_constant),
    "ConstantOfShape": Kernel(_constant_of_shape, (WIDE,), when=_plain_value),
    "Range": Kernel(_range, (frozenset({D.FLOAT, D.DOUBLE, D.INT16, D.INT32, D.INT64}),)),
    "Shape": Kernel(_shape, (ANY,)),
    "Size": Kernel(_size, (ANY,)),
    "EyeLike": Kernel(_eye_like, (NUMERIC | frozenset({D.BOOL}),), when=_plain_dtype),
}
