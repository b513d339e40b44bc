"""`Tensor`: lazy array math, recorded as ONNX nodes.

    argument("x", ("N", 4), float) --+
                                     +--> Tensor --> Tensor --build--> onnx_ir.Model
    asarray(weights) ----------------+

A tensor has a dtype, a shape and an origin: an argument, a constant, or an output of a recorded node.  References
point backwards only, so unused tensors are freed; the values of an `onnx_ir` graph would keep all their consumers
alive, and so every batch that a training loop ever fed.  Dtypes and shapes are checked while the graph is written;
names of dimensions ("N") are kept.  The functions are in the other modules of this package, `namespace` gathers them,
and `emit` writes the model.  Nothing is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.ir import regions
from dask_ferro.graph.ir.dtypes import ARITHMETIC, ARITHMETIC_FLOATS, HALVES, INTEGER, first_cast_opset, takes
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.tensor.dims import Shape, broadcast, check_dim, format_shape, is_static, sizes
from dask_ferro.graph.tensor.dtypes import DTypeLike as DTypeLike
from dask_ferro.graph.tensor.dtypes import common_dtype, dtype_of
from dask_ferro.graph.tensor.rows import example

# The opset of recorded nodes; newer operators state their own.
OPSET = 21
# Operators that are computed in float32 for half precision: they combine many numbers (in bfloat16, 256 + 1 is 256),
# or have several steps, each of which an engine would round.
_WIDE = frozenset({
    "BatchNormalization", "CumProd", "CumSum", "Gelu", "LayerNormalization", "LogSoftmax", "RMSNormalization",
    "ReduceL1", "ReduceL2", "ReduceMean", "ReduceProd", "ReduceSum", "Sigmoid", "Softmax", "Softplus",
})  # fmt: skip
# Numbers of sources and nodes grow with creation, so sorting by them gives a topological order: no graph is kept.
_NUMBERS = count()

Scalar = bool | int | float
# Arguments of functions of tensors; dask arrays are array-like too.
TensorLike: TypeAlias = "Tensor | npt.ArrayLike | ir.TensorProtocol"

# The function that returns a tensor's values; the layer with workers, `lower`, installs it.
_evaluators: list[Callable[..., Any]] = []


def set_evaluator(function: Callable[..., Any]) -> None:
    """Install the function that returns values, from a tensor and the arguments of its `compute`."""
    _evaluators.append(function)


def _method(name: str) -> Callable[..., Tensor]:
    """Return the method that calls a function of the namespace with the tensor first."""

    def method(self: Tensor, *others: TensorLike) -> Tensor:
        return getattr(self.__array_namespace__(), name)(self, *others)  # type: ignore[no-any-return]

    return method


def _operator(name: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the methods of a binary function, for a tensor on its left and on its right."""

    def right(self: Tensor, other: TensorLike) -> Tensor:
        return getattr(self.__array_namespace__(), name)(other, self)  # type: ignore[no-any-return]

    return _method(name), right


class TensorType(NamedTuple):
    """The dtype and the shape of a tensor, as far as they are known."""

    dtype: ir.DataType
    shape: Shape


@dataclass(frozen=True, eq=False, slots=True)
class TensorSource:
    """An argument (without a tensor) or a constant; `data` are the values bound to an argument, if any."""

    type: TensorType
    name: str | None
    tensor: ir.TensorProtocol | None = None
    data: Any = None
    number: int = field(default_factory=lambda: next(_NUMBERS))


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """A recorded ONNX node: it refers to the tensors that it reads, and has the types of its outputs."""

    op_type: str
    inputs: tuple[Tensor | None, ...]
    types: tuple[TensorType | None, ...]
    attributes: Mapping[str, Any]
    domain: str = ""
    opset: int = OPSET
    name: str | None = None
    region: regions.Region = field(default_factory=regions.current_region)
    # Whether it stops gradients, whatever its op; no model has this mark.
    is_stop: bool = False
    number: int = field(default_factory=lambda: next(_NUMBERS))

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the attribute's value; a float is rounded to float32, as a file would hold it."""
        value = self.attributes.get(name, default)
        value = value.value if isinstance(value, ir.Attr) else value
        return float(np.float32(value)) if isinstance(value, float) else value


