"""Integers that a graph computes from constants and known dimensions, as exporters write paddings and slices.

    Shape(x) -> Gather -> Add -> Div        where the gathered dimension of x is known

ONNX's reference runs the nodes here, with several sizes in place of every unknown dimension.  A result that is the
same with all of them does not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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


def known_value(tensor: Tensor) -> Array | None:
    """Return the value of a tensor that depends on no argument and no unknown dimension; None for any other."""
    stored = constant_of(tensor)
    if stored is not None:
        return stored
    found = list(by_size(tensor).values())
    return found[0] if found and all(np.array_equal(found[0], other) for other in found[1:]) else None


def by_size(tensor: Tensor) -> dict[int, Array]:
    """Return the values of a tensor by the size that stands for each unknown dimension; {} if they depend on others."""
    nodes = _arithmetic(tensor)
    if nodes is None:
        return {}
    found = {size: value for size in _SIZES if (value := _run(nodes, tensor, size)) is not None}
    return found if len(found) == len(_SIZES) else {}


def _arithmetic(tensor: Tensor) -> list[Node] | None:
    """Return the nodes that a tensor depends on, in order, up to shapes; None where it depends on other values."""
    found: dict[int, Node] = {}
    left = [tensor]
    while left:
        origin = left.pop().origin
        if isinstance(origin, TensorSource):
            if origin.tensor is None or origin.tensor.size > _ELEMENTS:
                return None
        elif origin.number not in found:
            if len(found) == _NODES or origin.domain or not _is_small(origin):
                return None
            found[origin.number] = origin
            # Of a shape only the type of its input is read.
            left += [x for x in origin.inputs if x is not None and origin.op_type != "Shape"]
    return [found[number] for number in sorted(found)]


def _is_small(node: Node) -> bool:
    shapes = [type_.shape for type_ in node.types if type_ is not None]
    if all(map(is_static, shapes)):
        return all(math.prod(sizes(shape)) <= _ELEMENTS for shape in shapes)
    return node.op_type not in _GROWING


def _run(nodes: Iterable[Node], wanted: Tensor, size: int) -> Array | None:
    """Return the value of a tensor with `size` in place of each unknown dimension; None where a node fails."""
    values: dict[tuple[int, int], Array] = {}
    for node in nodes:
        if node.op_type == "Shape" and node.inputs[0] is not None:
            dims = [dim if isinstance(dim, int) else size for dim in node.inputs[0].shape]
            results = [np.array(dims[node.attribute("start", 0) : node.attribute("end")], np.int64)]
        else:
            inputs = [None if x is None else values.get(x.key, constant_of(x)) for x in node.inputs]
            if node.op_type == "ConstantOfShape" and inputs[0] is not None and np.prod(inputs[0]) > _ELEMENTS:
                return None
            results = _computed(node, inputs)
        if not results or any(result.size > _ELEMENTS for result in results):
            return None
        values |= {(node.number, i): result for i, result in enumerate(results)}
    return values.get(wanted.key, constant_of(wanted))


def _computed(node: Node, inputs: list[Array | None]) -> list[Array]:
    """Return the outputs of a node by ONNX's reference; [] where it cannot compute them."""
    # Imported on use: it takes a tenth of a second, and few graphs compute sizes that a gradient reads.
    from onnx.reference import ReferenceEvaluator

    names = [None if x is None else ir.Value(name=f"x{i}") for i, x in enumerate(inputs)]
    outputs = [ir.Value(name=f"y{i}") for i in range(len(node.types))]
    attributes = ir.convenience.convert_attributes(node.attributes)
    proto = ir.serde.serialize_node(ir.Node("", node.op_type, names, attributes, outputs=outputs))
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    try:
        found = ReferenceEvaluator(proto, opsets={"": node.opset}).run(None, feeds)
    except Exception:  # noqa: BLE001 - whatever it cannot compute is not known, and the caller says so
        return []
    return list(found)
