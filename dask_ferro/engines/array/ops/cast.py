"""Casts between the dtypes that every namespace has.

`astype` already follows ONNX's rules for these: floats truncate toward zero, integers wrap, anything to bool
is `!= 0`, an overflowing float becomes infinite.  Float to integer out of range is undefined in ONNX, so
whatever comes is right. bfloat16, float8, int4 and strings have rules of their own, and are left to other
engines.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from dask_ferro.engines.array.kernel import ANY, Array, Fn, Kernel, Op, dtype


def _cast(xp: Any, op: Op) -> Fn:
    to = dtype(xp, op.get("to"))
    return lambda x: xp.astype(x, to, copy=False)


def _cast_like(xp: Any, op: Op) -> Fn:
    def fn(x: Array, target: Array) -> Array:
        return xp.astype(x, target.dtype, copy=False)

    return fn


def _to_known(node: ir.Node, opset: int) -> bool:
    to = node.attributes.get("to")
    return to is not None and to.as_int() in {int(d) for d in ANY}


TABLE: dict[str, Kernel] = {
    "Cast": Kernel(_cast, (ANY,), when=_to_known),
    "CastLike": Kernel(_cast_like, (ANY,)),
}
