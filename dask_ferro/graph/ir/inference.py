"""Infer types and shapes of a graph's values from sizes of its symbolic dimensions or inputs.

ONNX's own inference does the work (`onnx_inference`), on a copy of the graph that holds no weights (tensors over 1 KiB
become bare dtypes and dimensions).  Types that it cannot infer are the model's declared types; a type that is neither
inferred nor declared stays None.  Inference never fails here: a graph that it cannot digest keeps its declared types.
`graph.model.load` decides which models are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import onnx
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.messages import TYPE_PROTO, all_types, holds_map, lean_model
from dask_ferro.graph.ir.onnx_inference import INVENTED_NAME, complete_types, fold_constants

Dim = int | str | None

# None for a number that onnx_ir does not know; `ir.DataType(number)` would raise.
_DTYPES = {dtype.value: dtype for dtype in ir.DataType if dtype is not ir.DataType.UNDEFINED}


class ValueType(NamedTuple):
    """The type of a value, as far as it is known before the graph runs.

    `kind` is "tensor", "sparse", "sequence", "optional", "map" or "unknown".  `dtype` is the dtype of the (innermost)
    elements.  `shape` holds an int, a symbol or None per dimension, and is None if the rank is unknown; a sequence or
    map has none, an optional tensor has the tensor's shape.
    """

    kind: str
    dtype: ir.DataType | None
    shape: tuple[Dim, ...] | None


UNKNOWN = ValueType("unknown", None, None)


def infer(
    model: ir.Model,
    *,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    trusts_declared: bool = True,
) -> dict[str, ValueType]:
    """Return the type of every value by its name: inputs, initializers and node outputs, also in bodies.

    The shapes that a Loop carries around may change from trip to trip, so only the body's declarations count.

    `dims` are sizes of symbolic dimensions, and `shapes` are whole shapes of inputs, which also bind the symbols that
    they meet.  If a shape contradicts a declared size (a batch of 8 into a model for 1), or with
    `trusts_declared=False`, every declared shape except the inputs' is dropped and inferred again.  A dimension or
    input that the model does not have, a rank that does not fit, and two sizes for one name raise `InputError`.
    """
    return Inference(model).types(dims=dims, shapes=shapes, trusts_declared=trusts_declared)


class Inference:
    """Inference of one unchanging model at any number of sizes; values that do not depend on them are computed once.

    If its types were inferred only from the types of its inputs (`TypedModel`), and each size is a number or a symbol
    of an input, the sizes of the symbols give all types, and nothing is inferred again.
    """

    def __init__(self, model: ir.Model, *, is_inferred: bool = False) -> None:
        self._model = model
        every = chain.from_iterable(map(values, model.graphs()))
        self._declared = {value.name: declared_type(value) for value in every if value.name}
        self._is_complete = all(
            t.kind != "unknown" and (t.kind != "tensor" or t.shape is not None)
            for t in self._declared.values()
        )
        # None: the types at other sizes are not these with the symbols replaced.
        self._symbols = self._closed_symbols() if is_inferred else None
        self._bare: dict[bool, onnx.ModelProto] = {}

    def types(
        self,
        *,
        dims: Mapping[str, int] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        trusts_declared: bool = True,
    ) -> dict[str, ValueType]:
        """Return the type of every value, as `infer` does."""
        bound, contradicted = _bindings(self._model.graph, dims or {}, shapes or {})
        if self._is_complete and not bound and not shapes and trusts_declared:
            return dict(self._declared)
        if self._symbols is not None and self._symbols <= bound.keys() and not contradicted:
            return {name: _substitute(type_, bound) for name, type_ in self._declared.items()}
        stale = contradicted or not trusts_declared
        proto = onnx.ModelProto()
        proto.CopyFrom(self._without_weights(keep_declared=not stale))
        # An input may be an output too.
        for info in [*proto.graph.input, *proto.graph.output]:
            if info.name in (shapes or {}):
                _set_shape(info, (shapes or {})[info.name])
        for info in [*proto.graph.input, *proto.graph.value_info, *proto.graph.output] if bound else ():
            _bind(info, bound)
        found, _ = complete_types(proto)
        inferred = value_types(found.graph)
        declared = self._inputs_alone if stale else self._declared
        return {
            name: _merge(inferred.get(name, UNKNOWN), _substitute(t, bound)) for name, t in declared.items()
        }

    def _closed_symbols(self) -> frozenset[Dim] | None:
        """Return the symbols of all shapes; None if a value is not a tensor, or a size is not a symbol of an input."""
        shapes = [t.shape if t.kind == "tensor" else None for t in self._declared.values()]
        inputs = [self._declared[value.name or ""].shape or () for value in self._model.graph.inputs]
        sizes = frozenset(chain.from_iterable((None,) if shape is None else shape for shape in shapes))
        symbols = frozenset(size for size in sizes if not isinstance(size, int))
        return symbols if symbols <= frozenset(chain.from_iterable(inputs)) - {None} else None

    def _without_weights(self, *, keep_declared: bool) -> onnx.ModelProto:
        if keep_declared not in self._bare:
            self._bare[keep_declared] = fold_constants(lean_model(self._model, keep_declared=keep_declared))
        return self._bare[keep_declared]

    @cached_property
    def _inputs_alone(self) -> dict[str, ValueType]:
        """The declared types without the shapes of node outputs."""
        graphs = list(self._model.graphs())
        entries = {
            value.name
            for value in chain(self._model.graph.inputs, *(g.initializers.values() for g in graphs))
        }
        return {n: t if n in entries else t._replace(shape=None) for n, t in self._declared.items()}


# Types, from ONNX's messages and from the graph's values.


def value_types(graph: onnx.GraphProto) -> dict[str, ValueType]:
    """Return the types of `graph` and of its bodies by name; equal ones are converted once."""
    seen: dict[bytes, ValueType] = {}
    found = {}
    for name, type_ in all_types(graph).items():
        content = type_.SerializeToString()
        if content not in seen:
            seen[content] = from_type(type_)
        found[name] = seen[content]
    return found


def from_type(type_: onnx.TypeProto) -> ValueType:
    which = type_.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        tensor = getattr(type_, which)
        return ValueType(which.split("_")[0], _DTYPES.get(tensor.elem_type), _shape(tensor))
    if which == "sequence_type":
        return from_type(type_.sequence_type.elem_type)._replace(kind="sequence", shape=None)
    if which == "optional_type":
        return from_type(type_.optional_type.elem_type)._replace(kind="optional")
    if which == "map_type":
        return from_type(type_.map_type.value_type)._replace(kind="map", shape=None)
    return UNKNOWN


def _shape(tensor: onnx.TypeProto.Tensor | onnx.TypeProto.SparseTensor) -> tuple[Dim, ...] | None:
    if not tensor.HasField("shape"):
        return None
    return tuple(_dim(dim) for dim in tensor.shape.dim)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    return _name(dim.dim_param)


def _name(symbol: str | None) -> str | None:
    """Return a dimension's symbol, None for one that inference invented ("unk__0"), which no other dimension has."""
    return None if not symbol or INVENTED_NAME.fullmatch(symbol) else symbol


