"""Nodes that ONNX Runtime's CPU provider computes slowly, written as faster ones with the same results.

    Where(c, x, 0)        a branch an element, mispredicted on irregular masks   x times the mask, if x is finite
    MaxPool's indices     a branch an element of each window                     comparison with the enlarged maxima
    Conv, large kernel    a narrow matrix product an image                       a product of all images for each place

Gradients have all three: of ReLU and Clip, of pooling, of a convolution's weight.  They are written for one session,
so the graph, its shards, other engines and its own gradients are unchanged.  Whether a node is replaced depends on
its own declaration, never on its neighbours, so its bits do not depend on the places at which a model is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from dask_ferro.graph.ir.nodes import attribute_of, input_of

# From this version on Resize, ReduceSum and Unsqueeze have the inputs that are written here.
_OPSET = 13
# Below this many elements Where takes as long as the nodes that replace it, 5 us.
_SMALL_SIZE = 2048
# Integers below it are exact in float32.
_EXACT_LIMIT = 2**24
# A matrix product for each place in a result: 49 in the gradient of a kernel of 7 x 7.
_MOST_PLACES = 64
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
# The separator between the name of a node, or of its first output, and the number of a node that replaces it.
IN_PLACE_OF = "/faster/"
Nodes: TypeAlias = list[onnx.NodeProto]
Attribute: TypeAlias = int | str | list[int] | onnx.TensorProto | onnx.GraphProto


def faster(nodes: Iterable[ir.Node], written: Iterable[onnx.NodeProto], opset: int) -> Nodes:
    """Return the nodes of a session, slow ones replaced by faster ones.

    Parameters
    ----------
    nodes : iterable of onnx_ir.Node
        Nodes whose values have types and constants.
    written : iterable of NodeProto
        The same nodes, serialized.
    opset : int
        The version of the default domain.
    """
    found: Nodes = []
    for node, proto in zip(nodes, written, strict=True):
        rule = _RULES.get(node.op_type) if not node.domain and opset >= _OPSET else None
        out = _NodesInPlace(node)
        if rule is not None:
            rule(node, out)
        found += out.nodes or [proto]
    return found


class _NodesInPlace:
    """The nodes that replace one; names of new values and nodes begin with the names of the node."""

    def __init__(self, node: ir.Node) -> None:
        self.nodes: Nodes = []
        self._value, self._node = next((v.name for v in node.outputs if v.name), ""), node.name
        self._count = 0

    def add(self, op: str, *inputs: str, result: str | None = None, **attributes: Attribute) -> str:
        """Write a node of one output, and return the output's name."""
        self._count += 1
        output = result or f"{self._value}{IN_PLACE_OF}{self._count}"
        name = f"{self._node}{IN_PLACE_OF}{self._count}" if self._node else ""
        node = helper.make_node(op, list(inputs), [output], name)
        node.attribute.extend(helper.make_attribute(*each) for each in attributes.items())
        self.nodes.append(node)
        return output

    def constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike) -> str:
        """Write a constant, and return its name."""
        return self.add("Constant", value=numpy_helper.from_array(np.asarray(value, dtype)))

    def branch(self, write: Callable[[], str], dtype: ir.DataType) -> onnx.GraphProto:
        """Return what `write` writes, as a branch of an If with one output."""
        outside, self.nodes = self.nodes, []
        output = helper.make_tensor_value_info(write(), int(dtype), None)
        inside, self.nodes = self.nodes, outside
        return helper.make_graph(inside, output.name, [], [output])


# ---- Where -------------------------------------------------------------------------------------------------


