"""Known defects of engines: results that differ from the standard, and nodes that are declared and refused.

Each row names an operator, a test of the node, and what was seen.  The rows come from runs of ONNX's backend
suite, one engine at a time (onnx 1.23, ONNX Runtime 1.31), and of the special values of `tests.engines.special`
(NaN, infinities, extremes of each integer type, empty arrays); both tests run again, and fail when a case is routed
to an engine that gets it wrong.

The body of an If, Loop or Scan runs whole on one engine, and the only other one is the slow reference: what is wrong
of extreme values alone (`extremes`) does not send a body there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.ir.nodes import attribute_of

# The largest weights that are looked into: divisors, exponents and bounds, mostly scalars.
_LOOKED_AT_BYTES = 1 << 20
D = ir.DataType
# Signed apart: the least of them over -1 has no result.
_SIGNED = frozenset({D.INT8, D.INT16, D.INT32, D.INT64})
_INTEGERS = _SIGNED | {D.UINT8, D.UINT16, D.UINT32, D.UINT64}
_FLOATS = (D.FLOAT, D.DOUBLE)
_LONG = (D.INT32, D.INT64)


class Wrong(NamedTuple):
    """A known defect of an engine: `when(node, opset)` tells whether a node is affected."""

    op: str
    when: Callable[[ir.Node, int], bool]
    seen: str
    domain: str = ""
    # Of special values alone: NaN, overflow, integers beyond the digits of a double.
    extremes: bool = False


def _has_input(node: ir.Node, position: int) -> bool:
    return len(node.inputs) > position and node.inputs[position] is not None


def _has_output(node: ir.Node, position: int) -> bool:
    return len(node.outputs) > position and bool(node.outputs[position].name)


def _is(node: ir.Node, dtype: ir.DataType) -> bool:
    return _has_input(node, 0) and node.inputs[0] is not None and node.inputs[0].dtype == dtype


def _dtype(node: ir.Node) -> ir.DataType | None:
    """Return the dtype of the first input, or None where it is not known."""
    return node.inputs[0].dtype if node.inputs and node.inputs[0] is not None else None


def _rank(node: ir.Node) -> int | None:
    """Return the number of axes of the first input, or None where it is not known."""
    shape = node.inputs[0].shape if node.inputs and node.inputs[0] is not None else None
    return None if shape is None else len(shape)


def _of(*dtypes: ir.DataType) -> Callable[[ir.Node, int], bool]:
    """Return a test of the first input's dtype."""
    return lambda node, opset: _dtype(node) in dtypes


def _known(node: ir.Node, position: int) -> np.ndarray | None:
    """Return an input's value, where it is a weight of a reasonable size; else None."""
    value = node.inputs[position] if _has_input(node, position) else None
    tensor = None if value is None else value.const_value
    if tensor is None and value is not None:
        tensor = _constant(value.producer())
    return tensor.numpy() if tensor is not None and tensor.nbytes <= _LOOKED_AT_BYTES else None


def _constant(node: ir.Node | None) -> ir.TensorProtocol | None:
    """Return the value of a Constant node."""
    # Constants of the main graph are weights by now; those of bodies stay nodes.
    if node is None or node.op_type != "Constant" or node.domain != "":
        return None
    found = (
        node.attributes.get("value") or node.attributes.get("value_int") or node.attributes.get("value_ints")
    )
    if found is None or found.is_ref():
        return None
    if found.type == ir.AttributeType.TENSOR:
        return found.as_tensor()
    return ir.tensor(found.value, dtype=D.INT64)


def _may_trap(node: ir.Node, opset: int) -> bool:
    """Return whether integers are divided by a divisor that may be 0, or -1 where they have signs."""
    typed = [v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype is not None]
    # Any of them: Div and Mod have one dtype.
    dtype = typed[0] if typed else None
    if dtype not in _INTEGERS:
        return False
    divisor = _known(node, 1)
    return divisor is None or bool((divisor == 0).any() or (dtype in _SIGNED and (divisor == -1).any()))


