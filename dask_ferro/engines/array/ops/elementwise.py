"""Elementwise arithmetic, comparison, logic and mathematics, with ONNX's (NumPy's) broadcasting.

Where an ONNX operator and an array-API function agree, the row's kernel *is* the namespace's function, so a call
has no overhead.  The others differ in details: integer division truncates, `Mod` has two sign conventions, `Pow`
keeps its base's dtype, `BitShift` is defined for every shift.

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
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Build, Fn, Kernel, Op, dtype, dtypes, only
from dask_ferro.graph.ir.dtypes import ANY, BOOL, FLOAT, INTEGER, NUMERIC, SIGNED

# The error of an integer divided by 0, on each engine that checks for it itself.
DIVIDED_BY_ZERO = (
    "an integer is divided by 0, which ONNX leaves undefined; keep zeros out of the divisor, or divide floats"
)
# The error function, which the array API and numpy lack.  SciPy's is not used: a result must not depend on the optional
# packages of a worker.
_ERF = np.frompyfunc(math.erf, 1, 1)
# Clip's default bounds before opset 11.
_FLOAT32_MAX = 3.4028234e38


def _named(name: str) -> Build:
    """Return the builder that returns the namespace's own function."""

    def build(xp: Namespace, op: Op) -> Fn:
        fn: Fn = getattr(xp, name)
        return fn

    return build


def _refuses_zeros(xp: Namespace, op: Op) -> Callable[[Array, Array], None]:
    """Return a check that raises where integers would be divided by 0."""
    # A constant divisor is read once: on a GPU each read waits for all queued work.
    constant = op.constants.get(1)
    harmless = constant is not None and bool((constant != 0).all())

    def check(a: Array, b: Array) -> None:
        if not harmless and 0 not in a.shape and 0 not in b.shape and bool(xp.any(b == 0)):
            raise ZeroDivisionError(DIVIDED_BY_ZERO)

    return check


def _div(xp: Namespace, op: Op) -> Fn:
    integer, signed = dtypes(xp, INTEGER), dtypes(xp, SIGNED)
    check = _refuses_zeros(xp, op)

    def fn(a: Array, b: Array) -> Array:
        if a.dtype not in integer:
            return xp.divide(a, b)
        check(a, b)
        q = xp.floor_divide(a, b)
        if a.dtype not in signed:
            return q
        # ONNX truncates, the array API rounds down: they differ by one where the quotient is negative and not exact.
        inexact = xp.logical_and(q * b != a, (a < 0) != (b < 0))
        return q + xp.astype(inexact, q.dtype)

    return fn


def _mod(xp: Namespace, op: Op) -> Fn:
    integer = dtypes(xp, INTEGER)
    check = _refuses_zeros(xp, op)
    rest = _remainder(xp, op)

    def fn(a: Array, b: Array) -> Array:
        if a.dtype in integer:
            check(a, b)
        return rest(a, b)

    return fn


def _remainder(xp: Namespace, op: Op) -> Fn:
    """Return the remainder function: it has the divisor's sign, or with `fmod` the dividend's."""
    integer = dtypes(xp, INTEGER)
    # CuPy's remainder of floats rounds the quotient, and is NaN of an infinite divisor; its fmod is right.
    exact: Fn | None = getattr(xp, "fmod", None)
    if not op.get("fmod", 0):
        remainder: Fn = xp.remainder
        on_cupy = xp.__name__.rpartition(".")[2] == "cupy"
        return floored(xp, exact) if on_cupy and exact is not None else remainder

    def fn(a: Array, b: Array) -> Array:
        if a.dtype in integer:
            r = xp.remainder(a, b)
            return xp.where(xp.logical_and(r != 0, (r < 0) != (a < 0)), r - b, r)
        if exact is not None:
            return exact(a, b)
        # On numpy the remainder of positive numbers is exact, as C's fmod is.
        return xp.copysign(xp.remainder(xp.abs(a), xp.abs(b)), a)

    return fn


