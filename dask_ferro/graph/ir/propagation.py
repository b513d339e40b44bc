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
from dask_ferro.graph.ir.messages import bodies

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
    if not _may_follow(found.graph, {}):
        return found
    for _ in range(_ROUNDS):
        met, open_before = _met(found.graph, {})
        if met > ELEMENTS:
            return found
        if not open_before:
            return shape_inference.infer_shapes(proto, data_prop=True, **options)
        cut = onnx.ModelProto()
        cut.CopyFrom(proto)
        _cut(cut.graph, cut.graph, found.graph, {})
        found = _mended(shape_inference.infer_shapes(cut, data_prop=True, **options), proto)
        if _met(found.graph, {})[1] == open_before:
            return found
    return found


def _may_follow(graph: onnx.GraphProto, outer: Types) -> bool:
    """Return whether a node's output may be the value of a shape: a vector or a single number, of integers.

    Propagation follows such values alone; without one its result is that of plain inference.
    """
    types: Types | None = None
    for node in graph.node:
        follows, inner = _propagates(node), bodies(node)
        if types is None and (follows or inner):
            types = _known(graph, outer)
        if follows and any(_may_be_a_shape(types.get(name)) for name in node.output if name and types):
            return True
        if any(_may_follow(body, types or {}) for body in inner):
            return True
    return False


def _may_be_a_shape(type_: onnx.TypeProto | None) -> bool:
    if type_ is None or not type_.HasField("tensor_type"):
        return True
    tensor = type_.tensor_type
    return tensor.elem_type not in _FLOATS and (not tensor.HasField("shape") or len(tensor.shape.dim) < 2)


def _known(graph: onnx.GraphProto, outer: Types) -> dict[str, onnx.TypeProto]:
    """Return the types of the values that are visible in a graph, its own before those around it."""
    types = dict(outer)
    types.update((i.name, i.type) for i in [*graph.input, *graph.value_info, *graph.output])
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    return types


def _met(graph: onnx.GraphProto, outer: Types) -> tuple[int, int]:
    """Return the number of elements that propagation would store, and of operands of unknown length."""
    types = _known(graph, outer)
    elements = unknown = 0
    for node in graph.node:
        if _propagates(node) and node.op_type not in ("Shape", "Size"):
            lengths = [_length(types.get(name)) for name in [*node.input, *node.output] if name]
            elements += sum(length for length in lengths if length is not None)
            unknown += lengths.count(None)
        for body in bodies(node):
            more, open_ = _met(body, types)
            elements, unknown = elements + more, unknown + open_
    return elements, unknown


def _propagates(node: onnx.NodeProto) -> bool:
    return not node.domain and node.op_type in _propagating()


def _length(type_: onnx.TypeProto | None) -> int | None:
    """Return the entries that propagation makes for a value; None while its length is unknown."""
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


def _cut(graph: onnx.GraphProto, main: onnx.GraphProto, found: onnx.GraphProto, outer: Types) -> None:
    """Replace operands of unknown length by new inputs of the main graph, of the same type."""
    types = _known(found, outer)
    for node, inferred in zip(graph.node, found.node, strict=True):
        follows = _propagates(node) and node.op_type not in ("Shape", "Size")
        for i, name in enumerate(node.input if follows else ()):
            type_ = types.get(name)
            if name and type_ is not None and _length(type_) is None:
                node.input[i] = f"{_CUT}{len(main.input)}"
                main.input.add(name=node.input[i]).type.CopyFrom(type_)
        for body, its in zip(bodies(node), bodies(inferred), strict=True):
            _cut(body, main, its, types)


def _mended(found: onnx.ModelProto, proto: onnx.ModelProto) -> onnx.ModelProto:
    """Restore the inputs and operands of `proto` in `found`, which was inferred from a cut graph."""
    del found.graph.input[len(proto.graph.input) :]
    for node, original in _pairs(found.graph, proto.graph):
        node.input[:] = original.input
    return found


def _pairs(graph: onnx.GraphProto, other: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto]]:
    for node, original in zip(graph.node, other.node, strict=True):
        yield node, original
        for body, its in zip(bodies(node), bodies(original), strict=True):
            yield from _pairs(body, its)
