"""Train the two models of handwritten digits that ship with the examples, and write them as ONNX files.

    python examples/train_digits.py             # into examples/models/; takes some seconds

The data are scikit-learn's own 1,797 images of 8 x 8 pixels (`load_digits`, no download).  A quarter is
held out by a fixed seed, stratified by digit; accuracy on it is written into the metadata of the model.

- `digits_mlp.onnx`: scikit-learn's MLPClassifier; input `image` float32 [N, 64], output `scores` [N, 10].
- `digits_conv.onnx`: a small convolutional net, trained here in plain numpy; `image` is float32 [N, 1, 8, 8].

The inputs are raw pixels, 0 to 16; the graph scales them.  Scores are probabilities.  On one machine with the
same library versions, running this again writes the same bytes; elsewhere BLAS may round differently, so that
weights differ in their last bits, and accuracy by a digit or two.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from onnx import TensorProto, helper, numpy_helper

SEED = 0
HELD_OUT = 0.25
LEAST_ACCURACY = 0.95
MODELS = Path(__file__).parent / "models"
OPSET, IR_VERSION = 21, 10


class Digits(NamedTuple):
    """Images, float32 [N, 64] of pixels 0 to 16, and their labels, int64 [N]."""

    images: np.ndarray
    labels: np.ndarray


def split(seed: int = SEED) -> tuple[Digits, Digits]:
    """Return the training digits, and the held-out ones."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise SystemExit("The digits come with scikit-learn: pip install 'dask-ferro[examples]'") from None

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        images.astype(np.float32), labels, test_size=HELD_OUT, stratify=labels, random_state=seed
    )
    return Digits(parts[0], parts[2]), Digits(parts[1], parts[3])


# ---- the multilayer perceptron -----------------------------------------------------------------------------


def train_mlp(digits: Digits, seed: int = SEED) -> onnx.ModelProto:
    """Train scikit-learn's MLPClassifier; return it as an ONNX model without metadata."""
    from sklearn.neural_network import MLPClassifier

    classifier = MLPClassifier((64,), random_state=seed, max_iter=400)
    classifier.fit(digits.images / 16, digits.labels)
    (w_0, w_1), (b_0, b_1) = classifier.coefs_, classifier.intercepts_
    nodes = [
        helper.make_node("Mul", ["image", "sixteenth"], ["scaled"], name="scale"),
        helper.make_node("Gemm", ["scaled", "fc_0.weight", "fc_0.bias"], ["hidden"], name="fc_0"),
        helper.make_node("Relu", ["hidden"], ["active"], name="relu"),
        helper.make_node("Gemm", ["active", "fc_1.weight", "fc_1.bias"], ["logits"], name="fc_1"),
        helper.make_node("Softmax", ["logits"], ["scores"], name="softmax", axis=-1),
    ]
    weights = {"fc_0.weight": w_0, "fc_0.bias": b_0, "fc_1.weight": w_1, "fc_1.bias": b_1}
    return _model("digits_mlp", nodes, weights, ("N", 64))


# ---- the convolutional net, in numpy -----------------------------------------------------------------------

CHANNELS, EPOCHS, BATCH, RATE, MOMENTUM = 16, 30, 32, 0.05, 0.9


class ConvNet(NamedTuple):
    """The weights: a 3x3 convolution (relu, max pool 2x2), and a dense layer with inputs in C, H, W order."""

    kernel: np.ndarray  # [9, CHANNELS]
    kernel_bias: np.ndarray
    fc: np.ndarray  # [CHANNELS * 16, 10]
    fc_bias: np.ndarray


def train_conv(digits: Digits, seed: int = SEED) -> onnx.ModelProto:
    """Train the convolutional net by gradient descent with momentum; return it without metadata."""
    rng = np.random.default_rng(seed)
    net = _initial(rng)
    velocity = ConvNet(*map(np.zeros_like, net))
    patches, labels = _patches(digits.images / 16), np.eye(10, dtype=np.float32)[digits.labels]
    for epoch in range(EPOCHS):
        rate = RATE * (1 - epoch / EPOCHS)
        order = rng.permutation(len(labels))
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            gradient = _gradient(net, patches[batch], labels[batch])
            velocity = ConvNet(*(MOMENTUM * v - rate * g for v, g in zip(velocity, gradient, strict=True)))
            net = ConvNet(*(w + v for w, v in zip(net, velocity, strict=True)))
    return _export_conv(net)


def _initial(rng: np.random.Generator) -> ConvNet:
    def random(fan_in: int, fan_out: int) -> np.ndarray:
        return (rng.standard_normal((fan_in, fan_out)) * np.sqrt(2 / fan_in)).astype(np.float32)

    def zeros(n: int) -> np.ndarray:
        return np.zeros(n, np.float32)

    return ConvNet(random(9, CHANNELS), zeros(CHANNELS), random(16 * CHANNELS, 10), zeros(10))