def floored(xp: Namespace, exact: Fn) -> Fn:
    """Return the remainder with the divisor's sign; of floats by `exact`, the remainder with the dividend's."""
    integer = dtypes(xp, INTEGER)

    def fn(a: Array, b: Array) -> Array:
        if a.dtype in integer:
            return xp.remainder(a, b)
        r = exact(a, b)
        other_side = (r < 0) != (b < 0)
        return xp.where(r == 0, xp.copysign(xp.zeros_like(r), b), xp.where(other_side, r + b, r))

    return fn


def _pow(xp: Namespace, op: Op) -> Fn:
    # Squares are common (variances, norms), and `pow` takes many times as long as a product.
    if 1 in op.constants and op.constants[1].ndim == 0 and op.constants[1] == 2:
        return lambda a, b: a * a
    integer = dtypes(xp, INTEGER)

    def fn(a: Array, b: Array) -> Array:
        if a.dtype not in integer:
            return xp.pow(a, b if a.dtype == b.dtype else xp.astype(b, a.dtype))
        if b.dtype not in integer:
            return xp.astype(xp.pow(xp.astype(a, xp.float64), xp.astype(b, xp.float64)), a.dtype)
        # A negative power of an integer is 0, except of 1 and -1, where it depends on whether the exponent is odd.
        negative = b < 0
        r = xp.pow(a, xp.astype(xp.where(negative, b & 1, b), a.dtype))
        return xp.where(xp.logical_and(negative, xp.abs(a) != 1), xp.zeros_like(r), r)

    return fn


def _bit_shift(xp: Namespace, op: Op) -> Fn:
    left = op.get("direction") == "LEFT"
    shift = xp.bitwise_left_shift if left else xp.bitwise_right_shift
    signed = dtypes(xp, SIGNED)

    def fn(x: Array, y: Array) -> Array:
        # C, and therefore numpy, leaves a shift by the number of bits or more undefined.
        sane = xp.logical_and(y >= 0, y < xp.iinfo(x.dtype).bits)
        shifted = shift(x, xp.where(sane, y, xp.zeros_like(y)))
        beyond = xp.zeros_like(x) if left or x.dtype not in signed else -xp.astype(x < 0, x.dtype)
        return xp.where(sane, shifted, beyond)

    return fn


def _is_inf(xp: Namespace, op: Op) -> Fn:
    positive, negative = op.get("detect_positive", 1), op.get("detect_negative", 1)
    if positive and negative:
        isinf: Fn = xp.isinf
        return isinf
    if positive or negative:
        bound = float("inf") if positive else float("-inf")
        return lambda x: x == bound
    return lambda x: xp.zeros_like(x, dtype=xp.bool)


def _folded(name: str) -> Build:
    """Return the builder that folds a binary function of the namespace over one or more inputs."""

    def build(xp: Namespace, op: Op) -> Fn:
        binary: Fn = getattr(xp, name)
        if len(op.given) == 1:
            return lambda x: x
        return binary if len(op.given) == 2 else lambda *xs: functools.reduce(binary, xs)

    return build


def _mean(xp: Namespace, op: Op) -> Fn:
    total, count = _folded("add")(xp, op), len(op.given)
    return lambda *xs: total(*xs) / count


def _clip(xp: Namespace, op: Op) -> Fn:
    # Bounds became inputs at opset 11.  Before, the widest float32 meant no bound: as a bound it would clip infinities.
    if op.opset < 11:
        low, high = op.get("min", -_FLOAT32_MAX), op.get("max", _FLOAT32_MAX)
        bounds = (low if low > -_FLOAT32_MAX else None, high if high < _FLOAT32_MAX else None)
        return lambda x: _clipped(xp, x, *bounds)
    return lambda x, low=None, high=None: _clipped(xp, x, low, high)


