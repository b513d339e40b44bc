"""Checks of inferred sizes: no value that the graph computes may be larger than the limit.

A file of a few hundred bytes can ask for terabytes (ConstantOfShape, Expand, Tile, Range, ...), and constant
folding would compute them while the file is still being loaded.  Every value of known size is held against one
bound; sizes that depend on the inputs are checked when the inputs are known.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod

import numpy as np
import onnx
from onnx import TensorProto

from dask_ferro.graph.ir.order import bodies
from dask_ferro.graph.model.checks import tensors

# Operators whose operand of this number is a size or a count; inference may overflow on those, silently.
_SIZE_OPERANDS: Mapping[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "OneHot": (1,),
    "Pad": (1,),
    "Resize": (2, 3),
    "Tile": (1,),
    "Upsample": (1,),
    "Range": (0, 1),
}
# Inference gives small negative sizes for branches that are never taken; these are products that overflowed.
_OVERFLOWN = -(1 << 31)
# A string is a pointer and a length at least.
_STRING_BYTES = 16


def problems(inferred: onnx.ModelProto, value_bytes: int) -> Iterator[str]:
    """Yield values of `inferred`, a model with inferred shapes, that are too large, as sentences."""
    yield from _graph_problems(inferred.graph, value_bytes, "")


def _graph_problems(graph: onnx.GraphProto, value_bytes: int, where: str) -> Iterator[str]:
    makers: dict[str, onnx.NodeProto] = {}
    for node in graph.node:
        makers.update(dict.fromkeys(node.output, node))
    for info in {i.name: i for i in [*graph.input, *graph.value_info, *graph.output]}.values():
        problem = _value_problem(info.type, value_bytes)
        if problem:
            node = makers.get(info.name)
            maker = f", of node {node.name!r} ({node.op_type})" if node is not None else ""
            yield f"value {info.name!r}{maker}{where}, {problem}"
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        yield from _operand_problems(node, stored, value_bytes, where)
        for body in bodies(node):
            yield from _graph_problems(
                body, value_bytes, f" in a body of node {node.name!r} ({node.op_type}){where}"
            )


def _value_problem(type_: onnx.TypeProto, value_bytes: int) -> str | None:
    tensor = type_.tensor_type
    if not type_.HasField("tensor_type") or not tensor.HasField("shape"):
        return None
    if not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
        return None
    dims = [dim.dim_value for dim in tensor.shape.dim]
    if any(dim < _OVERFLOWN for dim in dims):
        return f"comes out with the dimensions {dims[:8]}: it has more elements than can be counted"
    if any(dim < 0 for dim in dims):
        return None
    nbytes = _nbytes(tensor.elem_type, prod(dims))
    if nbytes <= value_bytes:
        return None
    return (
        f"has the dimensions {dims[:8]}: {_short(nbytes)}, and {_short(value_bytes)} are allowed "
        "(Limits.value_bytes); raise the limit if that is meant"
    )


def _nbytes(data_type: int, count: int) -> int:
    if data_type == TensorProto.STRING:
        return count * _STRING_BYTES
    return tensors.size(data_type, count) if tensors.is_known(data_type) else count


def _short(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.3g} GiB" if nbytes >= 1 << 28 else f"{nbytes} bytes"


def _operand_problems(
    node: onnx.NodeProto, stored: Mapping[str, TensorProto], value_bytes: int, where: str
) -> Iterator[str]:
    if node.domain:
        return
    for operand in _SIZE_OPERANDS.get(node.op_type, ()):
        tensor = stored.get(node.input[operand]) if operand < len(node.input) else None
        largest = _largest(tensor)
        if largest > value_bytes:
            yield (
                f"node {node.name!r} ({node.op_type}){where} is asked for a size of {largest:.3g} by "
                f"its input {node.input[operand]!r}; at most {value_bytes} are allowed (Limits.value_bytes)"
            )
    for repeats in (a.ints for a in node.attribute if a.name in ("shape", "repeats", "pads", "output_shape")):
        yield from _attribute_problems(node, repeats, value_bytes, where)


def _attribute_problems(
    node: onnx.NodeProto, sizes: Iterable[int], value_bytes: int, where: str
) -> Iterator[str]:
    for size in sizes:
        if abs(size) > value_bytes:
            yield (
                f"node {node.name!r} ({node.op_type}){where} is asked for a size of {size:.3g} by "
                f"its attributes; at most {value_bytes} are allowed (Limits.value_bytes)"
            )


def _largest(tensor: TensorProto | None) -> float:
    """Return the largest finite magnitude in a stored tensor; 0 for strings and external data."""
    if (
        tensor is None
        or tensor.data_location == TensorProto.EXTERNAL
        or tensor.data_type == TensorProto.STRING
    ):
        return 0.0
    values = np.abs(onnx.numpy_helper.to_array(tensor).astype(np.float64)).ravel()
    return float(np.max(values, initial=0.0, where=np.isfinite(values)))
