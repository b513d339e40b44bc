"""Write four ONNX models with deterministic weights: an encoder, a ResNet-18, an MLP, a branching network.

    python examples/make_models.py                     # all of them, into examples/models/
    python examples/make_models.py encoder --out /tmp  # one, somewhere else

Nothing is downloaded or trained: the weights are random, scaled so that activations keep their magnitude through any
number of layers.  Shapes and costs are those of real networks.  The batch dimension is symbolic.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MODELS = Path(__file__).parent / "models"
OPSET, IR_VERSION = 21, 10
RELU_GAIN = math.sqrt(2)  # a relu halves the variance
Shape = Sequence[int | str]


class Net:
    """A builder of models: it collects nodes and weights; a value is the name of its tensor."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, name: str, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def random(self, name: str, shape: Sequence[int], fan_in: int, gain: float = 1.0) -> str:
        """Add a random weight of mean 0 and variance gain^2 / fan_in."""
        unit = self.rng.random(shape, dtype=np.float32) * 2 - 1
        return self.weight(name, unit * np.float32(gain * math.sqrt(3 / fan_in)))

    def node(self, op: str, name: str, *inputs: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attributes))
        return name

    def linear(self, name: str, x: str, fan_in: int, fan_out: int, gain: float = 1.0) -> str:
        w = self.random(f"{name}.weight", (fan_in, fan_out), fan_in, gain)
        b = self.random(f"{name}.bias", (fan_out,), 100)
        return self.node("Add", name, self.node("MatMul", f"{name}.matmul", x, w), b)

    def norm(self, name: str, x: str, d: int) -> str:
        scale = self.weight(f"{name}.scale", np.ones(d, np.float32))
        return self.node("LayerNormalization", name, x, scale, self.random(f"{name}.bias", (d,), 100))

    def conv(
        self,
        name: str,
        x: str,
        channels: tuple[int, int],
        size: int,
        stride: int = 1,
        gain: float = RELU_GAIN,
    ) -> str:
        """Add a convolution with an odd kernel and padding that keeps the image's size, divided by the stride."""
        fan_in = channels[0] * size * size
        w = self.random(f"{name}.weight", (channels[1], channels[0], size, size), fan_in, gain)
        b = self.random(f"{name}.bias", (channels[1],), 100)
        return self.node("Conv", name, x, w, b, strides=[stride] * 2, pads=[size // 2] * 4)

    def relu(self, x: str) -> str:
        return self.node("Relu", f"{x}.relu", x)

    def classify(self, x: str, channels: int, classes: int) -> str:
        """Add a classifier: scores [batch, classes] of an image [batch, channels, height, width]."""
        pooled = self.node("Flatten", "pooled", self.node("GlobalAveragePool", "average", x))
        w, b = (
            self.random("fc.weight", (classes, channels), channels),
            self.random("fc.bias", (classes,), 100),
        )
        return self.node("Gemm", "y", pooled, w, b, transB=1)

    def model(self, name: str, x_shape: Shape, y_shape: Shape) -> onnx.ModelProto:
        """Return the model from input `x` to output `y`."""
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, x_shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, y_shape)],
            self.weights,
        )
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="dask_ferro"
        )


