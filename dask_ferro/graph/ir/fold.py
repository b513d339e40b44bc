"""Constant folding of small integers for inference, which takes shapes from constants alone.

ONNX's data propagation follows sums and slices of shapes, but neither `Mod` nor `Reshape`; PyTorch's older exporter
writes a dimension as Reshape(Mod(2 + 3, 3)), and everything behind a Slice that ends there has no rank.  Only what is
small and of integers is looked at, so nothing here can grow: no weight is read, and results are as short as shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import numpy_helper

from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ir.strip_weights import KEPT_BYTES

Ints: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Attributes: TypeAlias = Mapping[str, Any]

# Elements of a result: a shape with the most dimensions that numpy has.
_MOST = 64
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
    found: dict[int, Ints] = {}
    for position, node in enumerate(proto.graph.node):
        value = _value(node, known)
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


def _value(node: onnx.NodeProto, known: Mapping[str, Ints]) -> Ints | None:
    """Return the value of a node's only output, None if it is not a known small integer."""
    if node.domain not in STANDARD_DOMAINS or len(node.output) != 1:
        return None
    if node.op_type == "Constant":
        tensor = next((a.t for a in node.attribute if a.name == "value" and a.HasField("t")), None)
        return numpy_helper.to_array(tensor) if tensor is not None and _is_small(tensor) else None
    fn = _TABLE.get(node.op_type)
    if fn is None or not node.input or any(name not in known for name in node.input):
        return None
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    try:
        value = fn([known[name] for name in node.input], attributes)
    except (ValueError, IndexError, ZeroDivisionError):
        # The engine refuses operands that do not fit each other, and names the node.
        return None
    return value if value is not None and value.size <= _MOST else None


def _elementwise(ufunc: Callable[[Ints, Ints], Ints]) -> Callable[[Sequence[Ints], Attributes], Ints]:
    def fn(given: Sequence[Ints], _: Attributes) -> Ints:
        a, b = given
        return np.asarray(ufunc(a, b), a.dtype)

    return fn


def _quotient(given: Sequence[Ints], _: Attributes) -> Ints | None:
    """Return the quotient rounded towards 0, as ONNX defines it."""
    a, b = given
    # numpy gives 0 for a division by 0, which no engine does.
    if not np.all(b):
        return None
    return np.asarray(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)), a.dtype)


def _remainder(given: Sequence[Ints], attributes: Attributes) -> Ints | None:
    a, b = given
    return None if attributes.get("fmod") or not np.all(b) else np.asarray(np.mod(a, b), a.dtype)


def _reshaped(given: Sequence[Ints], attributes: Attributes) -> Ints:
    data, shape = given[0], [int(n) for n in given[1]]
    if not attributes.get("allowzero"):
        shape = [data.shape[i] if n == 0 else n for i, n in enumerate(shape)]
    return data.reshape(shape)


def _gathered(given: Sequence[Ints], attributes: Attributes) -> Ints:
    return np.asarray(np.take(given[0], given[1], axis=attributes.get("axis", 0)))


def _joined(given: Sequence[Ints], attributes: Attributes) -> Ints:
    return np.concatenate(given, axis=attributes["axis"])


# Only the operators that exporters write around shapes, as each is a second implementation of an operator.
_TABLE: Mapping[str, Callable[[Sequence[Ints], Attributes], Ints | None]] = {
    "Identity": lambda given, _: given[0],
    "Add": _elementwise(np.add),
    "Sub": _elementwise(np.subtract),
    "Mul": _elementwise(np.multiply),
    "Div": _quotient,
    "Mod": _remainder,
    "Reshape": _reshaped,
    "Gather": _gathered,
    "Concat": _joined,
}
