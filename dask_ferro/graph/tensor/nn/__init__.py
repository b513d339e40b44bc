"""Layers as functions of tensors: activations, normalization, attention, convolution, losses.

No layer holds parameters: they are arguments, so that one function serves for inference, for training and for
weights from a file.  A layer is one ONNX operator where there is one; only attention is written as products and a
softmax, since those can be sharded and every engine computes them in every dtype.  Images are (batch, channels,
height, width).

Examples
--------
>>> import dask_ferro as ff
>>> ff.nn.relu([-1.0, 2.0]).compute()
array([0., 2.], dtype=float32)
"""

from __future__ import annotations

# ruff: noqa: F403, F405
from dask_ferro.graph.tensor.nn.activations import *
from dask_ferro.graph.tensor.nn.images import *
from dask_ferro.graph.tensor.nn.layers import *
from dask_ferro.graph.tensor.nn.layers import softmax_of_seen as softmax_of_seen
from dask_ferro.graph.tensor.nn.losses import *

__all__ = [
    "attention", "avg_pool2d", "causal", "conv2d", "cross_entropy", "embedding", "gelu", "layer_norm",
    "linear", "log_softmax", "max_pool2d", "mse", "relu", "sigmoid", "silu", "softmax", "softplus",
]  # fmt: skip
