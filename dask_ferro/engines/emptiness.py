"""Flow analysis: the values of a model that may have no elements although each of its inputs has some.

A task checks its inputs when it starts, so all their dimensions are at least 1.  Inside the model, an axis loses all of
its elements where data decide (Compress, NonZero), or where a cut may remove the whole axis (a Slice of a symbolic
axis).  A value computed from such a value may be empty too, unless its sizes are known.

    x[N,S,4] --Slice [9:]--> s, maybe empty --Relu--> maybe empty --GRU: to be checked when it runs

Sizes that are computed from shapes (Shape, Gather, Concat) are at least 1, and so are axes expanded or cut to them.
Operators of other domains are taken to keep elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import onnx_ir as ir

from dask_ferro.graph.ir.dtypes import INDEX
from dask_ferro.graph.ir.nodes import attribute_of, bodies, input_of, reads

# Operators that may return an empty value for nonempty inputs, unless its sizes or their arguments exclude it.
_SHRINKING = frozenset({
    "Slice", "Compress", "NonZero", "Split", "SplitToSequence", "Unique", "NonMaxSuppression", "Range",
    "ConstantOfShape", "Expand", "Tile", "TopK", "Pad", "Resize", "Upsample", "CenterCropPad", "Loop",
    "StringSplit", "SequenceEmpty", "MaxPool", "AveragePool", "LpPool", "OneHot", "STFT", "Crop",
})  # fmt: skip
# Operators whose results are positive where their inputs are (sizes, positions).
_KEEP_POSITIVE = frozenset({
    "Gather", "Unsqueeze", "Squeeze", "Cast", "Concat", "Identity", "Mul", "Add", "Reshape", "Max", "Min",
    "ReduceProd", "ReduceMax", "ReduceMin", "Flatten", "Expand", "Slice",
})  # fmt: skip
# Operators whose result has the shape of the first input.
_SHAPED_BY_FIRST = frozenset({"ScatterND", "ScatterElements", "Scatter", "CastLike"})
# Of those operators, the ones whose other inputs are positions and shapes.
_POSITIVE_BY_FIRST = frozenset(
    {"Gather", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Cast", "Flatten", "Slice"}
)
# Exporters write an end that no axis reaches as the largest int32, or beyond.
_LARGEST = 2**31 - 1
# Lists of sizes, positions and scales are no longer than this.
_SHORT = 64


# For values without elements, ONNX Runtime (1.31) computes these operators as the standard defines, or refuses the
# cases that all engines refuse: tests/engines/test_emptiness.py runs each.  Inputs of all others are checked at run
# time.
TAKEN = frozenset({
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd",
    "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Compress", "Concat",
    "Cos", "Cosh", "CumProd", "CumSum", "DepthToSpace", "DequantizeLinear", "Div", "Dropout", "Elu", "Equal",
    "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Gelu", "Greater",
    "GreaterOrEqual", "HardSigmoid", "HardSwish", "Hardmax", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "LogSoftmax", "LpNormalization", "Max", "Min", "Mish", "Mod", "Mul", "Neg", "NonZero",
    "Not", "OneHot", "Or", "PRelu", "Pad", "Pow", "QuantizeLinear", "Reciprocal", "Relu", "Round", "Selu",
    "Shape", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Size", "Slice", "Softmax", "Softplus", "Softsign",
    "SpaceToDepth", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Tile", "Transpose", "Trilu",
    "Unsqueeze", "Where", "Xor", "EyeLike", "Constant",
})  # fmt: skip
# For empty inputs it computes these wrongly, or ends the process: a body that may pass them one runs elsewhere.
_HARMED = frozenset({
    "GRU", "LSTM", "Attention", "Conv", "Einsum", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin",
    "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare",
})  # fmt: skip
# Products over an axis without elements, where both factors are empty.
_HARMED_BY_BOTH = frozenset({"MatMul", "Gemm"})


class EmptinessFlow:
    """A flow analysis of emptiness over a graph and its bodies, node by node in topological order.

    Parameters
    ----------
    nodes : iterable of ir.Node
    given : iterable of ir.Value
        Values from outside the graph that may have no elements.

    Attributes
    ----------
    empty : set of ir.Value
        Values that may have no elements.
    readers : set of ir.Node
        Nodes whose results may have none where their inputs have none.
    origins : set of ir.Node
        Nodes whose results may be empty although no input is.
    harmed : bool
        Whether a node, or a node in a body, reads such a value and ONNX Runtime computes it wrongly.
    """

    def __init__(self, nodes: Iterable[ir.Node], given: Iterable[ir.Value] = ()) -> None:
        self.empty: set[ir.Value] = set(given)
        self.readers: set[ir.Node] = set()
        self.origins: set[ir.Node] = set()
        self.harmed = False
        self._positive: set[ir.Value] = set()
        for node in nodes:
            self._follow(node)

    def makers(self, node: ir.Node) -> Iterable[ir.Node]:
        """Yield the makers of the values that `node` or its bodies read and that may have no elements."""
        for value in reads(node):
            maker = value.producer()
            if value in self.empty and maker is not None:
                yield maker

    def _follow(self, node: ir.Node) -> None:
        inputs = [v for v in node.inputs if v is not None]
        nothing = [v in self.empty or is_empty_weight(v) for v in inputs]
        self.harmed = self.harmed or (node.domain == "" and _harms(node.op_type, nothing))
        if self._gives_positive(node, inputs):
            self._positive.update(node.outputs)
        if node.domain == "" and node.op_type in ("Shape", "Size", "Constant"):
            return
        if bodies(node):
            maybe, origin = self._body_results(node), True
        else:
            origin = self._is_origin(node, inputs)
            maybe = [origin or self._passes_on(node, inputs)] * len(node.outputs)
        pairs = zip(node.outputs, maybe, strict=False)
        found = [value for value, may in pairs if may and not _is_sized(value)]
        self.empty.update(found)
        if found:
            self.readers.add(node)
        if found and origin:
            self.origins.add(node)

    def _body_results(self, node: ir.Node) -> list[bool]:
        """Return, for each output of an If, Loop or Scan, whether it may be empty."""
        handed = [v is not None and (v in self.empty or is_empty_weight(v)) for v in node.inputs]
        found = [False] * len(node.outputs)
        first = 1 if node.op_type == "Loop" else 0
        for body in bodies(node):
            given = {i for i, may in zip(body.inputs, handed, strict=False) if may}
            inside = body_flow(node, body, self.empty | given)
            self.harmed = self.harmed or inside.harmed
            results = [v in inside.empty for v in body.outputs][first:]
            found = [may or more for may, more in zip(found, results, strict=False)]
            if first:
                states = len(body.inputs) - 2
                # A Loop may end before its first trip: its collected outputs are empty then.
                found[states:] = [True] * (len(found) - states)
        return [may or any(handed) for may in found]

    def _is_origin(self, node: ir.Node, inputs: Sequence[ir.Value]) -> bool:
        """Return whether a node without bodies may return an empty value for nonempty inputs."""
        if node.domain == "" and node.op_type in _SHRINKING and not self._keeps(node):
            return True
        # The `roi` of a Resize usually is empty.
        return node.op_type != "Resize" and any(map(is_empty_weight, inputs))

    def _passes_on(self, node: ir.Node, inputs: Sequence[ir.Value]) -> bool:
        """Return whether a node's results may have no elements where its inputs have none."""
        own = node.domain == ""
        first = own and node.op_type in _SHAPED_BY_FIRST
        empty = [v in self.empty for v in (inputs[:1] if first else inputs)]
        # The result has the elements of each nonempty input.
        if own and node.op_type == "Concat":
            return all(empty)
        return any(empty)

    def _keeps(self, node: ir.Node) -> bool:
        """Return whether the arguments of a shrinking operator show that its result has elements."""
        check = _CHECKS.get(node.op_type)
        return check is not None and check(node, self._positive)

    def _gives_positive(self, node: ir.Node, inputs: Sequence[ir.Value]) -> bool:
        if node.domain or not inputs:
            return False
        if node.op_type in ("Shape", "Size"):
            return inputs[0] not in self.empty
        one = node.op_type in _POSITIVE_BY_FIRST or node.op_type.startswith("Reduce")
        data = inputs[:1] if one else inputs
        return node.op_type in _KEEP_POSITIVE and all(_is_positive(v, self._positive) for v in data)


