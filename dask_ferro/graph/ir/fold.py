"""Constant folding of small integers for inference, which takes shapes from constants alone.

ONNX's data propagation follows sums and slices of shapes, but neither `Mod` nor `Reshape`; PyTorch's older exporter
writes a dimension as Reshape(Mod(2 + 3, 3)), and everything behind a Slice that ends there has no rank.  Only what is
small and of integers is looked at, so nothing here can grow: no weight is read, and results are as short as shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import numpy_helper

from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ir.strip_weights import KEPT_BYTES

Ints: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Elements of a result: a shape with the most dimensions that numpy has.
_MOST = 64
# Those that exporters write around shapes; none of them makes much of little.
_OPERATORS = frozenset({"Identity", "Add", "Sub", "Mul", "Div", "Mod", "Reshape", "Gather", "Concat"})
_INTEGERS = frozenset({onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL})


def folded(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, or a copy in which nodes that give known small integers are constants.

    Parameters
    ----------
    proto : onnx.ModelProto
        Not changed; its large tensors are left out (`strip_weights`).
    """
    # An initializer that is also an input is a default that a caller may override, so it is no constant.
    entries = {info.name for info in proto.graph.input}
    known = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in proto.graph.initializer
        if tensor.name not in entries and _is_small(tensor)
    }
    opset = next((entry.version for entry in proto.opset_import if entry.domain in STANDARD_DOMAINS), 1)
    found: dict[int, Ints] = {}
    for position, node in enumerate(proto.graph.node):
        value = _value(node, known, opset)
        if value is not None:
            known[node.output[0]] = value
            if node.op_type != "Constant":
                found[position] = value
    if not found:
        return proto
    # Most models have nothing to fold, and are not copied.
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for position, value in found.items():
        node = copy.graph.node[position]
        node.CopyFrom(
            onnx.helper.make_node(
                "Constant", [], node.output[:1], node.name, value=numpy_helper.from_array(value)
            )
        )
    return copy


def _is_small(tensor: onnx.TensorProto) -> bool:
    external = tensor.data_location == onnx.TensorProto.EXTERNAL
    return not external and tensor.data_type in _INTEGERS and tensor.ByteSize() <= KEPT_BYTES + 256


def _value(node: onnx.NodeProto, known: Mapping[str, Ints], opset: int) -> Ints | None:
    """Return the value of a node's only output, None if it is not a known small integer."""
    if node.domain not in STANDARD_DOMAINS or len(node.output) != 1:
        return None
    if node.op_type == "Constant":
        tensor = next((a.t for a in node.attribute if a.name == "value" and a.HasField("t")), None)
        return numpy_helper.to_array(tensor) if tensor is not None and _is_small(tensor) else None
    if node.op_type not in _OPERATORS or not node.input or any(name not in known for name in node.input):
        return None
    # Imported on use: it takes a tenth of a second, and few graphs have such nodes.
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(node, opsets=dict.fromkeys(STANDARD_DOMAINS, opset))
    try:
        # Without it numpy gives 0 for a division by 0, which no engine does.
        with np.errstate(all="raise"):
            (computed,) = evaluator.run(None, {name: known[name] for name in node.input})
    except Exception:  # noqa: BLE001 - the engine refuses operands that do not fit each other, and names the node
        return None
    value = np.asarray(computed)
    return value if value.size <= _MOST else None