def _mixes_dtypes(node: ir.Node, opset: int) -> bool:
    """Return whether the first two inputs differ in dtype."""
    return len({v.dtype for v in node.inputs[:2] if v is not None and v.dtype is not None}) > 1


def _power_of_integers(node: ir.Node, opset: int) -> bool:
    """Return whether an integer is raised to anything but a constant square or cube, which are products."""
    exponent = _known(node, 1)
    return _dtype(node) in _INTEGERS and not (
        exponent is not None and exponent.size == 1 and exponent.item() in (2, 3)
    )


def _bound_may_be_nan(node: ir.Node, opset: int) -> bool:
    """Return whether a bound of Clip is computed, or a constant NaN."""
    if _dtype(node) in _INTEGERS:
        return False
    bounds = [_known(node, i) for i in (1, 2) if _has_input(node, i)]
    # NaN alone differs from itself, in every dtype of floats.
    return any(bound is None or bool((bound != bound).any()) for bound in bounds)


def _reduces_nothing(node: ir.Node, opset: int) -> bool:
    """Return whether a dimension is known to be 0."""
    shape = node.inputs[0].shape if node.inputs and node.inputs[0] is not None else None
    return shape is not None and any(isinstance(d, int) and d == 0 for d in shape)


def _always(node: ir.Node, opset: int) -> bool:
    return True


def _batchwise(node: ir.Node, opset: int) -> bool:
    return bool(attribute_of(node, "layout", 0))


def _changes_case(node: ir.Node, opset: int) -> bool:
    return attribute_of(node, "case_change_action", "NONE") != "NONE" or not attribute_of(
        node, "is_case_sensitive", 0
    )


def _scatters_what_it_lacks(node: ir.Node, opset: int) -> bool:
    """Return whether a scatter has a reduction that the registry declares by dtype, and the kernel refuses."""
    reduction = attribute_of(node, "reduction", "none")
    if _is(node, ir.DataType.FLOAT16):
        return reduction in ("add", "mul") or (node.op_type == "ScatterND" and reduction != "none")
    return _is(node, ir.DataType.BOOL) and reduction != "none"


def _trains(node: ir.Node, opset: int) -> bool:
    """Return whether a BatchNormalization takes the statistics of the batch: up to opset 13, when it returns them."""
    return bool(attribute_of(node, "training_mode", 0)) or _has_output(node, 1)


def _flattens(node: ir.Node, opset: int) -> bool:
    """Return whether an operator takes everything from `axis` on as one axis, as before opset 13."""
    return opset < 13


