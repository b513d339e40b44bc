"""Gradients of products: MatMul, Gemm, Einsum, Conv, ConvTranspose; and of pooling, which slides windows too.

The gradient of a convolution's input is a transposed convolution, that of its weight a convolution with the
roles of batch and channel exchanged (Dumoulin and Visin, arXiv:1603.07285).  Spatial sizes have to be known;
the batch may be named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.array_api import permute_dims
from dask_ferro.graph.gradient_rules import Call, Row, summed_to
from dask_ferro.graph.tensor import Tensor, asarray, emit, emit_all
from dask_ferro.graph.tensor_layout import broadcast_like, expand_dims, ints, reshape_like, sliced, zeros_like
from dask_ferro.graph.tensor_origin import TensorType

# ---- matrices ----------------------------------------------------------------------------------------------


def _as_matrices(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Both factors and g with at least two dimensions each."""
    a, b, g = call.input(0), call.input(1), call.g
    if a.ndim == 1:
        a, g = expand_dims(a, axis=0), expand_dims(g, axis=g.ndim - (b.ndim > 1))
    if b.ndim == 1:
        b, g = expand_dims(b, axis=1), expand_dims(g, axis=g.ndim)
    return a, b, g


def _left_factor(call: Call) -> Tensor:
    a, b, g = _as_matrices(call)
    return reshape_like(summed_to(g @ b.mT, a), call.x)


def _right_factor(call: Call) -> Tensor:
    a, b, g = _as_matrices(call)
    if (
        b.ndim == 2 and a.ndim > 2
    ):  # a weight: one product over the rows of all batches, not a sum of products
        a, g = _rows(a), _rows(g)
    return reshape_like(summed_to(a.mT @ g, b), call.x)


def _rows(x: Tensor) -> Tensor:
    """All leading dimensions as one."""
    last = x.shape[-1]
    if isinstance(last, int) and last > 0:
        return emit("Reshape", [x, ints([-1, last])], (None, last))
    return emit("Flatten", [x], (None, last), axis=x.ndim - 1)


def _gemm_left(call: Call) -> Tensor:
    b = call.input(1)
    product = call.g @ (b if call.get("transB", 0) else b.mT)
    return _scaled(product.mT if call.get("transA", 0) else product, call.get("alpha", 1.0))


def _gemm_right(call: Call) -> Tensor:
    a = call.input(0)
    product = (a if call.get("transA", 0) else a.mT) @ call.g
    return _scaled(product.mT if call.get("transB", 0) else product, call.get("alpha", 1.0))


def _gemm_bias(call: Call) -> Tensor:
    return _scaled(summed_to(call.g, call.x), call.get("beta", 1.0))


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def _einsum(call: Call) -> Tensor:
    """The other terms with g in the place of the result; labels that only this term has are repeated."""
    terms, result = _einsum_terms(call)
    own = terms[call.index]
    others = [(t, x) for i, (t, x) in enumerate(zip(terms, call.node.inputs, strict=True)) if i != call.index]
    found = set(result).union(*(t for t, _ in others))
    common = "".join(label for label in own if label in found)
    equation = ",".join([result, *(t for t, _ in others)]) + "->" + common
    shape = tuple(dim for label, dim in zip(own, call.x.shape, strict=True) if label in found)
    g = emit("Einsum", [call.g, *(x for _, x in others)], shape, equation=equation)
    missing = [i for i, label in enumerate(own) if label not in found]
    return broadcast_like(expand_dims(g, axis=missing), call.x) if missing else g


def _einsum_terms(call: Call) -> tuple[list[str], str]:
    equation = str(call.get("equation")).replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if "." in equation or any(len(set(term)) != len(term) for term in terms):
        raise call.unsupported(f"{equation!r} has an ellipsis or a label twice in one term; write it out")
    return terms, result if arrow else "".join(sorted(x for x in set(left) - {","} if left.count(x) == 1))


# ---- windows -----------------------------------------------------------------------------------------------


