"""Floating-point operations of every ONNX operator, as a table.

Exact where arithmetic is the price: matrix products, convolutions, attention, recurrent cells (a multiply-add
is two).  For the rest a stated number for each element of the output or of the first input: plain arithmetic
and comparisons count 1, an exponential (or logarithm, sine, error function, power) `EXP`.  What only moves
data counts none, and is paid for by its bytes.  Algorithms are the direct ones: no Winograd, no FFT
convolution, causal masks save nothing.  The body of an If, Loop or Scan is not counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log2, prod

from dask_ferro.graph.ir.nodes import Operands

# A vectorised exponential: range reduction, a polynomial of degree 5 or 6, scaling by a power of two.
EXP = 10.0
# Softmax: the maximum, a subtraction, the exponential, the sum, a division.
SOFTMAX = EXP + 4
# Bilinear interpolation of one sample: three lerps and the weights.
BILINEAR = 8.0
# Boxes that a suppression keeps in a class when nothing bounds them, and the FLOPs to intersect two.
KEPT_BOXES, INTERSECTION = 100, 16.0


def flops(o: Operands) -> float:
    """Return the FLOPs of a node on its operands; bodies inside it count nothing here."""
    op = o.node.op_type
    if op in EXACT:
        return float(EXACT[op](o))
    if op in MOVES:
        return 0.0
    if op in PER_INPUT:
        return PER_INPUT[op] * o.size(0)
    return PER_OUTPUT.get(op, 1.0) * o.out_total()  # an operator of another domain: one for each element


# Products and convolutions.


def _matmul(o: Operands) -> float:
    return 2.0 * o.out() * (o.shape(0)[-1:] or (1,))[0]


def _gemm(o: Operands) -> float:
    a = o.shape(0) or (1,)
    inner = a[0 if o.attribute("transA", 0) else -1]
    return o.out() * (2.0 * inner + o.has(2))


def _conv(weight: int, bias: int) -> Callable[[Operands], float]:
    """Each output element is a product over [C / group, *kernel]."""
    return lambda o: o.out() * (2.0 * prod(o.shape(weight)[1:]) + o.has(bias))


def _conv_transpose(o: Operands) -> float:
    """Each input element meets [M / group, *kernel] weights."""
    return 2.0 * o.size(0) * prod(o.shape(1)[1:]) + o.has(2) * o.out()


def _deform_conv(o: Operands) -> float:
    """A convolution whose every input is sampled between pixels."""
    samples = o.shape(0)[1:2] + o.shape(1)[2:] + o.out_shape()[:1] + o.out_shape()[2:]
    return _conv(1, 3)(o) + BILINEAR * prod(samples)


def _causal_conv(o: Operands) -> float:
    activation = 0.0 if str(o.attribute("activation", "none")) == "none" else EXP + 3
    return o.out() * (2.0 * prod(o.shape(1)[2:]) + o.has(2) + activation)


def _einsum(o: Operands) -> float:
    """Every combination of index values takes a multiplication for each further factor, and an addition."""
    inputs, arrow, output = str(o.attribute("equation", "")).replace(" ", "").partition("->")
    terms = inputs.split(",")
    sizes: dict[str, int] = {}
    for position, term in enumerate(terms):
        for letter, size in zip(_indices(term, len(o.shape(position))), o.shape(position), strict=False):
            sizes[letter] = max(size, sizes.get(letter, 1))
    if arrow:
        summed = any(letter not in output for letter in sizes if letter.isalpha())
    else:  # without an arrow, what occurs twice is summed over
        summed = any(inputs.count(letter) > 1 for letter in sizes if letter.isalpha())
    return float(prod(sizes.values()) * (len(terms) - 1 + summed))


def _indices(term: str, rank: int) -> list[str]:
    """One name for each dimension; those under an ellipsis are named from the right, as they broadcast."""
    head, dots, tail = term.partition("...")
    hidden = rank - len(head) - len(tail) if dots else 0
    return [*head, *(f"...{i}" for i in range(hidden, 0, -1)), *tail]


# Attention and recurrent cells.


def _attention(o: Operands) -> float:
    """Two products of [q length, kv length] by the head size, and a softmax of as many scores."""
    q, k, v = o.shape(0), o.shape(1), o.shape(2)
    if len(q) == 4:
        batch, heads, length, size = q
        v_size = v[-1] if v else size
    else:
        batch, length, hidden = (*q, 1, 1, 1)[:3]
        heads = o.attribute("q_num_heads", 1)
        size = hidden // max(1, heads)
        v_size = (v[-1] if v else hidden) // max(1, o.attribute("kv_num_heads", heads))
    past = o.shape(4)
    kv_length = (k[-2] if len(k) > 1 else 1) + (past[-2] if len(past) > 1 else 0)
    soft_cap = (EXP + 2) * bool(o.attribute("softcap", 0.0))
    each = 2.0 * size + 2.0 * v_size + 1 + SOFTMAX + o.has(3) + soft_cap  # 1: the scale
    return float(batch * heads * length * kv_length * each)


def _linear_attention(o: Operands) -> float:
    """A state [d_k, d_v] for each key-value head: updated and read once a token, by its rule."""
    batch, length, hidden = (*o.shape(0), 1, 1, 1)[:3]
    heads, kv_heads = o.attribute("q_num_heads", 1), o.attribute("kv_num_heads", 1)
    d_k = hidden // max(1, heads)
    d_v = (o.shape(2) or (1,))[-1] // max(1, kv_heads)
    rule = str(o.attribute("update_rule", "linear"))
    update = 2.0 + ("gated" in rule) + 2.0 * ("delta" in rule)
    decay = EXP * d_k * ("gated" in rule)
    state = kv_heads * (update * d_k * d_v + decay)
    return float(batch * length * (state + heads * 2.0 * d_k * d_v))


def _recurrent(gates: int, activations: float, products: float) -> Callable[[Operands], float]:
    """For each step and gate: input and state times weights, and biases; then activations and products."""

    def count(o: Operands) -> float:
        x, w, r = o.shape(0), o.shape(1), o.shape(2)
        if len(x) < 3 or len(w) < 3 or len(r) < 3:
            return float(o.out())
        directions, hidden = r[0], r[2]
        gate = 2.0 * w[2] + 2.0 * hidden + 2.0 * o.has(3)
        return x[0] * x[1] * directions * hidden * (gates * gate + activations * EXP + products)

    return count


# Reductions, sorting, sampling.


def _variadic(o: Operands) -> float:
    mean = o.node.op_type == "Mean"
    return o.out() * (max(1, len(o.node.inputs) - 1) + mean)


def _pool(o: Operands) -> float:
    return float(o.out() * prod(o.attribute("kernel_shape", ())))


def _lrn(o: Operands) -> float:
    return float(o.out() * (2.0 * o.attribute("size", 1) + EXP + 3))


def _sort(o: Operands) -> float:
    """Comparisons of a sort along the axis (all elements without one)."""
    shape = o.shape(0)
    axis = o.attribute("axis", None if o.node.op_type == "Unique" else -1)
    length = o.size(0) if axis is None or not -len(shape) <= axis < len(shape) else shape[axis]
    return o.size(0) * log2(max(2, length))


def _suppression(o: Operands) -> float:
    """Scores of a class are sorted, and every box is held against those that were kept."""
    boxes = (*o.shape(0), 1, 1)[1]
    return o.size(1) * (log2(max(2, boxes)) + INTERSECTION * min(boxes, KEPT_BOXES))


def _taps(o: Operands) -> float:
    """Interpolation: 2 (linear) or 4 (cubic) neighbours for each dimension that is resampled."""
    mode = str(o.attribute("mode", "linear" if o.node.op_type == "GridSample" else "nearest"))
    if "nearest" in mode:
        return 0.0
    given, made = o.shape(0), o.out_shape()
    if o.node.op_type == "GridSample":
        dims = max(1, len(given) - 2)
    else:
        dims = sum(a != b for a, b in zip(given, made, strict=False))
    return 2.0 * o.out() * float((4 if "cubic" in mode else 2) ** dims)


def _roi_align(o: Operands) -> float:
    samples = o.attribute("sampling_ratio", 0) or 2  # 0 adapts to the box: two a side is usual
    return BILINEAR * o.out() * samples**2


def _dft(o: Operands) -> float:
    """5 n log2 n for a complex transform of n (Cooley and Tukey 1965, radix 2)."""
    shape = o.shape(0)
    axis = o.attribute("axis", 1)
    length = shape[axis] if -len(shape) <= axis < len(shape) else 2
    return 5.0 * max(prod(shape[:-1]), o.out() / 2) * log2(max(2, length))


def _stft(o: Operands) -> float:
    frames, bins = (*o.out_shape(), 1, 1, 1)[1:3]
    length = 2 * (bins - 1) if o.attribute("onesided", 1) else bins
    return (o.shape(0) or (1,))[0] * frames * length * (5.0 * log2(max(2, length)) + 1)


def _det(o: Operands) -> float:
    """LU factorization: 2/3 n^3 for each matrix."""
    return o.size(0) * 2.0 / 3.0 * (o.shape(0)[-1:] or (1,))[0]


def _affine_grid(o: Operands) -> float:
    return o.out() * 2.0 * ((o.out_shape() or (1,))[-1] + 1)


def _scatter(o: Operands) -> float:
    return float(o.size(2)) if str(o.attribute("reduction", "none")) != "none" else 0.0


# Classical learners (ai.onnx.ml), for each row.


def _rows(o: Operands) -> int:
    return o.shape(0)[0] if len(o.shape(0)) > 1 else 1


def _linear(o: Operands) -> float:
    return 2.0 * _rows(o) * o.length("coefficients")


def _svm(o: Operands) -> float:
    return _rows(o) * (2.0 * o.length("support_vectors") + EXP * o.length("coefficients"))


def _trees(o: Operands) -> float:
    """A comparison a level of each tree, taken as balanced."""
    if o.node.op_type == "TreeEnsemble":
        nodes, trees = o.length("nodes_splits"), o.length("tree_roots")
    else:
        nodes, trees = o.length("nodes_treeids"), len(set(o.attribute("nodes_treeids", ())))
    return _rows(o) * trees * log2(max(2.0, nodes / max(1, trees)))


EXACT: Mapping[str, Callable[[Operands], float]] = {
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "QLinearMatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv(1, 2),
    "ConvInteger": _conv(1, 8),
    "QLinearConv": _conv(3, 8),
    "ConvTranspose": _conv_transpose,
    "DeformConv": _deform_conv,
    "CausalConvWithState": _causal_conv,
    "Einsum": _einsum,
    "Attention": _attention,
    "FlexAttention": _attention,
    "LinearAttention": _linear_attention,
    "RNN": _recurrent(1, 1, 0),
    "GRU": _recurrent(3, 3, 5),
    "LSTM": _recurrent(4, 5, 4),
    "MaxPool": _pool,
    "AveragePool": _pool,
    "LpPool": _pool,
    "LRN": _lrn,
    **dict.fromkeys(("Sum", "Mean", "Max", "Min"), _variadic),
    **dict.fromkeys(("TopK", "Unique"), _sort),
    "NonMaxSuppression": _suppression,
    **dict.fromkeys(("Resize", "Upsample", "GridSample"), _taps),
    "RoiAlign": _roi_align,
    "DFT": _dft,
    "STFT": _stft,
    "Det": _det,
    "AffineGrid": _affine_grid,
    **dict.fromkeys(("Scatter", "ScatterElements", "ScatterND"), _scatter),
    **dict.fromkeys(("LinearClassifier", "LinearRegressor"), _linear),
    **dict.fromkeys(("SVMClassifier", "SVMRegressor"), _svm),
    **dict.fromkeys(("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"), _trees),
}


def _each(price: float, names: str) -> dict[str, float]:
    return dict.fromkeys(names.split(), price)


PER_INPUT: Mapping[str, float] = {
    **_each(
        1, "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceLogSum ArgMax ArgMin CumSum CumProd"
    ),
    **_each(1, "GlobalAveragePool GlobalMaxPool MaxRoiPool Col2Im TfIdfVectorizer NonZero"),
    **_each(2, "ReduceL1 ReduceL2 ReduceSumSquare GlobalLpPool NegativeLogLikelihoodLoss"),
    **_each(EXP + 3, "ReduceLogSumExp"),
    **_each(SOFTMAX + EXP, "SoftmaxCrossEntropyLoss"),
    **_each(7, "DynamicQuantizeLinear"),
}

PER_OUTPUT: Mapping[str, float] = {
    **_each(1, "Abs Neg Add Sub Mul Div Mod Reciprocal Sqrt Ceil Floor Round Sign IsInf IsNaN Relu Range"),
    **_each(
        1, "And Or Xor Not BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Binarizer ThresholdedRelu"
    ),
    **_each(1, "Equal Greater GreaterOrEqual Less LessOrEqual"),
    **_each(2, "Clip LeakyRelu PRelu Shrink Scaler DequantizeLinear BatchNormalization Hardmax"),
    **_each(3, "Softsign LpNormalization Normalizer RotaryEmbedding"),
    **_each(4, "HardSigmoid QuantizeLinear MelWeightMatrix"),
    **_each(5, "HardSwish RMSNormalization RandomUniform RandomUniformLike Bernoulli Adagrad Adam Momentum"),
    **_each(7, "MeanVarianceNormalization"),
    **_each(8, "LayerNormalization GroupNormalization InstanceNormalization"),
    **_each(EXP, "Exp Log Erf Pow Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh Acosh Atanh Multinomial"),
    **_each(EXP + 2, "Sigmoid Elu HannWindow HammingWindow"),
    **_each(EXP + 3, "Selu Swish Celu"),
    **_each(EXP + 4, "Gelu SwiGLU"),
    **_each(SOFTMAX, "Softmax"),
    **_each(SOFTMAX + 1, "LogSoftmax"),
    **_each(2 * EXP, "RandomNormal RandomNormalLike BlackmanWindow"),
    **_each(2 * EXP + 1, "Softplus"),
    **_each(3 * EXP + 2, "Mish"),
}

# Control flow stands here too: its bodies are counted node by node.  Gradient is rewritten before it runs.
MOVES: frozenset[str] = frozenset(
    _each(
        0,
        "Reshape Transpose Concat Split Slice Gather GatherElements GatherND Squeeze Unsqueeze Flatten"
        " Identity Expand Tile Pad Shape Size Constant ConstantOfShape Cast CastLike BitCast DepthToSpace"
        " SpaceToDepth"
        " TensorScatter Where Compress EyeLike OneHot ReverseSequence Trilu CenterCropPad MaxUnpool Dropout"
        " ImageDecoder SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength"
        " SplitToSequence ConcatFromSequence Optional OptionalGetElement OptionalHasElement"
        " StringConcat StringNormalizer StringSplit RegexFullMatch"
        " ArrayFeatureExtractor CastMap CategoryMapper DictVectorizer FeatureVectorizer Imputer LabelEncoder"
        " OneHotEncoder ZipMap If Loop Scan SequenceMap Gradient Sleep",
    )
)
