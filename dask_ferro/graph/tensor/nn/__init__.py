"""Layers as functions of tensors: activations, normalization, attention, convolution, recurrence, losses.

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

from dask_ferro.graph.tensor.nn.activations import gelu, log_softmax, relu, sigmoid, silu, softmax, softplus
from dask_ferro.graph.tensor.nn.attention import attention, causal, rotary_embedding
from dask_ferro.graph.tensor.nn.convolution import avg_pool2d, conv1d, conv2d, conv3d, max_pool2d
from dask_ferro.graph.tensor.nn.layers import embedding, linear, stop_gradient
from dask_ferro.graph.tensor.nn.losses import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber,
    mse,
    smooth_l1,
)
from dask_ferro.graph.tensor.nn.normalization import batch_norm, batch_norm_training, layer_norm, rms_norm
from dask_ferro.graph.tensor.nn.random import dropout
from dask_ferro.graph.tensor.nn.recurrent import gru, lstm

__all__ = [
    "attention", "avg_pool2d", "batch_norm", "batch_norm_training", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "causal", "conv1d", "conv2d", "conv3d", "cross_entropy", "dropout", "embedding",
    "gelu", "gru", "huber", "layer_norm", "linear", "log_softmax", "lstm", "max_pool2d", "mse", "relu", "rms_norm",
    "rotary_embedding", "sigmoid", "silu", "smooth_l1", "softmax", "softplus", "stop_gradient",
]  # fmt: skip
