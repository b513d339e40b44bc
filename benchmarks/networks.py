"""The models that `gpu.py` measures: parallel matrix products, a transformer block, a network of ResNet-18's shape.

Weights are random with a fixed seed.  The batch is symbolic ("N"), except for the products, which have one input each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

OPSET = 21
SEED = 0


class _Net:
    """A builder of a model: it collects nodes and weights."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(SEED)

    def weight(self, *shape: int, fan_in: int) -> str:
        """Add normal weights of variance 1 / fan-in; return their name."""
        values = self._rng.standard_normal(shape, dtype=np.float32) / np.float32(math.sqrt(fan_in))
        return self.constant(values)

    def constant(self, values: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node of one output; return the output's name."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(op, list(inputs), [name], name=f"{op.lower()}_{name}", **attributes)
        )
        return name

    def model(self, name: str, x: Sequence[Any], y: str, shape: Sequence[Any]) -> onnx.ModelProto:
        kind = onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info("x", kind, x)],
            [helper.make_tensor_value_info(y, kind, shape)],
            self.weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def products(chains: int, length: int, m: int, dtype: str) -> onnx.ModelProto:
    """Return `chains` independent chains of products of m x m matrices, by one weight; FLOPs: 2 m^3 a node."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weight = np.random.default_rng(SEED).standard_normal((m, m), dtype=np.float32) / np.float32(math.sqrt(m))
    nodes, ends = [], []
    for chain in range(chains):
        values = [f"x{chain}", *(f"c{chain}_{k}" for k in range(1, length)), f"y{chain}"]
        nodes += [
            helper.make_node("MatMul", [values[k], "w"], [values[k + 1]], name=f"product_{chain}_{k}")
            for k in range(length)
        ]
        ends.append((values[0], values[-1]))
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info(x, kind, (m, m)) for x, _ in ends],
        [helper.make_tensor_value_info(y, kind, (m, m)) for _, y in ends],
        [numpy_helper.from_array(weight.astype(dtype), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def tanh_chain(length: int, width: int) -> onnx.ModelProto:
    """Return a chain of Tanh on one vector."""
    net, value = _Net(), "x"
    for _ in range(length):
        value = net.add("Tanh", value)
    return net.model("chain", [width], value, [width])


def transformer(width: int, sequence: int, heads: int) -> onnx.ModelProto:
    """Return one block of an encoder: self-attention and a feed-forward part of four widths, norms before."""
    net, each = _Net(), width // heads
    split = net.constant(np.int64([0, sequence, heads, each]))
    joined = net.constant(np.int64([0, sequence, width]))

    def norm(x: str) -> str:
        ones, zeros = (net.constant(make(width, np.float32)) for make in (np.ones, np.zeros))
        return net.add("LayerNormalization", x, ones, zeros)

    def dense(x: str, rows: int, columns: int) -> str:
        product = net.add("MatMul", x, net.weight(rows, columns, fan_in=rows))
        return net.add("Add", product, net.constant(np.zeros(columns, np.float32)))

    def head(x: str, perm: Sequence[int]) -> str:
        return net.add("Transpose", net.add("Reshape", dense(x, width, width), split), perm=perm)

    before = norm("x")
    q, k, v = head(before, (0, 2, 1, 3)), head(before, (0, 2, 3, 1)), head(before, (0, 2, 1, 3))
    scores = net.add("Mul", net.add("MatMul", q, k), net.constant(np.float32(each**-0.5)))
    mixed = net.add("MatMul", net.add("Softmax", scores, axis=-1), v)
    attended = dense(net.add("Reshape", net.add("Transpose", mixed, perm=(0, 2, 1, 3)), joined), width, width)
    x = net.add("Add", "x", attended)
    active = net.add("Gelu", dense(norm(x), width, 4 * width))
    y = net.add("Add", x, dense(active, 4 * width, width))
    return net.model("transformer", ["N", sequence, width], y, ["N", sequence, width])


def resnet18(channels: int, pixels: int) -> onnx.ModelProto:
    """Return a network of ResNet-18's shape: 20 convolutions with their norms folded in; `channels` is 64 for real."""
    net = _Net()

    def conv(x: str, before: int, after: int, size: int, stride: int) -> str:
        weights = net.weight(after, before, size, size, fan_in=before * size * size)
        bias = net.constant(np.zeros(after, np.float32))
        pads = [size // 2] * 4
        return net.add("Conv", x, weights, bias, kernel_shape=[size] * 2, strides=[stride] * 2, pads=pads)

    def block(x: str, before: int, after: int, stride: int) -> str:
        inner = net.add("Relu", conv(x, before, after, 3, stride))
        inner = conv(inner, after, after, 3, 1)
        around = x if before == after else conv(x, before, after, 1, stride)
        return net.add("Relu", net.add("Add", inner, around))

    x = net.add("Relu", conv("x", 3, channels, 7, 2))
    x = net.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    before = channels
    for stage in range(4):
        after = channels << stage
        x = block(x, before, after, 1 if stage == 0 else 2)
        x = block(x, after, after, 1)
        before = after
    flat = net.add("Flatten", net.add("GlobalAveragePool", x))
    bias = net.constant(np.zeros(10, np.float32))
    y = net.add("Gemm", flat, net.weight(before, 10, fan_in=before), bias)
    return net.model("resnet18", ["N", 3, pixels, pixels], y, ["N", 10])
