"""Functions of tensors that move elements (reshape, transpose, join, cut, take), and matrix products."""

from __future__ import annotations

# ruff: noqa: F403, F405
from dask_ferro.graph.tensor.manipulation.creation import *
from dask_ferro.graph.tensor.manipulation.creation import positions as positions
from dask_ferro.graph.tensor.manipulation.filled import *
from dask_ferro.graph.tensor.manipulation.indexing import *
from dask_ferro.graph.tensor.manipulation.indexing import checked_indices as checked_indices
from dask_ferro.graph.tensor.manipulation.indexing import getitem as getitem
from dask_ferro.graph.tensor.manipulation.indexing import sliced as sliced
from dask_ferro.graph.tensor.manipulation.joining import *
from dask_ferro.graph.tensor.manipulation.joining import ints as ints
from dask_ferro.graph.tensor.manipulation.products import *
from dask_ferro.graph.tensor.manipulation.repetition import *
from dask_ferro.graph.tensor.manipulation.shapes import *
from dask_ferro.graph.tensor.manipulation.shapes import broadcast_like as broadcast_like
from dask_ferro.graph.tensor.manipulation.shapes import reshape_like as reshape_like
from dask_ferro.graph.tensor.manipulation.shapes import scalar_size as scalar_size
from dask_ferro.graph.tensor.manipulation.shapes import shape_of as shape_of
from dask_ferro.graph.tensor.manipulation.shapes import size_of as size_of

__all__ = [
    "arange", "astype", "broadcast_arrays", "broadcast_shapes", "broadcast_to", "concat", "expand_dims",
    "eye", "flip", "full", "full_like", "linspace", "matmul", "matrix_transpose", "meshgrid", "moveaxis",
    "ones", "ones_like", "permute_dims", "repeat", "reshape", "roll", "split", "squeeze", "stack", "take",
    "take_along_axis", "tensordot", "tile", "tril", "triu", "unstack", "vecdot", "zeros", "zeros_like",
]  # fmt: skip