def declared_type(value: ir.Value) -> ValueType:
    if value.const_value is not None:
        return ValueType("tensor", value.const_value.dtype, tuple(value.const_value.shape.numpy()))
    if TYPE_PROTO in value.meta:
        return from_type(onnx.TypeProto.FromString(value.meta[TYPE_PROTO]))
    type_ = value.type
    if type_ is None:
        return UNKNOWN
    kinds = {ir.TensorType: "tensor", ir.SparseTensorType: "sparse", ir.SequenceType: "sequence"}
    kind = kinds.get(type(type_), "optional")
    dtype = type_.dtype if type_.dtype != ir.DataType.UNDEFINED else None
    if kind == "sequence" or value.shape is None:
        return ValueType(kind, dtype, None)
    return ValueType(kind, dtype, tuple(_ir_dim(dim) for dim in value.shape))


def _ir_dim(dim: int | ir.SymbolicDim) -> Dim:
    if isinstance(dim, int):
        return dim if dim >= 0 else None
    return _name(dim.value)


def set_types(model: ir.Model, types: Mapping[str, onnx.TypeProto]) -> None:
    """Set the types of a model's values, by their names; in a body, declared types stay."""
    for graph in model.graphs():
        for value in values(graph):
            type_ = types.get(value.name or "")
            is_open = graph is model.graph or value.type is None
            if type_ is None or not is_open or value.const_value is not None or TYPE_PROTO in value.meta:
                continue
            if holds_map(type_):
                value.meta[TYPE_PROTO] = type_.SerializeToString()
                value.type = value.shape = None
            else:
                value.type = ir.serde.deserialize_type_proto_for_type(type_)
                value.shape = ir.serde.deserialize_type_proto_for_shape(type_)


