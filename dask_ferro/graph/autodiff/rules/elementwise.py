"""Gradients of elementwise arithmetic, mathematics and activation functions.

At a kink the choices are PyTorch's: 0 for |x| and relu at 0, an even split if a maximum is reached twice, a clip
passes its bounds.  If a branch of a function could overflow, the other branch's gradient is chosen by `where`, never
by a product with 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dask_ferro.graph.autodiff.rule import GradientRequest, Row, Rule, sum_to
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.tensor import Tensor, cast, constant_of, elementwise, widen

# tanh of 0.8 (x + 0.04 x^3) is 1 to the last bit of a double long before it.
_GELU_FLAT = 20.0
_SELU_ALPHA, _SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


def _derivative(derivative: Callable[[Tensor, GradientRequest], Tensor]) -> Row:
    """Return the row of a function of one input from its derivative."""
    return (lambda call: call.g * derivative(call.x, call),)


def _identity_where(condition: Callable[[Tensor, GradientRequest], Tensor]) -> Row:
    """Return the row of a function that is the identity if a condition holds, and otherwise a constant."""
    return (lambda call: xp.where(condition(call.x, call), call.g, 0.0),)


def _broadcast(rule: Rule) -> Rule:
    def fn(call: GradientRequest) -> Tensor:
        others = [x for i, x in enumerate(call.node.inputs) if i != call.index and x is not None]
        # Whatever the unknown sizes of this input are, all others certainly broadcast to it.
        is_largest = all(x.ndim <= call.x.ndim and set(x.shape) <= {1} for x in others)
        return rule(call) if is_largest else sum_to(rule(call), call.x)

    return fn


def _power_base(call: GradientRequest) -> Tensor:
    base, exponent = call.input(0), cast(call.input(1), call.input(0).type.dtype)
    known = constant_of(call.input(1))
    # A constant exponent needs no `where`, and x * x is cheaper than a power.
    if known is not None and known.ndim == 0 and known != 0:
        return call.g * float(known) * (base if known == 2 else base ** float(known - 1))
    # At exponent 0 the slope is 0, while base ** -1 may be infinite.
    return xp.where(exponent == 0, 0.0, call.g * exponent * base ** (exponent - 1))


def _power_exponent(call: GradientRequest) -> Tensor:
    base = call.input(0)
    # The value is 0 there already, so any finite logarithm gives the right gradient of 0.
    logs = xp.log(xp.where(base == 0, 1.0, base))
    return cast(call.g * call.y * logs, call.x.type.dtype)


def _share(call: GradientRequest) -> Tensor:
    # An input that attains the maximum or minimum has g, which ties share evenly.
    hits = [cast(x == call.y, call.g.type.dtype) for x in call.node.inputs if x is not None]
    return call.g * hits[call.index] / sum(hits[1:], start=hits[0])


def _clip_input(call: GradientRequest) -> Tensor:
    g, low, high = call.g, call.maybe(1), call.maybe(2)
    g = g if low is None else xp.where(call.x < low, 0.0, g)
    return g if high is None else xp.where(call.x > high, 0.0, g)


def _clip_low(call: GradientRequest) -> Tensor:
    x, high = call.input(0), call.maybe(2)
    # On a bound the gradient belongs to the input, as in `clip`.
    below = x < call.x
    return xp.where(below if high is None else below & (call.x < high), call.g, 0.0)


def _clip_high(call: GradientRequest) -> Tensor:
    x, low = call.input(0), call.maybe(1)
    return xp.where(x > call.x if low is None else (x > call.x) | (low > call.x), call.g, 0.0)


def _gelu(x: Tensor, call: GradientRequest) -> Tensor:
    if call.get("approximate", "none") == "tanh":
        # Beyond it the slope is 0 or 1, and x^3 may be infinite.
        x = xp.clip(x, -_GELU_FLAT, _GELU_FLAT)
        c = math.sqrt(2 / math.pi)
        t = xp.tanh(c * (x + 0.044715 * x * x * x))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)
    density = xp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + elementwise("Erf", x * math.sqrt(0.5))) + x * density


def _selu(x: Tensor, call: GradientRequest) -> Tensor:
    alpha, gamma = call.get("alpha", _SELU_ALPHA), call.get("gamma", _SELU_GAMMA)
    return xp.where(x > 0, gamma, call.y + gamma * alpha)


def _hard_sigmoid(call: GradientRequest) -> Tensor:
    alpha: float = call.get("alpha", 0.2)
    line = alpha * call.x + call.get("beta", 0.5)
    return xp.where((line > 0) & (line < 1), call.g * alpha, 0.0)


TABLE: dict[str, Row] = {
    "Add": (_broadcast(lambda c: c.g),),
    "Sub": (_broadcast(lambda c: c.g), _broadcast(lambda c: -c.g)),
    "Mul": (_broadcast(lambda c: c.g * c.input(1)), _broadcast(lambda c: c.g * c.input(0))),
    "Div": (_broadcast(lambda c: c.g / c.input(1)), _broadcast(lambda c: -c.g * c.y / c.x)),
    # Mod(a, b) is a - q b, of the integer quotient q.
    "Mod": (_broadcast(lambda c: c.g), _broadcast(lambda c: -c.g * ((c.input(0) - c.y) / c.input(1)))),
    "Pow": (_broadcast(_power_base), _broadcast(_power_exponent)),
    "Sum": (_broadcast(lambda c: c.g),),
    "Mean": (_broadcast(lambda c: c.g / len(c.node.inputs)),),
    "Max": (_broadcast(_share),),
    "Min": (_broadcast(_share),),
    "Where": (
        None,
        _broadcast(lambda c: xp.where(c.input(0), c.g, 0.0)),
        _broadcast(lambda c: xp.where(c.input(0), 0.0, c.g)),
    ),
    "Clip": (_clip_input, _broadcast(_clip_low), _broadcast(_clip_high)),
    "Neg": (lambda c: -c.g,),
    "Abs": _derivative(lambda x, c: xp.sign(x)),
    "Reciprocal": _derivative(lambda x, c: -c.y * c.y),
    "Sqrt": _derivative(lambda x, c: 0.5 / c.y),
    "Exp": _derivative(lambda x, c: c.y),
    "Log": _derivative(lambda x, c: xp.reciprocal(x)),
    "Erf": _derivative(lambda x, c: 2 / math.sqrt(math.pi) * xp.exp(-x * x)),
    "Sin": _derivative(lambda x, c: xp.cos(x)),
    "Cos": _derivative(lambda x, c: -xp.sin(x)),
    "Tan": _derivative(lambda x, c: 1 + c.y * c.y),
    "Asin": _derivative(lambda x, c: xp.reciprocal(xp.sqrt(1 - x * x))),
    "Acos": _derivative(lambda x, c: -xp.reciprocal(xp.sqrt(1 - x * x))),
    "Atan": _derivative(lambda x, c: xp.reciprocal(1 + x * x)),
    "Sinh": _derivative(lambda x, c: xp.cosh(x)),
    "Cosh": _derivative(lambda x, c: xp.sinh(x)),
    "Tanh": _derivative(lambda x, c: 1 - c.y * c.y),
    "Asinh": _derivative(lambda x, c: xp.reciprocal(xp.sqrt(x * x + 1))),
    "Acosh": _derivative(lambda x, c: xp.reciprocal(xp.sqrt(x * x - 1))),
    "Atanh": _derivative(lambda x, c: xp.reciprocal(1 - x * x)),
    # Like PyTorch's, it passes at NaN.
    "Relu": (lambda c: xp.where(c.x <= 0, 0.0, c.g),),
    "ThresholdedRelu": _identity_where(lambda x, c: x > c.get("alpha", 1.0)),
    "Shrink": _identity_where(lambda x, c: xp.abs(x) > c.get("lambd", 0.5)),
    "LeakyRelu": (lambda c: xp.where(c.x > 0, c.g, c.g * c.get("alpha", 0.01)),),
    "PRelu": (
        lambda c: xp.where(c.x > 0, c.g, c.g * c.input(1)),
        _broadcast(lambda c: xp.where(c.input(0) > 0, 0.0, c.g * c.input(0))),
    ),
    "Elu": _derivative(lambda x, c: xp.where(x > 0, 1.0, c.y + c.get("alpha", 1.0))),
    "Celu": _derivative(lambda x, c: xp.where(x > 0, 1.0, xp.exp(xp.minimum(x, 0.0) / c.get("alpha", 1.0)))),
    "Selu": _derivative(_selu),
    "Sigmoid": _derivative(lambda x, c: c.y * (1 - c.y)),
    "Softplus": _derivative(lambda x, c: elementwise("Sigmoid", x)),
    "Softsign": _derivative(lambda x, c: xp.reciprocal((1 + xp.abs(x)) ** 2)),
    "HardSigmoid": (_hard_sigmoid,),
    "HardSwish": _derivative(lambda x, c: xp.where(x <= -3, 0.0, xp.where(x >= 3, 1.0, x / 3 + 0.5))),
    "Gelu": _derivative(lambda x, c: cast(_gelu(widen(x), c), x.type.dtype)),
}
