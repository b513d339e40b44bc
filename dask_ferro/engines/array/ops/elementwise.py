"""Elementwise arithmetic, comparison, logic and mathematics, with ONNX's (NumPy's) broadcasting.

If an ONNX operator and an array-API function agree, the row's kernel *is* the namespace's function, so a call has no
overhead.  The others differ in details: integer division truncates, `Mod` has two sign conventions, `Pow` keeps its
base's dtype, `BitShift` is defined for every shift.

Dividing an integer by 0 is an error in Div and Mod on every engine: ONNX leaves the result undefined, ONNX Runtime
raises, and any number would be arbitrary.  Integers wrap; the smallest one divided by -1 is itself.

Casts are between the dtypes of every namespace.  `astype` already follows ONNX's rules for them: floats truncate
toward zero, integers wrap, any value cast to bool is `!= 0`, an overflowing float becomes infinite.  ONNX leaves the
cast of an out-of-range float to an integer undefined, so every result of it is correct.  bfloat16, float8, int4 and
strings have rules of their own, and are left to other engines.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Build, Fn, Kernel, Op, dtype, one_of, row, widen
from dask_ferro.graph.ir.dtypes import BOOL, DTYPES, FLOAT, INTEGER, NUMERIC

# The error of an integer divided by 0, on each engine that checks for it itself.
DIVIDED_BY_ZERO = (
    "an integer is divided by 0, which ONNX leaves undefined; keep zeros out of the divisor, or divide floats"
)
# The error function, which the array API and numpy lack.  SciPy's is not used: a result must not depend on the optional
# packages of a worker.
_ERF = np.frompyfunc(math.erf, 1, 1)
# Clip's default bounds before opset 11.
_FLOAT32_MAX = 3.4028234e38


def _namespace_function(name: str) -> Build:
    """Return the builder that returns the namespace's own function."""

    def build(xp: Namespace, op: Op) -> Fn:
        fn: Fn = getattr(xp, name)
        return fn

    return build


def _division_row(fn: Fn, **defaults: Any) -> Kernel:
    """Return the row of a kernel that divides numbers, but no integer by 0."""

    def build(xp: Namespace, op: Op) -> Fn:
        # A constant divisor is read once: on a GPU each read waits for all queued work.
        constant = op.constants.get(1)
        harmless = constant is not None and bool((constant != 0).all())
        divide = row(fn, **defaults).build(xp, op)

        def checked(a: Array, b: Array) -> Array:
            some = not harmless and xp.isdtype(a.dtype, "integral") and 0 not in (*a.shape, *b.shape)
            if some and bool(xp.any(b == 0)):
                raise ZeroDivisionError(DIVIDED_BY_ZERO)
            return divide(a, b)

        return checked

    return Kernel(build, (NUMERIC,))


def _div(xp: Namespace, a: Array, b: Array) -> Array:
    if not xp.isdtype(a.dtype, "integral"):
        return xp.divide(a, b)
    q = xp.floor_divide(a, b)
    if not xp.isdtype(a.dtype, "signed integer"):
        return q
    # ONNX truncates, the array API rounds down: they differ by one if the quotient is negative and not exact.
    inexact = xp.logical_and(q * b != a, (a < 0) != (b < 0))
    return q + xp.astype(inexact, q.dtype)


def _mod(xp: Namespace, a: Array, b: Array, fmod: int) -> Array:
    """Return the remainder, which has the divisor's sign, or with `fmod` the dividend's."""
    is_integer = xp.isdtype(a.dtype, "integral")
    # CuPy's remainder of floats rounds the quotient, and is NaN of an infinite divisor; its fmod is right.
    if not fmod:
        return floor_remainder(xp, a, b) if not is_integer and _is_cupy(xp) else xp.remainder(a, b)
    if is_integer:
        r = xp.remainder(a, b)
        return xp.where(xp.logical_and(r != 0, (r < 0) != (a < 0)), r - b, r)
    if hasattr(xp, "fmod"):
        return xp.fmod(a, b)
    # On numpy the remainder of positive numbers is exact, as C's fmod is.
    return xp.copysign(xp.remainder(xp.abs(a), xp.abs(b)), a)


def floor_remainder(xp: Namespace, a: Array, b: Array) -> Array:
    """Return the remainder of floats with the divisor's sign, by the one with the dividend's."""
    r = xp.fmod(a, b)
    other_side = (r < 0) != (b < 0)
    return xp.where(r == 0, xp.copysign(xp.zeros_like(r), b), xp.where(other_side, r + b, r))


def _is_cupy(xp: Namespace) -> bool:
    return xp.__name__.rpartition(".")[2] == "cupy"


def _pow(xp: Namespace, op: Op) -> Fn:
    # Squares are common (variances, norms), and `pow` takes many times as long as a product.
    if 1 in op.constants and op.constants[1].ndim == 0 and op.constants[1] == 2:
        return lambda a, b: a * a

    def fn(a: Array, b: Array) -> Array:
        if not xp.isdtype(a.dtype, "integral"):
            return xp.pow(a, b if a.dtype == b.dtype else xp.astype(b, a.dtype))
        if not xp.isdtype(b.dtype, "integral"):
            return xp.astype(xp.pow(xp.astype(a, xp.float64), xp.astype(b, xp.float64)), a.dtype)
        # A negative power of an integer is 0, except for 1 and -1: their power depends on whether the exponent is odd.
        negative = b < 0
        r = xp.pow(a, xp.astype(xp.where(negative, b & 1, b), a.dtype))
        return xp.where(xp.logical_and(negative, xp.abs(a) != 1), xp.zeros_like(r), r)

    return fn