def _write_where(node: ir.Node, out: _NodesInPlace) -> None:
    """Write a choice between a tensor and 0 as a product with the mask, if the tensor is finite.

    An infinity or NaN times 0 is NaN.  The sum of a tensor that has one is not finite; a finite tensor whose sum
    overflows is left to Where too.  A zero has no sign.
    """
    condition, *both = node.inputs
    zeros = [i for i, value in enumerate(both) if _is_zero(value)]
    if condition is None or len(zeros) != 1 or _elements(node.outputs[0]) < _SMALL_SIZE:
        return
    value = both[1 - zeros[0]]
    if value is None or value.const_value is not None or value.dtype not in _FLOATS:
        return
    dtype, x, mask = value.dtype, str(value.name), str(condition.name)
    total = out.add("ReduceSum", x, keepdims=0)

    def product() -> str:
        chosen = mask if zeros == [1] else out.add("Not", mask)
        found = out.add("Mul", x, out.add("Cast", chosen, to=int(dtype)))
        # A negative number times 0 is -0.  ONNX Runtime would take the sum with a constant 0 out.
        return out.add("Add", found, out.add("Sub", total, total))

    def where() -> str:
        zero = out.constant(0, dtype.numpy())
        return out.add("Where", mask, *([x, zero] if zeros == [1] else [zero, x]))

    is_finite = out.add("Less", out.add("Abs", total), out.constant(np.inf, dtype.numpy()))
    branches = {"then_branch": out.branch(product, dtype), "else_branch": out.branch(where, dtype)}
    out.add("If", is_finite, result=str(node.outputs[0].name), **branches)


def _is_zero(value: ir.Value | None) -> bool:
    tensor = None if value is None else value.const_value
    return tensor is not None and not tensor.shape.rank() and not tensor.numpy()


def _elements(value: ir.Value) -> float:
    """Return the number of elements; infinity if a size is not known."""
    if value.shape is None or not value.shape.is_static():
        return math.inf
    return math.prod(value.shape.numpy())


def _space(value: ir.Value | None) -> tuple[int, ...] | None:
    """Return the spatial sizes of a value; None if one is not known."""
    if value is None or value.shape is None:
        return None
    sizes = tuple(size for size in value.shape[2:] if isinstance(size, int))
    return sizes if len(sizes) == len(value.shape) - 2 else None


# ---- MaxPool -----------------------------------------------------------------------------------------------


def _max_pool(node: ir.Node, out: _NodesInPlace) -> None:
    """Write the maxima of windows that do not overlap, and the index of the first maximum in each.

    Every element that is not less than its window's maximum is a candidate, and a larger number means an earlier
    place, so the largest number in a window belongs to its first maximum.  NaN is not less than anything.
    """
    kernel: tuple[int, ...] = tuple(attribute_of(node, "kernel_shape", ()))
    if len(node.outputs) < 2 or not node.outputs[1].name or len(kernel) != 2 or not _tiles(node, kernel):
        return
    x, space, counts = node.inputs[0], _space(node.inputs[0]), _space(node.outputs[0])
    if x is None or x.dtype != ir.DataType.FLOAT or space is None or counts is None:
        return
    covered = [count * size for count, size in zip(counts, kernel, strict=True)]
    # In the order of the tensor, from the window's first element.
    offsets = np.arange(kernel[0])[:, None] * space[1] + np.arange(kernel[1])
    most = int(offsets[-1, -1]) + 1
    if covered[0] > space[0] or covered[1] > space[1] or most >= _EXACT_LIMIT:
        return
    windows = list(kernel)
    # Declared like the forward's pool, whose maxima ONNX Runtime then reuses.
    own = {name: attribute.value for name, attribute in node.attributes.items()}
    maxima = out.add("MaxPool", str(x.name), result=node.outputs[0].name, **own)
    given = str(x.name)
    if covered != list(space):
        # The rest is in no window.
        bounds = (out.constant(numbers, np.int64) for numbers in ([0, 0], covered, [2, 3]))
        given = out.add("Slice", given, *bounds)
    scales = out.constant([1, 1, *kernel], np.float32)
    # Each maximum as often as its window has elements.
    nearest = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    is_less = out.add("Less", given, out.add("Resize", maxima, "", scales, **nearest))
    hits = out.add("Cast", out.add("Not", is_less), to=int(ir.DataType.FLOAT))
    earliness = out.add("Mul", hits, out.constant(np.tile(most - offsets, counts), np.float32))
    earliest = out.add("MaxPool", earliness, kernel_shape=windows, strides=windows)
    corners = np.arange(counts[0])[:, None] * kernel[0] * space[1] + np.arange(counts[1]) * kernel[1]
    first = out.add("Cast", earliest, to=int(ir.DataType.INT64))
    inside = out.add("Sub", out.constant(corners + most, np.int64), first)
    result = str(node.outputs[1].name)
    _from_planes(out, inside, maxima, result, made=math.prod(counts), read=math.prod(space))


