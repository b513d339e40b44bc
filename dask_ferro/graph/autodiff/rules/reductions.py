"""Gradients of reductions, cumulative sums and products, softmax and layer normalization.

A reduction's gradient goes back over the axes by broadcasting.  Elements that share a maximum share its
gradient evenly (PyTorch's amax).  The gradient of a product holds where factors are 0.
"""

from __future__ import annotations

from collections.abc import Callable

from dask_ferro.graph.autodiff.rule import GradientRequest, Row, kept, reduced_axes, shared_over, summed_to
from dask_ferro.graph.tensor.manipulation import broadcast_like
from dask_ferro.graph.tensor.namespace import exp, reciprocal, sign, sqrt, where
from dask_ferro.graph.tensor.statistical import reduce
from dask_ferro.graph.tensor.tensor import Tensor, cast, emit, widened


def _back(rule: Callable[[GradientRequest, Tensor, Tensor], Tensor]) -> Row:
    """Return the row of a reduction: `rule(call, g, y)`, with the axes of g and y kept."""

    def fn(call: GradientRequest) -> Tensor:
        return broadcast_like(rule(call, kept(call, call.g), kept(call, call.y)), call.x)

    return (fn, None)


def _extreme(call: GradientRequest, g: Tensor, y: Tensor) -> Tensor:
    # Equality is exact here: a maximum is one of its elements, never rounded.
    hits = cast(call.x == y, g.type.dtype)
    return g * hits / reduce("ReduceSum", hits, reduced_axes(call), keepdims=True)


def _product(call: GradientRequest, g: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of a product: y / x without a zero, the product of the others at one zero, else 0."""
    axes, zero = reduced_axes(call), call.x == 0
    # Zeros are replaced before the division, or 0 / 0 would poison the gradient with NaN.
    filled = where(zero, 1.0, call.x)
    others = reduce("ReduceProd", filled, axes, keepdims=True)
    zeros = reduce("ReduceSum", cast(zero, g.type.dtype), axes, keepdims=True)
    alone = where(zero & (zeros == 1), others, 0.0)
    return g * where(zeros == 0, others / filled, alone)


def _cumulative_sum(call: GradientRequest) -> Tensor:
    other_way = 1 - int(call.get("reverse", 0))
    exclusive = int(call.get("exclusive", 0))
    return emit("CumSum", [call.g, call.input(1)], call.g.shape, exclusive=exclusive, reverse=other_way)


def _softmax(call: GradientRequest) -> Tensor:
    product = call.g * call.y
    return product - call.y * reduce("ReduceSum", product, call.get("axis", -1), keepdims=True)


def _log_softmax(call: GradientRequest) -> Tensor:
    return call.g - exp(call.y) * reduce("ReduceSum", call.g, call.get("axis", -1), keepdims=True)


# Layer normalization: y = scale * z + bias, with z the standardized x.


def standardized(half: Tensor, axes: tuple[int, ...], epsilon: float) -> tuple[Tensor, Tensor]:
    """Return x minus its mean over its standard deviation, and 1 over the deviation.

    Both are float32 where x is of half precision, as ONNX's `stash_type` asks: squares of float16 end at 256 * 256.
    """
    x = widened(half)
    centred = x - reduce("ReduceMean", x, axes, keepdims=True)
    variance = reduce("ReduceMean", centred * centred, axes, keepdims=True)
    factor = reciprocal(sqrt(variance + epsilon))
    return centred * factor, factor


def _layer_parts(call: GradientRequest) -> tuple[tuple[int, ...], Tensor, Tensor]:
    x = call.input(0)
    if any(g is not None for g in call.grads[1:]):
        raise call.unsupported("its mean and deviation outputs are differentiated; compute them with `mean`")
    axes = tuple(range(call.get("axis", -1) % x.ndim, x.ndim))
    return axes, *standardized(x, axes, call.get("epsilon", 1e-5))


def _layer_input(call: GradientRequest) -> Tensor:
    axes, z, factor = _layer_parts(call)
    g = widened(call.g) * widened(call.input(1))
    along = reduce("ReduceMean", g * z, axes, keepdims=True)
    moved = factor * (g - reduce("ReduceMean", g, axes, keepdims=True) - z * along)
    return cast(moved, call.x.type.dtype)


TABLE: dict[str, Row] = {
    "ReduceSum": (lambda c: broadcast_like(kept(c, c.g), c.x) if reduced_axes(c) else c.g, None),
    "ReduceMean": _back(lambda c, g, y: shared_over(g, c.x, reduced_axes(c))),
    "ReduceMax": _back(_extreme),
    "ReduceMin": _back(_extreme),
    "ReduceProd": _back(_product),
    "ReduceL1": _back(lambda c, g, y: g * sign(c.x)),
    # It is 0 at 0.
    "ReduceL2": _back(lambda c, g, y: where(y == 0, 0.0, g * c.x / where(y == 0, 1.0, y))),
    "ReduceSumSquare": _back(lambda c, g, y: 2.0 * g * c.x),
    "ReduceLogSum": _back(lambda c, g, y: g / exp(y)),
    "ReduceLogSumExp": _back(lambda c, g, y: g * exp(c.x - y)),
    "CumSum": (_cumulative_sum, None),
    "Softmax": (_softmax,),
    "LogSoftmax": (_log_softmax,),
    "LayerNormalization": (
        _layer_input,
        lambda c: cast(summed_to(widened(c.g) * _layer_parts(c)[1], c.x), c.x.type.dtype),
        lambda c: summed_to(c.g, c.x),
    ),
}
