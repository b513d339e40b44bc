"""Layers: open sizes through ONNX Runtime, their shapes, and what they refuse."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.emit import to_model
from dask_ferro.graph.tensor.tensor import asarray, input
from tests.each import every

from .runs import by_onnxruntime, values

RNG = np.random.default_rng(11)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


TOKENS, BIAS = normal(2, 5, 4), normal(4)
IMAGE, KERNEL = normal(2, 3, 7, 6), normal(4, 3, 3, 3)
LABELS = np.array([[0, 3, 1, 2, 0], [1, 1, 3, 2, 0]])
CAUSAL = np.where(np.tri(5, dtype=bool), 0, -np.inf)


@pytest.mark.parametrize(
    "layer",
    [
        lambda x: nn.conv2d(x, KERNEL, BIAS, stride=2),
        lambda x: nn.max_pool2d(x, 2),
        lambda x: nn.avg_pool2d(x, 3),
    ],
    ids=["conv2d", "max_pool2d", "avg_pool2d"],
)
def test_the_size_of_an_image_may_be_open(layer):
    y, known = (layer(input("x", shape)) for shape in (("N", 3, "H", "W"), IMAGE.shape))
    assert y.shape == ("N", known.shape[1], None, None)
    found, wanted = by_onnxruntime(y, {"x": IMAGE})["y"], values(known, {"x": IMAGE})["y"]
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


def test_causal_attention_may_have_open_lengths():
    x = input("x", ("N", "T", 4))
    y = nn.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert y.shape == ("N", "T", 4)
    wanted = softmax(TOKENS @ TOKENS.swapaxes(1, 2) / 2 + CAUSAL) @ TOKENS
    np.testing.assert_allclose(by_onnxruntime(y, {"x": TOKENS})["y"], wanted, rtol=1e-4, atol=1e-5)


def test_groups_of_channels_are_convolved_apart():
    weight = normal(6, 1, 3, 3)
    y = nn.conv2d(input("x", ("N", 3, "H", "W")), weight, normal(6), groups=3)
    assert y.shape == ("N", 6, None, None)


def test_labels_may_be_of_unknown_number():
    x, labels = input("x", (None, 4)), input("t", ("N",), np.int64)
    loss = nn.cross_entropy(x, labels, reduction="none")
    feeds = {"x": TOKENS[0], "t": LABELS[0]}
    wanted = -np.log(np.take_along_axis(softmax(TOKENS[0]), LABELS[0][:, None], -1))[:, 0]
    np.testing.assert_allclose(by_onnxruntime(loss, feeds)["y"], wanted, rtol=2e-4, atol=2e-5)


def test_padding_keeps_a_named_size():
    x = input("x", ("N", 3, "H", "W"))
    assert nn.conv2d(x, KERNEL, padding=1).shape == ("N", 4, "H", "W")


def test_a_transformer_block_is_a_model_that_onnx_accepts():
    x = input("x", ("N", "T", 8))
    h = x + nn.scaled_dot_product_attention(*(nn.linear(x, normal(8, 8)) for _ in range(3)), is_causal=True)
    h = h + nn.linear(nn.gelu(nn.linear(h, normal(16, 8))), normal(8, 16))
    y = nn.layer_norm(h, (8,))
    proto = ir.to_proto(to_model(y))
    onnx.checker.check_model(proto, full_check=True)
    assert y.shape == ("N", "T", 8)


@every(
    ("call", "said"),
    [
        pytest.param(lambda x: nn.relu(asarray([1])), "relu: takes floating point numbers", id="integers"),
        pytest.param(lambda x: nn.gelu(x, approximate="erf"), "got 'erf', wanted 'none' or 'tanh'",
            id="a gelu of its own"),
        pytest.param(lambda x: nn.layer_norm(x, (4,), normal(3)),
            "layer_norm: weight: got <Tensor constant: float32(3,)>, wanted (4,), the normalized shape",
            id="a weight that does not fit"),
        pytest.param(lambda x: nn.layer_norm(x, normal(4)), "wanted the last dimensions of", id="a weight as a shape"),
        pytest.param(lambda x: nn.layer_norm(x, (6,)), "normalized_shape: got (6,), wanted the last dimensions of"
            " <Tensor x: float32(6, 4)>, such as (4,)", id="the shape of other dimensions"),
        pytest.param(lambda x: nn.rms_norm(input("h", ("N", "D")), ("D",)), "rms_norm: weight: got none, wanted one",
            id="no weight of unknown size"),
        pytest.param(lambda x: nn.conv2d(x, KERNEL), "(batch, channels, height, width)", id="no image"),
        pytest.param(lambda x: nn.conv2d(input("i", (1, 2, 9, 9)), KERNEL), "2 channels",
            id="channels that do not meet"),
        pytest.param(lambda x: nn.cross_entropy(x, np.zeros(7, np.int64)),
            "target: got <Tensor constant: int64(7,)>, wanted (6,), one for each sample", id="labels that differ"),
        pytest.param(lambda x: nn.cross_entropy(x, np.zeros(1, np.int64)),
            "wanted (6,), one for each sample of <Tensor x: float32(6, 4)>, whose dimension 1 has the classes",
            id="one label for all samples"),
        pytest.param(lambda x: nn.mse_loss(x[:, :1], x[:, 0]),
            "mse_loss: target: got <Tensor Squeeze: float32(6,)>, wanted (6, 1), the shape of",
            id="a column against a row"),
        pytest.param(lambda x: nn.conv2d(IMAGE, KERNEL, stride=0),
            "conv2d: stride: got 0, wanted a whole number of at least 1", id="a convolution with stride 0"),
        pytest.param(lambda x: nn.conv2d(IMAGE, KERNEL, padding=-1), "padding: got -1", id="padding below 0"),
        pytest.param(lambda x: nn.conv2d(IMAGE, KERNEL, normal(3)),
            "bias: got <Tensor constant: float32(3,)>, wanted (4,), one for each channel out",
            id="a bias of another length"),
        pytest.param(lambda x: nn.conv2d(IMAGE, normal(4, 1, 3, 3), groups=3), "4 channels out in 3 groups",
            id="groups that do not divide the channels out"),
        pytest.param(lambda x: nn.conv2d(IMAGE, input("w", (4, None, 3, 3)), groups=2),
            "3 channels in in 2 groups", id="groups that do not divide the channels in"),
        pytest.param(lambda x: nn.cross_entropy(x, np.zeros(6)), "target: takes int32 or int64 indices",
            id="labels in floats"),
        pytest.param(lambda x: nn.mse_loss(x, x, reduction="max"), "mse_loss: reduction: got 'max'",
            id="a reduction it has not"),
        pytest.param(lambda x: nn.embedding(x, np.zeros(2, np.int64)),
            "the order is PyTorch's: embedding(indices, weight)", id="an embedding in the other order"),
        pytest.param(lambda x: nn.rms_norm(x, (4,), normal(3)), "rms_norm: weight: got", id="a weight of others"),
        pytest.param(lambda x: nn.batch_norm(x[0], *[normal(4)] * 4), "takes (batch, channels, ...)",
            id="a normalized vector"),
        pytest.param(lambda x: nn.conv1d(IMAGE, KERNEL), "conv1d: takes (batch, channels, length)",
            id="an image as a sequence"),
        pytest.param(lambda x: nn.conv3d(normal(1, 1, 4, 4, 4), KERNEL),
            "a weight is (out, in / groups, depth, height, width)", id="a flat weight of a volume"),
        pytest.param(lambda x: nn.gru(normal(5, 2, 3), normal(6, 3), normal(6, 2), normal(6)),
            "gru: got one bias, wanted both", id="one bias"),
        pytest.param(lambda x: nn.rotary_embedding(normal(4, 3)), "of a known even size", id="an odd size"),
        pytest.param(lambda x: nn.rotary_embedding(x, positions=normal(6)), "takes int32 or int64 indices",
            id="positions in floats"),
        pytest.param(lambda x: nn.huber_loss(x, x, delta=0), "huber_loss: delta: got 0",
            id="a huber loss without a parabola"),
        pytest.param(lambda x: nn.smooth_l1_loss(x, x, beta=-1), "smooth_l1_loss: beta: got -1", id="a beta below 0"),
        pytest.param(lambda x: nn.binary_cross_entropy(x, x[:1]), "wanted (6, 4), the shape of",
            id="targets that differ"),
        pytest.param(lambda x: nn.cross_entropy(x, np.zeros(6, np.int64), label_smoothing=1.5),
            "label_smoothing: got 1.5", id="labels that are too smooth"),
        pytest.param(lambda x: nn.scaled_dot_product_attention(*[input("q", ("T", "D"))] * 3), "give a scale",
            id="attention of unknown size"),
    ],
)  # fmt: skip
def test_is_refused(call, said):
    with pytest.raises(InputError, match=re.escape(said)):
        call(input("x", (6, 4)))
