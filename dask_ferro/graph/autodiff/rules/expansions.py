"""Write composite ops as array math, whose simpler ops are differentiated instead.

An op is here if a rule of its own would add nothing; the forward graph has the op itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain

import numpy as np

from dask_ferro.graph.autodiff.rule import GradientRequest
from dask_ferro.graph.autodiff.rules.recurrent import recurrent
from dask_ferro.graph.autodiff.rules.reductions import standardize
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.dims import axis_of
from dask_ferro.graph.tensor.manipulation import fold, ints, reshape_like
from dask_ferro.graph.tensor.nn.attention import attention_of
from dask_ferro.graph.tensor.nn.normalization import per_channel
from dask_ferro.graph.tensor.tensor import Tensor, asarray, cast, elementwise, emit, widen

Expansion = Callable[[GradientRequest], Tensor | tuple[Tensor, ...]]


def _batch(call: GradientRequest) -> Tensor:
    """Return a BatchNormalization; gradients of the running statistics that it returns in training are refused."""
    x, scale, bias, center, variance = (call.input(i) for i in range(5))
    epsilon = call.get("epsilon", 1e-5)
    if not call.get("training_mode", 0):
        factor = scale / xp.sqrt(variance + epsilon)
        return (x - per_channel(center, x)) * per_channel(factor, x) + per_channel(bias, x)
    z, _ = standardize(x, (0, *range(2, x.ndim)), epsilon)
    return cast(z * per_channel(widen(scale), x) + per_channel(widen(bias), x), x.type.dtype)


def _group(call: GradientRequest) -> Tensor:
    # Each channel of an InstanceNormalization is a group.
    x, groups = call.input(0), call.get("num_groups", call.input(0).shape[1])
    if call.node.op_type == "GroupNormalization" and call.node.opset < 21:
        raise call.unsupported("it is the withdrawn form of opset 18; export the model again")
    parts = fold(x, (0, groups if isinstance(groups, int) else 0, -1))
    wide, _ = standardize(parts, (2,), call.get("epsilon", 1e-5))
    z = reshape_like(cast(wide, x.type.dtype), x)
    return z * per_channel(call.input(1), x) + per_channel(call.input(2), x)


def _rms(call: GradientRequest) -> Tensor:
    x, scale = widen(call.input(0)), call.input(1)
    axes = tuple(range(call.get("axis", -1) % x.ndim, x.ndim))
    z = x / xp.sqrt(xp.mean(x * x, axis=axes, keepdims=True) + call.get("epsilon", 1e-5))
    return cast(z, scale.type.dtype) * scale


def _local_response(call: GradientRequest) -> Tensor:
    x, channels, size = call.input(0), call.input(0).shape[1], int(call.get("size"))
    if not isinstance(channels, int):
        raise call.unsupported(f"the channels of {x!r} are not known; give them")
    # ONNX puts the odd channel of an even window behind.
    distance = np.subtract.outer(np.arange(channels), np.arange(channels))
    band = (distance <= (size - 1) // 2) & (distance >= (size - 1) // 2 - size + 1)
    total = reshape_like(asarray(band.astype(x.dtype)) @ fold(x * x, (0, 0, -1)), x)
    defaults = {"bias": 1.0, "alpha": 1e-4, "beta": 0.75}
    bias, alpha, power = (float(call.get(name, default)) for name, default in defaults.items())
    return x / (bias + total * (alpha / size)) ** power


def _spatial_axes(call: GradientRequest) -> tuple[int, ...]:
    return tuple(range(2, call.input(0).ndim))


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Return (batch, sequence, heads * size) as (batch, heads, sequence, size), which a 4-D input has already."""
    return x if x.ndim == 4 else xp.permute_dims(fold(x, (0, 0, heads, -1)), (0, 2, 1, 3))


