"""Lazy tensors, their functions, layers, optimizers and gradients.

>>> import dask_ferro.tensor as ft
>>> x = ft.input("x", (2, 3))
>>> (x @ ft.ones((3, 4))).sum(axis=0)
<Tensor ReduceSum: float32(4,)>

Functions have their names in the array-API standard; `nn` and `optim` have PyTorch's.
"""

from __future__ import annotations

from dask_ferro.graph.autodiff.grad import grad, value_and_grad
from dask_ferro.graph.ir.regions import region
from dask_ferro.graph.tensor import nn, optim
from dask_ferro.graph.tensor.emit import save_onnx, to_model
from dask_ferro.graph.tensor.namespace import *  # noqa: F403
from dask_ferro.graph.tensor.namespace import __all__ as _FUNCTIONS
from dask_ferro.lower.tensor import Tensor

__all__ = ["Tensor", "grad", "nn", "optim", "region", "save_onnx", "to_model", "value_and_grad", *_FUNCTIONS]
