"""Convolution and its transpose, in any number of spatial dimensions.

A convolution is one matrix product over unrolled windows (im2col), group by group; taking a few samples at a time
bounds the bytes of the unrolled slab.  A 1x1 convolution is a product without unrolling.  A depthwise convolution
does not sum over channels, so a product gains nothing: it adds up scaled slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import NEWEST, Fn, Kernel, Op, listed, only, widened
from dask_ferro.engines.array.ops.layout import padded
from dask_ferro.engines.array.ops.linear import product
from dask_ferro.engines.array.window import KernelWindow, Placement, only_pads, place, taps, window_of
from dask_ferro.graph.ir.dtypes import FLOAT

# Bytes of unrolled windows: larger slabs were no faster, and a batch of 64 would unroll to gigabytes.
_SLAB_BYTES = 32 << 20


def _conv(xp: Namespace, op: Op) -> Fn:
    groups, wide = op.get("group", 1), widened(xp)

    def fn(x: Array, w: Array, bias: Array = None) -> Array:
        kind, x, w = x.dtype, wide(x), wide(w)
        window = window_of(op, op.get("kernel_shape") or w.shape[2:])
        placement = place(window, x.shape[2:])
        if any(map(any, placement.widths())):
            x = padded(xp, x, placement.widths())
        if all(n == 1 for n in (*window.sizes, *window.strides)) and groups == 1:
            # The windows are the elements: one product, and nothing unrolled.
            y = _pointwise(xp, x, w)
        elif w.shape[1] == 1 and groups > 1:
            # No sum over channels: products of vectors, for which BLAS is no faster than slices.
            y = _depthwise(xp, x, w, window, placement, groups)
        else:
            y = _unrolled(xp, x, w, window, placement, groups)
        if bias is not None:
            y += xp.reshape(bias, (-1,) + (1,) * len(window.sizes))
        return xp.astype(y, kind, copy=False)

    return fn


def _pointwise(xp: Namespace, x: Array, w: Array) -> Array:
    columns = xp.reshape(x, (*x.shape[:2], math.prod(x.shape[2:])))
    y = product(xp)(xp.reshape(w, (w.shape[0], w.shape[1])), columns)
    return xp.reshape(y, (x.shape[0], w.shape[0], *x.shape[2:]))


def _depthwise(
    xp: Namespace, x: Array, w: Array, window: KernelWindow, placement: Placement, groups: int
) -> Array:
    rank = len(window.sizes)
    per_group = w.shape[0] // groups
    x = xp.reshape(x, (x.shape[0], groups, 1, *x.shape[2:]))
    w = xp.reshape(w, (groups, per_group, *w.shape[2:]))
    y = xp.zeros((x.shape[0], groups, per_group, *placement.counts), dtype=x.dtype)
    for offsets, slices in taps(window, placement.counts):
        y += x[(..., *slices)] * xp.reshape(w[(..., *offsets)], (groups, per_group) + (1,) * rank)
    return xp.reshape(y, (y.shape[0], groups * per_group, *placement.counts))


def _unrolled(
    xp: Namespace, x: Array, w: Array, window: KernelWindow, placement: Placement, groups: int
) -> Array:
    samples, channels = x.shape[:2]
    positions = math.prod(placement.counts)
    depth = math.prod(window.sizes) * channels // groups
    w = xp.reshape(w, (groups, w.shape[0] // groups, depth))
    slices = [s for _, s in taps(window, placement.counts)]
    multiply = product(xp)

    def convolved(part: Array) -> Array:
        unrolled = xp.stack([part[(..., *s)] for s in slices], axis=2)
        return multiply(w, xp.reshape(unrolled, (part.shape[0], groups, depth, positions)))

    # Few samples at a time, so that the slab is bounded for every batch size.
    sample_bytes = depth * groups * positions * xp.finfo(x.dtype).bits // 8
    step = max(1, _SLAB_BYTES // max(sample_bytes, 1))
    parts = [convolved(x[i : min(i + step, samples), ...]) for i in range(0, samples, step)]
    # An empty batch has no parts, but its result still needs a shape.
    y = parts[0] if len(parts) == 1 else xp.concat(parts, axis=0) if parts else convolved(x)
    return xp.reshape(y, (samples, w.shape[0] * w.shape[1], *placement.counts))


def _conv_transpose(xp: Namespace, op: Op) -> Fn:
    groups, wide = op.get("group", 1), widened(xp)

    def fn(x: Array, w: Array, bias: Array = None) -> Array:
        kind, x, w = x.dtype, wide(x), wide(w)
        window = window_of(op, op.get("kernel_shape") or w.shape[2:])
        samples, channels, *sizes = x.shape
        kernels, positions = math.prod(window.sizes), math.prod(sizes)
        # Output channels of a group.
        out = w.shape[1]
        grouped = xp.reshape(w, (groups, channels // groups, out * kernels))
        columns = xp.reshape(x, (samples, groups, channels // groups, positions))
        spread = product(xp)(xp.matrix_transpose(grouped), columns)
        spread = xp.reshape(spread, (samples, groups * out, kernels, *sizes))
        extra = op.get("output_padding") or (0,) * len(sizes)
        full = [
            (n - 1) * s + window.reach(i) for i, (n, s) in enumerate(zip(sizes, window.strides, strict=True))
        ]
        y = xp.zeros((samples, groups * out, *full), dtype=x.dtype)
        # The reverse of a convolution: each element of a window is added where the convolution would have read it.
        for i, (_, slices) in enumerate(taps(window, sizes)):
            y[(..., *slices)] += spread[:, :, i, ...]
        pads = _transposed_pads(op, window, sizes, full, extra)
        y = padded(xp, y, [(0, 0), (0, 0), *((-a, e - b) for (a, b), e in zip(pads, extra, strict=True))])
        if bias is not None:
            y += xp.reshape(bias, (-1,) + (1,) * len(sizes))
        return xp.astype(y, kind, copy=False)

    return fn


def _transposed_pads(
    op: Op, window: KernelWindow, sizes: Sequence[int], full: Sequence[int], extra: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the number of elements to crop at both ends of each axis."""
    wanted = op.get("output_shape")
    if wanted is None and window.auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        return list(window.pads) if window.auto_pad == "NOTSET" else [(0, 0)] * len(sizes)
    wanted = wanted or [n * s for n, s in zip(sizes, window.strides, strict=True)]
    pads = []
    for n, e, goal in zip(full, extra, wanted, strict=True):
        total = n + e - goal
        # An output that is larger than the windows reach grows at its end.
        if total < 0:
            pads.append((0, total))
            continue
        small = total // 2
        pads.append((small, total - small) if window.auto_pad == "SAME_UPPER" else (total - small, small))
    return pads


