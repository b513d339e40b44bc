"""The namespace of tensors: the functions of the array-API standard that make sense for lazy arrays.

`Tensor.__array_namespace__` returns this module, so code written against the standard takes tensors.  The names of the
standard that are left out are in docs/reference/functions.md, with the reasons.
"""

from __future__ import annotations

import math

import numpy as np

from dask_ferro.graph.tensor import creation, dtypes, elementwise, manipulation, products, statistical
from dask_ferro.graph.tensor.creation import *  # noqa: F403
from dask_ferro.graph.tensor.dtypes import *  # noqa: F403
from dask_ferro.graph.tensor.elementwise import *  # noqa: F403
from dask_ferro.graph.tensor.manipulation import *  # noqa: F403
from dask_ferro.graph.tensor.manipulation import getitem as getitem
from dask_ferro.graph.tensor.products import *  # noqa: F403
from dask_ferro.graph.tensor.statistical import *  # noqa: F403
from dask_ferro.graph.tensor.tensor import asarray, input

__array_api_version__ = "2024.12"

e, pi, inf, nan, newaxis = math.e, math.pi, math.inf, math.nan, None
bool = np.dtype(np.bool_)
int8, int16, int32, int64 = map(np.dtype, (np.int8, np.int16, np.int32, np.int64))
uint8, uint16, uint32, uint64 = map(np.dtype, (np.uint8, np.uint16, np.uint32, np.uint64))
float16, float32, float64 = map(np.dtype, (np.float16, np.float32, np.float64))

__all__ = [
    "input", "asarray", *creation.__all__, *dtypes.__all__, *elementwise.__all__,
    *manipulation.__all__, *products.__all__, *statistical.__all__,
]  # fmt: skip
