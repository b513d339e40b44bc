"""Rows of the placement table for what computes: element by element, products, reductions, normalization, layers.

Each function reads the shapes and attributes of a node and returns its `Rule`, or None where the node has to be
computed whole; each `make` function returns such a row.  `placements` says what a rule means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_ferro.graph.sharding.placements import Dims, Row, Rule, Site, aligned, names, without

# Element by element.


def pointwise(*linear: tuple[int, ...]) -> Row:
    """Make a row for what broadcasts; `linear` as in `Rule`."""

    def row(o: Site) -> Rule:
        out = o.out_shape()
        inputs = tuple(aligned(o.shape(i), out) for i in range(len(o.node.inputs)))
        return Rule(inputs, (names(len(out)),) * len(o.node.outputs), linear=linear)

    return row


def _summed(o: Site) -> Rule | None:
    """Add, Sub, Sum, Mean: linear in all operands together."""
    return pointwise(tuple(range(len(o.node.inputs))))(o)


def _divided(o: Site) -> Rule | None:
    return pointwise((0,))(o) if o.is_float() else pointwise()(o)


def _quantized(o: Site) -> Rule | None:
    """One scale for all, or one for each index of `axis`; blocks that share a scale are not split."""
    if o.rank(1) > 1 or o.attribute("block_size", 0):
        return None
    dims = names(o.rank())
    scale: Dims = (dims[o.axis(1)],) if o.size(1) > 1 else (None,) * o.rank(1)
    return Rule((dims, scale, scale), (dims,))


# Products and convolutions.


def _matmul(o: Site) -> Rule:
    a, b, out = o.shape(0), o.shape(1), o.out_shape()
    rows: Dims = ("i",) if len(a) > 1 else ()
    columns: Dims = ("j",) if len(b) > 1 else ()
    batch = out[: len(out) - len(rows) - len(columns)]
    left = (*aligned(a[:-2], batch), *rows, "k")
    right = (*aligned(b[:-2], batch), "k", *columns)
    return Rule((left, right), ((*names(len(batch)), *rows, *columns),), "sum", ((0,), (1,)))


def _gemm(o: Site) -> Rule:
    a: Dims = ("k", "i") if o.attribute("transA", 0) else ("i", "k")
    b: Dims = ("j", "k") if o.attribute("transB", 0) else ("k", "j")
    c = tuple({"0": "i", "1": "j", None: None}[label] for label in aligned(o.shape(2), o.out_shape()))
    if not o.is_float() or (o.opset < 11 and o.has(2)):
        # alpha and beta cut whole numbers off; and up to opset 10 no rank could leave C to another
        return Rule((a, b, c), (("i", "j"),))
    return Rule((a, b, c), (("i", "j"),), "sum", ((0,), (1,)), once=(2,))


def _einsum(o: Site) -> Rule | None:
    """Each letter is a label; equations with an ellipsis or a diagonal are not split."""
    left, arrow, right = str(o.attribute("equation", "")).replace(" ", "").partition("->")
    terms = left.split(",")
    if "." in left or any(len(set(term)) < len(term) for term in terms):
        return None
    if not arrow:
        right = "".join(sorted(x for x in set(left) - {","} if left.count(x) == 1))
    linear = tuple((i,) for i in range(len(terms)))
    return Rule(tuple(tuple(term) for term in terms), (tuple(right),), "sum", linear)


def _conv(kernel: Dims) -> Row:
    """Make a row: batch, input and output channels are split; with groups, whole groups."""

    def row(o: Site) -> Rule:
        still: Dims = (None,) * (o.rank() - 2)
        linear = ((0,), (1,))
        if o.attribute("group", 1) == 1:
            x, w, y = ("n", "c", *still), (*kernel, *still), ("n", "m", *still)
            return Rule((x, w, ("m",)), (y,), "sum", linear, once=(2,))
        x, w = ("n", "m", *still), ("m", None, *still)
        return Rule((x, w, ("m",)), (x,), "sum", linear, once=(2,), counts={"group": (0, 1)})

    return row


def _pooled(*linear: tuple[int, ...]) -> Row:
    """Make a row: batch and channels are split."""

    def row(o: Site) -> Rule | None:
        if len(o.node.outputs) > 1:  # MaxPool's indices count through the whole tensor
            return None
        dims = without(names(o.rank()), range(2, o.rank()))
        return Rule((dims,), (dims,), linear=linear)

    return row


# Reductions, and what runs along an axis.


def _dropped(dims: Dims, axes: Sequence[int]) -> Dims:
    return tuple(label for i, label in enumerate(dims) if i not in axes)


def _reduction(reduction: str | None = None, *linear: tuple[int, ...], commutes: str = "sum mean") -> Row:
    """Make a row: what is reduced over is split if the parts' results can be reduced again."""

    def row(o: Site) -> Rule | None:
        given = o.constant(1) if o.has(1) else tuple(o.attribute("axes", ()))
        if given is None or (not given and o.attribute("noop_with_empty_axes", 0)):
            return None
        dims = names(o.rank())
        axes = [axis % o.rank() for axis in given] or range(o.rank())
        kept = without(dims, axes) if o.attribute("keepdims", 1) else _dropped(dims, axes)
        if reduction == "mean" and not o.is_float():
            return Rule((dims,), (kept,))
        return Rule((dims,), (kept,), reduction, linear, tuple(commutes.split()))

    return row


