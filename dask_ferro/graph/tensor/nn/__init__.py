"""Layers as functions of tensors: activations, normalization, attention, convolution, recurrence, losses.

No layer holds parameters: they are arguments, so that one function serves for inference, for training and for weights
from a file.  A function with a name of `torch.nn.functional` takes PyTorch's arguments, by position or by name, with
PyTorch's defaults, and returns PyTorch's results; a table in docs/reference/layers.md lists the differences.  A layer
is one ONNX operator if there is one; only attention is written as products and a softmax, since those can be sharded
and every engine computes them in every dtype.  Images are (batch, channels, height, width).

Examples
--------
>>> import dask_ferro as ff
>>> import dask_ferro.tensor as ft
>>> ft.nn.relu([-1.0, 2.0]).compute()
array([0., 2.], dtype=float32)
"""

from __future__ import annotations

from dask_ferro.graph.tensor.nn.attention import rotary_embedding, scaled_dot_product_attention
from dask_ferro.graph.tensor.nn.convolution import avg_pool2d, conv1d, conv2d, conv3d, max_pool2d
from dask_ferro.graph.tensor.nn.layers import (
    embedding,
    gelu,
    linear,
    log_softmax,
    relu,
    sigmoid,
    silu,
    softmax,
    softplus,
    stop_gradient,
)
from dask_ferro.graph.tensor.nn.losses import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    mse_loss,
    smooth_l1_loss,
)
from dask_ferro.graph.tensor.nn.normalization import batch_norm, batch_norm_training, layer_norm, rms_norm
from dask_ferro.graph.tensor.nn.random import dropout
from dask_ferro.graph.tensor.nn.recurrent import gru, lstm

__all__ = [
    "avg_pool2d", "batch_norm", "batch_norm_training", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "conv1d", "conv2d", "conv3d", "cross_entropy", "dropout", "embedding", "gelu", "gru", "huber_loss", "layer_norm",
    "linear", "log_softmax", "lstm", "max_pool2d", "mse_loss", "relu", "rms_norm", "rotary_embedding",
    "scaled_dot_product_attention", "sigmoid", "silu", "smooth_l1_loss", "softmax", "softplus", "stop_gradient",
]  # fmt: skip