def values(graph: ir.Graph) -> Iterable[ir.Value]:
    """Yield the values that `graph` itself defines, without the values of its bodies."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _merge(inferred: ValueType, declared: ValueType) -> ValueType:
    # If they differ, the inferred type counts.
    if inferred.kind == "unknown":
        return declared
    shape = inferred.shape
    if shape is None:
        shape = declared.shape
    elif declared.shape is not None and len(declared.shape) == len(shape):
        shape = tuple(d if i is None else i for i, d in zip(shape, declared.shape, strict=True))
    return ValueType(inferred.kind, inferred.dtype or declared.dtype, shape)


# Sizes for symbolic dimensions.


def _bindings(
    graph: ir.Graph, dims: Mapping[str, int], shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, int], bool]:
    """Return sizes by symbol, and whether `shapes` contradict a declared size."""
    _check_symbols(graph, dims)
    bound, stale = dict(dims), False
    inputs = {value.name: value for value in graph.inputs}
    for name, shape in shapes.items():
        if name not in inputs:
            raise InputError(
                f"shapes: the model has no input {name!r}; its inputs are {sorted(map(str, inputs))}"
            )
        declared = declared_type(inputs[name]).shape
        if declared is None:
            continue
        if len(declared) != len(shape):
            raise InputError(
                f"shapes: input {name!r} has {len(declared)} dimensions {declared}, got {tuple(shape)}"
            )
        for want, got in zip(declared, shape, strict=True):
            if isinstance(want, int):
                stale |= want != got
            elif want is not None and bound.setdefault(want, got) != got:
                raise InputError(
                    f"dimension {want!r} is {bound[want]} and, from the shape of {name!r}, {got}"
                )
    return bound, stale


def _check_symbols(graph: ir.Graph, dims: Mapping[str, int]) -> None:
    if not dims:
        return
    declared = chain.from_iterable(declared_type(value).shape or () for value in values(graph))
    known = {dim for dim in declared if isinstance(dim, str)}
    for name in dims:
        if name not in known:
            raise InputError(f"dims: the model has no dimension {name!r}; its symbols are {sorted(known)}")


def _substitute(type_: ValueType, bound: Mapping[str, int]) -> ValueType:
    if type_.shape is None or not bound:
        return type_
    shape = tuple(bound.get(d, d) if isinstance(d, str) else d for d in type_.shape)
    return type_._replace(shape=shape)


def _bind(info: onnx.ValueInfoProto, bound: Mapping[str, int]) -> None:
    type_ = info.type
    while type_.WhichOneof("value") in ("sequence_type", "optional_type"):
        type_ = getattr(type_, type_.WhichOneof("value")).elem_type
    if type_.WhichOneof("value") in ("tensor_type", "sparse_tensor_type"):
        for dim in getattr(type_, type_.WhichOneof("value")).shape.dim:
            if dim.dim_param in bound:
                dim.dim_value = bound[dim.dim_param]


def _set_shape(info: onnx.ValueInfoProto, shape: Sequence[int]) -> None:
    tensor = info.type.tensor_type
    tensor.ClearField("shape")
    tensor.shape.SetInParent()
    for size in shape:
        tensor.shape.dim.add().dim_value = int(size)
