"""What PyTorch computes for a row of the gradient table: its own function of the op wherever it has one.

Each entry takes the torch module, the row's attributes and its inputs as tensors (None where left out), and
gives the first output.  Where PyTorch pads on both sides alike and ONNX does not, the padding is apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .gradient_cases import Case
from .torch_layout import INDICES, LAYOUT, Attributes, Op, ints, widths

# Rows that PyTorch has no function for.
WITHOUT = {
    "gru, both ways": "PyTorch's GRU resets after the product only",
    "rotary, halves": "PyTorch has no rotary embedding",
    "rotary, pairs, part of the size, by position": "PyTorch has no rotary embedding",
}


def by_torch(torch: Any, case: Case, weight: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The first output, and the gradients of its product with `weight` by the names of the inputs."""
    leaves: dict[int, Any] = {}
    for i, x in enumerate(case.inputs):
        if x is not None and case.first(i) == i:
            leaves[i] = torch.tensor(x, requires_grad=case.is_moved(i))
    inputs = [None if x is None else leaves[case.first(i)] for i, x in enumerate(case.inputs)]
    y = OPS[case.op](torch, Attributes(case.attributes), *inputs)
    (y * torch.tensor(weight)).sum().backward()
    found = {f"x{i}": leaves[i].grad.numpy() for i in leaves if case.is_moved(i)}
    return y.detach().numpy(), found


# ---- helpers -----------------------------------------------------------------------------------------------


def _by_name(name: str) -> Op:
    return lambda t, a, x: getattr(t, name)(x)


def _by_functional(name: str) -> Op:
    return lambda t, a, x: getattr(t.nn.functional, name)(x)


# ---- arithmetic and activations ----------------------------------------------------------------------------


def _folded(name: str) -> Op:
    def fn(t: Any, a: Attributes, *xs: Any) -> Any:
        total = xs[0]
        for x in xs[1:]:
            total = getattr(t, name)(total, x)
        return total

    return fn


def _mean(t: Any, a: Attributes, *xs: Any) -> Any:
    return sum(xs) / len(xs)


def _clip(t: Any, a: Attributes, x: Any, low: Any = None, high: Any = None) -> Any:
    return t.clamp(x, low, high)


def _hard_sigmoid(t: Any, a: Attributes, x: Any) -> Any:
    """PyTorch's own has slope 1/6 only; its `hardtanh` has the same ends."""
    return t.nn.functional.hardtanh(a("alpha", 0.2) * x + a("beta", 0.5), 0.0, 1.0)


def _selu(t: Any, a: Attributes, x: Any) -> Any:
    """PyTorch's own has more digits of its two constants than ONNX's float32."""
    y = a("gamma", 1.0507009873554805) * t.nn.functional.elu(x, a("alpha", 1.6732632423543772))
    assert t.allclose(y, t.nn.functional.selu(x), rtol=1e-7)
    return y