def body_flow(node: ir.Node, body: ir.Graph, given: Iterable[ir.Value]) -> EmptinessFlow:
    """Return the flow of a body; each state that a trip of a Loop or Scan returns is an input of the next trip."""
    first = 1 if node.op_type == "Loop" else 0
    count = len(body.inputs) - first
    if node.op_type == "Scan":
        count -= int(attribute_of(node, "num_scan_inputs", 0))
    states = list(zip(body.inputs[first:], body.outputs, strict=False))[:count]
    handed = set(given)
    # To a fixed point: `handed` only grows, and is bounded by the number of states.
    while True:
        flow = EmptinessFlow(body, handed)
        carried = {i for i, o in states if o in flow.empty}
        if carried <= handed:
            return flow
        handed |= carried


def is_harmed(node: ir.Node) -> bool:
    """Return whether a body of an If, Loop or Scan may pass an empty value to an operator of `_HARMED`."""
    return _harmed(node, ())


def is_harmed_by_empty_inputs(node: ir.Node) -> bool:
    """Return whether ONNX Runtime computes a node's bodies wrongly where a value that they read has no elements."""
    return _harmed(node, chain(reads(node), *(body.inputs for body in bodies(node))))


def _harmed(node: ir.Node, given: Iterable[ir.Value]) -> bool:
    empty = set(given)
    for body in bodies(node):
        # Weights without elements: the arrays of a call do not show them.
        pairs = zip(body.inputs, node.inputs, strict=False)
        empty.update(value for value, passed in pairs if passed is not None and is_empty_weight(passed))
    return any(body_flow(node, body, empty).harmed for body in bodies(node))