ONNXRUNTIME: tuple[Wrong, ...] = (
    Wrong("Attention", lambda n, v: _is(n, ir.DataType.FLOAT16), "causal fp16 differs"),
    Wrong("Attention", lambda n, v: _has_input(n, 6), "nonpad_kv_seqlen: refuses the padded mask"),
    Wrong("Attention", lambda n, v: _has_output(n, 3), "qk_matmul_output with bias and causal mask differs"),
    Wrong("ConvInteger", lambda n, v: any(attribute_of(n, "pads", ())), "refuses padding"),
    Wrong("DFT", _always, "differs on the suite's own signals"),
    Wrong("STFT", _always, "differs on the suite's own signals"),
    Wrong("GRU", _batchwise, "refuses layout=1"),
    Wrong("LSTM", _batchwise, "refuses layout=1"),
    Wrong("RNN", _batchwise, "refuses layout=1"),
    Wrong("GRU", _of(D.DOUBLE), "registered, and refuses doubles when it runs"),
    Wrong("LSTM", _of(D.DOUBLE), "registered, and refuses doubles when it runs"),
    Wrong(
        "MeanVarianceNormalization", lambda n, v: not _is(n, D.FLOAT), "has its body's kernels, and refuses"
    ),
    Wrong("RMSNormalization", _mixes_dtypes, "gives the scale's dtype where inference says the input's"),
    Wrong("LRN", lambda n, v: _rank(n) not in (None, 4), "refuses any rank but 4"),
    Wrong("MaxUnpool", lambda n, v: _has_input(n, 2), "output_shape differs"),
    Wrong("ReduceMax", lambda n, v: _is(n, ir.DataType.BOOL), "refuses an empty set of bool"),
    Wrong("ReduceMin", lambda n, v: _is(n, ir.DataType.BOOL), "refuses an empty set of bool"),
    Wrong(
        "Resize",
        lambda n, v: (
            attribute_of(n, "coordinate_transformation_mode", "half_pixel") == "align_corners"
            and not _has_input(n, 3)
        ),
        "align_corners with scales: takes the rounded size for the length",
    ),
    Wrong(
        "ScatterElements", _scatters_what_it_lacks, "refuses float16 with add and mul, bool with max and min"
    ),
    Wrong("ScatterND", _scatters_what_it_lacks, "refuses float16 with a reduction, bool with max and min"),
    Wrong("StringNormalizer", _changes_case, "wants an en_US locale on the machine"),
    Wrong("Dropout", lambda n, v: _has_input(n, 2), "training mode: another random mask"),
    Wrong("BatchNormalization", _trains, "writes the running mean over its weight: the next run differs"),
    # An integer divided by 0 raises there, also where nothing is divided; min / -1 ends the process by SIGFPE.
    Wrong("Div", _may_trap, "int32, int64: min / -1 is SIGFPE"),
    Wrong("Mod", _may_trap, "int32, int64: min % -1 is SIGFPE"),
    Wrong("ArgMax", _of(*_FLOATS), "a NaN that is not first is passed over", extremes=True),
    Wrong("ArgMin", _of(*_FLOATS), "a NaN that is not first is passed over", extremes=True),
    Wrong("ReduceMax", _of(*_FLOATS), "drops a NaN, depending on its place", extremes=True),
    Wrong("ReduceMin", _of(*_FLOATS), "drops a NaN, depending on its place", extremes=True),
    Wrong("TopK", _of(*_FLOATS), "a NaN stands anywhere, not as the largest", extremes=True),
    Wrong("Hardmax", _of(*_FLOATS), "of a row with NaN all zeros, or another place", extremes=True),
    Wrong("LogSoftmax", _of(D.DOUBLE), "numbers in a row with NaN, -inf beside inf", extremes=True),
    Wrong("Sign", _of(D.FLOAT16), "0 of NaN", extremes=True),
    Wrong("Clip", _bound_may_be_nan, "a bound of NaN counts as none", extremes=True),
    Wrong("Shrink", lambda n, v: not _is(n, D.FLOAT), "computes doubles and integers in float32"),
    Wrong("Pow", _power_of_integers, "int64: through a double, 3**39 ends in 256 for 267", extremes=True),
    Wrong("ReduceSum", _of(*_LONG), "int64: through a double, 2**53 + 1 is lost; saturates", extremes=True),
    Wrong("ReduceL1", _of(*_LONG), "int64: through a double, 2**53 + 1 is lost; saturates", extremes=True),
    Wrong("ReduceProd", _of(*_LONG), "int64: through a double, 2**53 + 1 is lost; saturates", extremes=True),
    Wrong("ReduceSumSquare", _of(*_LONG), "int64: through a double; saturates", extremes=True),
    Wrong("ReduceL2", _of(*_LONG), "takes no root of large integers", extremes=True),
    Wrong("ReduceLogSumExp", _of(*_FLOATS), "-inf for the least number", extremes=True),
    Wrong("ReduceMean", _reduces_nothing, "0 for the mean of nothing, which is NaN", extremes=True),
)

