"""Gradients of reductions, cumulative sums and products, softmax and layer normalization.

A reduction's gradient goes back over the axes by broadcasting.  Elements that share a maximum share its
gradient evenly (PyTorch's amax).  The gradient of a product holds where factors are 0.
"""

from __future__ import annotations

from collections.abc import Callable

from dask_ferro.graph.autodiff.rule import GradientRequest, Row, sum_to
from dask_ferro.graph.tensor.dims import axis_of
from dask_ferro.graph.tensor.manipulation import broadcast_like
from dask_ferro.graph.tensor.namespace import exp, expand_dims, reciprocal, sign, sqrt, where
from dask_ferro.graph.tensor.statistical import count_over, reduce
from dask_ferro.graph.tensor.tensor import Tensor, cast, emit, widen


def _axes(call: GradientRequest) -> tuple[int, ...]:
    rank, axes = call.input(0).ndim, call.constant(1, "axes")
    # No axes means all, unless the node says that it means none.
    if not axes:
        return () if call.get("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted(axis_of(axis, rank, call.node.op_type) for axis in axes))


def _keep_axes(call: GradientRequest, reduced: Tensor) -> Tensor:
    """Return a reduction's result, or its gradient, with the reduced axes as ones."""
    return reduced if call.get("keepdims", 1) else expand_dims(reduced, axis=list(_axes(call)))


def _broadcast_back(rule: Callable[[GradientRequest, Tensor, Tensor], Tensor]) -> Row:
    """Return the row of a reduction: `rule(call, g, y)`, the reduced axes of g and y as ones."""

    def fn(call: GradientRequest) -> Tensor:
        return broadcast_like(rule(call, _keep_axes(call, call.g), _keep_axes(call, call.y)), call.x)

    return (fn, None)


def _mean(call: GradientRequest, g: Tensor, y: Tensor) -> Tensor:
    # A count may exceed half precision: float16 ends at 65,504.
    wide = widen(g)
    return cast(wide / count_over(call.x, _axes(call), wide.type.dtype), g.type.dtype)


def _extreme(call: GradientRequest, g: Tensor, y: Tensor) -> Tensor:
    # Equality is exact here: a maximum is one of its elements, never rounded.
    hits = cast(call.x == y, g.type.dtype)
    return g * hits / reduce("ReduceSum", hits, _axes(call), keepdims=True)


def _product(call: GradientRequest, g: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of a product: y / x without a zero, the product of the others at one zero, else 0."""
    axes, zero = _axes(call), call.x == 0
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


def standardize(half: Tensor, axes: tuple[int, ...], epsilon: float) -> tuple[Tensor, Tensor]:
    """Return x minus its mean over its standard deviation, and 1 over the deviation, in float32 for half precision."""
    # ONNX's `stash_type` requires it: squares of float16 end at 256 * 256.
    x = widen(half)
    centred = x - reduce("ReduceMean", x, axes, keepdims=True)
    variance = reduce("ReduceMean", centred * centred, axes, keepdims=True)
    factor = reciprocal(sqrt(variance + epsilon))
    return centred * factor, factor


def _layer_parts(call: GradientRequest) -> tuple[tuple[int, ...], Tensor, Tensor]:
    x = call.input(0)
    if any(g is not None for g in call.grads[1:]):
        raise call.unsupported("its mean and deviation outputs are differentiated; compute them with `mean`")
    axes = tuple(range(call.get("axis", -1) % x.ndim, x.ndim))
    return axes, *standardize(x, axes, call.get("epsilon", 1e-5))


def _layer_input(call: GradientRequest) -> Tensor:
    axes, z, factor = _layer_parts(call)
    g = widen(call.g) * widen(call.input(1))
    along = reduce("ReduceMean", g * z, axes, keepdims=True)
    moved = factor * (g - reduce("ReduceMean", g, axes, keepdims=True) - z * along)
    return cast(moved, call.x.type.dtype)


TABLE: dict[str, Row] = {
    "ReduceSum": _broadcast_back(lambda c, g, y: g),
    "ReduceMean": _broadcast_back(_mean),
    "ReduceMax": _broadcast_back(_extreme),
    "ReduceMin": _broadcast_back(_extreme),
    "ReduceProd": _broadcast_back(_product),
    "ReduceL1": _broadcast_back(lambda c, g, y: g * sign(c.x)),
    # It is 0 at 0.
    "ReduceL2": _broadcast_back(lambda c, g, y: where(y == 0, 0.0, g * c.x / where(y == 0, 1.0, y))),
    "ReduceSumSquare": _broadcast_back(lambda c, g, y: 2.0 * g * c.x),
    "ReduceLogSum": _broadcast_back(lambda c, g, y: g / exp(y)),
    "ReduceLogSumExp": _broadcast_back(lambda c, g, y: g * exp(c.x - y)),
    "CumSum": (_cumulative_sum, None),
    "Softmax": (_softmax,),
    "LogSoftmax": (_log_softmax,),
    "LayerNormalization": (
        _layer_input,
        lambda c: cast(sum_to(widen(c.g) * _layer_parts(c)[1], c.x), c.x.type.dtype),
        lambda c: sum_to(c.g, c.x),
    ),
}