def _arg(o: Site) -> Rule:
    dims, axes = names(o.rank()), (o.axis(0),)
    kept = without(dims, axes) if o.attribute("keepdims", 1) else _dropped(dims, axes)
    return Rule((without(dims, axes),), (kept,))


def _along(default: int) -> Row:
    """Make a row: all dimensions but `axis`."""

    def row(o: Site) -> Rule:
        dims = without(names(o.rank()), (o.axis(default),))
        return Rule((dims,), (dims,) * len(o.node.outputs))

    return row


def _cumulative(o: Site) -> Rule | None:
    axis = o.constant(1)
    if axis is None:
        return None
    dims = without(names(o.rank()), (axis[0] % max(1, o.rank()),))
    return Rule((dims,), (dims,), linear=((0,),) if o.node.op_type == "CumSum" else ())


def _softmax(o: Site) -> Rule:
    """The dimensions before `axis`: up to opset 12 all others are one, and later `axis` is mostly the last."""
    dims = without(names(o.rank()), range(o.axis(-1 if o.opset >= 13 else 1), o.rank()))
    return Rule((dims,), (dims,))


# Normalization.


def _layer_normalized(o: Site) -> Rule:
    """LayerNormalization and RMSNormalization: what lies before `axis`, in the statistics too."""
    dims = without(names(o.rank()), range(o.axis(-1), o.rank()))
    return Rule((dims,), (dims,) * len(o.node.outputs))


def _batch_normalized(o: Site) -> Rule:
    """All dimensions when the statistics are given, channels when they are those of the batch."""
    dims, channel = names(o.rank()), ("1",)
    if o.attribute("training_mode", 0):
        dims = without(dims, [i for i in range(o.rank()) if i != 1])
    return Rule((dims, *(channel,) * 4), (dims, *(channel,) * (len(o.node.outputs) - 1)))


def _instance_normalized(o: Site) -> Rule:
    dims = without(names(o.rank()), range(2, o.rank()))
    return Rule((dims, ("1",), ("1",)), (dims,))


def _group_normalized(o: Site) -> Rule:
    """Batch alone: the meaning of scale and bias for groups changed between opsets."""
    dims = without(names(o.rank()), range(1, o.rank()))
    return Rule((dims,), (dims,))


def _except(*unsplit: int) -> Row:
    """Make a row: all dimensions but these, or but those of the attribute `axes`."""

    def row(o: Site) -> Rule:
        dims = without(names(o.rank()), [axis % o.rank() for axis in o.attribute("axes", unsplit)])
        return Rule((dims,), (dims,))

    return row


# Attention, recurrent cells, losses.


def _attention(o: Site) -> Rule:
    """Batch and heads; heads lie in a dimension of their own, or as parts of the last."""
    flat = o.rank() == 3
    q: Dims = ("b", None, "h") if flat else ("b", "h", None, None)
    heads = o.attribute("q_num_heads", 1) if flat else o.shape(0)[1]
    state: Dims = ("b", "h", None, None)
    inputs = (q, q, q, _mask(o.shape(3), (o.shape(0)[0], heads)), state, state, ("b",))
    counts = {"q_num_heads": (0, 2), "kv_num_heads": (1, 2)} if flat else {}
    return Rule(inputs, (q, state, state, state)[: len(o.node.outputs)], counts=counts)


