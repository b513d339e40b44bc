"""The namespace of tensors: the array-API standard's names, as far as they are lazy array math.

`Tensor.__array_namespace__` gives this module, so code written against the standard takes tensors.  It only
gathers; what each function does is said where it is written.
"""

from __future__ import annotations

from dask_ferro.graph import tensor_layout, tensor_math, tensor_reduce
from dask_ferro.graph.tensor import argument, asarray
from dask_ferro.graph.tensor_layout import *  # noqa: F403
from dask_ferro.graph.tensor_math import *  # noqa: F403
from dask_ferro.graph.tensor_reduce import *  # noqa: F403

__all__ = [
    "argument",
    "asarray",
    *tensor_layout.__all__,
    *tensor_math.__all__,
    *tensor_reduce.__all__,
]
