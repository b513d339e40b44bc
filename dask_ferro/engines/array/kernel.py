"""A row of the kernel table, and the view of a node that a kernel's builder gets.

A row names the cases that its kernel computes correctly (opsets, dtypes of the inputs, a predicate on the node)
and the kernel's builder.  `build(xp, op)` runs once, when a program is bound to an array namespace: it parses
attributes and reads the constant inputs.  It returns the kernel, which runs once a call: `fn(*arrays)` takes the
node's inputs in order (None for an omitted one) and returns an array, or a tuple of all outputs of the operator, of
which the node may list fewer.  Most kernels need only their attributes (`row`); some are built for the values of
integer inputs, such as shapes and axes (`row_of`).

Rules for kernels: an input is never written to, an output may be a view of an input.  Every float result has the
dtype that ONNX specifies (Python scalars are weakly typed in all namespaces, so `2.0 * x` keeps float16).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.lib.array_utils import normalize_axis_index

from dask_ferro.engines import Array, Namespace
from dask_ferro.graph.ir.dtypes import NAMES
from dask_ferro.graph.ir.nodes import attribute_of

# Takes arrays, or None for an omitted input; returns an array, or a tuple of arrays.
Fn = Callable[..., Array]

# The newest opset that the tables were checked against; a newer one may change an operator.
NEWEST = 28
# Returns an axis counted from the front; raises if it is out of range, unlike Python's indexing.
from_front = normalize_axis_index


class Op(NamedTuple):
    """A node at bind time: attributes as Python values, and the inputs whose values are already known."""

    type: str
    opset: int
    attributes: Mapping[str, Any]
    given: tuple[bool, ...]  # per input: whether it is present
    outputs: int  # number of outputs that the node lists
    constants: Mapping[int, np.ndarray]  # input position -> value, for inputs that are weights

    def get(self, name: str, default: Any = None) -> Any:
        """Return the attribute, or `default` if the node omits it."""
        # float32 is the dtype of ONNX's floats: a default of 0.1 has to equal the 0.1 of a file.
        value = self.attributes.get(name, default)
        return float(np.float32(value)) if isinstance(value, float) else value

    def has(self, index: int) -> bool:
        """Return whether input `index` is present."""
        return index < len(self.given) and self.given[index]


Build = Callable[[Namespace, Op], Fn]


def one_of(attribute: str, allowed: Container[object], default: object) -> Callable[[ir.Node, int], bool]:
    """Return the predicate of a row that supports some values of an attribute; `default` stands for an omitted one."""
    return lambda node, opset: attribute_of(node, attribute, default) in allowed


class Kernel(NamedTuple):
    """A row of the table: the kernel's builder, and the cases that the kernel is declared for.

    `dtypes` has one set per input; the last one applies to all further inputs.  `when` is a predicate on nodes; None:
    the kernel is declared for each node of its operator.  `reads` are the positions of inputs whose values the kernel
    reads as Python integers (`row_of`): on a device they stay on the host.
    """

    build: Build
    dtypes: tuple[frozenset[ir.DataType], ...]
    opsets: range = range(7, NEWEST + 1)
    when: Callable[[ir.Node, int], bool] | None = None
    reads: tuple[int, ...] = ()


def row(
    fn: Fn,
    *dtypes: frozenset[ir.DataType],
    opsets: range = range(7, NEWEST + 1),
    when: Callable[[ir.Node, int], bool] | None = None,
    **defaults: Any,
) -> Kernel:
    """Return the row of the kernel `fn(xp, *arrays, **attributes)`, with the defaults of its attributes."""

    def build(xp: Namespace, op: Op) -> Fn:
        return partial(fn, xp, **{name: op.get(name, default) for name, default in defaults.items()})

    return Kernel(build, dtypes, opsets, when)


def row_of(
    make: Callable[..., Fn],
    *dtypes: frozenset[ir.DataType],
    at: tuple[int, ...] = (1,),
    since: int = 0,
    attributes: tuple[str, ...] = (),
    when: Callable[[ir.Node, int], bool] | None = None,
) -> Kernel:
    """Return the row of the kernel `make(xp, op, *values)`, for the values of integer inputs (None: omitted).

    The kernel takes all of the node's inputs.

    Parameters
    ----------
    at : tuple of int
        Positions of these inputs.
    since, attributes
        Before opset `since` the values are these attributes.
    """

    def build(xp: Namespace, op: Op) -> Fn:
        bound = partial(make, xp, op)
        if op.opset < since:
            return bound(*map(op.get, attributes))
        # They are weights in nearly every model.
        if all(i in op.constants or not op.has(i) for i in at):
            return bound(*(ints(op.constants[i]) if op.has(i) else None for i in at))

        def fn(*arrays: Array) -> Array | tuple[Array, ...]:
            return bound(*(ints(arrays[i]) if op.has(i) else None for i in at))(*arrays)

        return fn

    return Kernel(build, dtypes, when=when, reads=at)


def ints(array: Array) -> tuple[int, ...]:
    """Return the values of a 0-d or 1-d array as Python ints."""
    # In one transfer if the array has `tolist`: from a GPU each element would be a transfer of its own.
    if hasattr(array, "tolist"):
        values = array.tolist()
        return tuple(map(int, values)) if isinstance(values, list) else (int(values),)
    return (int(array),) if array.ndim == 0 else tuple(int(array[i]) for i in range(array.shape[0]))


def dtype(xp: Namespace, onnx_type: int) -> object:
    """Return the namespace's dtype for an ONNX dtype."""
    return getattr(xp, NAMES[ir.DataType(onnx_type)])


def widen(xp: Namespace, x: Array) -> Array:
    """Return float16 as float32, and other dtypes as they are."""
    # A sum in float16 loses every term below a 2,048th of it.
    return xp.astype(x, xp.float32) if x.dtype == getattr(xp, "float16", None) else x


def axis_shape(axis: int, rank: int) -> tuple[int, ...]:
    """Return the shape that lays a vector along one axis of `rank`, counted from the front, and broadcasts."""
    return tuple(-1 if i == axis else 1 for i in range(rank))


def index_at(axis: int, index: int | slice) -> tuple[Array, ...]:
    """Return the index that takes `index` of one axis, counted from the front, and all of the other axes."""
    return (*(slice(None),) * axis, index, ...)
