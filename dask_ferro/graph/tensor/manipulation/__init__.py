"""Functions of tensors that move elements (reshape, transpose, join, cut, take), and matrix products."""

from __future__ import annotations

from dask_ferro.graph.tensor.manipulation.creation import (
    astype,
    full_like,
    ones_like,
    zeros_like,
)
from dask_ferro.graph.tensor.manipulation.creation import positions as positions
from dask_ferro.graph.tensor.manipulation.indexing import checked_indices as checked_indices
from dask_ferro.graph.tensor.manipulation.indexing import (
    flip,
    take,
    take_along_axis,
)
from dask_ferro.graph.tensor.manipulation.indexing import getitem as getitem
from dask_ferro.graph.tensor.manipulation.indexing import sliced as sliced
from dask_ferro.graph.tensor.manipulation.joining import (
    concat,
    split,
)
from dask_ferro.graph.tensor.manipulation.joining import ints as ints
from dask_ferro.graph.tensor.manipulation.products import (
    matmul,
)
from dask_ferro.graph.tensor.manipulation.shapes import broadcast_like as broadcast_like
from dask_ferro.graph.tensor.manipulation.shapes import (
    broadcast_to,
    expand_dims,
    matrix_transpose,
    permute_dims,
    reshape,
    squeeze,
    stack,
)
from dask_ferro.graph.tensor.manipulation.shapes import moveaxis as moveaxis
from dask_ferro.graph.tensor.manipulation.shapes import reshape_like as reshape_like
from dask_ferro.graph.tensor.manipulation.shapes import shape_of as shape_of
from dask_ferro.graph.tensor.manipulation.shapes import size_of as size_of

__all__ = [
    "astype", "broadcast_to", "concat", "expand_dims", "flip", "full_like", "matmul",
    "matrix_transpose", "ones_like", "permute_dims", "reshape", "split", "squeeze", "stack", "take",
    "take_along_axis", "zeros_like",
]  # fmt: skip