class _Window(NamedTuple):
    """The geometry of a sliding window, one entry a spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def pads(self) -> list[int]:
        """As ONNX writes them."""
        return [*self.before, *self.after]

    def reach(self, axis: int) -> int:
        """How far a window extends."""
        return self.dilations[axis] * (self.kernel[axis] - 1) + 1


def _space(x: Tensor, call: Call) -> tuple[int, ...]:
    dims = x.shape[2:]
    if not all(isinstance(dim, int) for dim in dims):
        raise call.unsupported(f"spatial sizes of {x!r} are not all known; give them")
    return tuple(dim for dim in dims if isinstance(dim, int))


def _window(call: Call, kernel: Sequence[int], space: Sequence[int], counts: Sequence[int]) -> _Window:
    """The node's window; `space` slides into `counts` positions."""
    rank = len(kernel)
    window = _Window(
        tuple(kernel),
        tuple(call.get("strides") or (1,) * rank),
        tuple(call.get("dilations") or (1,) * rank),
        (0,) * rank,
        (0,) * rank,
    )
    auto = call.get("auto_pad", "NOTSET")
    if auto in ("NOTSET", ""):
        pads = tuple(call.get("pads") or (0,) * 2 * rank)
        return window._replace(before=pads[:rank], after=pads[rank:])
    if auto == "VALID":
        return window
    total = [max((counts[i] - 1) * window.strides[i] + window.reach(i) - space[i], 0) for i in range(rank)]
    small, large = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    upper = auto == "SAME_UPPER"
    return window._replace(before=small if upper else large, after=large if upper else small)


def _conv_window(call: Call) -> _Window:
    return _window(call, _space(call.input(1), call), _space(call.input(0), call), _space(call.y, call))


def _conv_transpose_window(call: Call) -> _Window:
    if call.get("auto_pad", "NOTSET") not in ("NOTSET", "") or call.get("output_shape"):
        raise call.unsupported("its padding is by auto_pad or output_shape; give pads")
    return _window(call, _space(call.input(1), call), _space(call.y, call), _space(call.input(0), call))


def _transposed_conv(g: Tensor, w: Tensor, x: Tensor, window: _Window, group: int, call: Call) -> Tensor:
    """What a convolution reads, from what it writes: `g` spread over the shape of `x`."""
    space, counts = _space(x, call), _space(g, call)
    extra = [
        n + before + after - (count - 1) * stride - window.reach(i)
        for i, (n, count, stride, before, after) in enumerate(
            zip(space, counts, window.strides, window.before, window.after, strict=True)
        )
    ]
    return emit(
        "ConvTranspose",
        [g, w],
        x.shape,
        strides=list(window.strides),
        dilations=list(window.dilations),
        pads=window.pads,
        output_padding=extra,
        group=group,
    )


def _weight_of(x: Tensor, g: Tensor, w: Tensor, window: _Window, group: int) -> Tensor:
    """The gradient of a convolution's weight: `x` convolved by `g`, batch and channel exchanged."""
    as_batch = _channels_first(x, group)
    kernel = permute_dims(g, [1, 0, *range(2, g.ndim)])
    product = emit(
        "Conv",
        [as_batch, kernel],
        (w.shape[1], w.shape[0], *(None,) * len(window.kernel)),
        strides=list(window.dilations),
        dilations=list(window.strides),
        pads=window.pads,
        group=group,
    )
    cuts = {2 + i: slice(0, size) for i, size in enumerate(window.kernel)}
    cut = permute_dims(sliced(product, cuts), [1, 0, *range(2, w.ndim)])
    return Tensor(cut.origin, cut.index, cut.type._replace(shape=w.shape))


def _channels_first(x: Tensor, group: int) -> Tensor:
    """(N, group * C, ...) as (C, group * N, ...)."""
    if group == 1:
        return permute_dims(x, [1, 0, *range(2, x.ndim)])
    channels, space = x.shape[1], x.shape[2:]
    assert isinstance(channels, int)
    each = channels // group
    parts = emit("Reshape", [x, ints([-1, group, each, *_known(space)])], (x.shape[0], group, each, *space))
    turned = permute_dims(parts, [2, 1, 0, *range(3, parts.ndim)])
    return emit("Reshape", [turned, ints([each, -1, *_known(space)])], (each, None, *space))