ELEMENTWISE: dict[str, Op] = {
    **{op: _folded(op.lower()) for op in ("Add", "Sub", "Mul", "Div", "Pow")},
    "Sum": _folded("add"),
    "Max": _folded("maximum"),
    "Min": _folded("minimum"),
    "Mod": _folded("fmod"),
    **{op: _by_name(op.lower()) for op in ("Neg", "Abs", "Reciprocal", "Sqrt", "Exp", "Log", "Erf")},
    **{op: _by_name(op.lower()) for op in ("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sigmoid")},
    **{op: _by_name(op.lower()) for op in ("Sinh", "Cosh", "Tanh", "Asinh", "Acosh", "Atanh")},
    **{op: _by_functional(op.lower()) for op in ("Relu", "Softplus", "Softsign", "HardSwish", "Mish")},
    "Mean": _mean,
    "Where": lambda t, a, c, x, y: t.where(c, x, y),
    "Clip": _clip,
    "LeakyRelu": lambda t, a, x: t.nn.functional.leaky_relu(x, a("alpha", 0.01)),
    "PRelu": lambda t, a, x, slope: t.nn.functional.prelu(x, slope.reshape(-1)),
    "ThresholdedRelu": lambda t, a, x: t.nn.functional.threshold(x, a("alpha", 1.0), 0.0),
    "Shrink": lambda t, a, x: t.nn.functional.hardshrink(x, a("lambd", 0.5)),
    "Elu": lambda t, a, x: t.nn.functional.elu(x, a("alpha", 1.0)),
    "Celu": lambda t, a, x: t.nn.functional.celu(x, a("alpha", 1.0)),
    "Selu": _selu,
    "HardSigmoid": _hard_sigmoid,
    "Swish": lambda t, a, x: x * t.sigmoid(a("alpha", 1.0) * x),
    "Gelu": lambda t, a, x: t.nn.functional.gelu(x, approximate=a("approximate", "none")),
    "Identity": lambda t, a, x: x.clone(),
    "Dropout": lambda t, a, x: t.nn.functional.dropout(x, training=False),
}


# ---- reductions and normalization --------------------------------------------------------------------------


def _axes(a: Attributes, x: Any, axes: Any) -> tuple[int, ...]:
    given = () if axes is None else tuple(ints(axes))
    return given or (() if a("noop_with_empty_axes", 0) else tuple(range(x.ndim)))


def _reduced(fn: Callable[[Any, Any, tuple[int, ...], bool], Any]) -> Op:
    """`fn(torch, x, axes, keepdims)` over the node's axes; over none, PyTorch is given one of size 1."""

    def op(t: Any, a: Attributes, x: Any, axes: Any = None) -> Any:
        over = _axes(a, x, axes)
        if not over:
            return fn(t, x.unsqueeze(0), (0,), False)
        return fn(t, x, over, bool(a("keepdims", 1)))

    return op


