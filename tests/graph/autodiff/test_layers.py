"""Layers and losses: their values and gradients against PyTorch's, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.tensor import argument
from tests.graph.tensor.runs import values

from .against_torch import compare

torch = pytest.importorskip("torch")
F = torch.nn.functional

RNG = np.random.default_rng(37)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


A, B = normal(4, 5), normal(4, 5)
TARGETS, ODDS = RNG.random((4, 5)), RNG.uniform(0.02, 0.98, (4, 5))
LABELS = np.array([2, 0, -7, 4])
IMAGES = normal(3, 4, 2, 3)
CHANNELS = (normal(4), 0.5 + RNG.random(4), normal(4), normal(4))
# The epsilon as a file holds it: a float32.
EPSILON = float(np.float32(1e-5))


def by_torch(layer: Any, x: Any, weights: tuple[Any, ...], state: Any) -> Any:
    """PyTorch's recurrent layer of one direction, with given weights."""
    module = layer(x.shape[-1], weights[1].shape[1]).double()
    named = zip(("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"), weights, strict=True)
    return torch.func.functional_call(module, dict(named), (x, state))


def lstm_by_torch(x: Any, w: Any, r: Any, b: Any, c: Any, h0: Any, c0: Any) -> Any:
    y, (h, c1) = by_torch(torch.nn.LSTM, x, (w, r, b, c), (h0[None], c0[None]))
    return torch.cat([y, h + c1])


def lstm_by_us(x: Any, w: Any, r: Any, b: Any, c: Any, h0: Any, c0: Any) -> Any:
    y, (h, c1) = nn.lstm(x, w, r, b, c, state=(h0, c0))
    return xp.concat([y, xp.expand_dims(h + c1)])


def gru_by_torch(x: Any, w: Any, r: Any, b: Any, c: Any) -> Any:
    y, h = by_torch(torch.nn.GRU, x.transpose(0, 1), (w, r, b, c), None)
    return torch.cat([y.transpose(0, 1), h.transpose(0, 1)], 1)


def gru_by_us(x: Any, w: Any, r: Any, b: Any, c: Any) -> Any:
    y, h = nn.gru(x, w, r, b, c, batch_first=True)
    return xp.concat([y, xp.expand_dims(h, axis=1)], axis=1)


def turned_by_torch(x: Any, interleaved: bool, places: Any = None) -> Any:
    """Pairs as complex numbers, times powers of i."""
    at = torch.arange(x.shape[-2], dtype=torch.float64) if places is None else torch.tensor(places).double()
    size = x.shape[-1]
    angles = at[..., None] * 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    y = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles))
    return (y if interleaved else y.transpose(-1, -2)).flatten(-2)


def batch_by_torch(x: Any, scale: Any, bias: Any) -> Any:
    return F.batch_norm(x, None, None, scale, bias, training=True, eps=1e-5)


def _by_reduction(ours: Any, theirs: Any, arrays: tuple[np.ndarray, ...], name: str) -> dict[str, Any]:
    return {
        f"{name}, {how}": (
            lambda *a, how=how: ours(*a, reduction=how),
            lambda *a, how=how: theirs(*a, reduction=how),
            arrays,
        )
        for how in ("mean", "sum", "none")
    }


