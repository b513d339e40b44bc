"""Elementwise functions of tensors, under the array-API standard's names.

Each is one ONNX node; the few functions that ONNX lacks (`square`, `log1p`, `floor_divide`) are compositions.
Shapes and dtypes are checked in `tensor`.
"""

from __future__ import annotations

from dask_ferro.graph.tensor.elementwise.arithmetic import (
    add,
    clip,
    divide,
    floor_divide,
    maximum,
    minimum,
    multiply,
    negative,
    pow,
    subtract,
)
from dask_ferro.graph.tensor.elementwise.comparison import (
    equal,
    greater,
    greater_equal,
    isinf,
    isnan,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    not_equal,
    where,
)
from dask_ferro.graph.tensor.elementwise.elementary import (
    abs,
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atanh,
    ceil,
    cos,
    cosh,
    erf,
    exp,
    expm1,
    floor,
    log,
    log1p,
    reciprocal,
    round,
    sign,
    sin,
    sinh,
    sqrt,
    square,
    tan,
    tanh,
)

__all__ = [
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atanh", "ceil", "clip", "cos", "cosh",
    "divide", "equal", "erf", "exp", "expm1", "floor", "floor_divide", "greater", "greater_equal",
    "isinf", "isnan", "less", "less_equal", "log", "log1p", "logical_and", "logical_not", "logical_or",
    "logical_xor", "maximum", "minimum", "multiply", "negative", "not_equal", "pow", "reciprocal",
    "round", "sign", "sin", "sinh", "sqrt", "square", "subtract", "tan", "tanh", "where",
]  # fmt: skip