def _causal(xp: Namespace, op: Op) -> Fn:
    """Return the kernel of a causal convolution per channel, and of the state for the next call."""
    activated = op.get("activation", "none") != "none"
    widen = widened(xp)

    def fn(
        x: Array, weight: Array, bias: Array | None = None, past: Array | None = None
    ) -> tuple[Array, Array]:
        length, earlier = x.shape[2], weight.shape[2] - 1
        before = xp.zeros((*x.shape[:2], earlier), dtype=x.dtype) if past is None else past
        seen = xp.concat([before, x], axis=2)
        wide, taps = widen(seen), widen(weight)
        # One tap at a time: kernels have 3 or 4 taps, and windows would copy the input as many times.
        y = sum(taps[:, 0, i, None] * wide[:, :, i : i + length] for i in range(earlier + 1))
        y = y if bias is None else y + xp.expand_dims(widen(bias), axis=1)
        y = y / (1.0 + xp.exp(-y)) if activated else y
        return xp.astype(y, x.dtype, copy=False), seen[:, :, length:]

    return listed(op, fn)


TABLE: dict[str, Kernel] = {
    "Conv": Kernel(_conv, (FLOAT,), when=only_pads),
    "CausalConvWithState": Kernel(
        _causal, (FLOAT,), range(27, NEWEST + 1), only("activation", ("none", "silu", "swish"), "none")
    ),
    "ConvTranspose": Kernel(_conv_transpose, (FLOAT,), when=only_pads),
}