def _attention(call: GradientRequest) -> Tensor:
    windows = [call.get(name, -1) for name in ("left_window_size", "right_window_size")]
    if any(call.maybe(i) is not None for i in (4, 5, 6)) or any(window >= 0 for window in windows):
        raise call.unsupported("it has a cache of keys, or a window; use `nn.scaled_dot_product_attention`")
    q = _split_heads(call.input(0), int(call.get("q_num_heads", 0)))
    k, v = (_split_heads(call.input(i), int(call.get("kv_num_heads", 0))) for i in (1, 2))
    heads, shared, size = q.shape[1], k.shape[1], q.shape[3]
    if not (isinstance(heads, int) and isinstance(shared, int) and isinstance(size, int)):
        raise call.unsupported("its heads and their size are not known; give them")
    if heads != shared:
        # Grouped queries: each key head serves several query heads, so it is repeated.
        owners = ints([head // (heads // shared) for head in range(heads)])
        k, v = xp.take(k, owners, axis=1), xp.take(v, owners, axis=1)
    scores = (q @ k.mT) * (call.get("scale") or 1 / math.sqrt(size))
    cap = call.get("softcap", 0.0)
    scores = cap * xp.tanh(scores / cap) if cap else scores
    attended = attention_of(scores, v, call.maybe(3), bool(call.get("is_causal", 0)))
    if call.input(0).ndim == 4:
        return attended
    return fold(xp.permute_dims(attended, (0, 2, 1, 3)), (0, 0, -1))


def _cumulative_product(call: GradientRequest) -> Tensor:
    """Return products of ever more neighbours, in log2(n) steps: nothing is divided, so that factors may be 0."""
    x, step = call.input(0), -1 if call.get("reverse", 0) else 1
    axis = axis_of(call.constant(1, "axis")[0], x.ndim, "CumProd")
    size = x.shape[axis]
    if not isinstance(size, int):
        raise call.unsupported(f"dimension {axis} of {x!r} is not known; give its size")
    x = _move(x, axis, step) if call.get("exclusive", 0) and size else x
    while abs(step) < size:
        x, step = x * _move(x, axis, step), 2 * step
    return x


def _move(x: Tensor, axis: int, step: int) -> Tensor:
    """Return the elements moved by `step` places towards the end, below 0 towards the start, and ones for the rest."""
    pads = [0] * (2 * x.ndim)
    # A Pad of a negative width cuts, so one node moves and fills.
    pads[axis], pads[x.ndim + axis] = step, -step
    return emit("Pad", [x, ints(pads), asarray(np.ones((), x.dtype))], x.shape)


def _tile(call: GradientRequest) -> Tensor:
    x, repeats = call.input(0), call.constant(1, "repeats")
    # Each dimension gets one of its repeats in front.
    parts = xp.expand_dims(x, axis=list(range(0, 2 * x.ndim, 2)))
    shape = tuple(chain.from_iterable(zip(repeats, x.shape, strict=True)))
    wide = emit("Expand", [parts, ints([n for times in repeats for n in (times, 1)])], shape)
    return reshape_like(wide, call.y)


def _swish(call: GradientRequest) -> Tensor:
    return call.input(0) * elementwise("Sigmoid", call.get("alpha", 1.0) * call.input(0))


EXPANSIONS: Mapping[str, Expansion] = {
    "Mish": lambda c: c.input(0) * xp.tanh(elementwise("Softplus", c.input(0))),
    "Swish": _swish,
    "SwiGLU": lambda c: _swish(c) * c.input(1),
    "Tile": _tile,
    "CumProd": _cumulative_product,
    "BatchNormalization": _batch,
    "InstanceNormalization": _group,
    "GroupNormalization": _group,
    "RMSNormalization": _rms,
    "LRN": _local_response,
    "GlobalAveragePool": lambda c: xp.mean(c.input(0), axis=_spatial_axes(c), keepdims=True),
    "GlobalMaxPool": lambda c: xp.max(c.input(0), axis=_spatial_axes(c), keepdims=True),
    "Attention": _attention,
    **dict.fromkeys(("RNN", "GRU", "LSTM"), recurrent),
}
