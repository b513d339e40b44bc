"""The computations of collectives: reduce terms, split an array, join its parts.

Terms are always reduced in the given order, so the same terms give the same bits, independent of the order of their
arrival.  Arrays are of one namespace (numpy, CuPy).  The messages are planned elsewhere; this module does not wait or
communicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from operator import add

import numpy as np
from array_api_compat import array_namespace

from dask_ferro.engines import Array
from dask_ferro.graph.ir.dtypes import HALF_NAMES
from dask_ferro.graph.ir.nodes import extent


def reduce_arrays(terms: Sequence[Array], reduction: str = "sum") -> Array:
    """Return the sum, mean, maximum or minimum of terms, reduced from the first to the last.

    Terms in half precision are added in float32, and the result is rounded once.

    Parameters
    ----------
    terms : sequence of array
        At least one, of the same shape and dtype; they are not changed.
    reduction : str
        "sum", "mean", "max" or "min".

    Examples
    --------
    >>> import numpy as np
    >>> reduce_arrays([np.array([1.0, 2.0]), np.array([3.0, 6.0])], "mean").tolist()
    [2.0, 4.0]
    """
    xp, dtype = array_namespace(*terms), terms[0].dtype
    if reduction in ("max", "min"):
        return xp.asarray(reduce(xp.maximum if reduction == "max" else xp.minimum, terms))
    # Half precision would round every sum to 8 or 11 bits.
    is_half = str(dtype) in HALF_NAMES
    wide = (xp.astype(term, xp.float32) if is_half else term for term in terms)
    # Infinite sums are results, as in engines: they determine the loss scale (`ff.fit`).
    with np.errstate(all="ignore"):
        total = reduce(add, wide)
        total = xp.asarray(total / len(terms) if reduction == "mean" else total)
        return xp.astype(total, dtype) if is_half else total


def join_pieces(pieces: Sequence[Array], axis: int) -> Array:
    """Return pieces joined along an axis."""
    # A single piece is returned unchanged: `concat` would copy it.
    return pieces[0] if len(pieces) == 1 else array_namespace(*pieces).concat(list(pieces), axis=axis)


def piece(array: Array, axis: int, index: int, count: int) -> Array:
    """Return part `index` of `count` along an axis, as `extent` cuts it; a view if the namespace has views."""
    cut = slice(*extent(array.shape[axis], index, count))
    return array[(slice(None),) * axis + (cut,)]


def flat_piece(array: Array, index: int, count: int) -> Array:
    """Return part `index` of `count` nearly equal parts of an array's elements, in row-major order.

    Examples
    --------
    >>> import numpy as np
    >>> [flat_piece(np.arange(5), i, 2).tolist() for i in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    size = prod(array.shape)
    flat = array_namespace(array).reshape(array, (-1,))
    return flat[size * index // count : size * (index + 1) // count]


def unflatten(pieces: Sequence[Array], shape: Sequence[int]) -> Array:
    """Return the array of a shape that `flat_piece` split."""
    flat = join_pieces(pieces, 0)
    return array_namespace(flat).reshape(flat, tuple(shape))
