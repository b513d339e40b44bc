"""Bounds on the memory and time of shape inference itself, checked before it runs.

Inference stores every dimension of every value (about 95 bytes each), and with data propagation the
elements of integer values too (430 bytes each).  Both can be made to grow without end by files of a few
hundred bytes: thirty `Concat(s, s)` are a billion elements, thirty `Gather(i, i)` a billion dimensions.
First an upper bound is computed, node by node.  It is far below the limits for real models; for the others,
ranks are inferred in small pieces, each given what the one before found, and the first value that no engine
could compute ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from math import prod
from typing import NamedTuple

import onnx
from onnx import TensorProto, defs, shape_inference

from dask_ferro.graph.ir.order import bodies, uses

# numpy's limit; ONNX Runtime has no kernel for more either.
MOST_DIMS = 64

# Most dimensions and elements that one inference may store: 200 MB each.
DIMS = 2_000_000
ELEMENTS = 500_000
# Inference copies the names around a body into each body, 45 ns each and with the interpreter's lock held: 100,000
# branches in a row would be 15 minutes.
NAMES = 100_000_000

# ONNX takes a rank from the length of a shape operand up to this; also the bound of an unknown length.
_LENGTH = 1024
# The rank assumed of values of which nothing is known.
_RANK = 8

# A piece of a suspicious graph: four nodes multiply ranks by at most 16.
_PIECE_NODES, _PIECE_RAISING = 256, 4

_SHAPE_OPERAND = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}
_ONE_MORE = frozenset({"OneHot", "ConcatFromSequence", "Loop", "Scan", "StringSplit", "SequenceMap", "DFT"})
_RAISING = frozenset({"Gather", "GatherND", "Unsqueeze", "Einsum", *_SHAPE_OPERAND, *_ONE_MORE})
# Operators whose result is as long as their longest operand.
_SAME_LENGTH = frozenset(
    {
        "Abs",
        "Cast",
        "Ceil",
        "Clip",
        "Floor",
        "Gather",
        "Identity",
        "Neg",
        "Not",
        "Slice",
        "Squeeze",
        "Unsqueeze",
    }
    | {"Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "And", "Or", "Where"}
    | {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
)


class Growth(NamedTuple):
    """Upper bounds of what inference stores: dimensions, elements of integer values, names copied for bodies."""

    dims: int
    elements: int
    names: int


class _Sizes(NamedTuple):
    """Upper bounds of the values so far, by name.

    `ranks`; `lengths`, the elements of vectors; `carried`, the elements that data propagation would know.
    """

    ranks: dict[str, int]
    lengths: dict[str, int]
    carried: dict[str, int]


@lru_cache(maxsize=1)
def propagating() -> frozenset[str]:
    """Return the operators through which inference propagates values of shapes."""
    return frozenset(s.name for s in defs.get_all_schemas() if s.has_data_propagation_function)


def growth(graph: onnx.GraphProto) -> Growth:
    """Return upper bounds of what inference stores for `graph`, whose nodes are sorted."""
    return _reckon(graph, _Sizes({}, {}, {}))


def _reckon(graph: onnx.GraphProto, sizes: _Sizes, visible: int = 0) -> Growth:
    """Return the bounds of `graph`; `visible` is the number of names around it."""
    # Bodies write into the sizes of the graph around them, for copies take the number of bodies times that of values;
    # `graph.model.normalize` leaves no name that means two values.
    for info in graph.input:
        shape = info.type.tensor_type.shape.dim
        sizes.ranks[info.name] = max(len(shape), 1)
        if len(shape) == 1:
            sizes.lengths[info.name] = min(max(shape[0].dim_value, 1), _LENGTH)
    for tensor in graph.initializer:
        _store(tensor, tensor.name, sizes)
    dims = known = names = 0
    visible += len(graph.input) + len(graph.initializer)
    for node in graph.node:
        rank = _rank(node, sizes)
        length = _length(node, sizes, rank)
        for name in node.output:
            sizes.ranks[name], sizes.lengths[name] = rank, length
        dims += rank * len(node.output)
        carried = _carried(node, sizes)
        sizes.carried.update(dict.fromkeys(node.output, carried))
        known += carried
        for body in bodies(node):
            inner = _reckon(body, sizes, visible)
            names += visible
            dims, known, names = dims + inner.dims, known + inner.elements, names + inner.names
        visible += len(node.output)
    return Growth(dims, known, names)


def _store(tensor: TensorProto, name: str, sizes: _Sizes) -> None:
    sizes.ranks[name] = max(len(tensor.dims), 1)
    if len(tensor.dims) < 2:
        sizes.lengths[name] = tensor.dims[0] if tensor.dims else 1
        if tensor.data_type in (TensorProto.INT64, TensorProto.INT32):
            sizes.carried[name] = sizes.lengths[name]


def _rank(node: onnx.NodeProto, sizes: _Sizes) -> int:
    ranks = [sizes.ranks.get(name, _RANK) for name in node.input if name]
    op, largest = node.op_type, max(ranks, default=_RANK)
    if op in ("Gather", "GatherND"):
        return min(sum(ranks), 1 << 62)
    if op == "Unsqueeze":
        return largest + _axes(node, sizes, _LENGTH)
    if op == "Squeeze":
        return max(largest - _axes(node, sizes, 0), 0)
    if op in _SHAPE_OPERAND and len(node.input) > _SHAPE_OPERAND[op]:
        wanted = min(sizes.lengths.get(node.input[_SHAPE_OPERAND[op]], _LENGTH), _LENGTH)
        return wanted if op != "Expand" else max(wanted, largest)
    if op in ("Reshape", "Constant", "RandomNormal", "RandomUniform", "Einsum"):
        held = [len(a.ints) + len(a.s) + len(a.t.dims) for a in node.attribute]
        return max(held, default=_RANK)
    return max(largest, _RANK) + (op in _ONE_MORE)


def _axes(node: onnx.NodeProto, sizes: _Sizes, unknown: int) -> int:
    listed = [len(a.ints) for a in node.attribute if a.name == "axes"]
    if listed:
        return listed[0]
    return sizes.lengths.get(node.input[1], unknown) if len(node.input) > 1 else unknown and _RANK


def _length(node: onnx.NodeProto, sizes: _Sizes, rank: int) -> int:
    """Return the length of the node's output, if that is a vector."""
    lengths = [sizes.lengths.get(name, _LENGTH) for name in node.input if name]
    op = node.op_type
    if op == "Shape":
        return max((sizes.ranks.get(name, _LENGTH) for name in node.input), default=_LENGTH)
    if op in ("Size", "Gather") and rank == 1 and lengths[1:]:
        return lengths[1]
    if op == "Concat":
        return min(sum(lengths), 1 << 62)
    if op == "Constant":
        return max((prod(a.t.dims) + len(a.ints) for a in node.attribute), default=1)
    return max(lengths, default=_LENGTH) if op in _SAME_LENGTH else 1 if op == "Size" else _LENGTH


