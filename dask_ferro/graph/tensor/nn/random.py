"""Dropout by a counter-based generator, whose bits depend on a key and an element's place in the whole tensor alone.

    key      64 bits of (seed, layer, step), by the mixing function of SplitMix64
    counter  the element's index in the whole tensor, row by row
    bits     Squares (Widynski, arXiv:2004.06278): four rounds of counter * key, squared and with its halves exchanged

Ordinary integer nodes compute them, so every engine gives the same mask, on any number of ranks, and again when it is
computed a second time.  No state is kept, and no two calls depend on their order.
"""

from __future__ import annotations

import hashlib
import math
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.dtypes import INTEGER
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.dims import alike, is_static, sizes, written
from dask_ferro.graph.tensor.manipulation import positions, shape_of, sliced
from dask_ferro.graph.tensor.statistical import reduce
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, asarray, cast, floating

_INT64, _UINT64 = ir.DataType.INT64, ir.DataType.UINT64
# The weights of SplitMix64: the golden ratio, and the multipliers of its mixing function.
_GOLDEN, _FIRST, _SECOND = (
    np.asarray(n, np.uint64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_HALF = np.asarray(32, np.uint64)
_WORD = 2**64

# A tensor, or a numpy scalar of uint64: both have the operators that mixing needs.
_Bits = TypeVar("_Bits")


def dropout(
    x: TensorLike,
    rate: float,
    /,
    *,
    seed: TensorLike,
    layer: int | str,
    step: TensorLike = 0,
    rows: TensorLike | None = None,
) -> Tensor:
    """Return x with each element set to 0 with probability `rate`, the others divided by 1 - rate.

    The same seed, layer and step give the same elements, whatever the plan, the engine or the number of ranks.  For
    inference, leave the call out or give a rate of 0.

    Parameters
    ----------
    x : Tensor
    rate : float
        From 0 up to and including 1.
    seed : int or Tensor
        A scalar of integers, of the whole run.
    layer : int or str
        What distinguishes this call from the others of a step: two calls with one layer drop the same places.
    step : int or Tensor, optional
        A scalar of integers: an argument that counts the steps of training, so that each has other places.
    rows : Tensor, optional
        The number of each row (dimension 0) in the whole batch, integers of (rows), where the graph sees a part of it:
        an argument that is cut into chunks or micro-batches as `x` is.  0, 1, ... if left out.

    Returns
    -------
    Tensor
        In the shape and dtype of `x`.

    Raises
    ------
    ConfigError
        A rate outside 0 to 1; a seed or step that is no integer; or rows that do not match.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.nn.dropout([1.0, 2.0, 3.0, 4.0], 0.5, seed=7, layer="mlp").compute()
    array([0., 4., 0., 0.], dtype=float32)
    """
    tensor = floating(x, "dropout")
    if not 0 <= rate <= 1:
        raise ConfigError(f"dropout: rate: got {rate!r}, wanted a number from 0 to 1")
    if rate in (0, 1):
        return tensor if rate == 0 else tensor * 0.0
    key = _key(_scalar(seed, "seed"), layer, _scalar(step, "step"))
    bits = _squares(_counter(tensor, rows), key)
    # An element is kept where its 32 bits are at or above the rate, as a part of 2 ** 32.
    kept = bits >= np.asarray(math.floor(rate * 2**32), np.uint64)
    return xp.where(kept, tensor * (1 / (1 - rate)), 0.0)


def _scalar(value: TensorLike, name: str) -> Tensor | np.ndarray[tuple[()], np.dtype[np.uint64]]:
    """Return a scalar of uint64: a number where it is known, else a tensor."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return np.asarray(int(value) % _WORD, np.uint64)
    given = asarray(value)
    if given.ndim or given.type.dtype not in INTEGER:
        raise ConfigError(f"dropout: {name}: got {given!r}, wanted one integer")
    return cast(given, _UINT64)


def _mixed(x: _Bits) -> _Bits:
    """Return 64 bits of which each depends on all bits of `x` (the finalizer of SplitMix64)."""
    for shift, weight in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ (x >> np.asarray(shift, np.uint64))) * weight  # type: ignore[operator]
    return x ^ (x >> np.asarray(31, np.uint64))  # type: ignore[no-any-return, operator]


def _key(seed: _Bits, layer: int | str, step: _Bits) -> _Bits:
    """Return the odd key of one call in one step."""
    text = str(layer).encode()
    told = np.asarray(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"), np.uint64)
    with np.errstate(over="ignore"):
        key = _mixed(_mixed(seed + _GOLDEN) ^ told)  # type: ignore[operator]
        mixed = _mixed(key + step * _GOLDEN)  # type: ignore[operator]
        # Odd, as the generator asks: an even key would lose the counter's upper bits.
        return mixed | np.asarray(1, np.uint64)  # type: ignore[no-any-return, operator]


def _counter(x: Tensor, rows: TensorLike | None) -> Tensor:
    """Return the index of each element in the whole tensor as uint64, laid out over ranks as `x` is."""
    if not x.ndim:
        return _like(x, asarray(np.asarray(0, np.int64)))
    first = positions(x, 0) if rows is None else _rows(rows, x)
    if x.ndim == 1:
        return _like(x, first)
    within: Tensor | None = None
    for axis in reversed(range(1, x.ndim)):
        part = _along(positions(x, axis) * _stride(x, axis), axis, x.ndim)
        within = part if within is None else within + part
    assert within is not None
    return _like(x, _along(first * _stride(x, 0), 0, x.ndim)) + cast(within, _UINT64)


def _rows(rows: TensorLike, x: Tensor) -> Tensor:
    given = asarray(rows)
    if given.type.dtype not in INTEGER or not alike(given.shape, x.shape[:1]):
        wanted = f"integers of {written(x.shape[:1])}, the number of each row of {x!r}"
        raise ConfigError(f"dropout: rows: got {given!r}, wanted {wanted}")
    return cast(given, _INT64)


def _along(vector: Tensor, axis: int, rank: int) -> Tensor:
    return xp.expand_dims(vector, axis=[i for i in range(rank) if i != axis])


def _stride(x: Tensor, axis: int) -> Tensor:
    """Return the number of elements of one position along an axis, as an int64 scalar."""
    behind = x.shape[axis + 1 :]
    if is_static(behind):
        return asarray(np.asarray(math.prod(sizes(behind)), np.int64))
    return reduce("ReduceProd", sliced(shape_of(x), {0: slice(axis + 1, None)}), None, keepdims=False)


def _like(x: Tensor, index: Tensor) -> Tensor:
    """Return an index broadcast to the shape of `x`, as uint64.

    Both branches are the same: the condition only ties the result to `x`, so that ranks which have a part of `x`
    compute the bits of that part.
    """
    return cast(xp.where(xp.isnan(x), index, index), _UINT64)


def _squares(counter: Tensor, key: TensorLike) -> Tensor:
    """Return 32 random bits for each counter, as uint64."""
    y = counter * key
    z = y + key
    x = y
    for shift in (y, z, y):
        x = x * x + shift
        x = (x >> _HALF) | (x << _HALF)
    return (x * x + z) >> _HALF


__all__ = ["dropout"]