class Tensor:
    """A lazy array: named operations and Python's operators on it record ONNX nodes.

    Follows the array-API standard (2024.12) in names, broadcasting and promotion. Created by `input`, `asarray` and
    functions of tensors. A Python scalar takes the dtype of the other operand.  Every operation and function
    immediately raises `InputError` if dtypes, shapes, axes or settings do not fit; the message states which do.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> x = ft.input("x", ("N", 4))
    >>> (x * 2 + 1).mean(axis=1)
    <Tensor ReduceMean: float32(N,)>
    """

    __slots__ = ("index", "origin", "type")
    # Without this, numpy and dask arrays would take `array + tensor` apart, element by element.
    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]  # == is elementwise

    def __init__(self, origin: Node | TensorSource, index: int, type_: TensorType) -> None:
        self.origin, self.index, self.type = origin, index, type_

    @property
    def shape(self) -> Shape:
        """A size, a name or None per dimension."""
        return self.type.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.type.shape)

    @property
    def size(self) -> int | None:
        """Number of elements; None if a dimension is not known."""
        return int(np.prod(sizes(self.shape), dtype=np.int64)) if is_static(self.shape) else None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, as numpy's (bfloat16 and friends are ml_dtypes')."""
        return self.type.dtype.numpy()

    @property
    def is_floating(self) -> bool:
        """Whether the elements are floating point numbers."""
        return self.type.dtype in ARITHMETIC_FLOATS

    @property
    def key(self) -> tuple[int, int]:
        """A unique key for sets and mappings; tensors themselves are not hashable."""
        return self.origin.number, self.index

    def compute(self, inputs: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        """Return the values as a numpy array; `inputs` are the values of unbound arguments by name."""
        return _evaluators[-1](self, inputs, **kwargs)

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        # Methods call functions of modules that import this one, so this import is late: it is the only circle.
        from dask_ferro.graph.tensor import namespace

        return namespace

    def __repr__(self) -> str:
        label = self.origin.op_type if isinstance(self.origin, Node) else self.origin.name or "constant"
        return f"<Tensor {label}: {self.dtype.name}{format_shape(self.shape)}>"

    # Conversions to values are refused.

    def _no_value(self, *_: Any) -> NoReturn:
        raise InputError(f"{self!r} is lazy and has no value yet: compute it first, or use `where` to choose")

    __bool__ = __int__ = __float__ = __index__ = __complex__ = _no_value
    __iter__ = __array__ = __len__ = _no_value

    # Operators

    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("subtract")
    __mul__, __rmul__ = _operator("multiply")
    __truediv__, __rtruediv__ = _operator("divide")
    __pow__, __rpow__ = _operator("pow")
    __matmul__, __rmatmul__ = _operator("matmul")
    __floordiv__, __rfloordiv__ = _operator("floor_divide")
    __mod__, __rmod__ = _operator("remainder")
    __eq__, _ = _operator("equal")  # type: ignore[assignment]
    __ne__, _ = _operator("not_equal")  # type: ignore[assignment]
    __lt__, __gt__ = _operator("less")
    __le__, __ge__ = _operator("less_equal")
    __and__, __rand__ = _operator("bitwise_and")
    __or__, __ror__ = _operator("bitwise_or")
    __xor__, __rxor__ = _operator("bitwise_xor")
    __lshift__, __rlshift__ = _operator("bitwise_left_shift")
    __rshift__, __rrshift__ = _operator("bitwise_right_shift")
    __neg__, __pos__, __abs__, __invert__ = map(_method, ("negative", "positive", "abs", "bitwise_invert"))

    __getitem__ = _method("getitem")

    def __divmod__(self, other: TensorLike) -> tuple[Tensor, Tensor]:
        return self // other, self % other

    def __rdivmod__(self, other: TensorLike) -> tuple[Tensor, Tensor]:
        return self.__rfloordiv__(other), self.__rmod__(other)

    @property
    def T(self) -> Tensor:
        """The transpose of a matrix."""
        if self.ndim != 2:
            raise InputError(f"T: {self!r} is not a matrix; use mT, or permute_dims")
        return self.mT

    @property
    def mT(self) -> Tensor:
        """The transpose of the last two dimensions."""
        return self.__array_namespace__().matrix_transpose(self)  # type: ignore[no-any-return]

    def reshape(self, *shape: Any) -> Tensor:
        """Return `reshape(shape)` of this tensor; the sizes may also be given one by one."""
        new = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return self.__array_namespace__().reshape(self, tuple(new))  # type: ignore[no-any-return]

    def astype(self, dtype: DTypeLike) -> Tensor:
        """Return this tensor in another dtype."""
        return cast(self, dtype_of(dtype))

    def sum(self, axis: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Tensor:
        """Return `sum` of this tensor."""
        return self.__array_namespace__().sum(self, axis=axis, keepdims=keepdims)  # type: ignore[no-any-return]

    def mean(self, axis: int | Sequence[int] | None = None, *, keepdims: bool = False) -> Tensor:
        """Return `mean` of this tensor."""
        return self.__array_namespace__().mean(self, axis=axis, keepdims=keepdims)  # type: ignore[no-any-return]


# ---- sources -----------------------------------------------------------------------------------------------


@example('input("x", ("N", 4)) * 2 + 1', "<Tensor Add: float32(N, 4)>")
def input(name: str, shape: Sequence[Dim], dtype: DTypeLike = np.float32, *, data: Any = None) -> Tensor:
    """Return a named input of the graph; its values are given when the graph runs.

    Parameters
    ----------
    name : str
    shape : sequence of int, str or None
        A string names a dimension that is not known yet ("N" for the batch), None leaves it open.
    dtype : dtype, optional
    data : object, optional
        The default value of the input, such as a numpy or dask array; it is kept and never read.
    """
    if not isinstance(name, str) or not name:
        raise InputError(f"input: the name must be a non-empty string, got {name!r}")
    dims = tuple(check_dim(dim, name) for dim in shape)
    type_ = TensorType(dtype_of(dtype), dims)
    return Tensor(TensorSource(type_, name, data=data), 0, type_)


@example('asarray([[1.0, 2.0]], name="w")', "<Tensor w: float32(1, 2)>")
def asarray(values: TensorLike, dtype: DTypeLike = None, *, name: str | None = None) -> Tensor:
    """Return `values` as a constant of the graph, a weight if named; a tensor is returned unchanged.

    Parameters
    ----------
    values : array_like, onnx_ir tensor, dask array or Tensor
        An array is not copied, so do not change it later. A dask array becomes an argument that is bound to it.
    dtype : dtype, optional
        By default the dtype of `values`; Python floats are float32.  `InputError` if ONNX does not have it.
    name : str, optional
        The name of the weight in the model.
    """
    if isinstance(values, Tensor):
        return values if dtype is None else cast(values, dtype_of(dtype))
    if hasattr(values, "__dask_graph__"):
        lazy: Any = values
        return bind_argument(lazy if dtype is None else lazy.astype(dtype), name)
    is_onnx = isinstance(values, ir.TensorProtocol) and not isinstance(values, np.ndarray)
    tensor: ir.TensorProtocol = values if is_onnx else _to_onnx(values, dtype)  # type: ignore[assignment]  # of the check above
    type_ = TensorType(tensor.dtype, tuple(int(n) for n in tensor.shape.numpy()))
    return Tensor(TensorSource(type_, name, tensor), 0, type_)


def bind_argument(array: Any, name: str | None = None) -> Tensor:
    # dask gives an unknown chunk size as NaN.
    dims = tuple(None if math.isnan(n) else int(n) for n in array.shape)
    type_ = TensorType(dtype_of(array.dtype), dims)
    return Tensor(TensorSource(type_, name, data=array), 0, type_)


def _to_onnx(values: Any, dtype: Any) -> ir.TensorProtocol:
    array = np.asarray(values, dtype)
    # A list of Python floats has no dtype; an array of float64 has its dtype on purpose.
    if dtype is None and array.dtype == np.float64 and not isinstance(values, (np.ndarray, np.generic)):
        array = array.astype(np.float32)
    return ir.Tensor(array, dtype=dtype_of(array.dtype))


def constant_of(tensor: Tensor | None) -> np.ndarray[Any, Any] | None:
    """Return the values of a constant; None for any other tensor."""
    source = tensor.origin if tensor is not None else None
    return source.tensor.numpy() if isinstance(source, TensorSource) and source.tensor is not None else None


# ---- writing nodes -----------------------------------------------------------------------------------------


def emit_all(
    op_type: str,
    inputs: Sequence[Tensor | None],
    types: Sequence[TensorType],
    *,
    opset: int = OPSET,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """Return a new node's outputs, of unchecked types.

    Half precision is computed in float32 and rounded once for operators in `_WIDE`, or if ONNX lacks the operator in
    it.
    """
    dtypes = [None if x is None else x.type.dtype for x in inputs]
    if not HALVES.isdisjoint(dtypes) and (op_type in _WIDE or not takes("", op_type, opset, dtypes)):
        wide = [t._replace(dtype=ir.DataType.FLOAT) if t.dtype in HALVES else t for t in types]
        wide_inputs = [x if x is None else widen(x) for x in inputs]
        outputs = emit_all(op_type, wide_inputs, wide, opset=opset, **attributes)
        return tuple(cast(y, type_.dtype) for y, type_ in zip(outputs, types, strict=True))
    attributes = {name: value for name, value in attributes.items() if value is not None}
    node = Node(op_type, tuple(inputs), tuple(types), attributes, opset=opset)
    return tuple(Tensor(node, i, type_) for i, type_ in enumerate(types))


def emit(
    op_type: str,
    inputs: Sequence[Tensor | None],
    shape: Shape,
    dtype: ir.DataType | None = None,
    **attributes: Any,
) -> Tensor:
    """Return the only output of a new node; its default dtype is the first input's."""
    if dtype is None and inputs[0] is not None:
        dtype = inputs[0].type.dtype
    assert dtype is not None
    return emit_all(op_type, inputs, [TensorType(dtype, shape)], **attributes)[0]


