"""Normalizations: batch, layer, instance, group, root mean square, L^p, across channels.

float16 is normalized in float32, as ONNX's `stash_type` requires; other values of `stash_type` are declared
unsupported.  Opset 9's outputs of saved statistics are declared unsupported too: engines do not agree on them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Fn, Kernel, Op, from_front, one_of, row, widen
from dask_ferro.engines.array.ops.layout import pad_array
from dask_ferro.graph.ir.dtypes import FLOAT, D
from dask_ferro.graph.ir.nodes import attribute_of


def _batch(xp: Namespace, op: Op) -> Fn:
    # Up to opset 13, a node uses the statistics of the batch when it returns them.
    trains = op.get("training_mode", 0) or op.outputs > 1
    return _training_batch(xp, op) if trains else _frozen_batch(xp, op)


def _training_batch(xp: Namespace, op: Op) -> Fn:
    epsilon, momentum = op.get("epsilon", 1e-5), op.get("momentum", 0.9)

    def fn(x: Array, scale: Array, bias: Array, mean: Array, variance: Array) -> tuple[Array, ...]:
        w, axes = widen(xp, x), (0, *range(2, x.ndim))
        y, centre, _ = _standardize(xp, w, axes, epsilon)
        own = xp.reshape(centre, (-1,)), xp.var(w, axis=axes)
        y = _scale_channels(xp, xp.astype(y, x.dtype, copy=False), scale, bias)
        running = (
            xp.astype(old * momentum + new * (1 - momentum), old.dtype, copy=False)
            for old, new in zip((mean, variance), own, strict=True)
        )
        return (y, *running, *own)

    return fn


def _frozen_batch(xp: Namespace, op: Op) -> Fn:
    epsilon = op.get("epsilon", 1e-5)
    # If scale, bias, mean and variance are constant, one product and one sum remain, so computing them in float64 is
    # free.
    if all(i in op.constants for i in (1, 2, 3, 4)):
        scale, bias, mean, variance = (np.asarray(op.constants[i], np.float64) for i in (1, 2, 3, 4))
        factor = scale / np.sqrt(variance + epsilon)
        kind = getattr(xp, op.constants[1].dtype.name)
        by = xp.astype(xp.asarray(factor), kind)
        shift = xp.astype(xp.asarray(bias - mean * factor), kind)
        return lambda x, *_: _scale_channels(xp, x, by, shift)

    def fn(x: Array, scale: Array, bias: Array, mean: Array, variance: Array) -> Array:
        factor = scale / xp.sqrt(variance + epsilon)
        return _scale_channels(xp, x, factor, bias - mean * factor)

    return fn


def _scale_channels(xp: Namespace, x: Array, factor: Array, shift: Array) -> Array:
    """Return x * factor + shift, per channel, in x's dtype."""
    shape = (-1,) + (1,) * max(x.ndim - 2, 0)
    y = x * xp.reshape(factor, shape) + xp.reshape(shift, shape)
    return xp.astype(y, x.dtype, copy=False)


def _is_standard(node: ir.Node, opset: int) -> bool:
    """Return whether statistics are per channel, and the outputs of saved statistics (early opsets) are unused."""
    is_saved = any(value.is_graph_output() or value.uses() for value in node.outputs[3:])
    return attribute_of(node, "spatial", 1) == 1 and not is_saved


def _standardize(
    xp: Namespace, x: Array, axes: tuple[int, ...], epsilon: float
) -> tuple[Array, Array, Array]:
    """Return (x - mean) / sqrt(variance + epsilon) over `axes`, with the mean and the reciprocal deviation."""
    mean = xp.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    reciprocal = 1 / xp.sqrt(xp.mean(centred * centred, axis=axes, keepdims=True) + epsilon)
    # In place, which saves one array of the input's size.
    centred *= reciprocal
    return centred, mean, reciprocal