T = torch.tensor
# name -> (our function of tensors, PyTorch's, the arrays)
ROWS: dict[str, tuple[Any, Any, tuple[np.ndarray, ...]]] = {
    **_by_reduction(nn.huber, F.huber_loss, (A, B), "huber"),
    **_by_reduction(nn.smooth_l1, F.smooth_l1_loss, (A, B), "smooth l1"),
    **_by_reduction(lambda x, **k: nn.binary_cross_entropy(x, TARGETS, **k),
        lambda x, **k: F.binary_cross_entropy(x, T(TARGETS), **k), (ODDS,), "binary cross entropy"),
    **_by_reduction(nn.binary_cross_entropy_with_logits, F.binary_cross_entropy_with_logits, (5 * A, TARGETS),
        "binary cross entropy with logits"),
    **_by_reduction(
        lambda x, **k: nn.cross_entropy(x, LABELS, label_smoothing=0.2, ignore_index=-7, **k),
        lambda x, **k: F.cross_entropy(x, T(LABELS), label_smoothing=0.2, ignore_index=-7, **k), (A,),
        "smoothed cross entropy that ignores a label"),
    "huber with a delta, on and far beyond it": (lambda x: nn.huber(x, np.zeros(5), delta=0.5, reduction="sum"),
        lambda x: F.huber_loss(x, torch.zeros(5).double(), delta=0.5, reduction="sum"),
        (np.array([0.0, 0.2, -0.4, 3.0, -1e9]),)),
    "smooth l1 with a beta": (lambda x, y: nn.smooth_l1(x, y, beta=0.3), lambda x, y: F.smooth_l1_loss(x, y, beta=0.3),
        (A, B)),
    "smooth l1 without a parabola": (lambda x, y: nn.smooth_l1(x, y, beta=0), lambda x, y: F.l1_loss(x, y), (A, B)),
    "binary cross entropy of a sure and right answer": (lambda x: nn.binary_cross_entropy(x, np.array([0.0, 1.0])),
        lambda x: F.binary_cross_entropy(x, T([0.0, 1.0]).double()), (np.array([1e-9, 1 - 1e-9]),)),
    "logits far out": (lambda x: nn.binary_cross_entropy_with_logits(x, TARGETS[0, :4], reduction="none"),
        lambda x: F.binary_cross_entropy_with_logits(x, T(TARGETS[0, :4]), reduction="none"),
        (np.array([-800.0, -40.0, 40.0, 800.0]),)),
    "weighted positives": (lambda x: nn.binary_cross_entropy_with_logits(x, TARGETS, positive_weight=B[0] ** 2),
        lambda x: F.binary_cross_entropy_with_logits(x, T(TARGETS), pos_weight=T(B[0] ** 2)), (A,)),
    "rms norm": (lambda x, s: nn.rms_norm(x, s), lambda x, s: F.rms_norm(x, (3,), s, EPSILON), (IMAGES, normal(3))),
    "rms norm of two axes": (lambda x, s: nn.rms_norm(x, s, axis=-2),
        lambda x, s: F.rms_norm(x, (2, 3), s, EPSILON), (IMAGES, normal(2, 3))),
    "batch norm": (lambda x, s, b: nn.batch_norm(x, CHANNELS[0], CHANNELS[1], s, b)[0], batch_by_torch,
        (IMAGES, *CHANNELS[2:])),
    "batch norm of rows": (lambda x, s, b: nn.batch_norm(x, CHANNELS[0], CHANNELS[1], s, b)[0], batch_by_torch,
        (normal(6, 4), *CHANNELS[2:])),
    "batch norm by running statistics": (nn.batch_norm_inference,
        lambda x, m, v, s, b: (x - m[:, None, None]) * (s / torch.sqrt(v + EPSILON))[:, None, None] + b[:, None, None],
        (IMAGES, *CHANNELS)),
    "conv1d": (lambda x, w, b: nn.conv1d(x, w, b, stride=2, padding=1, dilation=2),
        lambda x, w, b: F.conv1d(x, w, b, 2, 1, 2), (normal(2, 3, 9), normal(4, 3, 3), normal(4))),
    "conv1d in groups": (lambda x, w: nn.conv1d(x, w, groups=2), lambda x, w: F.conv1d(x, w, groups=2),
        (normal(2, 4, 6), normal(6, 2, 3))),
    "conv3d": (lambda x, w, b: nn.conv3d(x, w, b, stride=(1, 2, 1), padding=(1, 0, 1)),
        lambda x, w, b: F.conv3d(x, w, b, (1, 2, 1), (1, 0, 1)),
        (normal(2, 2, 4, 5, 3), normal(3, 2, 2, 3, 2), normal(3))),
    "lstm with a state": (lstm_by_us, lstm_by_torch,
        (normal(4, 2, 3), normal(8, 3), normal(8, 2), normal(8), normal(8), normal(2, 2), normal(2, 2))),
    "gru, batch first": (gru_by_us, gru_by_torch,
        (normal(2, 4, 3), normal(6, 3), normal(6, 2), normal(6), normal(6))),
    "embedding": (lambda w: nn.embedding(np.array([[1, 3], [1, 0]]), w),
        lambda w: F.embedding(T([[1, 3], [1, 0]]), w), (A,)),
    "rotary, halves": (nn.rotary_embedding, lambda x: turned_by_torch(x, False), (normal(2, 3, 6),)),
    "rotary, pairs, by place": (lambda x: nn.rotary_embedding(x, places=np.array([7, 0, 900]), interleaved=True),
        lambda x: turned_by_torch(x, True, [7, 0, 900]), (normal(2, 3, 6),)),
    "a stopped gradient": (lambda x: x * nn.stop_gradient(xp.exp(x)), lambda x: x * torch.exp(x).detach(), (A,)),
    "a stopped gradient of the loss": (lambda x: nn.stop_gradient(x * x) + x, lambda x: (x * x).detach() + x, (A,)),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_layer_and_its_gradient_equal_pytorch(name):
    compare(*ROWS[name], rtol=1e-7)


@pytest.mark.parametrize("data", [IMAGES, normal(6, 4)], ids=["images", "rows"])
def test_running_statistics_are_those_of_pytorch(data):
    mean, variance = CHANNELS[0].copy(), CHANNELS[1].copy()
    x = argument("x", data.shape, np.float64)
    _, next_mean, next_variance = nn.batch_norm(x, mean, variance, *CHANNELS[2:], momentum=0.3)
    found = values({"mean": next_mean, "variance": next_variance}, {"x": data})
    theirs = T(mean), T(variance)
    F.batch_norm(T(data), *theirs, training=True, momentum=0.3)
    np.testing.assert_allclose(found["mean"], theirs[0].numpy(), rtol=1e-12)
    np.testing.assert_allclose(found["variance"], theirs[1].numpy(), rtol=1e-12)


def test_a_probability_of_0_is_a_loss_of_100_as_in_pytorch():
    loss = nn.binary_cross_entropy(argument("p", (2,), np.float64), np.array([1.0, 0.0]), reduction="none")
    np.testing.assert_array_equal(values(loss, {"p": np.array([0.0, 1.0])})["y"], [100.0, 100.0])