def _from_planes(out: _NodesInPlace, inside: str, like: str, result: str, *, made: int, read: int) -> None:
    """Write indices within planes, which keep `made` of their `read` elements, as indices within the tensor."""
    count = out.add("Div", out.add("Size", like), out.constant(made, np.int64))
    step = out.constant(read, np.int64)
    starts = out.add("Range", out.constant(0, np.int64), out.add("Mul", count, step), step)
    column = out.add("Reshape", starts, out.constant([-1, 1], np.int64))
    rows = out.add("Reshape", inside, out.constant([-1, made], np.int64))
    out.add("Reshape", out.add("Add", rows, column), out.add("Shape", like), result=result)


def _tiles(node: ir.Node, kernel: tuple[int, ...]) -> bool:
    """Return whether a pool's windows are side by side and begin at the first element."""
    ones, zeros = (1,) * len(kernel), (0,) * 2 * len(kernel)
    return (
        tuple(attribute_of(node, "strides", ones)) == tuple(kernel)
        and tuple(attribute_of(node, "dilations", ones)) == ones
        and tuple(attribute_of(node, "pads", zeros)) == zeros
        and attribute_of(node, "auto_pad", "NOTSET") in ("NOTSET", "VALID")
        and not attribute_of(node, "storage_order", 0)
    )


# ---- Conv --------------------------------------------------------------------------------------------------


def _conv(node: ir.Node, out: _NodesInPlace) -> None:
    """Write a convolution with a kernel larger than its result as a matrix product for each place in the result.

    ONNX Runtime copies the elements that the kernel meets one by one and computes one matrix product an image, as
    wide as the image's result.  The gradient of a kernel of 3 x 3 is 9 wide, and its images are the input channels.
    """
    x, w, result = input_of(node, 0), input_of(node, 1), node.outputs[0]
    if x is None or w is None or x.dtype != ir.DataType.FLOAT or input_of(node, 2) is not None:
        return
    window, made = _space(w), _space(result)
    # A kernel that is a weight is packed when the session is built.
    if window is None or made is None or w.const_value is not None or attribute_of(node, "group", 1) != 1:
        return
    images, channels, rank = x.shape and x.shape[0], w.shape and w.shape[0], len(window)
    if not isinstance(images, int) or not isinstance(channels, int):
        return
    if attribute_of(node, "auto_pad", "NOTSET") not in ("NOTSET", ""):
        return
    if math.prod(window) <= math.prod(made) or math.prod(made) > _MOST_PLACES:
        return
    pads = list(attribute_of(node, "pads", (0,) * 2 * rank))
    image = str(x.name)
    if any(pads):
        image = out.add("Pad", image, out.constant([0, 0, *pads[:rank], 0, 0, *pads[rank:]], np.int64))
    steps, gaps = (attribute_of(node, name, (1,) * rank) for name in ("strides", "dilations"))

    def views(image: str, i: int) -> list[str]:
        """Return the elements that meet the kernel along one axis, for each place along it."""
        starts = (k * steps[i] for k in range(made[i]))
        reach = gaps[i] * (window[i] - 1) + 1
        bounds = ((start, start + reach, 2 + i, gaps[i]) for start in starts)
        return [out.add("Slice", image, *(out.constant([n], np.int64) for n in each)) for each in bounds]

    # The last axis first: its remaining elements are contiguous, so that slices along the others are cheap.
    parts = [out.add("Concat", *views(image, rank - 1), axis=0)]
    for i in range(rank - 1):
        parts = [view for part in parts for view in views(part, i)]
    rows = out.constant([0, -1], np.int64)
    kernels = out.add("Transpose", out.add("Reshape", str(w.name), rows), perm=[1, 0])
    products = [out.add("MatMul", out.add("Reshape", part, rows), kernels) for part in parts]
    sizes = out.constant([*made, images, channels], np.int64)
    places = out.add("Reshape", out.add("Concat", *products, axis=0), sizes)
    out.add("Transpose", places, result=str(result.name), perm=[rank, rank + 1, *range(rank)])


_RULES: Mapping[str, Callable[[ir.Node, _NodesInPlace], None]] = {
    "Where": _write_where,
    "MaxPool": _max_pool,
    "Conv": _conv,
}
# The operators of which some nodes are slow.
SLOW = frozenset(_RULES)
