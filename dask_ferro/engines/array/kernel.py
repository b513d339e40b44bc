"""A row of the kernel table, and the view of a node that a kernel's builder gets.

A row says which cases its kernel computes *rightly* (opsets, dtypes of the inputs, a predicate on the node)
and how to build it.  `build(xp, op)` runs once, when a program is bound to an array namespace: it parses
attributes and reads the constant inputs.  What it returns runs once a call: `fn(*arrays)` takes the node's
inputs in order (None for one that is left out) and gives an array, or a tuple when the node lists several
outputs.

Rules for kernels: an input is never written to; an output may be a view of an input; every float result has
the dtype ONNX says (Python scalars are weakly typed in all namespaces, so `2.0 * x` keeps float16).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.lib.array_utils import normalize_axis_index

from dask_ferro.engines import Array, Namespace

# Takes arrays, or None for an input that is left out; gives an array, or a tuple of them.
Fn = Callable[..., Array]

# The newest opset that the tables were checked against; a newer one may change the meaning of an op.
NEWEST = 28

D = ir.DataType
FLOAT = frozenset({D.FLOAT16, D.FLOAT, D.DOUBLE})
SIGNED = frozenset({D.INT8, D.INT16, D.INT32, D.INT64})
UNSIGNED = frozenset({D.UINT8, D.UINT16, D.UINT32, D.UINT64})
INTEGER = SIGNED | UNSIGNED
NUMERIC = FLOAT | INTEGER
BOOL = frozenset({D.BOOL})
# What every namespace has; bfloat16, float8, int4, strings and complex are left to other engines.
ANY = NUMERIC | BOOL
INDEX = frozenset({D.INT32, D.INT64})
WIDE = frozenset({D.INT64})

# By ONNX dtype: the array API's name for it.
NAMES: dict[ir.DataType, str] = {d: d.numpy().name for d in ANY}


class Op(NamedTuple):
    """A node at bind time: attributes as Python values, and the inputs whose values are known already."""

    type: str
    opset: int
    attributes: Mapping[str, Any]
    given: tuple[bool, ...]  # per input: is there one?
    outputs: int  # how many the node lists
    constants: Mapping[int, np.ndarray]  # input position -> value, for inputs that are weights

    def get(self, name: str, default: Any = None) -> Any:
        """Return the attribute, or `default` where the node leaves it out."""
        # As float32, which ONNX's floats are: a default of 0.1 has to be the 0.1 that a file would hold.
        value = self.attributes.get(name, default)
        return float(np.float32(value)) if isinstance(value, float) else value

    def has(self, index: int) -> bool:
        """Return whether input `index` is given."""
        return index < len(self.given) and self.given[index]


Build = Callable[[Namespace, Op], Fn]


def anything(node: ir.Node, opset: int) -> bool:
    """Return True: the predicate of a row that takes every node of its op."""
    return True


class Kernel(NamedTuple):
    """A row of the table: the kernel's builder, and the cases that the kernel is declared for.

    `dtypes` has one set per input, the last one standing for all that follow.
    """

    build: Build
    dtypes: tuple[frozenset[ir.DataType], ...]
    opsets: range = range(7, NEWEST + 1)
    when: Callable[[ir.Node, int], bool] = anything


def ints(array: Array) -> tuple[int, ...]:
    """Return the values of a 0-d or 1-d array as Python ints."""
    # At once where the array can: element by element would be a transfer each from a GPU.
    if hasattr(array, "tolist"):
        values = array.tolist()
        return tuple(map(int, values)) if isinstance(values, list) else (int(values),)
    return (int(array),) if array.ndim == 0 else tuple(int(array[i]) for i in range(array.shape[0]))


def late(op: Op, make: Callable[..., Fn], *indices: int) -> Fn:
    """Return the kernel `make(*values)`, of the values of the integer inputs at `indices` (None: left out).

    Shapes, axes and the like are weights in nearly every model: then `make` runs once, here.  Otherwise it
    runs at every call.  What `make` returns takes all of the node's inputs either way.
    """
    if all(i in op.constants or not op.has(i) for i in indices):
        return make(*(ints(op.constants[i]) if op.has(i) else None for i in indices))

    def fn(*arrays: Array) -> Array | tuple[Array, ...]:
        values = [ints(arrays[i]) if op.has(i) else None for i in indices]
        return make(*values)(*arrays)

    return fn


def listed(op: Op, fn: Fn) -> Fn:
    """Return a kernel that gives the outputs that the node lists, of all those that `fn` gives."""
    count = op.outputs
    # A program unpacks what a kernel gives by the node's list: one output is an array, and no tuple of one.
    if count == 1:
        return lambda *arrays: fn(*arrays)[0]
    return lambda *arrays: fn(*arrays)[:count]


def dtype(xp: Namespace, onnx_type: int) -> object:
    """Return the namespace's dtype for an ONNX one."""
    return getattr(xp, NAMES[ir.DataType(onnx_type)])


def dtypes(xp: Namespace, group: frozenset[ir.DataType]) -> frozenset[object]:
    """Return the dtypes of a group, as arrays of the namespace report them."""
    # numpy's `xp.float32` is a class and `x.dtype` an instance; array_api_strict has no float16.
    return frozenset(xp.empty(0, dtype=getattr(xp, NAMES[d])).dtype for d in group if hasattr(xp, NAMES[d]))


def widened(xp: Namespace) -> Fn:
    """Return the function that turns float16 into float32, and leaves other dtypes as they are."""
    # A sum in float16 loses all that is below a 2,048th of it.
    half = getattr(xp, "float16", None)
    return lambda x: xp.astype(x, xp.float32) if x.dtype == half else x


def from_front(axis: int, rank: int) -> int:
    """Return an axis counted from the front.

    Raises
    ------
    numpy.exceptions.AxisError
        It is out of range: counted as Python counts, it would be another axis.
    """
    return normalize_axis_index(axis, rank)


def along(axis: int, index: int | slice) -> tuple[Array, ...]:
    """Return the index that takes `index` of one axis, counted from the front, and all of the others."""
    return (*(slice(None),) * axis, index, ...)
