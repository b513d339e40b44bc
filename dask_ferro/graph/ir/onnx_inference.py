"""Run ONNX's own inference of types and shapes, within bounds of memory, and complete it.

    small integers folded -> a bound of all dimensions -> inference -> propagation, in rounds -> types of `ml_types`

Inference stores every dimension of every value, and propagation an entry for each element of integer values, so a file
of a few hundred bytes can make either take all memory: each runs only on bounded values.  Nothing here fails; an
error of inference is returned with the types that were inferred nevertheless.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx
from onnx import defs, numpy_helper, shape_inference

from dask_ferro.graph.ir import ml_types
from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ir.dtypes import ARITHMETIC_FLOATS
from dask_ferro.graph.ir.messages import KEPT_BYTES, all_nodes, all_types, bodies, types_of

# numpy's limit; ONNX Runtime has no kernel for more either.
MOST_DIMS = 64
# Names of dimensions that inference makes up.
INVENTED_NAME = re.compile(r"unk__\d+")
_ROWS = "batch"


class TooManyDimensions(ValueError):
    """A model whose values may have more dimensions in all than inference may store; the text is a sentence."""


class TypedModel(NamedTuple):
    """A model with inferred types in `value_info`; types of all values by name.

    `is_inferred`: all types follow from the types of the inputs, and the model declares no other type, so at other
    sizes its types are these with the symbols replaced.  `error` is the error of strict inference.
    """

    proto: onnx.ModelProto
    types: Mapping[str, onnx.TypeProto]
    is_inferred: bool
    error: Exception | None = None


# Operators whose sizes inference infers only from numbers.  Shape computes sizes, which no symbol expresses; ONNX
# mistakes a symbol for a number in an Einsum (for 1, if 1 broadcasts with it) and in an Attention (for 0).
_BY_SIZE = frozenset({"Shape", "Einsum", "Attention"})


def infer_types(proto: onnx.ModelProto) -> TypedModel:
    """Return a model without large tensors with its types; its rows are given a name.

    Declared types of values other than inputs are left out at first, and count only if inference differs from them.
    """
    _name_rows(proto.graph)
    # For such an operator inference would run twice in vain.
    if not any(node.op_type in _BY_SIZE for node in proto.graph.node):
        alone, error = complete_types(fold_constants(_drop_shapes(proto)))
        types, declared = all_types(alone.graph), [*proto.graph.output, *proto.graph.value_info]
        if error is None and all(_tells(types.get(info.name), info.type) for info in declared):
            return TypedModel(alone, types, True)
    found, error = complete_types(fold_constants(proto))
    return TypedModel(found, all_types(found.graph), False, error)


def _name_rows(graph: onnx.GraphProto) -> None:
    """Give axis 0 of the first input a name, if it has neither size nor name, so that output shapes refer to it.

    A name that another inference invented does not count; other dimensions of that name are renamed too.
    """
    inputs = [
        info.type.tensor_type.shape.dim for info in graph.input
    ]  # of a value that is not a tensor: empty
    others = [info.type.tensor_type.shape.dim for info in [*graph.value_info, *graph.output]]
    shapes, first = inputs + others, next((dims for dims in inputs if dims), None)
    if first is None or first[0].HasField("dim_value") or _is_known(first[0]):
        return
    named = list(chain.from_iterable(shapes))
    known = {dim.dim_param for dim in named}
    old, new = first[0].dim_param, _ROWS
    while new in known:
        new += "_"
    for dim in named:
        if old and dim.dim_param == old:
            dim.dim_param = new
    first[0].dim_param = new


def _tells(inferred: onnx.TypeProto | None, declared: onnx.TypeProto) -> bool:
    """Return whether an inferred type determines at least as much as the declared type."""
    if inferred is None or not inferred.HasField("tensor_type") or not declared.HasField("tensor_type"):
        return False
    found, said = inferred.tensor_type, declared.tensor_type
    if declared.denotation or found.elem_type != said.elem_type or not found.HasField("shape"):
        return False
    wanted, unknown = said.shape.dim, onnx.TensorShapeProto.Dimension()
    fits = all(size in (unknown, got) for got, size in zip(found.shape.dim, wanted, strict=False))
    return not said.HasField("shape") or (fits and len(wanted) == len(found.shape.dim))


def complete_types(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, Exception | None]:
    """Return a folded model with inferred types; `ml_types` adds those that ONNX's inference leaves out."""
    found, error = _infer_checked(proto)
    if not any((node.domain, node.op_type) in ml_types.TABLE for node in proto.graph.node):
        return found, error
    for _ in range(ml_types.ROUNDS):
        known = onnx.ModelProto()
        known.CopyFrom(found)
        if not ml_types.add_types(known.graph):
            break
        found, error = _infer_checked(known)
    return found, error


