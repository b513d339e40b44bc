"""Gradients of products (MatMul, Gemm, Einsum, Conv, ConvTranspose), of pooling, which slides windows, and of Resize.

The gradient of a convolution's input is a transposed convolution; the gradient of its weight is a convolution with
the roles of batch and channel exchanged (Dumoulin and Visin, arXiv:1603.07285).  Spatial sizes have to be known; the
batch may be named.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.autodiff.rule import GradientRequest, Row, multiply_along, sum_to
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor.dims import Shape, broadcast, is_static, sizes, window_size
from dask_ferro.graph.tensor.manipulation import broadcast_like, fold, ints, reshape_like, slice_dims
from dask_ferro.graph.tensor.namespace import expand_dims, eye, permute_dims, reshape, squeeze, zeros_like
from dask_ferro.graph.tensor.tensor import Tensor, TensorType, asarray, cast, emit, emit_all, widen

# ---- matrices ----------------------------------------------------------------------------------------------


def _matrices(call: GradientRequest) -> tuple[Tensor, Tensor, Tensor]:
    """Return both factors and g with at least two dimensions each."""
    a, b, g = call.input(0), call.input(1), call.g
    # numpy's matmul adds a dimension to a vector and drops it from the result; so does this.
    if a.ndim == 1:
        a, g = expand_dims(a, axis=0), expand_dims(g, axis=g.ndim - (b.ndim > 1))
    if b.ndim == 1:
        b, g = expand_dims(b, axis=1), expand_dims(g, axis=g.ndim)
    return a, b, g


def _left_factor(call: GradientRequest) -> Tensor:
    a, b, g = _matrices(call)
    return reshape_like(sum_to(g @ b.mT, a), call.x)


def _right_factor(call: GradientRequest) -> Tensor:
    a, b, g = _matrices(call)
    if b.ndim == 2 and a.ndim > 2:
        # The gradient of a weight is one product over the rows of all batches, not a sum of products.
        a, g = _rows(a), _rows(g)
    return reshape_like(sum_to(a.mT @ g, b), call.x)


def _rows(x: Tensor) -> Tensor:
    """Return `x` with all leading dimensions as one."""
    last = x.shape[-1]
    if isinstance(last, int) and last > 0:
        return reshape(x, (-1, last))
    rows = math.prod(sizes(x.shape[:-1])) if is_static(x.shape[:-1]) else None
    return emit("Flatten", [x], (rows, last), axis=x.ndim - 1)


def _gemm(call: GradientRequest) -> Tensor:
    """Return the gradient of one factor of a Gemm from the other factor."""
    i, is_transposed = call.index, (call.get("transA", 0), call.get("transB", 0))
    other = call.input(1 - i) if is_transposed[1 - i] else call.input(1 - i).mT
    product = call.g @ other if i == 0 else other @ call.g
    return _scale(product.mT if is_transposed[i] else product, call.get("alpha", 1.0))


def _scale(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _einsum(call: GradientRequest) -> Tensor:
    """Return the Einsum of g and the other terms, repeated along labels that only this term has."""
    terms, result = _einsum_terms(call)
    own, x = terms[call.index], call.x
    factors = [(result, call.g)]
    factors += [(term, call.input(i)) for i, term in enumerate(terms) if i != call.index]
    dims: dict[str, list[Shape]] = {}
    for term, y in factors:
        for label, dim in zip(term, y.shape, strict=True):
            dims.setdefault(label, []).append((dim,))
    shared = [i for i, label in enumerate(own) if label in dims]
    equation = ",".join(term for term, _ in factors) + "->" + "".join(own[i] for i in shared)
    shape = tuple(broadcast(dims[own[i]], "Einsum")[0] for i in shared)
    g = emit("Einsum", [y for _, y in factors], shape, equation=equation)
    g = sum_to(expand_dims(g, axis=[i for i in range(x.ndim) if i not in shared]), x)
    return g if g.shape == x.shape and len(shared) == x.ndim else broadcast_like(g, x)


def _einsum_terms(call: GradientRequest) -> tuple[list[str], str]:
    # An ellipsis becomes unused labels.
    equation = str(call.get("equation")).replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    labels = [term.replace("...", "") for term in terms]
    if any(len(set(label)) != len(label) for label in labels):
        raise call.unsupported(f"{equation!r} has a label twice in one term; write its diagonal out")
    ranks = [call.input(i).ndim - len(label) for i, label in enumerate(labels)]
    free = [letter for letter in string.ascii_letters if letter not in equation][: max(ranks)]
    dots = "".join(free)
    spelled = [t.replace("...", dots[len(dots) - n :]) for t, n in zip(terms, ranks, strict=True)]
    if arrow:
        return spelled, result.replace("...", dots)
    alone = sorted(x for x in set(left) - {",", "."} if left.count(x) == 1)
    return spelled, dots + "".join(alone)


def _rotate_back(call: GradientRequest) -> Tensor:
    """Return g turned by the opposite angles: each pair of features is a product with a rotation."""
    inputs = [call.g, call.input(1), -call.input(2), call.maybe(3)]
    return emit("RotaryEmbedding", inputs, call.x.shape, opset=call.node.opset, **call.node.attributes)


# ---- windows -----------------------------------------------------------------------------------------------


class _Axis(NamedTuple):
    """A window that slides along one spatial axis; a window of several axes is a list of them."""

    kernel: int
    stride: int
    dilation: int
    before: int
    after: int

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1) + 1


def _space(x: Tensor, call: GradientRequest) -> tuple[int, ...]:
    if not is_static(x.shape[2:]):
        raise call.unsupported(f"spatial sizes of {x!r} are not all known; give them")
    return sizes(x.shape[2:])


def _window(
    call: GradientRequest, kernel: Sequence[int], space: Sequence[int], counts: Sequence[int]
) -> list[_Axis]:
    """Return the node's window; `space` slides into `counts` positions."""
    rank, auto = len(kernel), call.get("auto_pad", "NOTSET")
    pads = (auto in ("NOTSET", "") and call.get("pads")) or (0,) * 2 * rank
    steps = (call.get(name) or (1,) * rank for name in ("strides", "dilations"))
    window = [_Axis(*axis) for axis in zip(kernel, *steps, pads[:rank], pads[rank:], strict=True)]
    if not auto.startswith("SAME"):
        return window
    total = [max((n - 1) * a.stride + a.reach - m, 0) for a, m, n in zip(window, space, counts, strict=True)]
    # An odd pixel of padding goes behind for SAME_UPPER, in front for SAME_LOWER.
    before = [t // 2 if auto == "SAME_UPPER" else t - t // 2 for t in total]
    return [a._replace(before=b, after=t - b) for a, b, t in zip(window, before, total, strict=True)]


def _conv_window(call: GradientRequest) -> list[_Axis]:
    return _window(call, _space(call.input(1), call), _space(call.input(0), call), _space(call.y, call))


def _conv_transpose_window(call: GradientRequest) -> list[_Axis]:
    if call.get("auto_pad", "NOTSET") not in ("NOTSET", "") or call.get("output_shape"):
        raise call.unsupported("its padding is set with auto_pad or output_shape; use pads")
    return _window(call, _space(call.input(1), call), _space(call.y, call), _space(call.input(0), call))


def _slide(
    op_type: str, call: GradientRequest, x: Tensor, w: Tensor, shape: Shape, window: list[_Axis], **more: Any
) -> Tensor:
    """Return a convolution, or a transposed convolution, with the node's groups."""
    _, strides, dilations, before, after = map(list, zip(*window, strict=True))
    geometry: dict[str, Any] = {"strides": strides, "dilations": dilations, "pads": before + after, **more}
    return emit(op_type, [x, w], shape, group=call.get("group", 1), **geometry)


def _transpose_conv(call: GradientRequest, g: Tensor, w: Tensor, shape: Shape, window: list[_Axis]) -> Tensor:
    """Return the gradient of a convolution's input, which has a shape: `g` spread over it."""
    axes = zip(sizes(shape[2:]), _space(g, call), window, strict=True)
    extra = [n + a.before + a.after - (count - 1) * a.stride - a.reach for n, count, a in axes]
    # In ceil_mode the last window may end behind the padding.
    padded = [a._replace(after=a.after + max(-e, 0)) for a, e in zip(window, extra, strict=True)]
    rest = [max(e, 0) for e in extra]
    return _slide("ConvTranspose", call, g, w, shape, padded, output_padding=rest)


def _conv(call: GradientRequest, x: Tensor, w: Tensor, window: list[_Axis]) -> Tensor:
    axes = zip(_space(x, call), _space(w, call), window, strict=True)
    space = [window_size(n, m, a.stride, (a.before, a.after), a.dilation, "Conv") for n, m, a in axes]
    return _slide("Conv", call, x, w, (x.shape[0], w.shape[0], *space), window)


def _crop(x: Tensor, space: Sequence[Dim]) -> Tensor:
    """Return the first elements of every spatial axis: strides leave a remainder that is in no window."""
    cuts = {2 + i: slice(0, n) for i, n in enumerate(space) if isinstance(n, int) and x.shape[2 + i] != n}
    return slice_dims(x, cuts)


def _conv_weight(call: GradientRequest, x: Tensor, g: Tensor, window: list[_Axis]) -> Tensor:
    """Return the gradient of a convolution's weight: `x` convolved by `g`, batch and channel exchanged."""
    # In the gradient of a weight the output positions are the taps: strides become dilations, and back.
    swapped = [a._replace(stride=a.dilation, dilation=a.stride) for a in window]
    kernel = permute_dims(g, [1, 0, *range(2, g.ndim)])
    product = _conv(call, _channels_first(call, x), kernel, swapped)
    return permute_dims(_crop(product, [a.kernel for a in window]), [1, 0, *range(2, g.ndim)])


def _channels_first(call: GradientRequest, x: Tensor) -> Tensor:
    """Return (N, group * C, ...) as (C, group * N, ...)."""
    group: int = call.get("group", 1)
    if group == 1:
        return permute_dims(x, [1, 0, *range(2, x.ndim)])
    channels, space = x.shape[1], _space(x, call)
    if not isinstance(channels, int):
        raise call.unsupported(f"the channels of {x!r} are not known; give them")
    parts = fold(x, (0, group, channels // group, *space))
    return fold(permute_dims(parts, [2, 1, 0, *range(3, parts.ndim)]), (channels // group, -1, *space))


def _bias(call: GradientRequest) -> Tensor:
    return call.g.sum(axis=[0, *range(2, call.g.ndim)])


# ---- pooling -----------------------------------------------------------------------------------------------


def _max_pool(call: GradientRequest) -> Tensor:
    """Return g at the places of the maxima; a second pool computes their indices."""
    if call.get("storage_order", 0):
        raise call.unsupported("its storage_order is 1; leave it out")
    if len(call.node.types) > 1 and call.node.types[1] is not None:
        places = call.output(1)
    else:
        types = [call.y.type, TensorType(ir.DataType.INT64, call.y.shape)]
        _, places = emit_all("MaxPool", [call.x], types, opset=call.node.opset, **call.node.attributes)
    # Windows overlap, so one place may get several gradients: they are added.
    inputs = [reshape(x, (-1,)) for x in (zeros_like(call.x), places, call.g)]
    added = emit("ScatterElements", inputs, (call.x.size,), axis=0, reduction="add")
    return reshape_like(added, call.x)


def _average_pool(call: GradientRequest) -> Tensor:
    """Return g over its window's count, spread by a transposed convolution with ones."""
    space, counts = _space(call.x, call), _space(call.y, call)
    window = _window(call, call.get("kernel_shape"), space, counts)
    # A window's count differs at the borders; counts depend only on shapes, so they are a constant of the graph.
    weights = 1 / _counts(window, space, counts, bool(call.get("count_include_pad", 0)))
    shared = call.g * asarray(np.asarray(weights, call.g.dtype))
    planes = fold(shared, (-1, 1, *counts))
    ones = asarray(np.ones((1, 1, *(a.kernel for a in window)), call.g.dtype))
    spread = _transpose_conv(call, planes, ones, (*planes.shape[:2], *space), window)
    return reshape_like(spread, call.x)


def _counts(
    window: list[_Axis], space: Sequence[int], counts: Sequence[int], with_padding: bool
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the number of elements that each position of the window averages."""
    along = []
    for a, size, count in zip(window, space, counts, strict=True):
        place = np.arange(count)[:, None] * a.stride - a.before + np.arange(a.kernel) * a.dilation
        low, high = (-a.before, size + a.after) if with_padding else (0, size)
        along.append(((place >= low) & (place < high)).sum(axis=1))
    return reduce(np.multiply.outer, along)


# ---- resizing ----------------------------------------------------------------------------------------------


def _resize(call: GradientRequest) -> Tensor:
    """Return g times the matrix of the resize of each axis: a Resize is linear along each."""
    mode = call.get("coordinate_transformation_mode", "half_pixel")
    if mode == "tf_crop_and_resize" or call.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise call.unsupported("it crops, or keeps an aspect ratio")
    x, g = call.x, widen(call.g)
    axes = [axis % x.ndim for axis in call.get("axes") or range(x.ndim)]
    scales: list[float | None] = call.values(2, "scales").tolist() or [None] * len(axes)
    for axis, scale in zip(axes, scales, strict=True):
        n, m = x.shape[axis], call.y.shape[axis]
        # Exporters compute the sizes of all axes; the rows of a batch are not resized.
        is_batch = axis == 0 and m is None
        if scale == 1 or (scale is None and (is_batch or (n is not None and n == m))):
            continue
        if not isinstance(n, int) or not isinstance(m, int):
            raise call.unsupported(f"sizes of {x!r} or {call.y!r} are not known; give them")
        g = multiply_along(g, axis, _resize_matrix(call, n, m, scale, g.dtype).mT)
    return cast(g, x.type.dtype)


def _resize_matrix(
    call: GradientRequest, n: int, m: int, scale: float | None, dtype: np.dtype[Any]
) -> Tensor:
    """Return (n, m): the same Resize of an identity, which breaks a tie of the nearest neighbours alike."""
    identity = reshape(eye(n, dtype=dtype), (1, 1, n, n))
    size: list[Tensor | None] = [asarray([1.0, 1.0, 1.0, scale])] if scale else [None, ints([1, 1, n, m])]
    attributes = {name: value for name, value in call.node.attributes.items() if name != "axes"}
    resized = emit("Resize", [identity, None, *size], (1, 1, n, m), opset=call.node.opset, **attributes)
    return squeeze(resized, (0, 1))


TABLE: dict[str, Row] = {
    "MatMul": (_left_factor, _right_factor),
    "Gemm": (_gemm, _gemm, lambda c: _scale(sum_to(c.g, c.x), c.get("beta", 1.0))),
    "Einsum": (_einsum,),
    "RotaryEmbedding": (_rotate_back, None, None, None),
    "Conv": (
        lambda c: _transpose_conv(c, c.g, c.input(1), c.x.shape, _conv_window(c)),
        lambda c: _conv_weight(c, c.input(0), c.g, _conv_window(c)),
        _bias,
    ),
    "ConvTranspose": (
        lambda c: _crop(_conv(c, c.g, c.input(1), _conv_transpose_window(c)), c.x.shape[2:]),
        lambda c: _conv_weight(c, c.g, c.input(0), _conv_transpose_window(c)),
        _bias,
    ),
    "MaxPool": (_max_pool,),
    "AveragePool": (_average_pool,),
    "Resize": (_resize, None, None, None),
}
