"""Known defects of engines: results that differ from the standard, and nodes that are declared and refused.

Each row has an operator, a predicate on the node, and the observed behaviour.  The rows come from runs of ONNX's
backend suite, one engine at a time (onnx 1.23, ONNX Runtime 1.31), and of the special values of
`tests.engines.onnxruntime.special` (NaN, infinities, extremes of each integer type, empty arrays); both tests fail
when a case is assigned to an engine that computes it wrongly.

The body of an If, Loop or Scan runs whole on one engine, and the only alternative is the slow reference.  A defect
that affects only extreme values (`extremes`) therefore does not send a body there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.ir.dtypes import INDEX, INTEGER, SIGNED_INTS, D
from dask_ferro.graph.ir.nodes import attribute_of, has_default_cell, input_of

# The largest weights whose values are read: divisors, exponents and bounds, mostly scalars.
_LOOKED_AT_BYTES = 1 << 20
_FLOATS = (D.FLOAT, D.DOUBLE)


class Bug(NamedTuple):
    """A known defect of an engine: `when(node, opset)` returns whether a node below opset `before` is affected."""

    op: str
    when: Callable[[ir.Node, int], bool]
    seen: str
    domain: str = ""
    before: float = inf
    # Whether it affects only special values: NaN, overflow, integers beyond the digits of a double.
    extremes: bool = False


Defects: TypeAlias = Mapping[tuple[str, str], Sequence[Bug]]


def _by_operator(*rows: Bug) -> Defects:
    """Return the rows of each operator, by domain and name."""
    # A mapping, because each node is looked up three times.
    found: defaultdict[tuple[str, str], list[Bug]] = defaultdict(list)
    for row in rows:
        found[row.domain, row.op].append(row)
    return dict(found)


def _rows(
    ops: Sequence[str],
    when: Callable[[ir.Node, int], bool],
    seen: str,
    *,
    before: float = inf,
    extremes: bool = False,
) -> Iterator[Bug]:
    """Yield the rows of a defect that several operators share."""
    return (Bug(op, when, seen, before=before, extremes=extremes) for op in ops)


def _has_input(node: ir.Node, position: int) -> bool:
    return input_of(node, position) is not None


def _has_output(node: ir.Node, position: int) -> bool:
    return len(node.outputs) > position and bool(node.outputs[position].name)


def _dtype(node: ir.Node) -> ir.DataType | None:
    """Return the dtype of the first input, or None if it is unknown."""
    value = input_of(node, 0)
    return None if value is None else value.dtype


def _rank(node: ir.Node) -> int | None:
    """Return the rank of the first input, or None if it is unknown."""
    value = input_of(node, 0)
    return None if value is None or value.shape is None else len(value.shape)


def _has(*dtypes: ir.DataType) -> Callable[[ir.Node, int], bool]:
    """Return a predicate on the first input's dtype."""
    return lambda node, opset: _dtype(node) in dtypes


def _weight_value(node: ir.Node, position: int) -> np.ndarray | None:
    """Return the value of an input that is a weight of a reasonable size; else None."""
    # Constants of the main graph have become weights; in bodies they are still nodes.
    value = input_of(node, position)
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return tensor.numpy() if tensor is not None and tensor.nbytes <= _LOOKED_AT_BYTES else None


def _may_trap(node: ir.Node, opset: int) -> bool:
    """Return whether integers are divided by a divisor that may be 0, or -1 for signed integers."""
    typed = [v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype is not None]
    # Any of them, because all values of Div and Mod have one dtype.
    dtype = typed[0] if typed else None
    if dtype not in INTEGER:
        return False
    divisor = _weight_value(node, 1)
    return divisor is None or bool((divisor == 0).any() or (dtype in SIGNED_INTS and (divisor == -1).any()))


def _mixes_dtypes(node: ir.Node, opset: int) -> bool:
    """Return whether the first two inputs differ in dtype."""
    return len({v.dtype for v in node.inputs[:2] if v is not None and v.dtype is not None}) > 1


def _bound_may_be_nan(node: ir.Node, opset: int) -> bool:
    """Return whether a bound of Clip is computed, or a constant NaN."""
    if _dtype(node) in INTEGER:
        return False
    bounds = [_weight_value(node, i) for i in (1, 2) if _has_input(node, i)]
    # Only NaN differs from itself.
    return any(bound is None or bool((bound != bound).any()) for bound in bounds)


