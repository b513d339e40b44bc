"""Integers that a graph computes from constants and known dimensions, as exporters write paddings and slices.

    Shape(x) -> Gather -> Add -> Div        where the gathered dimension of x is known

ONNX's reference runs the nodes here, with several sizes in place of every unknown dimension.  A result that is the
same with all of them does not depend on them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dask_ferro.graph.tensor.dims import is_static, sizes
from dask_ferro.graph.tensor.tensor import Node, Tensor, TensorSource, constant_of

# Neighbours, whose remainders differ whatever they are divided by, and one whose quotients differ from theirs.
_SIZES = (251, 252, 509)
# Paddings and slices have as many numbers as axes; a graph that computes more than this is no arithmetic on sizes.
_ELEMENTS, _NODES = 1024, 256
# Of these the size of the result is a value, so that it has to be known before they run.
_GROWING = frozenset({"Compress", "Expand", "NonZero", "OneHot", "Pad", "Range", "Resize", "Tile"})

Array = npt.NDArray[Any]


class _UnknownError(Exception):
    """A value depends on an argument, or is more than arithmetic on sizes."""


def known_value(tensor: Tensor) -> Array | None:
    """Return the value of a tensor that depends on no argument and no unknown dimension; None for any other."""
    stored = constant_of(tensor)
    if stored is not None:
        return stored
    try:
        first, *others = (_value(tensor, size, {}) for size in _SIZES)
    except _UnknownError:
        return None
    return first if all(np.array_equal(first, other) for other in others) else None


def _value(tensor: Tensor, size: int, known: dict[int, list[Array]]) -> Array:
    """Return the value of a tensor; `known` are the outputs of nodes, by their numbers."""
    node = tensor.origin
    if isinstance(node, TensorSource):
        if node.tensor is None or node.tensor.size > _ELEMENTS:
            raise _UnknownError
        return node.tensor.numpy()
    if node.number not in known:
        if len(known) == _NODES or node.domain or not _is_small(node):
            raise _UnknownError
        # Counted before its inputs, which bounds the depth too.
        known[node.number] = []
        known[node.number] = _outputs(node, size, known)
    return known[node.number][tensor.index]


def _is_small(node: Node) -> bool:
    shapes = [type_.shape for type_ in node.types if type_ is not None]
    is_known = all(is_static(shape) or node.op_type not in _GROWING for shape in shapes)
    return is_known and all(math.prod(sizes(shape)) <= _ELEMENTS for shape in shapes)


def _outputs(node: Node, size: int, known: dict[int, list[Array]]) -> list[Array]:
    """Return the outputs of a node by ONNX's reference."""
    # Of a shape only the type of its input is read.
    if node.op_type == "Shape" and node.inputs[0] is not None:
        dims = [dim if isinstance(dim, int) else size for dim in node.inputs[0].shape]
        return [np.array(dims[node.attribute("start", 0) : node.attribute("end")], np.int64)]
    # Imported on use: it takes a tenth of a second, and few graphs compute sizes that a gradient reads.
    from onnx.reference import ReferenceEvaluator

    inputs = [None if x is None else _value(x, size, known) for x in node.inputs]
    if node.op_type == "ConstantOfShape" and inputs[0] is not None and np.prod(inputs[0]) > _ELEMENTS:
        raise _UnknownError
    names = [None if x is None else ir.Value(name=f"x{i}") for i, x in enumerate(inputs)]
    outputs = [ir.Value(name=f"y{i}") for i in range(len(node.types))]
    attributes = ir.convenience.convert_attributes(node.attributes)
    proto = ir.serde.serialize_node(ir.Node("", node.op_type, names, attributes, outputs=outputs))
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    try:
        found = list(ReferenceEvaluator(proto, opsets={"": node.opset}).run(None, feeds))
    except Exception as error:
        # Whatever it cannot compute is not known, and the caller says so.
        raise _UnknownError from error
    if any(result.size > _ELEMENTS for result in found):
        raise _UnknownError
    return found