def transformer_encoder(
    layers: int = 4, d_model: int = 256, heads: int = 4, seq: int | str = 128, seed: int = 0
) -> onnx.ModelProto:
    """Return a pre-norm transformer encoder on embedded tokens: float32 [batch, seq, d_model] to the same shape.

    Parameters
    ----------
    layers, d_model, heads : int
        `heads` must divide `d_model`; the feed-forward part is 4 x `d_model` wide.
    seq : int or str
        Tokens in a sequence; a str makes it a symbolic dimension.
    seed : int
        Of the weights.

    Returns
    -------
    onnx.ModelProto
        12 layers x d_model^2 weights: 12.6 MB with the defaults.
    """
    if d_model % heads:
        raise ValueError(f"heads must divide d_model, got d_model={d_model} and heads={heads}")
    net, x = Net(seed), "x"
    net.weight("split_heads", np.array([0, 0, heads, d_model // heads]))
    net.weight("join_heads", np.array([0, 0, d_model]))
    net.weight("scale", np.float32(1 / math.sqrt(d_model // heads)))
    for i in range(layers):
        x = _attention(net, f"layer_{i}/attention", x, d_model)
        x = _feed_forward(net, f"layer_{i}/mlp", x, d_model)
    net.norm("y", x, d_model)
    return net.model("encoder", ("batch", seq, d_model), ("batch", seq, d_model))


def _attention(net: Net, p: str, x: str, d: int) -> str:
    normal = net.norm(f"{p}/norm", x, d)

    def split(role: str, perm: list[int]) -> str:
        flat = net.linear(f"{p}/{role}", normal, d, d)
        return net.node(
            "Transpose", f"{flat}.t", net.node("Reshape", f"{flat}.heads", flat, "split_heads"), perm=perm
        )

    q, k, v = split("q", [0, 2, 1, 3]), split("k", [0, 2, 3, 1]), split("v", [0, 2, 1, 3])
    scores = net.node("Mul", f"{p}/scaled", net.node("MatMul", f"{p}/scores", q, k), "scale")
    mixed = net.node("MatMul", f"{p}/mixed", net.node("Softmax", f"{p}/softmax", scores, axis=-1), v)
    joined = net.node("Transpose", f"{p}/mixed.t", mixed, perm=[0, 2, 1, 3])
    joined = net.node("Reshape", f"{p}/joined", joined, "join_heads")
    return net.node("Add", f"{p}/sum", x, net.linear(f"{p}/out", joined, d, d))


def _feed_forward(net: Net, p: str, x: str, d: int) -> str:
    up = net.linear(f"{p}/up", net.norm(f"{p}/norm", x, d), d, 4 * d)
    down = net.linear(f"{p}/down", net.node("Gelu", f"{p}/gelu", up), 4 * d, d)
    return net.node("Add", f"{p}/sum", x, down)


def resnet18(image: int = 224, classes: int = 1000, width: int = 64, seed: int = 0) -> onnx.ModelProto:
    """Return a ResNet-18 with folded batch norms: float32 [batch, 3, image, image] to scores [batch, classes].

    Parameters
    ----------
    image, classes : int
        Pixels a side, at least 32, and number of scores.
    width : int
        Channels of the first stage; each of the four stages has twice those of the one before.
    seed : int
        Of the weights.

    Returns
    -------
    onnx.ModelProto
        11.7 million weights, 47 MB, with the defaults.
    """
    net = Net(seed)
    x = net.relu(net.conv("stem", "x", (3, width), 7, stride=2))
    x = net.node("MaxPool", "stem.pool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    before = width
    for stage in range(4):
        after = width * 2**stage
        x = _residual(net, f"stage_{stage}/block_0", x, (before, after), stride=1 if stage == 0 else 2)
        x = _residual(net, f"stage_{stage}/block_1", x, (after, after), stride=1)
        before = after
    net.classify(x, before, classes)
    return net.model("resnet18", ("batch", 3, image, image), ("batch", classes))


def _residual(net: Net, p: str, x: str, channels: tuple[int, int], stride: int) -> str:
    main = net.relu(net.conv(f"{p}/conv_0", x, channels, 3, stride))
    main = net.conv(f"{p}/conv_1", main, (channels[1], channels[1]), 3, gain=0.5)  # or each block doubles x
    if channels[0] != channels[1]:
        x = net.conv(f"{p}/shortcut", x, channels, 1, stride)
    return net.relu(net.node("Add", f"{p}/sum", main, x))


def mlp(sizes: Sequence[int] = (784, 512, 512, 10), seed: int = 0) -> onnx.ModelProto:
    """Return a multilayer perceptron: float32 [batch, sizes[0]] to probabilities [batch, sizes[-1]].

    Parameters
    ----------
    sizes : sequence of int
        Width of the input, of each hidden layer (relu), and of the output (softmax).
    seed : int
        Of the weights.

    Returns
    -------
    onnx.ModelProto
        2.7 MB with the defaults.
    """
    net, x = Net(seed), "x"
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        x = net.relu(x) if i else x
        w = net.random(f"fc_{i}.weight", (fan_in, fan_out), fan_in, RELU_GAIN)
        x = net.node("Gemm", f"fc_{i}", x, w, net.random(f"fc_{i}.bias", (fan_out,), 100))
    net.node("Softmax", "y", x, axis=-1)
    return net.model("mlp", ("batch", sizes[0]), ("batch", sizes[-1]))


def branching(modules: int = 3, channels: int = 64, image: int = 64, seed: int = 0) -> onnx.ModelProto:
    """Return an inception-like network: modules of four parallel branches on one image, joined by a Concat.

    The branches are a 1x1 convolution, 1x1 then 3x3, 1x1 then 5x5, and a pool then 1x1: unequal on purpose.

    Parameters
    ----------
    modules, channels, image : int
        Modules in a chain, channels between them (a multiple of 4), and pixels a side.
    seed : int
        Of the weights.

    Returns
    -------
    onnx.ModelProto
        From float32 [batch, 3, image, image] to scores [batch, 10].
    """
    if channels % 4:
        raise ValueError(f"channels must be a multiple of 4, one part per branch, got {channels}")
    net = Net(seed)
    x = net.relu(net.conv("stem", "x", (3, channels), 3))
    for i in range(modules):
        x = _module(net, f"module_{i}", x, channels)
    net.classify(x, channels, 10)
    return net.model("branching", ("batch", 3, image, image), ("batch", 10))


def _module(net: Net, p: str, x: str, channels: int) -> str:
    part = channels // 4
    pool = net.node("MaxPool", f"{p}/pool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    point = net.relu(net.conv(f"{p}/point", x, (channels, part), 1))
    small = net.relu(net.conv(f"{p}/small_in", x, (channels, channels), 1))
    small = net.relu(net.conv(f"{p}/small", small, (channels, part), 3))
    large = net.relu(net.conv(f"{p}/large_in", x, (channels, channels), 1))
    large = net.relu(net.conv(f"{p}/large", large, (channels, part), 5))
    pooled = net.relu(net.conv(f"{p}/pooled", pool, (channels, part), 1))
    return net.node("Concat", f"{p}/concat", point, small, large, pooled, axis=1)


RECIPES: dict[str, Callable[..., onnx.ModelProto]] = {
    "encoder": transformer_encoder,
    "resnet18": resnet18,
    "mlp": mlp,
    "branching": branching,
}


def write(names: Sequence[str], folder: Path, seed: int = 0) -> list[Path]:
    """Write the named models as ``folder/<name>.onnx``; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.onnx" for name in names]
    for name, path in zip(names, paths, strict=True):
        model = RECIPES[name](seed=seed)
        onnx.checker.check_model(model)
        path.write_bytes(model.SerializeToString())
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Write example models with deterministic weights (no download)."
    )
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"of {', '.join(RECIPES)}; all when none is named"
    )
    parser.add_argument(
        "--out", type=Path, default=MODELS, metavar="FOLDER", help="where to (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.models) - set(RECIPES))
    if unknown:
        parser.error(f"no recipe for {', '.join(unknown)}; choose from {', '.join(RECIPES)}")
    for path in write(options.models or list(RECIPES), options.out, options.seed):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