def elementwise(op_type: str, x: Tensor, dtype: ir.DataType | None = None, **attributes: Any) -> Tensor:
    return emit(op_type, [x], x.shape, dtype, **attributes)


def of_kind(
    dtypes: Set[ir.DataType], kind: str, x: TensorLike, where: str, remedy: str = "use astype"
) -> Tensor:
    """Return `x` as a tensor, or raise `InputError` if `where` does not accept its dtype."""
    tensor = asarray(x)
    if tensor.type.dtype not in dtypes:
        raise InputError(f"{where}: takes {kind}, got {tensor!r}; {remedy}")
    return tensor


# Each takes a tensor and the name of the call.  ONNX computes nothing with bool, int4 and complex.
numbers = partial(of_kind, ARITHMETIC, "numbers")
floating = partial(of_kind, ARITHMETIC_FLOATS, "floating point numbers")
integers = partial(of_kind, INTEGER, "integers", remedy="use astype, or compare first")
bools = partial(of_kind, frozenset({ir.DataType.BOOL}), "bool", remedy="compare first")


def binary(
    op_type: str,
    a: TensorLike,
    b: TensorLike,
    *,
    check: Callable[[TensorLike, str], Tensor] | None = numbers,
    result: ir.DataType | None = None,
    **attributes: Any,
) -> Tensor:
    """Return the output of a node of two broadcast inputs, promoted to one dtype that passes `check`."""
    x, y = promote(op_type, a, b)
    if check is not None:
        check(x, op_type)
    return emit(op_type, [x, y], broadcast([x.shape, y.shape], op_type), result, **attributes)


