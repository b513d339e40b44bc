"""Elementwise functions of tensors, under the array-API standard's names.

Each is one ONNX node; the functions that ONNX lacks (`square`, `log1p`, `hypot`) are compositions.
Shapes and dtypes are checked in `tensor`.
"""

from __future__ import annotations

# ruff: noqa: F403, F405
from dask_ferro.graph.tensor.elementwise.arithmetic import *
from dask_ferro.graph.tensor.elementwise.bits import *
from dask_ferro.graph.tensor.elementwise.comparison import *
from dask_ferro.graph.tensor.elementwise.division import *
from dask_ferro.graph.tensor.elementwise.elementary import *
from dask_ferro.graph.tensor.elementwise.pairs import *

__all__ = [
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_invert", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "ceil",
    "clip", "copysign", "cos", "cosh", "divide", "equal", "erf", "exp", "expm1", "floor", "floor_divide",
    "greater", "greater_equal", "hypot", "isfinite", "isinf", "isnan", "less", "less_equal", "log",
    "log1p", "log2", "log10", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor",
    "maximum", "minimum", "multiply", "negative", "not_equal", "positive", "pow", "reciprocal",
    "remainder", "round", "sign", "signbit", "sin", "sinh", "sqrt", "square", "subtract", "tan", "tanh",
    "trunc", "where",
]  # fmt: skip
