"""Convolution and its transpose, in any number of spatial dimensions.

A convolution is one matrix product over unrolled windows (im2col), group by group; taking a few samples at a time
bounds the bytes of the unrolled slab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import NEWEST, Kernel, one_of, row, widen
from dask_ferro.engines.array.ops.layout import pad_array
from dask_ferro.engines.array.ops.linear import product
from dask_ferro.engines.array.window import WINDOW, KernelWindow, Placement, only_pads, place, taps, window_of
from dask_ferro.graph.ir.dtypes import FLOAT

# Bytes of unrolled windows: larger slabs were not faster, and a batch of 64 would unroll to gigabytes.
_SLAB_BYTES = 32 << 20


def _conv(
    xp: Namespace,
    x: Array,
    w: Array,
    bias: Array = None,
    *,
    group: int,
    kernel_shape: Sequence[int],
    **window: Any,
) -> Array:
    kind, x, w = x.dtype, widen(xp, x), widen(xp, w)
    each = window_of(kernel_shape or w.shape[2:], **window)
    placement = place(each, x.shape[2:])
    if any(map(any, placement.widths())):
        x = pad_array(xp, x, placement.widths())
    y = _unroll(xp, x, w, each, placement, group)
    if bias is not None:
        y += xp.reshape(bias, (-1,) + (1,) * len(each.sizes))
    return xp.astype(y, kind, copy=False)


def _unroll(
    xp: Namespace, x: Array, w: Array, window: KernelWindow, placement: Placement, groups: int
) -> Array:
    samples, channels = x.shape[:2]
    positions = math.prod(placement.counts)
    depth = math.prod(window.sizes) * channels // groups
    w = xp.reshape(w, (groups, w.shape[0] // groups, depth))
    slices = [s for _, s in taps(window, placement.counts)]

    def convolved(part: Array) -> Array:
        unrolled = xp.stack([part[(..., *s)] for s in slices], axis=2)
        return product(xp, w, xp.reshape(unrolled, (part.shape[0], groups, depth, positions)))

    # Few samples at a time, so that the slab is bounded for every batch size.
    sample_bytes = depth * groups * positions * xp.finfo(x.dtype).bits // 8
    step = max(1, _SLAB_BYTES // max(sample_bytes, 1))
    parts = [convolved(x[i : min(i + step, samples), ...]) for i in range(0, samples, step)]
    # An empty batch has no parts, but its result still needs a shape.
    y = parts[0] if len(parts) == 1 else xp.concat(parts, axis=0) if parts else convolved(x)
    return xp.reshape(y, (samples, w.shape[0] * w.shape[1], *placement.counts))


def _conv_transpose(
    xp: Namespace,
    x: Array,
    w: Array,
    bias: Array = None,
    *,
    group: int,
    kernel_shape: Sequence[int],
    output_padding: Sequence[int],
    output_shape: Sequence[int],
    **window: Any,
) -> Array:
    kind, x, w = x.dtype, widen(xp, x), widen(xp, w)
    each = window_of(kernel_shape or w.shape[2:], **window)
    samples, channels, *sizes = x.shape
    kernels, positions = math.prod(each.sizes), math.prod(sizes)
    # Output channels of a group.
    out = w.shape[1]
    grouped = xp.reshape(w, (group, channels // group, out * kernels))
    columns = xp.reshape(x, (samples, group, channels // group, positions))
    spread = product(xp, xp.matrix_transpose(grouped), columns)
    spread = xp.reshape(spread, (samples, group * out, kernels, *sizes))
    extra = output_padding or (0,) * len(sizes)
    full = [(n - 1) * s + each.reach(i) for i, (n, s) in enumerate(zip(sizes, each.strides, strict=True))]
    y = xp.zeros((samples, group * out, *full), dtype=x.dtype)
    # The reverse of a convolution: each element of a window is added at the place from which the convolution would
    # have read it.
    for i, (_, slices) in enumerate(taps(each, sizes)):
        y[(..., *slices)] += spread[:, :, i, ...]
    pads = _crop_sizes(output_shape, each, sizes, full, extra)
    y = pad_array(xp, y, [(0, 0), (0, 0), *((-a, e - b) for (a, b), e in zip(pads, extra, strict=True))])
    if bias is not None:
        y += xp.reshape(bias, (-1,) + (1,) * len(sizes))
    return xp.astype(y, kind, copy=False)


def _crop_sizes(
    wanted: Sequence[int],
    window: KernelWindow,
    sizes: Sequence[int],
    full: Sequence[int],
    extra: Sequence[int],
) -> list[tuple[int, int]]:
    """Return the number of elements to crop at both ends of each axis."""
    if not wanted and window.auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
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


def _causal(
    xp: Namespace,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    past: Array | None = None,
    *,
    activation: str,
) -> tuple[Array, Array]:
    """Return a causal convolution per channel, and the state for the next call."""
    length, earlier = x.shape[2], weight.shape[2] - 1
    before = xp.zeros((*x.shape[:2], earlier), dtype=x.dtype) if past is None else past
    seen = xp.concat([before, x], axis=2)
    wide, taps = widen(xp, seen), widen(xp, weight)
    # One tap at a time: kernels have 3 or 4 taps, and windows would copy the input as many times.
    y = sum(taps[:, 0, i, None] * wide[:, :, i : i + length] for i in range(earlier + 1))
    y = y if bias is None else y + xp.expand_dims(widen(xp, bias), axis=1)
    y = y if activation == "none" else y / (1.0 + xp.exp(-y))
    return xp.astype(y, x.dtype, copy=False), seen[:, :, length:]


TABLE: dict[str, Kernel] = {
    "Conv": row(_conv, FLOAT, when=only_pads, group=1, kernel_shape=(), **WINDOW),
    "CausalConvWithState": row(
        _causal,
        FLOAT,
        opsets=range(27, NEWEST + 1),
        when=one_of("activation", ("none", "silu", "swish"), "none"),
        activation="none",
    ),
    "ConvTranspose": row(
        _conv_transpose,
        FLOAT,
        when=only_pads,
        group=1,
        kernel_shape=(),
        output_padding=(),
        output_shape=(),
        **WINDOW,
    ),
}
