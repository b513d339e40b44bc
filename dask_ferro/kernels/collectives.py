"""What ranks compute when they exchange arrays: sums of terms, pieces of a whole, wholes of pieces.

Terms are put together in the order in which they are given, always, so the same terms give the same bits
however late each of them came.  Arrays are of one namespace (numpy, CuPy).  Who sends what to whom, and in how
many pieces, is decided elsewhere; nothing here waits or communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from array_api_compat import array_namespace


def reduced(terms: Sequence[Any], reduction: str = "sum") -> Any:
    """Return terms as one array: their sum, mean, maximum or minimum, from the first to the last.

    Parameters
    ----------
    terms : sequence of array
        One at least, of one shape and dtype; they are not changed.
    reduction : str
        "sum", "mean", "max" or "min".

    Examples
    --------
    >>> import numpy as np
    >>> reduced([np.array([1.0, 2.0]), np.array([3.0, 6.0])], "mean").tolist()
    [2.0, 4.0]
    """
    xp = array_namespace(*terms)
    total = terms[0]
    for term in terms[1:]:
        if reduction in ("sum", "mean"):
            total = total + term
        else:
            total = xp.maximum(total, term) if reduction == "max" else xp.minimum(total, term)
    return xp.asarray(total / len(terms) if reduction == "mean" else total)


def joined(pieces: Sequence[Any], axis: int) -> Any:
    """Return pieces one behind the other along an axis."""
    return pieces[0] if len(pieces) == 1 else array_namespace(*pieces).concat(list(pieces), axis=axis)


def piece(array: Any, axis: int, index: int, count: int) -> Any:
    """Return the part at `index` of `count` equal parts along an axis, as a view where there are views.

    The axis is a multiple of `count` long.
    """
    length = array.shape[axis] // count
    cut = slice(index * length, (index + 1) * length)
    return array[(slice(None),) * axis + (cut,)]


def flat_piece(array: Any, index: int, count: int) -> Any:
    """Return the part at `index` of `count` nearly equal parts of an array's elements, in their order.

    Examples
    --------
    >>> import numpy as np
    >>> [flat_piece(np.arange(5), i, 2).tolist() for i in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    size = prod(array.shape)
    flat = array_namespace(array).reshape(array, (-1,))
    return flat[size * index // count : size * (index + 1) // count]


def unflattened(pieces: Sequence[Any], shape: Sequence[int]) -> Any:
    """Return the array of a shape that `flat_piece` took apart."""
    flat = joined(pieces, 0)
    return array_namespace(flat).reshape(flat, tuple(shape))