def _harms(op: str, nothing: Sequence[bool]) -> bool:
    """Return whether ONNX Runtime computes an operator wrongly, or ends the process, for these empty inputs."""
    return (op in _HARMED and any(nothing)) or (op in _HARMED_BY_BOTH and all(nothing[:2]))


def _is_sized(value: ir.Value) -> bool:
    """Return whether all dimensions are known, and none is 0."""
    shape = value.shape
    # For an output of the graph, inference repeats the file's declaration, which may be wrong.
    return (
        shape is not None
        and not value.is_graph_output()
        and all(isinstance(size, int) and size > 0 for size in shape)
    )


def is_empty_weight(value: ir.Value) -> bool:
    """Return whether a value is a constant without elements."""
    return value.const_value is not None and value.const_value.size == 0


def _numbers(value: ir.Value | None) -> list[int] | None:
    """Return the integers of a short constant; None for every other value."""
    tensor = None if value is None else value.const_value
    if tensor is None and value is not None:
        maker = value.producer()
        found = maker.attributes.get("value") if maker is not None and maker.op_type == "Constant" else None
        tensor = None if found is None or found.is_ref() else found.as_tensor()
    if tensor is None or tensor.size > _SHORT or tensor.dtype not in INDEX:
        return None
    return [int(number) for number in tensor.numpy().ravel()]


def _is_positive(value: ir.Value, positive: set[ir.Value]) -> bool:
    numbers = _numbers(value)
    return value in positive or (numbers is not None and all(number > 0 for number in numbers))