def _carried(node: onnx.NodeProto, sizes: _Sizes) -> int:
    """Return the elements of the node's output that data propagation would hold."""
    if node.op_type == "Constant":
        return max((prod(a.t.dims) + len(a.ints) for a in node.attribute), default=0)
    if node.op_type not in propagating():
        return 0
    if node.op_type == "Shape":
        return max((sizes.ranks.get(name, _RANK) for name in node.input), default=0)
    carried = [sizes.carried.get(name, 0) for name in node.input if name]
    return min(sum(carried), 1 << 62) if node.op_type == "Concat" else max(carried, default=0)


def problems(proto: onnx.ModelProto, bounds: Growth) -> Iterator[str]:
    """Yield why `proto`, sorted, without large tensors and with these bounds, may not be given to inference."""
    if bounds.names > NAMES:
        yield (
            f"its bodies (If, Loop, Scan) see {bounds.names} names in all, which inference would copy; at most {NAMES} "
            "are allowed; use fewer bodies, or functions"
        )
    elif bounds.dims > DIMS:
        yield from tall_values(proto)


def tall_values(proto: onnx.ModelProto) -> Iterator[str]:
    """Yield the first value with more than `MOST_DIMS` dimensions as a sentence, inferring the graph in pieces.

    `proto` is sorted and holds no large tensors.  A body is inferred with its node, so bodies that are
    suspicious by themselves are reported too.
    """
    types: dict[str, onnx.TypeProto] = {info.name: info.type for info in proto.graph.input}
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    for piece in _pieces(proto.graph.node):
        for node in piece:
            if sum(_reckon(body, _Sizes({}, {}, {})).dims for body in bodies(node)) > DIMS:
                yield (
                    f"the bodies of node {node.name!r} ({node.op_type}) may make values of {DIMS} "
                    "dimensions in all, more than are checked; split them"
                )
                return
        found = _infer_piece(proto, piece, types, stored)
        for name, type_ in found.items():
            if len(type_.tensor_type.shape.dim) > MOST_DIMS:
                yield (
                    f"value {name!r} has {len(type_.tensor_type.shape.dim)} dimensions; "
                    f"engines compute at most {MOST_DIMS}"
                )
                return
        types.update(found)


def _pieces(nodes: Iterable[onnx.NodeProto]) -> Iterator[list[onnx.NodeProto]]:
    piece: list[onnx.NodeProto] = []
    raising = 0
    for node in nodes:
        piece.append(node)
        raising += node.op_type in _RAISING
        if len(piece) == _PIECE_NODES or raising == _PIECE_RAISING:
            yield piece
            piece, raising = [], 0
    yield piece


def _infer_piece(
    proto: onnx.ModelProto,
    piece: list[onnx.NodeProto],
    types: Mapping[str, onnx.TypeProto],
    stored: Mapping[str, TensorProto],
) -> dict[str, onnx.TypeProto]:
    needed = set(chain.from_iterable(map(uses, piece)))
    part = onnx.ModelProto(ir_version=proto.ir_version)
    part.opset_import.extend(proto.opset_import)
    part.graph.node.extend(piece)
    part.graph.initializer.extend(stored[name] for name in sorted(needed & stored.keys()))
    for name in sorted(needed & types.keys()):
        part.graph.input.add(name=name).type.CopyFrom(types[name])
    try:
        inferred = shape_inference.infer_shapes(part).graph
    except Exception:  # noqa: BLE001 - a graph that inference fails on takes no memory there
        return {}
    return {info.name: info.type for info in inferred.value_info}
