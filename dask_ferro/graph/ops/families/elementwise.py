"""Element by element: arithmetic, comparisons, activations, casts, texts, and the steps of optimizers."""

from __future__ import annotations

from collections.abc import Mapping

from dask_ferro.graph.ir.dtypes import ARITHMETIC_FLOATS
from dask_ferro.graph.ir.nodes import Operands, type_of
from dask_ferro.graph.ops.facts import EXP, OpFacts, keeps_sizes, rows_of, sizes_by_element
from dask_ferro.graph.ops.labels import REDUCTIONS, Labels, Rule, TypedNode, align, names, pointwise


def _variadic(o: Operands) -> float:
    mean = o.node.op_type == "Mean"
    return o.out() * (max(1, len(o.node.inputs) - 1) + mean)


def _sum_labels(o: TypedNode) -> Rule | None:
    """Add, Sub, Sum, Mean: linear in all operands together."""
    return pointwise(tuple(range(len(o.node.inputs))))(o)


def _division_labels(o: TypedNode) -> Rule | None:
    """Whole numbers are cut off, so that terms of them do not add up."""
    return pointwise((0,))(o) if o.is_float() else pointwise()(o)


def _cast(o: TypedNode) -> Rule:
    """Linear if floats become floats."""
    values = (o.node.inputs[0], o.node.outputs[0])
    dtypes = [type_of(v, o.types).dtype for v in values if v is not None]
    return pointwise((0,))(o) if all(dtype in ARITHMETIC_FLOATS for dtype in dtypes) else pointwise()(o)


def _cast_like(o: TypedNode) -> Rule:
    """The second operand is labelled if it has the dimensions of the result: ranks may have it in parts, too."""
    out, target = o.out_shape(), o.shape(1)
    pairs = zip(reversed(target), reversed(out), strict=False)
    fits = len(target) <= len(out) and all(size in (1, wanted) for size, wanted in pairs)
    return Rule((names(len(out)), align(target, out) if fits else ()), (names(len(out)),), ignored=(1,))


def _stop_words(o: TypedNode) -> Rule | None:
    """A text that is a stop word is left out, and then all later texts move up."""
    return None if o.attribute("stopwords", ()) else pointwise()(o)


def _split_texts(o: TypedNode) -> Rule:
    """The last dimension of the parts is as long as the longest."""
    dims = names(o.rank())
    return Rule((dims,), ((*dims, None), dims)[: len(o.node.outputs)])


def _priced_rows(price: float, kinds: str, labels: Labels | None = None) -> dict[str, OpFacts]:
    """Rows of operators with a price for each element, whose operands broadcast."""
    return rows_of(kinds, OpFacts(price, labels=labels or pointwise(), sizes=sizes_by_element))


TABLE: Mapping[str, OpFacts] = {
    **_priced_rows(1, "Abs Ceil Floor Mod Reciprocal Relu Round Sign Sqrt IsInf IsNaN"),
    **_priced_rows(1, "And Or Xor Not BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor"),
    **_priced_rows(1, "Equal Greater GreaterOrEqual Less LessOrEqual"),
    **_priced_rows(1, "Add Sub", _sum_labels),
    **_priced_rows(1, "Neg", pointwise((0,))),
    **_priced_rows(1, "Mul", pointwise((0,), (1,))),
    **_priced_rows(1, "Div", _division_labels),
    **_priced_rows(1, "ThresholdedRelu"),
    **_priced_rows(2, "Clip Shrink LeakyRelu PRelu"),
    **_priced_rows(3, "Softsign"),
    **_priced_rows(4, "HardSigmoid"),
    **_priced_rows(5, "HardSwish"),
    **_priced_rows(EXP, "Exp Log Erf Pow Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh Acosh Atanh"),
    **_priced_rows(EXP + 2, "Sigmoid Elu"),
    **_priced_rows(EXP + 3, "Selu Swish Celu"),
    **_priced_rows(EXP + 4, "Gelu SwiGLU"),
    **_priced_rows(2 * EXP + 1, "Softplus"),
    **_priced_rows(3 * EXP + 2, "Mish"),
    **rows_of("Max Min", OpFacts(_variadic, labels=pointwise(), sizes=sizes_by_element)),
    **rows_of("Sum Mean", OpFacts(_variadic, labels=_sum_labels, sizes=sizes_by_element)),
    "Where": OpFacts(0, labels=pointwise((1, 2), commutes=REDUCTIONS), sizes=sizes_by_element),
    "Identity": OpFacts(0, "none", labels=pointwise((0,), commutes=REDUCTIONS), sizes=keeps_sizes),
    "Cast": OpFacts(0, labels=_cast, sizes=keeps_sizes),
    "CastLike": OpFacts(0, labels=_cast_like, sizes=sizes_by_element),
    "BitCast": OpFacts(0),
    "Dropout": OpFacts(0, labels=pointwise(), draws="in training"),
    # Whole on each rank: no part of it is shorter.
    "Sleep": OpFacts(0, row_states=lambda o, states, rows: states[0]),
    **rows_of("Adagrad Adam Momentum", OpFacts(5)),
    **rows_of("StringConcat RegexFullMatch", OpFacts(0, labels=pointwise())),
    "StringNormalizer": OpFacts(0, labels=_stop_words),
    "StringSplit": OpFacts(0, labels=_split_texts),
}
