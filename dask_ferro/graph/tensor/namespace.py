"""The namespace of tensors: the functions of the array-API standard that make sense for lazy arrays.

`Tensor.__array_namespace__` returns this module, so code written against the standard takes tensors.
"""

from __future__ import annotations

import math

import numpy as np

from dask_ferro.graph.tensor import dtypes, elementwise, manipulation, searching, statistical
from dask_ferro.graph.tensor.dtypes import *  # noqa: F403
from dask_ferro.graph.tensor.elementwise import *  # noqa: F403
from dask_ferro.graph.tensor.manipulation import *  # noqa: F403
from dask_ferro.graph.tensor.manipulation import getitem as getitem
from dask_ferro.graph.tensor.searching import *  # noqa: F403
from dask_ferro.graph.tensor.statistical import *  # noqa: F403
from dask_ferro.graph.tensor.tensor import argument, asarray

__array_api_version__ = "2024.12"

e, pi, inf, nan, newaxis = math.e, math.pi, math.inf, math.nan, None
bool = np.dtype(np.bool_)
int8, int16, int32, int64 = map(np.dtype, (np.int8, np.int16, np.int32, np.int64))
uint8, uint16, uint32, uint64 = map(np.dtype, (np.uint8, np.uint16, np.uint32, np.uint64))
float16, float32, float64 = map(np.dtype, (np.float16, np.float32, np.float64))

# Names of the standard that are left out, and why.
LEFT_OUT = {
    **dict.fromkeys(
        ("complex64", "complex128", "conj", "imag", "real"),
        "ONNX's operators compute with no complex numbers",
    ),
    **dict.fromkeys(
        ("nonzero", "unique_all", "unique_counts", "unique_inverse", "unique_values"),
        "the size of the result depends on values, and shapes are known before a graph runs",
    ),
    **dict.fromkeys(("empty", "empty_like"), "a graph has no memory that is not initialized; use zeros"),
    **dict.fromkeys(("fft", "linalg"), "optional extensions"),
    "from_dlpack": "a tensor is lazy and has no memory; asarray takes arrays",
    "nextafter": "the bits of a floating point number cannot be read before opset 26",
    "__array_namespace_info__": "a tensor has no device; the dtypes are ONNX's",
}

__all__ = [
    "argument",
    "asarray",
    *manipulation.__all__,
    *elementwise.__all__,
    *statistical.__all__,
    *searching.__all__,
    *dtypes.__all__,
]