def _slice_keeps(node: ir.Node, positive: set[ir.Value]) -> bool:
    data, ends = input_of(node, 0), input_of(node, 2)
    starts = _numbers(input_of(node, 1))
    # Attributes before opset 10.
    if len(node.inputs) == 1:
        starts, until = attribute_of(node, "starts", None), attribute_of(node, "ends", None)
        axes: Sequence[int] | None = attribute_of(node, "axes", range(len(starts or ())))
        steps: list[int] | None = [1] * len(starts or ())
    else:
        until = _numbers(ends)
        axes = _numbers(input_of(node, 3)) if input_of(node, 3) is not None else range(len(starts or ()))
        steps = _numbers(input_of(node, 4)) if input_of(node, 4) is not None else [1] * len(starts or ())
    if starts is None or axes is None or steps is None or data is None:
        return False
    if until is None:
        ends_positive = ends is not None and ends in positive
        return ends_positive and all(s == 0 for s in starts) and all(s > 0 for s in steps)
    rows = zip(starts, until, steps, axes, strict=False)
    return all(_leaves(_size(data, axis), first, last, step) for first, last, step, axis in rows)


def _size(value: ir.Value, axis: int) -> int | None:
    if value.shape is None or not -len(value.shape) <= axis < len(value.shape) or value.is_graph_output():
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def _leaves(size: int | None, first: int, last: int, step: int) -> bool:
    """Return whether first:last:step selects elements of an axis, whose size is at least 1 where it is unknown."""
    if size is not None:
        return (
            step != 0 and len(range(size)[first : (None if step < 0 and last < -size else last) : step]) > 0
        )
    if step < 0:
        return first in (-1, *range(_LARGEST, _LARGEST + 2)) and last < -_LARGEST
    return (first == 0 and last > 0) or (first < 0 and last >= _LARGEST)


def _pool_keeps(node: ir.Node, positive: set[ir.Value]) -> bool:
    if attribute_of(node, "auto_pad", "NOTSET").startswith("SAME"):
        return True
    kernel: Sequence[int] = attribute_of(node, "kernel_shape", ())
    pads = attribute_of(node, "pads", [0] * 2 * len(kernel))
    dilations = attribute_of(node, "dilations", [1] * len(kernel))
    data = input_of(node, 0)
    for i, (size, dilation) in enumerate(zip(kernel, dilations, strict=False)):
        known = None if data is None else _size(data, 2 + i)
        # A size that is not known is at least 1.
        if (size - 1) * dilation >= (known or 1) + pads[i] + pads[i + len(kernel)]:
            return False
    return True


def _range_keeps(node: ir.Node, positive: set[ir.Value]) -> bool:
    start, delta = _numbers(input_of(node, 0)), _numbers(input_of(node, 2))
    end = input_of(node, 1)
    return (
        start == [0]
        and delta is not None
        and delta[0] > 0
        and end is not None
        and _is_positive(end, positive)
    )


def _sized_by(position: int) -> Callable[[ir.Node, set[ir.Value]], bool]:
    def check(node: ir.Node, positive: set[ir.Value]) -> bool:
        value = input_of(node, position)
        return value is not None and _is_positive(value, positive)

    return check


def _pad_keeps(node: ir.Node, positive: set[ir.Value]) -> bool:
    pads = attribute_of(node, "pads", None) if len(node.inputs) == 1 else _numbers(input_of(node, 1))
    return pads is not None and all(pad >= 0 for pad in pads)


def _resize_keeps(node: ir.Node, positive: set[ir.Value]) -> bool:
    sizes = input_of(node, 3)
    scales = input_of(node, 1 if node.op_type == "Upsample" or len(node.inputs) == 2 else 2)
    if sizes is not None:
        return _is_positive(sizes, positive)
    tensor = None if scales is None else scales.const_value
    return tensor is not None and 0 < tensor.size <= _SHORT and bool((tensor.numpy() >= 1).all())


_CHECKS: Mapping[str, Callable[[ir.Node, set[ir.Value]], bool]] = {
    "Slice": _slice_keeps,
    "Range": _range_keeps,
    "Pad": _pad_keeps,
    "ConstantOfShape": _sized_by(0),
    "Expand": _sized_by(1),
    "Tile": _sized_by(1),
    "TopK": _sized_by(1),
    "OneHot": _sized_by(1),
    **dict.fromkeys(("Resize", "Upsample"), _resize_keeps),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool_keeps),
}