def _mask(shape: tuple[int, ...], stacked: tuple[int, int]) -> Dims:
    """Labels of what broadcasts to batch, heads, queries and keys."""
    labels = {"0": "b", "1": "h", None: None}
    return (*(labels[x] for x in aligned(shape[:-2], stacked)), *(None,) * min(2, len(shape)))


def _rotary(o: Site) -> Rule:
    """Batch, positions and, where they have a dimension of their own, heads."""
    x: Dims = ("b", "s", None) if o.rank() == 3 else ("b", "h", "s", None)
    cache: Dims = ("b", "s", None) if o.rank(1) == 3 else (None,) * o.rank(1)
    return Rule((x, cache, cache, ("b", "s")), (x,))


def _recurrent(o: Site) -> Rule:
    """Batch."""
    is_first = o.attribute("layout", 0)
    x: Dims = ("b", None, None) if is_first else (None, "b", None)
    y: Dims = ("b", None, None, None) if is_first else (None, None, "b", None)
    return Rule((x, (), (), (), ("b",), x, x), (y, x, x)[: len(o.node.outputs)])


def _loss(o: Site) -> Rule | None:
    """Batch and what follows the classes; a mean only where each element counts the same."""
    scores = without(names(o.rank()), (1,))
    labels = _dropped(scores, (1,))
    kind = str(o.attribute("reduction", "mean"))
    if kind == "mean" and (o.has(2) or "ignore_index" in o.node.attributes):
        return None
    loss = labels if kind == "none" else ()
    outputs = (loss, scores)[: len(o.node.outputs)]
    return Rule((scores, labels), outputs, None if kind == "none" else kind)


def _rows(row: Row, kinds: str) -> dict[str, Row]:
    return dict.fromkeys(kinds.split(), row)


TABLE: Mapping[str, Row] = {
    **_rows(
        pointwise(),
        "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Celu Clip Cos Cosh Dropout Elu Erf Exp Floor Gelu HardSigmoid"
        " HardSwish IsInf IsNaN LeakyRelu Log Mish Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh"
        " Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu BitwiseNot Cast CastLike"
        " And Or Xor Equal Greater GreaterOrEqual Less LessOrEqual BitShift BitwiseAnd BitwiseOr BitwiseXor"
        " Max Min Mod Pow PRelu",
    ),
    "Neg": pointwise((0,)),
    "Div": _divided,
    "Mul": pointwise((0,), (1,)),
    **_rows(_summed, "Add Sub Sum Mean"),
    **_rows(_quantized, "QuantizeLinear DequantizeLinear"),
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Conv": _conv(("m", "c")),
    "ConvTranspose": _conv(("c", "m")),
    **_rows(_pooled((0,)), "AveragePool GlobalAveragePool"),
    **_rows(_pooled(), "MaxPool LpPool GlobalMaxPool GlobalLpPool"),
    "ReduceSum": _reduction("sum", (0,)),
    "ReduceMean": _reduction("mean", (0,)),
    "ReduceMax": _reduction("max", (0,), commutes="max"),
    "ReduceMin": _reduction("min", (0,), commutes="min"),
    **_rows(_reduction("sum"), "ReduceL1 ReduceSumSquare"),
    **_rows(_reduction(), "ReduceL2 ReduceLogSum ReduceLogSumExp ReduceProd"),
    **_rows(_arg, "ArgMax ArgMin"),
    **_rows(_along(-1), "LpNormalization TopK"),
    **_rows(_cumulative, "CumSum CumProd"),
    **_rows(_softmax, "Softmax LogSoftmax Hardmax"),
    **_rows(_layer_normalized, "LayerNormalization RMSNormalization"),
    "BatchNormalization": _batch_normalized,
    "InstanceNormalization": _instance_normalized,
    "GroupNormalization": _group_normalized,
    "MeanVarianceNormalization": _except(0, 2, 3),
    "LRN": _except(1),
    "Attention": _attention,
    "RotaryEmbedding": _rotary,
    **_rows(_recurrent, "LSTM GRU RNN"),
    **_rows(_loss, "SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss"),
}
