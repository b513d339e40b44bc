"""Type and shape inference of a graph's values, given sizes for its symbolic dimensions or inputs.

ONNX's own inference does the work, with data propagation, on a copy of the graph that holds no weights
(tensors over 1 KiB become bare dtypes and dimensions).  Types that inference cannot find are taken from what
the model declares; what neither tells stays None.  Inference never fails here: a graph that it cannot digest
keeps its declared types.  `graph.model.load` decides what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import onnx
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir import ml_types, propagation
from dask_ferro.graph.ir.fold import folded
from dask_ferro.graph.ir.inference_limits import DIMS, growth
from dask_ferro.graph.ir.messages import all_nodes, bodies
from dask_ferro.graph.ir.propagation import types_of
from dask_ferro.graph.ir.strip_weights import TYPE_PROTO, lean_model

Dim = int | str | None

_INVENTED = re.compile(r"unk__\d+")
_ROWS = "batch"
# None for a number that onnx_ir does not know; `ir.DataType(number)` would raise.
_DTYPES = {dtype.value: dtype for dtype in ir.DataType if dtype is not ir.DataType.UNDEFINED}


class ValueType(NamedTuple):
    """The type of a value, as far as it is known before the graph runs.

    `kind` is "tensor", "sparse", "sequence", "optional", "map" or "unknown".  `dtype` is that of the
    (innermost) elements.  `shape` holds an int, a symbol or None per dimension, and is None where the rank is
    unknown; a sequence or map has none, an optional tensor has the tensor's.
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
    """Return the type of every value by its name: inputs, initializers and node outputs, those of bodies too.

    The shapes that a Loop carries around may change from trip to trip, so they are known where the body declares them.

    Parameters
    ----------
    model : onnx_ir.Model
        Not changed, and its weights are not read.
    dims : mapping of str to int, optional
        Sizes for symbolic dimensions, by their names.
    shapes : mapping of str to sequence of int, optional
        Whole shapes for graph inputs, by input name.  They also bind the symbolic dimensions that they meet;
        where they contradict a declared size (a batch of 8 into a model made for 1) every declared shape but
        the inputs' is dropped and inferred anew.
    trusts_declared : bool
        Whether declared shapes count; if not, all but the inputs' are inferred from the nodes alone.

    Raises
    ------
    ConfigError
        A dimension or an input that the model does not have, a rank that does not fit, or two sizes for one
        name.
    """
    return Inference(model).types(dims=dims, shapes=shapes, trusts_declared=trusts_declared)


