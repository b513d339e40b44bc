"""Elementwise operators as C expressions for one element.

An expression computes the same as the operator's row in the kernel table, NaN and infinities included; a test compiles
each with the installed C compiler and compares.  Arguments are names or literals, so a macro may repeat one.  `Real` is
the type of the computation: float (for float16 too) or double.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from dask_ferro.engines.array.kernel import Op
from dask_ferro.engines.array.ops.activation import SELU_ALPHA, SELU_GAMMA

# As numpy's maximum and minimum: the result is NaN where either argument is.
PREAMBLE = """
#define FERRO_MAX(a, b) (((a) != (a) || (a) > (b)) ? (a) : (b))
#define FERRO_MIN(a, b) (((a) != (a) || (a) < (b)) ? (a) : (b))
"""

# (Op, *arguments) -> expression
Formula = Callable[..., str]


def _plain(text: str) -> Formula:
    return lambda op, *a: text.format(*a)


def number(value: float) -> str:
    """Return a literal of type `Real`."""
    if math.isnan(value):
        # The device's compiler defines neither NAN nor INFINITY.
        return "(Real(0) / Real(0))"
    return f"Real({value!r})" if math.isfinite(value) else f"(Real({math.copysign(1, value)}) / Real(0))"


def _attribute(text: str, **defaults: float) -> Formula:
    """Return a formula with attributes in braces, and their defaults."""

    def formula(op: Op, *a: str) -> str:
        return text.format(*a, **{n: number(float(op.get(n, d))) for n, d in defaults.items()})

    return formula


def _gelu(op: Op, x: str) -> str:
    if op.get("approximate", "none") == "tanh":
        c = number(math.sqrt(2 / math.pi))
        return f"Real(0.5) * {x} * (Real(1) + tanh({c} * ({x} + Real(0.044715) * {x} * {x} * {x})))"
    return f"Real(0.5) * {x} * (Real(1) + erf({x} * {number(math.sqrt(0.5))}))"


def _clip(op: Op, x: str, low: str = "", high: str = "") -> str:
    y = f"FERRO_MAX({x}, {low})" if low else x
    return f"FERRO_MIN({y}, {high})" if high else y


def _folded(operator: str) -> Formula:
    return lambda op, *a: operator.join(a)


_SOFTPLUS = "(FERRO_MAX({0}, Real(0)) + log1p(exp(-fabs({0}))))"
_SELU = {"alpha": SELU_ALPHA, "gamma": SELU_GAMMA}

FORMULAS: Mapping[str, Formula] = {
    "Identity": _plain("{0}"),
    "Add": _plain("{0} + {1}"),
    "Sub": _plain("{0} - {1}"),
    "Mul": _plain("{0} * {1}"),
    "Div": _plain("{0} / {1}"),
    "Sum": _folded(" + "),
    "Max": lambda op, *a: a[0] if len(a) == 1 else f"FERRO_MAX({a[0]}, {a[1]})",
    "Min": lambda op, *a: a[0] if len(a) == 1 else f"FERRO_MIN({a[0]}, {a[1]})",
    "Neg": _plain("-{0}"),
    "Abs": _plain("fabs({0})"),
    "Reciprocal": _plain("Real(1) / {0}"),
    **{name: _plain(f"{name.lower()}({{0}})") for name in ("Sqrt", "Exp", "Log", "Ceil", "Floor", "Erf")},
    **{name: _plain(f"{name.lower()}({{0}})") for name in ("Sin", "Cos", "Tan", "Sinh", "Cosh", "Tanh")},
    **{name: _plain(f"a{name[1:]}({{0}})") for name in ("Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh")},
    "Relu": _plain("FERRO_MAX({0}, Real(0))"),
    "LeakyRelu": _attribute("({0} < Real(0) ? {alpha} * {0} : {0})", alpha=0.01),
    "ThresholdedRelu": _attribute("({0} > {alpha} ? {0} : Real(0))", alpha=1.0),
    "Elu": _attribute("({0} < Real(0) ? {alpha} * expm1({0}) : {0})", alpha=1.0),
    "Selu": _attribute("{gamma} * ({0} > Real(0) ? {0} : {alpha} * expm1({0}))", **_SELU),
    "Celu": _attribute(
        "FERRO_MAX({0}, Real(0)) + FERRO_MIN({alpha} * expm1({0} / {alpha}), Real(0))", alpha=1.0
    ),
    "Sigmoid": _plain("Real(1) / (Real(1) + exp(-{0}))"),
    "Softplus": _plain(_SOFTPLUS),
    "Softsign": _plain("{0} / (Real(1) + fabs({0}))"),
    "HardSigmoid": _attribute(
        "FERRO_MIN(FERRO_MAX({alpha} * {0} + {beta}, Real(0)), Real(1))", alpha=0.2, beta=0.5
    ),
    "HardSwish": _plain("{0} * FERRO_MIN(FERRO_MAX({0} / Real(6) + Real(0.5), Real(0)), Real(1))"),
    "Mish": _plain("{0} * tanh(" + _SOFTPLUS + ")"),
    "Swish": _attribute("{0} / (Real(1) + exp(-{alpha} * {0}))", alpha=1.0),
    "Gelu": _gelu,
    "Clip": _clip,
}


def formula_of(op_type: str, opset: int, inputs: int) -> Formula | None:
    """Return an op's formula; None where it has none for this opset and number of inputs."""
    # Clip's bounds were attributes before opset 11; nested macros would double the text with every further argument.
    if (op_type == "Clip" and opset < 11) or (op_type in ("Max", "Min") and inputs > 2):
        return None
    return FORMULAS.get(op_type)