def _always(node: ir.Node, opset: int) -> bool:
    return True


def _reduces_nothing(node: ir.Node, opset: int) -> bool:
    """Return whether a dimension is known to be 0."""
    value = input_of(node, 0)
    return value is not None and 0 in (value.shape or ())


def _scatters_what_it_lacks(node: ir.Node, opset: int) -> bool:
    """Return whether a scatter has a reduction that the registry declares for its dtype, but the kernel refuses."""
    return _dtype(node) in (D.FLOAT16, D.BOOL) and attribute_of(node, "reduction", "none") != "none"


def _trains(node: ir.Node, opset: int) -> bool:
    """Return whether a BatchNormalization uses the statistics of the batch: up to opset 13, when it returns them."""
    return bool(attribute_of(node, "training_mode", 0)) or _has_output(node, 1)


_RECURRENT = ("GRU", "LSTM", "RNN")

ONNXRUNTIME = _by_operator(
    Bug("Attention", _has(D.FLOAT16), "causal fp16 differs"),
    Bug("Attention", lambda n, v: _has_input(n, 6), "nonpad_kv_seqlen: refuses the padded mask"),
    Bug("Attention", lambda n, v: _has_output(n, 3), "qk_matmul_output with bias and causal mask differs"),
    Bug("ConvInteger", lambda n, v: any(attribute_of(n, "pads", ())), "refuses padding"),
    *_rows(("DFT", "STFT"), _always, "differs on the suite's own signals"),
    *_rows(_RECURRENT, lambda n, v: bool(attribute_of(n, "layout", 0)), "refuses layout=1"),
    *_rows(("GRU", "LSTM"), _has(D.DOUBLE), "registered, and refuses doubles when it runs"),
    Bug(
        "MeanVarianceNormalization", lambda n, v: _dtype(n) != D.FLOAT, "has its body's kernels, and refuses"
    ),
    Bug("RMSNormalization", _mixes_dtypes, "returns the scale's dtype, where inference has the input's"),
    Bug("LRN", lambda n, v: _rank(n) not in (None, 4), "refuses every rank but 4"),
    Bug("MaxUnpool", lambda n, v: _has_input(n, 2), "output_shape differs"),
    *_rows(("ReduceMax", "ReduceMin"), _has(D.BOOL), "refuses an empty set of bool"),
    Bug(
        "Resize",
        lambda n, v: (
            attribute_of(n, "coordinate_transformation_mode", "half_pixel") == "align_corners"
            and not _has_input(n, 3)
        ),
        "align_corners with scales: uses the rounded size as the length",
    ),
    *_rows(
        ("ScatterElements", "ScatterND"),
        _scatters_what_it_lacks,
        "refuses most reductions of float16 and bool",
    ),
    Bug("StringNormalizer", _always, "requires an en_US locale on the machine"),
    Bug("Dropout", lambda n, v: _has_input(n, 2), "training mode: another random mask"),
    Bug("BatchNormalization", _trains, "writes the running mean over its weight: the next run differs"),
    # ONNX Runtime raises for an integer divided by 0, even if nothing is divided; min / -1 is a SIGFPE.
    *_rows(("Div", "Mod"), _may_trap, "int32, int64: min by -1 is SIGFPE"),
    *_rows(("ArgMax", "ArgMin"), _has(*_FLOATS), "skips a NaN that is not first", extremes=True),
    *_rows(("ReduceMax", "ReduceMin"), _has(*_FLOATS), "drops a NaN, depending on its place", extremes=True),
    Bug("TopK", _has(*_FLOATS), "places a NaN anywhere, not as the largest", extremes=True),
    Bug("Hardmax", _has(*_FLOATS), "returns zeros, or another place, for a row with NaN", extremes=True),
    Bug("LogSoftmax", _has(D.DOUBLE), "returns numbers for a row with NaN, -inf next to inf", extremes=True),
    Bug("Sign", _has(D.FLOAT16), "returns 0 for NaN", extremes=True),
    Bug("Clip", _bound_may_be_nan, "ignores a bound of NaN", extremes=True),
    Bug("Shrink", lambda n, v: _dtype(n) != D.FLOAT, "computes doubles and integers in float32"),
    Bug("Pow", _has(*INTEGER), "int64: through a double, 3**39 ends in 256 for 267", extremes=True),
    *_rows(
        ("ReduceSum", "ReduceL1", "ReduceProd", "ReduceSumSquare"),
        _has(*INDEX),
        "int64: through a double, 2**53 + 1 is lost; saturates",
        extremes=True,
    ),
    Bug("ReduceL2", _has(*INDEX), "omits the root of large integers", extremes=True),
    Bug("ReduceMean", _reduces_nothing, "returns 0, not NaN, as the mean of no elements", extremes=True),
    Bug("ReduceLogSumExp", _has(*_FLOATS), "returns -inf for the smallest number", extremes=True),
)