class Inference:
    """Inference of one model at any number of sizes; the part that does not depend on them is computed once.

    Parameters
    ----------
    model : onnx_ir.Model
        Not to be changed from now on.
    is_inferred : bool
        Whether its types were inferred from those of its inputs alone (`TypedModel`).  Where each size is then
        a number or a symbol of an input, the sizes of the symbols give all types, and nothing is inferred again.
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
        found, _ = _completed(proto)
        inferred = value_types(found.graph)
        declared = self._inputs_alone if stale else self._declared
        return {
            name: _merge(inferred.get(name, UNKNOWN), _substitute(t, bound)) for name, t in declared.items()
        }

    def _closed_symbols(self) -> frozenset[Dim] | None:
        """Return the symbols of all shapes; None if a value is no tensor, or a size is no symbol of an input."""
        shapes = [t.shape if t.kind == "tensor" else None for t in self._declared.values()]
        inputs = [self._declared[value.name or ""].shape or () for value in self._model.graph.inputs]
        sizes = frozenset(chain.from_iterable((None,) if shape is None else shape for shape in shapes))
        symbols = frozenset(size for size in sizes if not isinstance(size, int))
        return symbols if symbols <= frozenset(chain.from_iterable(inputs)) - {None} else None

    def _without_weights(self, *, keep_declared: bool) -> onnx.ModelProto:
        if keep_declared not in self._bare:
            self._bare[keep_declared] = folded(lean_model(self._model, keep_declared=keep_declared))
        return self._bare[keep_declared]

    @cached_property
    def _inputs_alone(self) -> dict[str, ValueType]:
        """The declared types, without the shapes of node outputs."""
        graphs = list(self._model.graphs())
        kept = {
            value.name
            for value in chain(self._model.graph.inputs, *(g.initializers.values() for g in graphs))
        }
        return {n: t if n in kept else t._replace(shape=None) for n, t in self._declared.items()}


def name_rows(graph: onnx.GraphProto) -> None:
    """Give axis 0 of the first input a name, if it has neither size nor name, so that output shapes refer to it.

    A name that another inference invented counts as none; other dimensions of that name are renamed too.
    """
    inputs = [info.type.tensor_type.shape.dim for info in graph.input]  # of what is no tensor, empty ones
    others = [info.type.tensor_type.shape.dim for info in [*graph.value_info, *graph.output]]
    shapes, first = inputs + others, next((dims for dims in inputs if dims), None)
    if first is None or first[0].HasField("dim_value") or _name(first[0].dim_param):
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


class TypedModel(NamedTuple):
    """A model with inferred types in `value_info`; types of all values by name.

    `is_inferred` tells that the types of the inputs gave all others, and nothing that the model declares differs:
    at other sizes its types are these with the symbols replaced.  `error` is that of strict inference.
    """

    proto: onnx.ModelProto
    types: Mapping[str, onnx.TypeProto]
    is_inferred: bool
    error: Exception | None = None


# Operators whose sizes inference tells at numbers alone.  Shape computes them, and no symbol tells those; ONNX takes a
# symbol for a number in an Einsum (for 1, where 1 broadcasts with it) and in an Attention (for 0).
_BY_SIZE = frozenset({"Shape", "Einsum", "Attention"})


def typed(proto: onnx.ModelProto) -> TypedModel:
    """Return a model without large tensors with its types.

    What it declares of other values than inputs is left out at first, and counts where inference finds anything else.
    """
    # With such an operator inference would run twice in vain.
    if not any(node.op_type in _BY_SIZE for node in proto.graph.node):
        alone, error = _completed(folded(_undeclared(proto)))
        types, declared = all_types(alone.graph), [*proto.graph.output, *proto.graph.value_info]
        if error is None and all(_tells(types.get(info.name), info.type) for info in declared):
            return TypedModel(alone, types, True)
    found, error = _completed(folded(proto))
    return TypedModel(found, all_types(found.graph), False, error)


def _tells(inferred: onnx.TypeProto | None, declared: onnx.TypeProto) -> bool:
    """Return whether an inferred type says at least as much as the declared one."""
    if inferred is None or not inferred.HasField("tensor_type") or not declared.HasField("tensor_type"):
        return False
    found, said = inferred.tensor_type, declared.tensor_type
    if declared.denotation or found.elem_type != said.elem_type or not found.HasField("shape"):
        return False
    wanted, unknown = said.shape.dim, onnx.TensorShapeProto.Dimension()
    fits = all(size in (unknown, got) for got, size in zip(found.shape.dim, wanted, strict=False))
    return not said.HasField("shape") or (fits and len(wanted) == len(found.shape.dim))


def _completed(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, Exception | None]:
    """Return a folded model with inferred types; `ml_types` adds those that ONNX's inference leaves out."""
    found, error = _inferred(proto)
    if not any(map(ml_types.is_left_out, proto.graph.node)):
        return found, error
    for _ in range(ml_types.ROUNDS):
        known = onnx.ModelProto()
        known.CopyFrom(found)
        if not ml_types.add_types(known.graph):
            break
        found, error = _inferred(known)
    return found, error


def _inferred(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, Exception | None]:
    if growth(proto.graph) > DIMS:
        return proto, None
    first: Exception | None = None
    try:
        # Strictly, since a declared shape that the graph contradicts is otherwise taken for the inferred one.
        return propagation.infer(proto, strict_mode=True, check_type=True), None
    except Exception as error:  # noqa: BLE001 - its C++ raises several kinds, and a bare declaration is still of use
        first = error
    try:
        corrected = _corrected(proto, propagation.infer(_undeclared(proto), strict_mode=True))
    except Exception:  # noqa: BLE001 - an operator that inference does not know, or misjudges
        corrected = proto
    for one in (corrected, _undeclared(proto)):
        with suppress(Exception):
            return propagation.infer(one), first
    return proto, first