def promote(where: str, *values: TensorLike) -> tuple[Tensor, ...]:
    """Return the values as tensors of one dtype, according to the array-API standard's rules."""
    tensors: list[Tensor | Scalar] = [v if _is_scalar(v) else asarray(v) for v in values]
    # In order, so that messages do not depend on hashes.
    dtypes = list(dict.fromkeys(t.type.dtype for t in tensors if isinstance(t, Tensor)))
    if not dtypes:
        return tuple(asarray(value) for value in values)
    common = dtypes[0] if len(dtypes) == 1 else common_dtype(dtypes, where)
    return tuple(cast(t, common) if isinstance(t, Tensor) else _weak(t, common, where) for t in tensors)


def _is_scalar(value: object) -> TypeGuard[Scalar]:
    return isinstance(value, (bool, int, float)) and not isinstance(value, np.generic)


def _weak(value: Scalar, dtype: ir.DataType, where: str) -> Tensor:
    is_bool = dtype == ir.DataType.BOOL
    if isinstance(value, bool) != is_bool or (isinstance(value, float) and dtype not in ARITHMETIC_FLOATS):
        raise InputError(f"{where}: {value!r} with {dtype.numpy().name}; use astype on the tensor")
    return asarray(np.asarray(value, dtype.numpy()))


def cast(x: Tensor, dtype: ir.DataType) -> Tensor:
    """Return `x` in `dtype`; `x` itself if it has that dtype."""
    if x.type.dtype == dtype:
        return x
    opset = max(OPSET, first_cast_opset(dtype), first_cast_opset(x.type.dtype))
    return elementwise("Cast", x, dtype, to=int(dtype), opset=opset)


def widen(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is half precision, for squares, sums and small differences."""
    return cast(x, ir.DataType.FLOAT) if x.type.dtype in HALVES else x
