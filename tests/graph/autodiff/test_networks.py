"""Gradients of whole networks against PyTorch, and through ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.tensor import input
from tests.graph.tensor.runs import by_onnxruntime, values

from .against_torch import compare
from .gradient_cases import normal, whole

torch = pytest.importorskip("torch")
F = torch.nn.functional


def _mlp(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    return nn.cross_entropy(nn.linear(xp.tanh(nn.linear(x, w1, b1)), w2, b2), whole(0, 1, 2, 0, 1))


def _torch_mlp(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    return F.cross_entropy(torch.tanh(x @ w1.T + b1) @ w2.T + b2, torch.tensor([0, 1, 2, 0, 1]))


def _conv_net(x: Any, w1: Any, b1: Any, w2: Any, dense: Any) -> Any:
    h = nn.max_pool2d(nn.relu(nn.conv2d(x, w1, b1, padding=1)), 2)
    h = nn.gelu(nn.conv2d(h, w2, stride=2))
    return nn.cross_entropy(h.reshape(2, -1) @ dense, whole(1, 0))


def _torch_conv_net(x: Any, w1: Any, b1: Any, w2: Any, dense: Any) -> Any:
    h = F.max_pool2d(F.relu(F.conv2d(x, w1, b1, padding=1)), 2)
    h = F.gelu(F.conv2d(h, w2, stride=2))
    return F.cross_entropy(h.reshape(2, -1) @ dense, torch.tensor([1, 0]))


def _block(x: Any, qkv: Any, out: Any, up: Any, down: Any, s1: Any, s2: Any) -> Any:
    """A pre-norm transformer block of two heads, as one writes it."""
    h = nn.layer_norm(x, (6,), s1) @ qkv
    q, k, v = (xp.permute_dims(h[..., i * 6 : i * 6 + 6].reshape(2, 4, 2, 3), (0, 2, 1, 3)) for i in range(3))
    mixed = xp.permute_dims(nn.scaled_dot_product_attention(q, k, v, is_causal=True), (0, 2, 1, 3)).reshape(
        2, 4, 6
    )
    x = x + mixed @ out
    return x + nn.gelu(nn.layer_norm(x, (6,), s2) @ up) @ down


def _torch_block(x: Any, qkv: Any, out: Any, up: Any, down: Any, s1: Any, s2: Any) -> Any:
    epsilon = float(np.float32(1e-5))
    h = F.layer_norm(x, (6,), s1, None, epsilon) @ qkv
    q, k, v = (h[..., i * 6 : i * 6 + 6].reshape(2, 4, 2, 3).transpose(1, 2) for i in range(3))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 4, 6)
    x = x + mixed @ out
    return x + F.gelu(F.layer_norm(x, (6,), s2, None, epsilon) @ up) @ down


NETWORKS = {
    "an MLP": (_mlp, _torch_mlp, [normal(5, 4), normal(6, 4), normal(6), normal(3, 6), normal(3)]),
    "a conv net": (_conv_net, _torch_conv_net,
        [normal(2, 3, 8, 8), normal(4, 3, 3, 3), normal(4), normal(5, 4, 2, 2), normal(20, 3)]),
    "a transformer block": (_block, _torch_block,
        [normal(2, 4, 6), normal(6, 18), normal(6, 6), normal(6, 8), normal(8, 6), normal(6), normal(6)]),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_of_a_network_run_in_onnxruntime(name):
    fn, _, arrays = NETWORKS[name]
    arrays = [a.astype(np.float32) for a in arrays]
    params = [input(f"p{i}", a.shape) for i, a in enumerate(arrays)]
    y = fn(*params)
    gradients = grad(y if y.ndim == 0 else xp.tanh(y).mean(), params)
    named = {f"d{i}": g for i, g in enumerate(gradients)}
    feeds = {f"p{i}": a for i, a in enumerate(arrays)}
    got, wanted = by_onnxruntime(named, feeds), values(named, feeds)
    for label in named:
        np.testing.assert_allclose(got[label], wanted[label], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_equals_pytorch(name):
    ours, theirs, arrays = NETWORKS[name]
    compare(ours, theirs, tuple(arrays), rtol=1e-6)