def _undeclared(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that declares no shapes but those of inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for info in copy.graph.output:
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    del copy.graph.value_info[:]
    return copy


def _corrected(proto: onnx.ModelProto, alone: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose outputs have the shapes of `alone`, inferred without declared ones, where those are known."""
    # ONNX infers the first size of a label of Einsum, also where that size is 1 and broadcasts.
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
            if len(declared) == len(tensor.shape.dim) and _dim(size) is None:
                size.CopyFrom(said)
    return copy


# Types, from ONNX's messages and from the graph's values.


def all_types(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    """Return the types of the values of `graph` and of its bodies, by name."""
    graphs = [graph, *chain.from_iterable(map(bodies, all_nodes(graph.node)))]
    return dict(chain.from_iterable(types_of(each).items() for each in graphs))


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
    """Return a `TypeProto` as a `ValueType`."""
    which = type_.WhichOneof("value")
    if which == "tensor_type":
        return ValueType("tensor", _dtype(type_.tensor_type.elem_type), _shape(type_.tensor_type))
    if which == "sparse_tensor_type":
        return ValueType(
            "sparse", _dtype(type_.sparse_tensor_type.elem_type), _shape(type_.sparse_tensor_type)
        )
    if which == "sequence_type":
        return from_type(type_.sequence_type.elem_type)._replace(kind="sequence", shape=None)
    if which == "optional_type":
        return from_type(type_.optional_type.elem_type)._replace(kind="optional")
    if which == "map_type":
        return from_type(type_.map_type.value_type)._replace(kind="map", shape=None)
    return UNKNOWN


def _dtype(number: int) -> ir.DataType | None:
    return _DTYPES.get(number)


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
    return None if not symbol or _INVENTED.fullmatch(symbol) else symbol


def declared_type(value: ir.Value) -> ValueType:
    """Return the type that a value of the graph declares."""
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


def _merge(inferred: ValueType, declared: ValueType) -> ValueType:
    """Return both types merged; where they differ the inferred one counts."""
    if inferred.kind == "unknown":
        return declared
    shape = inferred.shape
    if shape is None:
        shape = declared.shape
    elif declared.shape is not None and len(declared.shape) == len(shape):
        shape = tuple(d if i is None else i for i, d in zip(shape, declared.shape, strict=True))
    return ValueType(inferred.kind, inferred.dtype or declared.dtype, shape)


# Sizes for symbolic dimensions.


def values(graph: ir.Graph) -> Iterable[ir.Value]:
    """Yield the values that `graph` itself defines, without those of its bodies."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _bindings(
    graph: ir.Graph, dims: Mapping[str, int], shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, int], bool]:
    """Return sizes by symbol, and whether `shapes` contradict a declared size."""
    _check_symbols(graph, dims)
    bound, stale = dict(dims), False
    inputs = {value.name: value for value in graph.inputs}
    for name, shape in shapes.items():
        if name not in inputs:
            raise ConfigError(
                f"shapes: the model has no input {name!r}; its inputs are {sorted(map(str, inputs))}"
            )
        declared = declared_type(inputs[name]).shape
        if declared is None:
            continue
        if len(declared) != len(shape):
            raise ConfigError(
                f"shapes: input {name!r} has {len(declared)} dimensions {declared}, got {tuple(shape)}"
            )
        for want, got in zip(declared, shape, strict=True):
            if isinstance(want, int):
                stale |= want != got
            elif want is not None and bound.setdefault(want, got) != got:
                raise ConfigError(f"dimension {want!r} is {bound[want]} and, by the shape of {name!r}, {got}")
    return bound, stale


def _check_symbols(graph: ir.Graph, dims: Mapping[str, int]) -> None:
    if not dims:
        return
    declared = chain.from_iterable(declared_type(value).shape or () for value in values(graph))
    known = {dim for dim in declared if isinstance(dim, str)}
    for name in dims:
        if name not in known:
            raise ConfigError(f"dims: the model has no dimension {name!r}; its symbols are {sorted(known)}")


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