def _product(t: Any, x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _cumulated(name: str) -> Op:
    def op(t: Any, a: Attributes, x: Any, at: Any) -> Any:
        axis = int(at)
        x = x.flip(axis) if a("reverse", 0) else x
        y = getattr(t, name)(x, axis)
        if a("exclusive", 0):
            start = t.zeros_like if name == "cumsum" else t.ones_like
            y = t.cat([start(y.narrow(axis, 0, 1)), y.narrow(axis, 0, y.shape[axis] - 1)], axis)
        return y.flip(axis) if a("reverse", 0) else y

    return op


def _layer(t: Any, a: Attributes, x: Any, scale: Any, bias: Any = None) -> Any:
    return t.nn.functional.layer_norm(x, x.shape[a("axis", -1) :], scale, bias, a("epsilon", 1e-5))


def _batch(t: Any, a: Attributes, x: Any, scale: Any, bias: Any, center: Any, variance: Any) -> Any:
    """Written out: `batch_norm` has no gradients of its running statistics."""
    if a("training_mode", 0):
        y = t.nn.functional.batch_norm(x, None, None, scale, bias, training=True, eps=a("epsilon", 1e-5))
        # Of gradients 0, not None: the running statistics are inputs that the first output does not depend on.
        return y + 0 * (center.sum() + variance.sum())
    shape = (-1,) + (1,) * (x.ndim - 2)
    factor = (scale / t.sqrt(variance + a("epsilon", 1e-5))).reshape(shape)
    y = (x - center.reshape(shape)) * factor + bias.reshape(shape)
    theirs = t.nn.functional.batch_norm(
        x, center.detach(), variance.detach(), scale, bias, eps=a("epsilon", 1e-5)
    )
    assert t.allclose(y, theirs, rtol=1e-12)
    return y


def _instance(t: Any, a: Attributes, x: Any, scale: Any, bias: Any) -> Any:
    return t.nn.functional.instance_norm(x, weight=scale, bias=bias, eps=a("epsilon", 1e-5))


def _group(t: Any, a: Attributes, x: Any, scale: Any, bias: Any) -> Any:
    return t.nn.functional.group_norm(x, a("num_groups"), scale, bias, a("epsilon", 1e-5))


def _across(t: Any, a: Attributes, x: Any) -> Any:
    return t.nn.functional.local_response_norm(
        x, a("size"), a("alpha", 1e-4), a("beta", 0.75), a("bias", 1.0)
    )


REDUCTIONS: dict[str, Op] = {
    "ReduceSum": _reduced(lambda t, x, axes, keep: x.sum(axes, keepdim=keep)),
    "ReduceMean": _reduced(lambda t, x, axes, keep: x.mean(axes, keepdim=keep)),
    "ReduceMax": _reduced(lambda t, x, axes, keep: x.amax(axes, keepdim=keep)),
    "ReduceMin": _reduced(lambda t, x, axes, keep: x.amin(axes, keepdim=keep)),
    "ReduceProd": _reduced(_product),
    "ReduceL1": _reduced(lambda t, x, axes, keep: t.linalg.vector_norm(x, 1, axes, keepdim=keep)),
    "ReduceL2": _reduced(lambda t, x, axes, keep: t.linalg.vector_norm(x, 2, axes, keepdim=keep)),
    "ReduceSumSquare": _reduced(lambda t, x, axes, keep: t.square(x).sum(axes, keepdim=keep)),
    "ReduceLogSum": _reduced(lambda t, x, axes, keep: x.sum(axes, keepdim=keep).log()),
    "ReduceLogSumExp": _reduced(lambda t, x, axes, keep: t.logsumexp(x, axes, keepdim=keep)),
    "CumSum": _cumulated("cumsum"),
    "CumProd": _cumulated("cumprod"),
    "Softmax": lambda t, a, x: t.softmax(x, a("axis", -1)),
    "LogSoftmax": lambda t, a, x: t.log_softmax(x, a("axis", -1)),
    "LayerNormalization": _layer,
    "RMSNormalization": lambda t, a, x, s: t.nn.functional.rms_norm(x, s.shape, s, a("epsilon", 1e-5)),
    "BatchNormalization": _batch,
    "InstanceNormalization": _instance,
    "GroupNormalization": _group,
    "LRN": _across,
}


# ---- products and windows ----------------------------------------------------------------------------------


def _gemm(t: Any, a: Attributes, left: Any, right: Any, bias: Any = None) -> Any:
    left, right = left.T if a("transA", 0) else left, right.T if a("transB", 0) else right
    return t.addmm(bias, left, right, beta=a("beta", 1.0), alpha=a("alpha", 1.0))


def _for_rank(t: Any, name: str, rank: int) -> Any:
    return getattr(t.nn.functional, f"{name}{rank}d")


def _conv(t: Any, a: Attributes, x: Any, w: Any, bias: Any = None) -> Any:
    rank = x.ndim - 2
    steps, holes = a("strides", [1] * rank), a("dilations", [1] * rank)
    pads = a("pads", [0] * (2 * rank))
    if a("auto_pad") == "SAME_UPPER":
        total = [
            max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            for n, k, s, d in zip(x.shape[2:], w.shape[2:], steps, holes, strict=True)
        ]
        pads = [n // 2 for n in total] + [n - n // 2 for n in total]
    wide = t.nn.functional.pad(x, widths(pads))
    return _for_rank(t, "conv", rank)(wide, w, bias, steps, 0, holes, a("group", 1))


def _conv_transpose(t: Any, a: Attributes, x: Any, w: Any, bias: Any = None) -> Any:
    rank = x.ndim - 2
    convolve = _for_rank(t, "conv_transpose", rank)
    y = convolve(x, w, None, a("strides", 1), 0, 0, a("group", 1), a("dilations", 1))
    before, after = (a("pads", [0] * (2 * rank))[side * rank :][:rank] for side in (0, 1))
    more = a("output_padding", [0] * rank)
    cut = [-n for n in before] + [m - n for m, n in zip(more, after, strict=True)]
    y = t.nn.functional.pad(y, widths(cut))
    return y if bias is None else y + bias.reshape((-1,) + (1,) * rank)


def _both_sides(a: Attributes, rank: int) -> list[int]:
    """The padding where both sides have as much, which is PyTorch's."""
    pads = a("pads", [0] * (2 * rank))
    assert pads[:rank] == pads[rank:]
    return pads[:rank]


def _max_pool(t: Any, a: Attributes, x: Any) -> Any:
    rank = x.ndim - 2
    return _for_rank(t, "max_pool", rank)(x, a("kernel_shape"), a("strides", 1), _both_sides(a, rank))


def _average_pool(t: Any, a: Attributes, x: Any) -> Any:
    rank = x.ndim - 2
    return _for_rank(t, "avg_pool", rank)(
        x,
        a("kernel_shape"),
        a("strides", 1),
        _both_sides(a, rank),
        ceil_mode=bool(a("ceil_mode", 0)),
        count_include_pad=bool(a("count_include_pad", 0)),
    )


def _space(x: Any) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


PRODUCTS: dict[str, Op] = {
    "MatMul": lambda t, a, x, y: x @ y,
    "Gemm": _gemm,
    "Einsum": lambda t, a, *xs: t.einsum(a("equation"), *xs),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": lambda t, a, x: x.mean(_space(x), keepdim=True),
    "GlobalMaxPool": lambda t, a, x: x.amax(_space(x), keepdim=True),
}


# ---- attention and recurrent networks ----------------------------------------------------------------------


def _with_heads(x: Any, heads: int) -> Any:
    return x if x.ndim == 4 else x.unflatten(2, (heads, -1)).transpose(1, 2)


def _attention(t: Any, a: Attributes, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """PyTorch's own; written out with a cap on the scores, which it has not."""
    flat = q.ndim == 3
    q, k, v = _with_heads(q, a("q_num_heads")), *(_with_heads(x, a("kv_num_heads")) for x in (k, v))
    cap, causal = a("softcap", 0.0), bool(a("is_causal", 0))
    if cap:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = cap * t.tanh(q @ k.mT / q.shape[-1] ** 0.5 / cap)
        hidden = t.ones(scores.shape[-2:], dtype=t.bool).triu(1)
        y = t.softmax(scores.masked_fill(hidden, float("-inf")) if causal else scores, -1) @ v
    else:
        y = t.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
    return y.transpose(1, 2).flatten(2) if flat else y


def _recurrent(name: str, order: list[int]) -> Op:
    """PyTorch's network, its gates sorted: `order` is where each of its gates is in ONNX's weights."""

    def op(t: Any, a: Attributes, x: Any, w: Any, r: Any, b: Any = None) -> Any:
        hidden, ways = a("hidden_size"), w.shape[0]
        rows = t.cat([t.arange(gate * hidden, (gate + 1) * hidden) for gate in order])
        params = []
        for d in range(ways):
            params += [w[d][rows], r[d][rows]]
            params += [] if b is None else [half[rows] for half in b[d].chunk(2)]
        start = t.zeros(ways, x.shape[1], hidden, dtype=x.dtype)
        state = (start, start) if name == "lstm" else start
        found = getattr(t, name)(x, state, params, b is not None, 1, 0.0, False, ways == 2, False)
        return found[0].unflatten(2, (ways, hidden)).transpose(1, 2)

    return op


OPS: dict[str, Op] = {
    **(ELEMENTWISE | REDUCTIONS | LAYOUT | INDICES | PRODUCTS),
    "Attention": _attention,
    "RNN": _recurrent("rnn_tanh", [0]),
    "GRU": _recurrent("gru", [1, 0, 2]),  # r z n of z r h
    "LSTM": _recurrent("lstm", [0, 2, 3, 1]),  # i f g o of i o f c
}
