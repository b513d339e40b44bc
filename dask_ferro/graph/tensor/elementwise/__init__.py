"""Elementwise functions of tensors, under the array-API standard's names.

Each is one ONNX node; the few functions that ONNX lacks (`square`, `log1p`, `floor_divide`) are compositions.
Shapes and dtypes are checked in `tensor`.
"""

from __future__ import annotations

# ruff: noqa: F403, F405
from dask_ferro.graph.tensor.elementwise.arithmetic import *
from dask_ferro.graph.tensor.elementwise.comparison import *
from dask_ferro.graph.tensor.elementwise.elementary import *

__all__ = [
    "abs", "acos", "acosh", "add", "asin", "asinh", "atan", "atanh", "ceil", "clip", "cos", "cosh",
    "divide", "equal", "erf", "exp", "expm1", "floor", "floor_divide", "greater", "greater_equal",
    "isinf", "isnan", "less", "less_equal", "log", "log1p", "logical_and", "logical_not", "logical_or",
    "logical_xor", "maximum", "minimum", "multiply", "negative", "not_equal", "pow", "reciprocal",
    "round", "sign", "sin", "sinh", "sqrt", "square", "subtract", "tan", "tanh", "where",
]  # fmt: skip
