"""The computations of collectives: reduce terms, split an array, join its parts.

Terms are always reduced in the given order, so the same terms give the same bits, independent of the order of their
arrival.  Arrays are of one namespace (numpy, CuPy).  The messages are planned elsewhere; this module does not wait or
communicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from array_api_compat import array_namespace

from dask_ferro.engines import Array
from dask_ferro.graph.ir.dtypes import HALF_NAMES
from dask_ferro.graph.ir.nodes import extent


class Sum(NamedTuple):
    """A sum of terms in the precision of the addition, and the dtype of the result."""

    total: Array
    dtype: object


def reduced(terms: Sequence[Array], reduction: str = "sum") -> Array:
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
    >>> reduced([np.array([1.0, 2.0]), np.array([3.0, 6.0])], "mean").tolist()
    [2.0, 4.0]
    """
    if reduction in ("sum", "mean"):
        return finished(added(terms), len(terms) if reduction == "mean" else None)
    xp = array_namespace(*terms)
    total = terms[0]
    for term in terms[1:]:
        total = xp.maximum(total, term) if reduction == "max" else xp.minimum(total, term)
    return xp.asarray(total)


def added(terms: Sequence[Array]) -> Sum:
    """Return the sum of terms (arrays or earlier sums), added from the first to the last."""
    sums = [term if isinstance(term, Sum) else _wide(term) for term in terms]
    # In the given order, because the order of additions decides the last bits.
    total = sums[0].total
    # Infinite sums are results, as in engines: a loss scale is found by them (`ff.fit`).
    with np.errstate(all="ignore"):
        for term in sums[1:]:
            total = total + term.total
    return Sum(total, sums[0].dtype)


def finished(found: Sum, terms: int | None = None) -> Array:
    """Return a sum as an array of its dtype; with a number of terms their mean, which is a float for integers."""
    xp = array_namespace(found.total)
    with np.errstate(all="ignore"):
        total = xp.asarray(found.total if terms is None else found.total / terms)
        # Rounded once here, not after each addition.
        return xp.astype(total, found.dtype) if str(found.dtype) in HALF_NAMES else total


def _wide(term: Array) -> Sum:
    # In float32, because half precision would round every sum to 8 or 11 bits.
    xp = array_namespace(term)
    return Sum(xp.astype(term, xp.float32) if str(term.dtype) in HALF_NAMES else term, term.dtype)


def joined(pieces: Sequence[Array], axis: int) -> Array:
    """Return pieces joined along an axis."""
    # A single piece is returned unchanged: `concat` would copy it.
    return pieces[0] if len(pieces) == 1 else array_namespace(*pieces).concat(list(pieces), axis=axis)


def piece(array: Array, axis: int, index: int, count: int) -> Array:
    """Return part `index` of `count` along an axis, as `extent` cuts it; a view where the namespace has views."""
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


def unflattened(pieces: Sequence[Array], shape: Sequence[int]) -> Array:
    """Return the array of a shape that `flat_piece` split."""
    flat = joined(pieces, 0)
    return array_namespace(flat).reshape(flat, tuple(shape))
