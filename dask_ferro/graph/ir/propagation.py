"""Inference with bounded data propagation: ONNX's own stores an entry for each element of integer values.

That is any vector of known length that an elementwise operator reads, whatever its dtype: `Add(x, x)` of a
declared float[67108864] takes 6 GB.  A length may come from a value (ConstantOfShape, Tile, Expand, Range, ...), so it
is not known before propagation has run.  So it is run in rounds:

    types without propagation -> operands of unknown length are cut off -> propagation -> some lengths are known now
                                                 ^---------------------------------------------'

A round runs only when all lengths that it will meet are known and few in all.  Lengths that are still unknown when a
round finds no new one were unknown to that round too, so cutting them lost nothing.  Real models take one round or
two, and those that compute no integers none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import onnx
from onnx import defs, shape_inference

from dask_ferro.graph.ir.dtypes import ARITHMETIC_FLOATS
from dask_ferro.graph.ir.messages import all_nodes, bodies

# Most elements that one inference may store: 200 MB.
ELEMENTS = 500_000
# Rounds at most: each settles lengths that depend on lengths; models in use need two.
_ROUNDS = 6
_CUT = "ferro.cut."
# Shapes are integers: propagation through values of these dtypes finds nothing.
_FLOATS = frozenset(dtype.value for dtype in ARITHMETIC_FLOATS)

Types = Mapping[str, onnx.TypeProto]


@lru_cache(maxsize=1)
def _propagating() -> frozenset[str]:
    """Return the operators through which inference propagates values of shapes."""
    return frozenset(s.name for s in defs.get_all_schemas() if s.has_data_propagation_function)


def infer(proto: onnx.ModelProto, **options: bool) -> onnx.ModelProto:
    """Return `proto` with inferred types; values of shapes are propagated as far as that is cheap.

    `options` are those of ONNX's inference.

    Raises
    ------
    Exception
        Whatever ONNX's inference raises.
    """
    found = shape_inference.infer_shapes(proto, **options)
    if not any(_may_give_a_shape(node, types) for node, types in _nodes(found.graph)):
        return found
    for _ in range(_ROUNDS):
        lengths = _lengths(found.graph)
        if sum(filter(None, lengths)) > ELEMENTS:
            return found
        if None not in lengths:
            return shape_inference.infer_shapes(proto, data_prop=True, **options)
        cut = shape_inference.infer_shapes(_cut(proto, found), data_prop=True, **options)
        found = _mended(cut, proto)
        if _lengths(found.graph).count(None) == lengths.count(None):
            return found
    return found


def types_of(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    """Return the types of declared values and of initializers, by name."""
    found = {info.name: info.type for info in [*graph.input, *graph.value_info, *graph.output]}
    for tensor in graph.initializer:
        found[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    return found


def _nodes(graph: onnx.GraphProto, outer: Types | None = None) -> Iterator[tuple[onnx.NodeProto, Types]]:
    """Yield the nodes of a graph and of its bodies, as `all_nodes` does, each with the types of visible values."""
    types = {**(outer or {}), **types_of(graph)}
    for node in graph.node:
        yield node, types
        for body in bodies(node):
            yield from _nodes(body, types)


def _propagates(node: onnx.NodeProto) -> bool:
    return not node.domain and node.op_type in _propagating()


def _may_give_a_shape(node: onnx.NodeProto, types: Types) -> bool:
    """Return whether a node's output may be the value of a shape: a vector or a single number, of integers.

    Propagation follows such values alone; without one its result is that of plain inference.
    """
    return _propagates(node) and any(_may_be_a_shape(types.get(name)) for name in node.output if name)


def _may_be_a_shape(type_: onnx.TypeProto | None) -> bool:
    if type_ is None or not type_.HasField("tensor_type"):
        return True
    tensor = type_.tensor_type
    return tensor.elem_type not in _FLOATS and (not tensor.HasField("shape") or len(tensor.shape.dim) < 2)


def _stores(node: onnx.NodeProto) -> bool:
    """Return whether propagation stores the elements of a node's operands."""
    return _propagates(node) and node.op_type not in ("Shape", "Size")


def _lengths(graph: onnx.GraphProto) -> list[int | None]:
    """Return the entries that propagation would make for each operand; None for one of unknown length."""
    each = ((node, types) for node, types in _nodes(graph) if _stores(node))
    return [_length(types.get(n)) for node, types in each for n in (*node.input, *node.output) if n]


def _length(type_: onnx.TypeProto | None) -> int | None:
    if type_ is None or not type_.HasField("tensor_type"):
        # Not a tensor, or of a domain unknown to inference: there is no data to propagate.
        return 0
    tensor = type_.tensor_type
    if not tensor.HasField("shape"):
        return None
    if len(tensor.shape.dim) != 1:
        return int(not tensor.shape.dim)
    dim = tensor.shape.dim[0]
    return max(int(dim.dim_value), 0) if dim.HasField("dim_value") else None


def _cut(proto: onnx.ModelProto, found: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which operands of unknown length are new inputs of the main graph, of the same type."""
    cut = onnx.ModelProto()
    cut.CopyFrom(proto)
    inputs = cut.graph.input
    for node, (_, types) in zip(all_nodes(cut.graph.node), _nodes(found.graph), strict=True):
        for i, name in enumerate(node.input if _stores(node) else ()):
            type_ = types.get(name)
            if name and type_ is not None and _length(type_) is None:
                node.input[i] = f"{_CUT}{len(inputs)}"
                inputs.add(name=node.input[i]).type.CopyFrom(type_)
    return cut


def _mended(found: onnx.ModelProto, proto: onnx.ModelProto) -> onnx.ModelProto:
    """Restore the inputs and operands of `proto` in `found`, which was inferred from a cut graph."""
    del found.graph.input[len(proto.graph.input) :]
    for node, original in zip(all_nodes(found.graph.node), all_nodes(proto.graph.node), strict=True):
        node.input[:] = original.input
    return found