def _patches(images: np.ndarray) -> np.ndarray:
    """Return the 3 x 3 neighbourhood of every pixel: [N, 64] to [N, 64, 9]."""
    padded = np.pad(images.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    return np.ascontiguousarray(sliding_window_view(padded, (3, 3), axis=(1, 2))).reshape(-1, 64, 9)


def _gradient(net: ConvNet, patches: np.ndarray, labels: np.ndarray) -> ConvNet:
    """Return the gradient of the mean cross entropy over a batch: patches [B, 64, 9], one-hot labels [B, 10]."""
    n = len(patches)
    hidden = np.maximum(patches @ net.kernel + net.kernel_bias, 0).reshape(n, 4, 2, 4, 2, CHANNELS)
    pooled = hidden.max(axis=(2, 4), keepdims=True)
    flat = pooled.reshape(n, 16, CHANNELS).swapaxes(1, 2).reshape(n, -1)
    d_logits = (_softmax(flat @ net.fc + net.fc_bias) - labels) / n
    d_pooled = (d_logits @ net.fc.T).reshape(n, CHANNELS, 16).swapaxes(1, 2).reshape(pooled.shape)
    d_hidden = np.where((hidden == pooled) & (hidden > 0), d_pooled, 0).reshape(-1, CHANNELS)
    return ConvNet(
        patches.reshape(-1, 9).T @ d_hidden, d_hidden.sum(axis=0), flat.T @ d_logits, d_logits.sum(axis=0)
    )


def _softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def _export_conv(net: ConvNet) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Mul", ["image", "sixteenth"], ["scaled"], name="scale"),
        helper.make_node(
            "Conv", ["scaled", "conv.weight", "conv.bias"], ["features"], name="conv", pads=[1, 1, 1, 1]
        ),
        helper.make_node("Relu", ["features"], ["active"], name="relu"),
        helper.make_node("MaxPool", ["active"], ["pooled"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["pooled"], ["flat"], name="flatten"),
        helper.make_node("Gemm", ["flat", "fc.weight", "fc.bias"], ["logits"], name="fc"),
        helper.make_node("Softmax", ["logits"], ["scores"], name="softmax", axis=-1),
    ]
    kernel = net.kernel.T.reshape(CHANNELS, 1, 3, 3)
    weights = {
        "conv.weight": kernel,
        "conv.bias": net.kernel_bias,
        "fc.weight": net.fc,
        "fc.bias": net.fc_bias,
    }
    return _model("digits_conv", nodes, weights, ("N", 1, 8, 8))


# ---- files -------------------------------------------------------------------------------------------------

TRAINERS = {"digits_mlp": train_mlp, "digits_conv": train_conv}


def _model(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    weights: dict[str, np.ndarray],
    image_shape: Sequence[int | str],
) -> onnx.ModelProto:
    constants = {"sixteenth": np.float32(1 / 16)} | weights
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, image_shape)],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(np.asarray(w, np.float32), k) for k, w in constants.items()],
    )
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="dask_ferro")


def accuracy(model: onnx.ModelProto, digits: Digits) -> float:
    """Return the accuracy of the model on digits, computed by ONNX Runtime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    shape = [-1, *session.get_inputs()[0].shape[1:]]
    (scores,) = session.run(None, {"image": digits.images.reshape(shape)})
    return float((scores.argmax(axis=1) == digits.labels).mean())


def train(name: str, seed: int = SEED) -> onnx.ModelProto:
    """Train one of `TRAINERS`; return it with its seed and held-out accuracy as metadata."""
    training, held_out = split(seed)
    model = TRAINERS[name](training, seed)
    right = accuracy(model, held_out)
    if right <= LEAST_ACCURACY:
        raise RuntimeError(
            f"{name}: held-out accuracy is {right:.4f} with seed {seed}, wanted over {LEAST_ACCURACY}"
        )
    metadata = {
        "data": "sklearn.datasets.load_digits",
        "seed": str(seed),
        "training_rows": str(len(training.labels)),
        "held_out_rows": str(len(held_out.labels)),
        "held_out_accuracy": f"{right:.4f}",
    }
    helper.set_model_props(model, metadata)
    onnx.checker.check_model(model, full_check=True)
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the digit models and write them as ONNX.")
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"of {', '.join(TRAINERS)}; both when none is named"
    )
    parser.add_argument(
        "--out", type=Path, default=MODELS, metavar="FOLDER", help="where to (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of split and weights (default: %(default)s)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.models) - set(TRAINERS))
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; choose from {', '.join(TRAINERS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.models or TRAINERS:
        model, path = train(name, options.seed), options.out / f"{name}.onnx"
        path.write_bytes(model.SerializeToString())
        right = next(p.value for p in model.metadata_props if p.key == "held_out_accuracy")
        print(f"{path}  {path.stat().st_size / 1e3:.0f} kB, held-out accuracy {float(right):.1%}")


if __name__ == "__main__":
    main()
