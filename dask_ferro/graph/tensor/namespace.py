"""The namespace of tensors: the functions of the array-API standard that make sense for lazy arrays.

`Tensor.__array_namespace__` returns this module, so code written against the standard takes tensors.
"""

from __future__ import annotations

from dask_ferro.graph.tensor import elementwise, manipulation, statistical
from dask_ferro.graph.tensor.elementwise import *  # noqa: F403
from dask_ferro.graph.tensor.manipulation import *  # noqa: F403
from dask_ferro.graph.tensor.manipulation import getitem as getitem
from dask_ferro.graph.tensor.statistical import *  # noqa: F403
from dask_ferro.graph.tensor.tensor import argument, asarray

__all__ = [
    "argument",
    "asarray",
    *manipulation.__all__,
    *elementwise.__all__,
    *statistical.__all__,
]