def _known(dims: Sequence[int | str | None]) -> list[int]:
    return [dim for dim in dims if isinstance(dim, int)]


def _conv_input(call: Call) -> Tensor:
    return _transposed_conv(call.g, call.input(1), call.x, _conv_window(call), call.get("group", 1), call)


def _conv_weight(call: Call) -> Tensor:
    return _weight_of(call.input(0), call.g, call.x, _conv_window(call), call.get("group", 1))


def _per_channel(call: Call) -> Tensor:
    axes = [0, *range(2, call.g.ndim)]
    return call.g.sum(axis=axes)


def _conv_transpose_input(call: Call) -> Tensor:
    window = _conv_transpose_window(call)
    return emit(
        "Conv",
        [call.g, call.input(1)],
        call.x.shape,
        strides=list(window.strides),
        dilations=list(window.dilations),
        pads=window.pads,
        group=call.get("group", 1),
    )


def _conv_transpose_weight(call: Call) -> Tensor:
    return _weight_of(call.g, call.input(0), call.x, _conv_transpose_window(call), call.get("group", 1))


# ---- pooling -----------------------------------------------------------------------------------------------


def _max_pool(call: Call) -> Tensor:
    """g goes to the places of the maxima, which a second pool with indices tells."""
    if call.get("storage_order", 0):
        raise call.unsupported("its storage_order is 1; leave it out")
    int64 = ir.DataType.INT64
    if len(call.node.types) > 1 and call.node.types[1] is not None:
        places = call.output(1)
    else:
        types = [call.y.type, TensorType(int64, call.y.shape)]
        _, places = emit_all("MaxPool", [call.x], types, opset=call.node.opset, **call.node.attributes)
    inputs = [_flat(zeros_like(call.x)), _flat(places), _flat(call.g)]
    added = emit("ScatterElements", inputs, (call.x.size,), axis=0, reduction="add")
    return reshape_like(added, call.x)


def _flat(x: Tensor) -> Tensor:
    return emit("Reshape", [x, ints([-1])], (x.size,))


def _average_pool(call: Call) -> Tensor:
    """g over the count of its window, spread over the window by a transposed convolution with ones."""
    if call.get("ceil_mode", 0):
        raise call.unsupported("its ceil_mode is 1; pad instead")
    space, counts = _space(call.x, call), _space(call.y, call)
    window = _window(call, call.get("kernel_shape"), space, counts)
    weights = 1 / _counts(window, space, counts, bool(call.get("count_include_pad", 0)))
    shared = call.g * asarray(np.asarray(weights, call.g.dtype))
    single = emit("Reshape", [shared, ints([-1, 1, *counts])], (None, 1, *counts))
    ones = asarray(np.ones((1, 1, *window.kernel), call.g.dtype))
    like = Tensor(call.x.origin, call.x.index, call.x.type._replace(shape=(None, 1, *space)))
    return reshape_like(_transposed_conv(single, ones, like, window, 1, call), call.x)


def _counts(
    window: _Window, space: Sequence[int], counts: Sequence[int], with_padding: bool
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """How many elements each position of the window averages."""
    total = np.ones((1,) * len(space))
    for axis, (size, count) in enumerate(zip(space, counts, strict=True)):
        first = np.arange(count)[:, None] * window.strides[axis] - window.before[axis]
        place = first + np.arange(window.kernel[axis]) * window.dilations[axis]
        low, high = (-window.before[axis], size + window.after[axis]) if with_padding else (0, size)
        inside = ((place >= low) & (place < high)).sum(axis=1)
        total = total * inside.reshape([-1 if i == axis else 1 for i in range(len(space))])
    return total


TABLE: dict[str, Row] = {
    "MatMul": (_left_factor, _right_factor),
    "Gemm": (_gemm_left, _gemm_right, _gemm_bias),
    "Einsum": (_einsum,),
    "Conv": (_conv_input, _conv_weight, _per_channel),
    "ConvTranspose": (_conv_transpose_input, _conv_transpose_weight, _per_channel),
    "MaxPool": (_max_pool,),
    "AveragePool": (_average_pool,),
}
