"""The models of `networks.py` in eager PyTorch: op by op on one GPU, with all values on the device.

Used if ONNX Runtime has no CUDA provider.  It supports only the operators of those models, and is imported only if
PyTorch is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch.nn import functional as f

Op = Callable[..., torch.Tensor]

OPS: dict[str, Op] = {
    "Add": lambda a, b: a + b,
    "Mul": lambda a, b: a * b,
    "MatMul": torch.matmul,
    "Relu": torch.relu,
    "Gelu": f.gelu,
    "Softmax": lambda x, axis: torch.softmax(x, axis),
    "Transpose": lambda x, perm: x.permute(*perm),
    "Reshape": lambda x, shape: x.reshape([x.shape[0], *shape[1:]]),
    "Flatten": lambda x: x.flatten(1),
    "Gemm": lambda a, b, c: torch.addmm(c, a, b),
    "LayerNormalization": lambda x, scale, bias: f.layer_norm(x, scale.shape, scale, bias),
    "GlobalAveragePool": lambda x: x.mean((2, 3), keepdim=True),
    "MaxPool": lambda x, kernel_shape, strides, pads: f.max_pool2d(x, kernel_shape, strides, pads[0]),
    "Conv": lambda x, w, b, kernel_shape, strides, pads: f.conv2d(x, w, b, strides, pads[0]),
}


class Eager:
    """A model as calls of PyTorch, from one tensor on the GPU to one tensor on the GPU."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        weights = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
        self._values: dict[str, Any] = {name: _value(array) for name, array in weights.items()}
        self._nodes = [
            (
                OPS[n.op_type],
                list(n.input),
                n.output[0],
                {a.name: helper.get_attribute_value(a) for a in n.attribute},
            )
            for n in proto.graph.node
        ]
        self._output = proto.graph.output[0].name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values = self._values | {"x": x}
        with torch.inference_mode():
            for op, inputs, output, attributes in self._nodes:
                values[output] = op(*(values[name] for name in inputs), **attributes)
        return values[self._output]


def _value(array: np.ndarray) -> Any:
    """Return a weight on the GPU; a shape stays a list of numbers."""
    return array.tolist() if array.dtype == np.int64 else torch.tensor(array, device="cuda")