def _infer_checked(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, Exception | None]:
    if (dims := _growth(proto.graph, _Sizes({}, {}))) > _DIMS:
        return proto, TooManyDimensions(
            f"its values may have {dims:.3g} dimensions in all; at most {_DIMS} are allowed, and engines"
            f" compute at most {MOST_DIMS} of one value"
        )
    first: Exception | None = None
    try:
        # Strictly, since inference otherwise keeps a declared shape that the graph contradicts.
        return _propagate(proto, strict_mode=True, check_type=True), None
    except Exception as error:  # noqa: BLE001 - its C++ raises several kinds, and a bare declaration is still of use
        first = error
    try:
        corrected = _correct_outputs(proto, _propagate(_drop_shapes(proto), strict_mode=True))
    except Exception:  # noqa: BLE001 - an operator that inference does not know, or misjudges
        corrected = proto
    for one in (corrected, _drop_shapes(proto)):
        with suppress(Exception):
            return _propagate(one), first
    return proto, first


def _drop_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that declares only the shapes of inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for info in copy.graph.output:
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    del copy.graph.value_info[:]
    return copy


def _correct_outputs(proto: onnx.ModelProto, alone: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose outputs have the shapes of `alone`, inferred without declared shapes, if those are known."""
    # ONNX infers the first size of a label of Einsum, even if that size is 1 and broadcasts.
    if any(node.op_type == "Einsum" for node in proto.graph.node):
        return proto
    copy, known = onnx.ModelProto(), types_of(alone.graph)
    copy.CopyFrom(proto)
    for info in copy.graph.output:
        tensor, found = info.type.tensor_type, known.get(info.name, onnx.TypeProto()).tensor_type
        if not info.type.HasField("tensor_type") or not found.HasField("shape"):
            continue
        declared = list(tensor.shape.dim)
        tensor.shape.CopyFrom(found.shape)
        for size, said in zip(tensor.shape.dim, declared, strict=False):
            if len(declared) == len(tensor.shape.dim) and not _is_known(size):
                size.CopyFrom(said)
    return copy


def _is_known(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Return whether a size is a number, or a symbol that inference did not make up."""
    if dim.HasField("dim_value"):
        return bool(dim.dim_value >= 0)
    return bool(dim.dim_param) and not INVENTED_NAME.fullmatch(dim.dim_param)


# Folding.  ONNX's data propagation follows sums and slices of shapes, but neither `Mod` nor `Reshape`; PyTorch's older
# exporter writes a dimension as Reshape(Mod(2 + 3, 3)), and everything behind a Slice that ends there has no rank.
# Only small integer values are folded: no weight is read, and results are as short as shapes.

Ints: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Elements of a result: a shape with the most dimensions that numpy has.
_FOLD_SIZE = 64
# Operators that exporters write around shapes; none of them has a result much larger than its operands.
_FOLDABLE = frozenset({"Identity", "Add", "Sub", "Mul", "Div", "Mod", "Reshape", "Gather", "Concat"})
_INTEGERS = frozenset({onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL})


def fold_constants(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a lean model, or a copy in which nodes with known small integers as results are constants."""
    # An initializer that is also an input is a default that a caller may override, so it is not a constant.
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
    # Only small integers are known.
    if node.domain not in STANDARD_DOMAINS or len(node.output) != 1:
        return None
    if node.op_type == "Constant":
        tensor = next((a.t for a in node.attribute if a.name == "value" and a.HasField("t")), None)
        return numpy_helper.to_array(tensor) if tensor is not None and _is_small(tensor) else None
    if node.op_type not in _FOLDABLE or not node.input or any(name not in known for name in node.input):
        return None
    return evaluate(node, {name: known[name] for name in node.input}, opset)


def evaluate(node: onnx.NodeProto, inputs: Mapping[str, Ints], opset: int) -> Ints | None:
    """Return the only output of a node by ONNX's reference; None if there is none, or it is larger than a shape."""
    # Imported on use: it takes a tenth of a second, and few graphs have such nodes.
    from onnx.reference import ReferenceEvaluator

    try:
        # Without it numpy returns 0 for a division by 0, unlike every engine.
        with np.errstate(all="raise"):
            evaluator = ReferenceEvaluator(node, opsets=dict.fromkeys(STANDARD_DOMAINS, opset))
            (computed,) = evaluator.run(None, dict(inputs))
    except Exception:  # noqa: BLE001 - the engine refuses operands that do not fit each other, and names the node
        return None
    value = np.asarray(computed)
    return value if value.size <= _FOLD_SIZE else None


# The bound of dimensions.  Each takes about 95 bytes, and thirty `Gather(i, i)` are a billion.  So an upper bound of
# ranks is computed before, node by node; it is far below the limit for real models.

# Most dimensions that one inference may store: 200 MB.
_DIMS = 2_000_000
# ONNX infers a rank from the length of a shape operand up to this length.
_LENGTH = 1024
# The rank assumed of values of which nothing is known.
_RANK = 8
_SHAPE_OPERAND = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}
_ONE_MORE = frozenset({"OneHot", "ConcatFromSequence", "Loop", "Scan", "StringSplit", "SequenceMap", "DFT"})


class _Sizes(NamedTuple):
    """Upper bounds of the values so far, by name: their ranks, and the lengths of vectors."""

    ranks: dict[str, int]
    lengths: dict[str, int]


def _growth(graph: onnx.GraphProto, sizes: _Sizes) -> int:
    """Return an upper bound of the dimensions that inference stores for `graph`, whose nodes are sorted."""
    # Bodies write into the sizes of the graph around them, because copies would take the number of bodies times the
    # number of values; in the normal form no name means two values.
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
        rank, length = _rank(node, sizes), _vector_length(node, sizes)
        for name in node.output:
            sizes.ranks[name], sizes.lengths[name] = rank, length
        dims += rank * len(node.output) + sum(_growth(body, sizes) for body in bodies(node))
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


def _vector_length(node: onnx.NodeProto, sizes: _Sizes) -> int:
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


# Propagation.  An entry is stored for each element of any vector of known length that an elementwise operator reads,
# whatever its dtype: `Add(x, x)` of a declared float[67108864] takes 6 GB.  A length may come from a value
# (ConstantOfShape, Tile, Expand, Range, ...), so it is not known before propagation has run.  So it is run in rounds:
#
#     types without propagation -> operands of unknown length are cut off -> propagation -> some lengths are known now
#                                                  ^---------------------------------------------'
#
# A round runs only when all lengths that it will meet are known and few in all.  Lengths that are still unknown when a
# round finds no new one were unknown to that round too, so cutting them lost nothing.  Real models take one round or
# two, and those that compute no integers none.

# Most elements that one inference may store: 200 MB.
_ELEMENTS = 500_000
# Rounds at most: each settles lengths that depend on lengths; models in use need two.
_ROUNDS = 6
_CUT_PREFIX = "ferro.cut."
# Shapes are integers: propagation through values of these dtypes finds nothing.
_FLOATS = frozenset(dtype.value for dtype in ARITHMETIC_FLOATS)

Types = Mapping[str, onnx.TypeProto]


def _propagate(proto: onnx.ModelProto, **options: bool) -> onnx.ModelProto:
    """Return `proto` with inferred types; values of shapes are propagated as far as that is cheap.

    `options` and errors are the same as in ONNX's inference.
    """
    found = shape_inference.infer_shapes(proto, **options)
    if not any(_may_give_a_shape(node, types) for node, types in _nodes(found.graph)):
        return found
    for _ in range(_ROUNDS):
        lengths = _lengths(found.graph)
        if sum(filter(None, lengths)) > _ELEMENTS:
            return found
        if None not in lengths:
            return shape_inference.infer_shapes(proto, data_prop=True, **options)
        cut = shape_inference.infer_shapes(_cut_operands(proto, found), data_prop=True, **options)
        found = _restore_operands(cut, proto)
        if _lengths(found.graph).count(None) == lengths.count(None):
            return found
    return found


@lru_cache(maxsize=1)
def _propagating_operators() -> frozenset[str]:
    return frozenset(s.name for s in defs.get_all_schemas() if s.has_data_propagation_function)


def _nodes(graph: onnx.GraphProto, outer: Types | None = None) -> Iterator[tuple[onnx.NodeProto, Types]]:
    """Yield the nodes of a graph and of its bodies, as `all_nodes` does, each with the types of visible values."""
    types = {**(outer or {}), **types_of(graph)}
    for node in graph.node:
        yield node, types
        for body in bodies(node):
            yield from _nodes(body, types)


def _propagates(node: onnx.NodeProto) -> bool:
    return not node.domain and node.op_type in _propagating_operators()


def _may_give_a_shape(node: onnx.NodeProto, types: Types) -> bool:
    """Return whether a node's output may be the value of a shape: a vector or a single number, of integers.

    Propagation follows only such values; without one its result equals the result of plain inference.
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


def _cut_operands(proto: onnx.ModelProto, found: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which operands of unknown length are new inputs of the main graph, of the same type."""
    cut = onnx.ModelProto()
    cut.CopyFrom(proto)
    inputs = cut.graph.input
    for node, (_, types) in zip(all_nodes(cut.graph.node), _nodes(found.graph), strict=True):
        for i, name in enumerate(node.input if _stores(node) else ()):
            type_ = types.get(name)
            if name and type_ is not None and _length(type_) is None:
                node.input[i] = f"{_CUT_PREFIX}{len(inputs)}"
                inputs.add(name=node.input[i]).type.CopyFrom(type_)
    return cut


def _restore_operands(found: onnx.ModelProto, proto: onnx.ModelProto) -> onnx.ModelProto:
    """Restore the inputs and operands of `proto` in `found`, which was inferred from a cut graph."""
    del found.graph.input[len(proto.graph.input) :]
    for node, original in zip(all_nodes(found.graph.node), all_nodes(proto.graph.node), strict=True):
        node.input[:] = original.input
    return found