REFERENCE: tuple[Wrong, ...] = (
    Wrong("Softmax", _flattens, "takes one axis where opset < 13 means all from axis on"),
    Wrong("LogSoftmax", _flattens, "takes one axis where opset < 13 means all from axis on"),
    Wrong("Hardmax", _flattens, "takes one axis where opset < 13 means all from axis on"),
    Wrong("LRN", _always, "sums over the wrong axis"),
    Wrong("Scatter", _always, "has no such operator"),
    Wrong(
        "BatchNormalization",
        lambda n, v: v < 14 and _trains(n, v),
        "takes the running statistics for the batch's",
    ),
    Wrong("Loop", lambda n, v: not _has_input(n, 1), "makes no trip where no condition is given"),
    Wrong("Scan", lambda n, v: v < 9, "takes the optional first input of opset 8 for a state"),
    Wrong("Gradient", _always, "has no such operator", "ai.onnx.preview.training"),
    Wrong("ReduceSumSquare", lambda n, v: _dtype(n) in _INTEGERS - {D.INT64}, "gives 64 bits for fewer"),
)


# Operators that two engines compute rightly, and not alike: the array table does not take them from ONNX Runtime
# where a bundle is small, so that a model gives the same wherever it is cut.
UNLIKE: tuple[Wrong, ...] = (
    Wrong("MaxPool", _always, "NaN in a window: ONNX Runtime passes over it, the table does not"),
    Wrong("GlobalMaxPool", _always, "NaN in a window: ONNX Runtime passes over it, the table does not"),
    Wrong("LRN", _always, "NaN, inf: ONNX Runtime's running sum keeps them for the channels that follow"),
    Wrong("GRU", _always, "NaN in the input: ONNX Runtime clips its activations, which makes a number of it"),
    Wrong(
        "LSTM", _always, "NaN in the input: ONNX Runtime clips its activations, which makes a number of it"
    ),
    Wrong("RNN", _always, "NaN in the input: ONNX Runtime clips its activations, which makes a number of it"),
    Wrong("QuantizeLinear", _always, "NaN: the least integer, or 0"),
    Wrong("DynamicQuantizeLinear", _always, "NaN: other scales"),
    Wrong("Cast", _always, "floats that no integer is near: ONNX leaves it open"),
    Wrong("CastLike", _always, "floats that no integer is near: ONNX leaves it open"),
)


_ByOperator: TypeAlias = Mapping[tuple[str, str], Sequence[Wrong]]


def _by_operator(rows: Sequence[Wrong]) -> _ByOperator:
    """Return the rows of each operator, by domain and name."""
    # A table: each node is looked up three times.
    found: defaultdict[tuple[str, str], list[Wrong]] = defaultdict(list)
    for row in rows:
        found[row.domain, row.op].append(row)
    return dict(found)


_IN_ONNXRUNTIME, _IN_REFERENCE, _UNLIKE = map(_by_operator, (ONNXRUNTIME, REFERENCE, UNLIKE))


def _hits(rows: _ByOperator, node: ir.Node, opset: int, *, in_body: bool = False) -> bool:
    return any(
        not (in_body and row.extremes) and row.when(node, opset)
        for row in rows.get((node.domain, node.op_type), ())
    )


def wrong_in_onnxruntime(node: ir.Node, opset: int, *, in_body: bool = False) -> bool:
    """Return whether ONNX Runtime is known to compute this node wrongly, or to refuse it in spite of its registry.

    Parameters
    ----------
    in_body : bool
        Whether it stands in the body of another node.
    """
    return _hits(_IN_ONNXRUNTIME, node, opset, in_body=in_body)


def differs_between_engines(node: ir.Node, opset: int) -> bool:
    """Return whether ONNX Runtime and the array table are known to give different results, both of them right."""
    return _hits(_UNLIKE, node, opset)


def wrong_in_reference(node: ir.Node, opset: int) -> bool:
    """Return whether the reference ops are known to compute this node wrongly, or lack it."""
    return _hits(_IN_REFERENCE, node, opset)