def _looks_up_other_keys(node: ir.Node, opset: int) -> bool:
    """Return whether a LabelEncoder may have NaN as a key, or has a default that its file leaves out."""
    floats = _dtype(node) not in INTEGER | {D.STRING}
    return floats or ("values_tensor" in node.attributes and "default_tensor" not in node.attributes)


def _has_texts(node: ir.Node, opset: int) -> bool:
    return any(v is not None and v.dtype == D.STRING for v in (*node.inputs, *node.outputs))


_NO_TEXTS = (
    "Cast", "CastLike", "CenterCropPad", "Col2Im", "GridSample", "NonZero", "OneHot", "Pad", "RegexFullMatch", "Resize",
    "StringConcat", "StringSplit", "TensorScatter", "Trilu", "Upsample",
)  # fmt: skip
_REGRESSORS = ("LinearRegressor", "SVMRegressor", "TreeEnsembleRegressor")

REFERENCE = _by_operator(
    *_rows(
        _NO_TEXTS, _has_texts, "pads with the number 0, stops at a NUL, has Python's numbers and expressions"
    ),
    *(
        Bug(op, lambda n, v: attribute_of(n, "post_transform", "NONE") != "NONE", "lacks it", "ai.onnx.ml")
        for op in _REGRESSORS
    ),
    *(
        Bug(op, _always, "has no such operator", "ai.onnx.ml")
        for op in ("CastMap", "CategoryMapper", "ZipMap")
    ),
    Bug("LabelEncoder", _looks_up_other_keys, "matches no NaN, has no default of its own", "ai.onnx.ml"),
    Bug(
        "StringNormalizer",
        lambda n, v: str(attribute_of(n, "locale", ""))[:2] in ("tr", "az", "lt"),
        "changes case as in English",
    ),
    *_rows(
        ("Softmax", "LogSoftmax", "Hardmax"),
        _always,
        "uses one axis where opset < 13 means all axes from `axis`",
        before=13,
    ),
    Bug("LRN", _always, "sums over the wrong axis"),
    *_rows(
        _RECURRENT,
        lambda n, v: not has_default_cell(n),
        "ignores clip, activations, input_forget and sequence_lens",
    ),
    Bug("Scatter", _always, "has no such operator"),
    Bug("BatchNormalization", _trains, "uses the running statistics for the batch's", before=14),
    Bug("Loop", lambda n, v: not _has_input(n, 1), "makes no trip without a condition"),
    Bug("Scan", _always, "reads the optional first input of opset 8 as a state", before=9),
    Bug("Gradient", _always, "has no such operator", "ai.onnx.preview.training"),
    Bug(
        "ReduceSumSquare",
        lambda n, v: _dtype(n) in INTEGER - {D.INT64},
        "returns 64 bits for narrower types",
    ),
)


# Operators that two engines compute correctly, but with different results: the array table does not take them from
# ONNX Runtime in a small bundle, so that a model's results do not depend on the places at which it is cut.
UNLIKE = _by_operator(
    *_rows(
        ("MaxPool", "GlobalMaxPool"), _always, "NaN in a window: ONNX Runtime skips it, the table does not"
    ),
    Bug("LRN", _always, "NaN, inf: ONNX Runtime's running sum keeps them for the following channels"),
    *_rows(
        _RECURRENT, _always, "NaN in the input: ONNX Runtime clips its activations, which makes it a number"
    ),
    Bug("QuantizeLinear", _always, "NaN: the smallest integer, or 0"),
    Bug("DynamicQuantizeLinear", _always, "NaN: other scales"),
    *_rows(("Cast", "CastLike"), _always, "floats beyond the integers: undefined in ONNX"),
)
