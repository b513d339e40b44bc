"""Bounds on the memory and time of shape inference itself, checked before it runs.

Inference stores every dimension of every value, about 95 bytes each, and a file of a few hundred bytes can make them
grow without end: thirty `Gather(i, i)` are a billion dimensions.  So an upper bound of ranks is computed, node by node;
it is far below the limit for real models.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import onnx

from dask_ferro.graph.ir.messages import bodies

# numpy's limit; ONNX Runtime has no kernel for more either.
MOST_DIMS = 64

# Most dimensions that one inference may store: 200 MB.
DIMS = 2_000_000
# ONNX takes a rank from the length of a shape operand up to this.
_LENGTH = 1024
# The rank assumed of values of which nothing is known.
_RANK = 8
_SHAPE_OPERAND = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}
_ONE_MORE = frozenset({"OneHot", "ConcatFromSequence", "Loop", "Scan", "StringSplit", "SequenceMap", "DFT"})


class _Sizes(NamedTuple):
    """Upper bounds of the values so far, by name: their ranks, and the lengths of vectors."""

    ranks: dict[str, int]
    lengths: dict[str, int]


def growth(graph: onnx.GraphProto) -> int:
    """Return an upper bound of the dimensions that inference stores for `graph`, whose nodes are sorted."""
    return _reckon(graph, _Sizes({}, {}))


def problems(dims: int) -> Iterator[str]:
    """Yield why a model with this bound may not be given to inference."""
    if dims > DIMS:
        yield (
            f"its values may have {dims:.3g} dimensions in all; at most {DIMS} are allowed, and engines compute"
            f" at most {MOST_DIMS} of one value"
        )


def _reckon(graph: onnx.GraphProto, sizes: _Sizes) -> int:
    # Bodies write into the sizes of the graph around them, for copies take the number of bodies times that of values;
    # the normal form leaves no name that means two values.
    for info in graph.input:
        shape = info.type.tensor_type.shape.dim
        sizes.ranks[info.name] = len(shape)
        if len(shape) == 1 and shape[0].dim_value:
            sizes.lengths[info.name] = shape[0].dim_value
    for tensor in graph.initializer:
        sizes.ranks[tensor.name] = len(tensor.dims)
        sizes.lengths[tensor.name] = prod(tensor.dims) if len(tensor.dims) < 2 else 1
    dims = 0
    for node in graph.node:
        rank, length = _rank(node, sizes), _length(node, sizes)
        for name in node.output:
            sizes.ranks[name], sizes.lengths[name] = rank, length
        dims += rank * len(node.output) + sum(_reckon(body, sizes) for body in bodies(node))
    return dims


def _rank(node: onnx.NodeProto, sizes: _Sizes) -> int:
    ranks = [sizes.ranks.get(name, _RANK) for name in node.input if name]
    op, largest = node.op_type, max(ranks, default=_RANK)
    if op in ("Gather", "GatherND") and len(ranks) == 2:
        return min(max(sum(ranks) - 1, 0), 1 << 62)
    if op in ("Unsqueeze", "Squeeze"):
        listed = [len(a.ints) for a in node.attribute if a.name == "axes"]
        axes = listed[0] if listed else sizes.lengths.get(node.input[1], 1) if len(node.input) > 1 else 0
        return largest + axes if op == "Unsqueeze" else max(largest - axes, 0)
    if op in _SHAPE_OPERAND and len(node.input) > _SHAPE_OPERAND[op]:
        wanted = min(sizes.lengths.get(node.input[_SHAPE_OPERAND[op]], _RANK), _LENGTH)
        return wanted if op != "Expand" else max(wanted, largest)
    if op in ("Reshape", "Constant", "RandomNormal", "RandomUniform", "Einsum"):
        return max((len(a.ints) + len(a.s) + len(a.t.dims) for a in node.attribute), default=_RANK)
    return largest + (op in _ONE_MORE)


def _length(node: onnx.NodeProto, sizes: _Sizes) -> int:
    """Return the length of the node's output, if that is a vector."""
    op = node.op_type
    if op == "Shape":
        return max((sizes.ranks.get(name, _RANK) for name in node.input), default=_RANK)
    lengths = [sizes.lengths.get(name, _RANK) for name in node.input if name]
    if op in ("Size", "Gather") and lengths[1:]:
        return lengths[1]
    if op == "Concat":
        return min(sum(lengths), 1 << 62)
    if op == "Constant":
        return max((prod(a.t.dims) + len(a.ints) for a in node.attribute), default=1)
    return max(lengths, default=_RANK)
