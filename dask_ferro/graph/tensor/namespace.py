"""The namespace of tensors: the array-API standard's names, as far as they are lazy array math.

`Tensor.__array_namespace__` gives this module, so code written against the standard takes tensors.  It only
gathers; what each function does is said where it is written.
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