def _layer(
    xp: Namespace, x: Array, scale: Array, bias: Array = None, *, axis: int, epsilon: float
) -> tuple[Array, Array, Array]:
    axes = tuple(range(from_front(axis, x.ndim), x.ndim))
    y, mean, reciprocal = _standardize(xp, widen(xp, x), axes, epsilon)
    y = xp.astype(y, x.dtype, copy=False) * scale
    if bias is not None:
        y += bias
    return y, xp.astype(mean, xp.float32, copy=False), xp.astype(reciprocal, xp.float32, copy=False)


def _rms(xp: Namespace, x: Array, scale: Array, axis: int, epsilon: float) -> Array:
    axes = tuple(range(from_front(axis, x.ndim), x.ndim))
    w = widen(xp, x)
    y = w / xp.sqrt(xp.mean(w * w, axis=axes, keepdims=True) + epsilon)
    return xp.astype(y, scale.dtype, copy=False) * scale


_single_stash = one_of("stash_type", (D.FLOAT,), D.FLOAT)


def _instance(xp: Namespace, x: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    y, _, _ = _standardize(xp, widen(xp, x), tuple(range(2, x.ndim)), epsilon)
    return _scale_channels(xp, xp.astype(y, x.dtype, copy=False), scale, bias)


def _group(xp: Namespace, op: Op) -> Fn:
    groups, epsilon = op.get("num_groups"), op.get("epsilon", 1e-5)

    def fn(x: Array, scale: Array, bias: Array) -> Array:
        samples, channels = x.shape[:2]
        grouped = xp.reshape(widen(xp, x), (samples, groups, channels // groups, *x.shape[2:]))
        y, _, _ = _standardize(xp, grouped, tuple(range(2, grouped.ndim)), epsilon)
        y = xp.astype(y, x.dtype, copy=False)
        # One scale per group before opset 21, one per channel since.
        if op.opset < 21:
            return xp.reshape(_scale_channels(xp, y, scale, bias), x.shape)
        return _scale_channels(xp, xp.reshape(y, x.shape), scale, bias)

    return fn


def _mean_variance(xp: Namespace, x: Array, axes: tuple[int, ...]) -> Array:
    centred = x - xp.mean(x, axis=tuple(axes), keepdims=True)
    return centred / (xp.sqrt(xp.mean(centred * centred, axis=tuple(axes), keepdims=True)) + 1e-9)


def _lp(xp: Namespace, x: Array, axis: int, p: int) -> Array:
    if p == 1:
        norm = xp.sum(xp.abs(x), axis=axis, keepdims=True)
    else:
        norm = xp.sqrt(xp.sum(x * x, axis=axis, keepdims=True))
    # Zeros stay zeros: 0 / 0 would be NaN.
    return x / xp.where(norm == 0, xp.ones_like(norm), norm)


def _across_channels(xp: Namespace, x: Array, size: int, bias: float, alpha: float, beta: float) -> Array:
    channels, before = x.shape[1], (size - 1) // 2
    widths = [(0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)]
    # Padded with zeros, all shifted slices of the channels have the same shape, and one loop over the window sums them.
    squares = pad_array(xp, x * x, widths)
    total = xp.asarray(squares[:, :channels, ...], copy=True)
    for k in range(1, size):
        total += squares[:, k : k + channels, ...]
    return x / xp.pow(bias + alpha / size * total, beta)


TABLE: dict[str, Kernel] = {
    "BatchNormalization": Kernel(_batch, (FLOAT,), when=_is_standard),
    "LayerNormalization": row(_layer, FLOAT, when=_single_stash, axis=-1, epsilon=1e-5),
    "RMSNormalization": row(_rms, FLOAT, when=_single_stash, axis=-1, epsilon=1e-5),
    "InstanceNormalization": row(_instance, FLOAT, epsilon=1e-5),
    "GroupNormalization": Kernel(_group, (FLOAT,), when=_single_stash),
    "MeanVarianceNormalization": row(_mean_variance, FLOAT, axes=(0, 2, 3)),
    "LpNormalization": row(_lp, FLOAT, when=one_of("p", (1, 2), 2), axis=-1, p=2),
    "LRN": row(_across_channels, FLOAT, size=None, bias=1.0, alpha=1e-4, beta=0.75),
}