def _bit_shift(xp: Namespace, x: Array, y: Array, direction: str) -> Array:
    left = direction == "LEFT"
    shift = xp.bitwise_left_shift if left else xp.bitwise_right_shift
    # C, and therefore numpy, leaves a shift by the number of bits or more undefined.
    sane = xp.logical_and(y >= 0, y < xp.iinfo(x.dtype).bits)
    shifted = shift(x, xp.where(sane, y, xp.zeros_like(y)))
    signed = not left and xp.isdtype(x.dtype, "signed integer")
    return xp.where(sane, shifted, -xp.astype(x < 0, x.dtype) if signed else xp.zeros_like(x))


def _is_inf(xp: Namespace, x: Array, detect_positive: int, detect_negative: int) -> Array:
    if detect_positive and detect_negative:
        return xp.isinf(x)
    if not (detect_positive or detect_negative):
        return xp.zeros_like(x, dtype=xp.bool)
    return x == (float("inf") if detect_positive else float("-inf"))


def _fold(name: str) -> Build:
    """Return the builder that folds a binary function of the namespace over one or more inputs."""

    def build(xp: Namespace, op: Op) -> Fn:
        binary: Fn = getattr(xp, name)
        if len(op.given) == 1:
            return lambda x: x
        return binary if len(op.given) == 2 else lambda *xs: functools.reduce(binary, xs)

    return build


def _mean(xp: Namespace, op: Op) -> Fn:
    total, count = _fold("add")(xp, op), len(op.given)
    return lambda *xs: total(*xs) / count


def _clip(xp: Namespace, op: Op) -> Fn:
    # Bounds became inputs at opset 11.  Before, the widest float32 meant no bound: as a bound it would clip infinities.
    if op.opset < 11:
        low, high = op.get("min", -_FLOAT32_MAX), op.get("max", _FLOAT32_MAX)
        bounds = (low if low > -_FLOAT32_MAX else None, high if high < _FLOAT32_MAX else None)
        return lambda x: _limit(xp, x, *bounds)
    return lambda x, low=None, high=None: _limit(xp, x, low, high)


def _limit(xp: Namespace, x: Array, low: Array, high: Array) -> Array:
    if low is not None:
        x = xp.maximum(x, low)
    # The upper bound is applied last: with low > high, every value becomes high.
    return x if high is None else xp.minimum(x, high)


def _namespace_rows(names: dict[str, str], *dtypes: frozenset[ir.DataType]) -> dict[str, Kernel]:
    return {op: Kernel(_namespace_function(name), dtypes) for op, name in names.items()}


def erf(xp: Namespace, x: Array) -> Array:
    """Return the error function of an array: by CuPy's kernel, or the C library's function for each element."""
    if _is_cupy(xp):
        fn: Fn = importlib.import_module("cupyx.scipy.special").erf
        # CuPy's function returns float32 for float16, unlike ONNX.
        return xp.astype(fn(widen(xp, x)), x.dtype, copy=False)
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(_ERF(x), x.dtype)
    values = np.from_dlpack(x)
    return xp.from_dlpack(np.asarray(_ERF(values), values.dtype))


def _cast(xp: Namespace, op: Op) -> Fn:
    to = dtype(xp, op.get("to"))
    return lambda x: xp.astype(x, to, copy=False)


TABLE: dict[str, Kernel] = {
    **_namespace_rows({"Add": "add", "Sub": "subtract", "Mul": "multiply"}, NUMERIC),
    **_namespace_rows({"Neg": "negative", "Abs": "abs", "Sign": "sign"}, NUMERIC),
    **_namespace_rows({"Less": "less", "LessOrEqual": "less_equal"}, NUMERIC),
    **_namespace_rows({"Greater": "greater", "GreaterOrEqual": "greater_equal"}, NUMERIC),
    **_namespace_rows(
        {"And": "logical_and", "Or": "logical_or", "Xor": "logical_xor", "Not": "logical_not"}, BOOL
    ),
    **_namespace_rows(
        {"BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor"}, INTEGER
    ),
    **_namespace_rows({"BitwiseNot": "bitwise_invert"}, INTEGER),
    **_namespace_rows({"Ceil": "ceil", "Floor": "floor", "Round": "round"}, FLOAT),
    **_namespace_rows({"Sqrt": "sqrt", "Exp": "exp", "Log": "log", "IsNaN": "isnan"}, FLOAT),
    **_namespace_rows(
        {"Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin", "Acos": "acos", "Atan": "atan"}, FLOAT
    ),
    **_namespace_rows({"Sinh": "sinh", "Cosh": "cosh", "Tanh": "tanh"}, FLOAT),
    **_namespace_rows({"Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh"}, FLOAT),
    "Equal": Kernel(_namespace_function("equal"), (NUMERIC | BOOL,)),
    "Where": Kernel(_namespace_function("where"), (BOOL, NUMERIC | BOOL)),
    "Div": _division_row(_div),
    "Mod": _division_row(_mod, fmod=0),
    "Pow": Kernel(_pow, (NUMERIC,)),
    "BitShift": row(_bit_shift, INTEGER, direction=None),
    "IsInf": row(_is_inf, FLOAT, detect_positive=1, detect_negative=1),
    "Max": Kernel(_fold("maximum"), (NUMERIC,)),
    "Min": Kernel(_fold("minimum"), (NUMERIC,)),
    "Sum": Kernel(_fold("add"), (FLOAT,)),
    "Mean": Kernel(_mean, (FLOAT,)),
    "Clip": Kernel(_clip, (NUMERIC,)),
    "Reciprocal": row(lambda xp, x: 1 / x, FLOAT),
    "Erf": row(erf, FLOAT),
    "Cast": Kernel(_cast, (DTYPES,), when=one_of("to", DTYPES, None)),
    "CastLike": row(lambda xp, x, to: xp.astype(x, to.dtype, copy=False), DTYPES),
}