def _clipped(xp: Namespace, x: Array, low: Array, high: Array) -> Array:
    if low is not None:
        x = xp.maximum(x, low)
    # The upper bound is applied last: with low > high, every value becomes high.
    return x if high is None else xp.minimum(x, high)


def _same(names: dict[str, str], *dtypes: frozenset[ir.DataType]) -> dict[str, Kernel]:
    return {op: Kernel(_named(name), dtypes) for op, name in names.items()}


def erf(xp: Namespace) -> Fn:
    """Return the error function on arrays of `xp`: CuPy's kernel, or the C library's function for each element."""
    if xp.__name__.rpartition(".")[2] == "cupy":
        fn: Fn = importlib.import_module("cupyx.scipy.special").erf
        # CuPy's function returns float32 for float16, unlike ONNX.
        half = xp.float16
        return lambda x: xp.astype(fn(xp.astype(x, xp.float32)), half) if x.dtype == half else fn(x)
    if isinstance(xp.empty(0), np.ndarray):
        return lambda x: np.asarray(_ERF(x), x.dtype)
    return lambda x: xp.from_dlpack(np.asarray(_ERF(values := np.from_dlpack(x)), values.dtype))


def _cast(xp: Namespace, op: Op) -> Fn:
    to = dtype(xp, op.get("to"))
    return lambda x: xp.astype(x, to, copy=False)


TABLE: dict[str, Kernel] = {
    **_same({"Add": "add", "Sub": "subtract", "Mul": "multiply"}, NUMERIC),
    **_same({"Neg": "negative", "Abs": "abs", "Sign": "sign"}, NUMERIC),
    **_same({"Less": "less", "LessOrEqual": "less_equal"}, NUMERIC),
    **_same({"Greater": "greater", "GreaterOrEqual": "greater_equal"}, NUMERIC),
    **_same({"And": "logical_and", "Or": "logical_or", "Xor": "logical_xor", "Not": "logical_not"}, BOOL),
    **_same({"BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor"}, INTEGER),
    **_same({"BitwiseNot": "bitwise_invert"}, INTEGER),
    **_same({"Ceil": "ceil", "Floor": "floor", "Round": "round"}, FLOAT),
    **_same({"Sqrt": "sqrt", "Exp": "exp", "Log": "log", "IsNaN": "isnan"}, FLOAT),
    **_same(
        {"Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin", "Acos": "acos", "Atan": "atan"}, FLOAT
    ),
    **_same({"Sinh": "sinh", "Cosh": "cosh", "Tanh": "tanh"}, FLOAT),
    **_same({"Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh"}, FLOAT),
    "Equal": Kernel(_named("equal"), (NUMERIC | BOOL,)),
    "Where": Kernel(_named("where"), (BOOL, NUMERIC | BOOL)),
    "Div": Kernel(_div, (NUMERIC,)),
    "Mod": Kernel(_mod, (NUMERIC,)),
    "Pow": Kernel(_pow, (NUMERIC,)),
    "BitShift": Kernel(_bit_shift, (INTEGER,)),
    "IsInf": Kernel(_is_inf, (FLOAT,)),
    "Max": Kernel(_folded("maximum"), (NUMERIC,)),
    "Min": Kernel(_folded("minimum"), (NUMERIC,)),
    "Sum": Kernel(_folded("add"), (FLOAT,)),
    "Mean": Kernel(_mean, (FLOAT,)),
    "Clip": Kernel(_clip, (NUMERIC,)),
    "Reciprocal": Kernel(lambda xp, op: lambda x: 1 / x, (FLOAT,)),
    "Erf": Kernel(lambda xp, op: erf(xp), (FLOAT,)),
    "Cast": Kernel(_cast, (ANY,), when=only("to", ANY, None)),
    "CastLike": Kernel(lambda xp, op: lambda x, to: xp.astype(x, to.dtype, copy=False), (ANY,)),
}
