"""The argument of gradient rules, and functions that rules share: sums over broadcast axes, known inputs.

A rule is `rule(call) -> Tensor`: the gradient of one input of one node, written with the same array math that
users write.  Each input has a rule of its own, so the gradients of a product's two factors are separate nodes, one
for the activation and one for the weight, and a caller that needs only one writes only one.

Exporters compute paddings and slices from known dimensions, as in Shape(x) -> Gather -> Add -> Div.  ONNX's reference
runs such nodes with several sizes for each unknown dimension: a value that is always the same is known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dask_ferro.errors import UnsupportedOpError
from dask_ferro.graph.ir.onnx_inference import evaluate
from dask_ferro.graph.tensor.manipulation import fold, ints, moveaxis, reshape_like, shape_of
from dask_ferro.graph.tensor.namespace import concat, zeros_like
from dask_ferro.graph.tensor.statistical import reduce
from dask_ferro.graph.tensor.tensor import Node, Tensor, TensorSource, constant_of, emit

Array = npt.NDArray[Any]

# Neighbours, whose remainders differ for any divisor, and one size with other quotients.
_SIZES = (251, 252, 509)
# A graph of more nodes than this, of more unknown dimensions, or of other operators, is not arithmetic on sizes.
_NODES, _UNKNOWN_DIMS = 256, 4
_ARITHMETIC = frozenset({
    "Add", "Cast", "Concat", "ConstantOfShape", "Div", "Gather", "Identity", "Max", "Min", "Mod", "Mul", "Neg",
    "Reshape", "Slice", "Squeeze", "Sub", "Transpose", "Unsqueeze",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class GradientRequest:
    """A node, the gradients of its outputs, and the index of the input to differentiate by.

    `g` and `y` are the gradient and the value of the first output, `x` is the input to differentiate by.
    """

    node: Node
    grads: tuple[Tensor | None, ...]
    index: int

    @property
    def g(self) -> Tensor:
        return self.grads[0] if self.grads[0] is not None else zeros_like(self.y)

    @property
    def y(self) -> Tensor:
        return self.output(0)

    @property
    def x(self) -> Tensor:
        return self.input(self.index)

    def output(self, i: int) -> Tensor:
        type_ = self.node.types[i]
        assert type_ is not None
        return Tensor(self.node, i, type_)

    def input(self, i: int) -> Tensor:
        x = self.maybe(i)
        assert x is not None
        return x

    def maybe(self, i: int) -> Tensor | None:
        """Return input `i`, or None if it is left out."""
        return self.node.inputs[i] if i < len(self.node.inputs) else None

    def get(self, name: str, default: Any = None) -> Any:
        return self.node.attribute(name, default)

    def constant(self, i: int, what: str) -> tuple[int, ...]:
        """Return the integers of input `i`, as `values` does."""
        return tuple(int(v) for v in np.atleast_1d(self.values(i, what)))

    def values(self, i: int, what: str) -> Array:
        """Return the value of input `i`, which must be known; no numbers if it is left out."""
        tensor = self.maybe(i)
        values = np.zeros(0) if tensor is None else known_value(tensor)
        if values is None:
            raise self.unsupported(f"its {what} are computed; make them constants")
        return values

    def unsupported(self, reason: str) -> UnsupportedOpError:
        name = f" {self.node.name!r}" if self.node.name else ""
        return UnsupportedOpError(f"no gradient of {self.node.op_type}{name}", [reason])


Rule = Callable[[GradientRequest], Tensor]
# One rule for each input, the last for all further inputs; None: there is no gradient.
Row = tuple[Rule | None, ...]


def known_value(tensor: Tensor) -> Array | None:
    """Return the value of a tensor that depends on no argument and no unknown dimension; None for any other."""
    if (stored := constant_of(tensor)) is not None:
        return stored
    values = [value for size in _SIZES if (value := _value(tensor, size, {}, {})) is not None]
    is_known = len(values) == len(_SIZES) and all(np.array_equal(values[0], value) for value in values)
    return values[0] if is_known else None


def _value(
    tensor: Tensor, size: int, known: dict[int, Array | None], dims: dict[Hashable, int]
) -> Array | None:
    node = tensor.origin
    if isinstance(node, TensorSource):
        return constant_of(tensor)
    if node.number not in known and len(known) < _NODES:
        # Counted before its inputs, which bounds the depth too.
        known[node.number] = None
        known[node.number] = _output(node, size, known, dims)
    return known.get(node.number)


def _output(node: Node, size: int, known: dict[int, Array | None], dims: dict[Hashable, int]) -> Array | None:
    first = node.inputs[0] if node.inputs and not node.domain else None
    if first is not None and node.op_type == "Shape":
        sizes = list(first.shape)
        for axis, dim in enumerate(first.shape):
            if not isinstance(dim, int):
                # Neither differences nor quotients of unknown dimensions are the same for all sizes: the first of them
                # is the smallest for odd sizes, and the largest for the even one.
                number = dims.setdefault(dim or (id(first.origin), first.index, axis), len(dims))
                if number >= _UNKNOWN_DIMS:
                    return None
                sizes[axis] = size ** (number + 1 if size % 2 else _UNKNOWN_DIMS - number) + number
        return np.array(sizes[node.attribute("start", 0) : node.attribute("end")], np.int64)
    if first is None or node.op_type not in _ARITHMETIC:
        return None
    feeds = {f"x{i}": _value(x, size, known, dims) for i, x in enumerate(node.inputs) if x is not None}
    inputs = {name: value for name, value in feeds.items() if value is not None}
    # The size of the result is a value of this dimension only.
    is_large = node.op_type == "ConstantOfShape" and np.prod(inputs.get("x0", 0)) > _NODES
    if len(inputs) < len(feeds) or is_large:
        return None
    names = [None if x is None else ir.Value(name=f"x{i}") for i, x in enumerate(node.inputs)]
    attributes = ir.convenience.convert_attributes(node.attributes)
    step = ir.Node("", node.op_type, names, attributes, outputs=[ir.Value(name="y")])
    return evaluate(ir.serde.serialize_node(step), inputs, node.opset)


def sum_to(g: Tensor, x: Tensor) -> Tensor:
    """Return `g` summed over the axes along which `x` was broadcast, in the shape of `x`."""
    # Equal None dimensions may still differ at run time, one of them being 1.
    if g.shape == x.shape and None not in x.shape:
        return g
    extra = g.ndim - x.ndim
    if None in x.shape:
        return _sum_late(g, x)
    total = reduce("ReduceSum", g, range(extra), keepdims=False)
    stretched = [i for i, (n, m) in enumerate(zip(total.shape, x.shape, strict=True)) if m == 1 and n != 1]
    return reduce("ReduceSum", total, stretched, keepdims=True)


def _sum_late(g: Tensor, x: Tensor) -> Tensor:
    shape = concat([ints([1] * (g.ndim - x.ndim)), shape_of(x)]) if g.ndim > x.ndim else shape_of(x)
    # The axes to sum have size 1, which only the run knows; an empty list sums nothing.
    axes = fold(emit("NonZero", [shape == 1], (1, None), shape.type.dtype), (-1,))
    total = emit("ReduceSum", [g, axes], (None,) * g.ndim, keepdims=1, noop_with_empty_axes=1)
    # If the ranks are equal, the sum is known to have the shape of `x`.
    known = Tensor(total.origin, total.index, total.type._replace(shape=x.shape))
    return reshape_like(total, x) if g.ndim > x.ndim else known


def multiply_along(g: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """Return the product of each vector of `g` along an axis and a matrix."""
    return moveaxis(moveaxis(g, axis, -1) @ matrix, -1, axis)
