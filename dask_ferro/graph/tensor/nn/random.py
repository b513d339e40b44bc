"""Dropout with a counter-based generator, whose bits depend only on a key and an element's place in the whole tensor.

    key      64 bits of (seed, layer, step), by the mixing function of SplitMix64
    counter  the number of a group of four elements, 16 apart along the last dimension, in the whole tensor
    bits     Squares (Widynski, arXiv:2004.06278): five rounds of counter * key, squared and with its halves exchanged,
             give 64 bits, 16 for each element of the group

Ordinary integer nodes compute them, so every engine gives the same mask, on any number of ranks, and again when it is
computed a second time.  No state is kept, and no two calls depend on their order.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.manipulation import ints, positions, size_of
from dask_ferro.graph.tensor.nn.layers import check_shape
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, cast, emit, floating, integers

_INT64, _UINT64 = ir.DataType.INT64, ir.DataType.UINT64
# The weights of SplitMix64: the golden ratio, and the multipliers of its mixing function.
_GOLDEN, _FIRST, _SECOND = (
    np.asarray(n, np.uint64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_HALF = np.asarray(32, np.uint64)
_WORD = 2**64
# Elements that share a draw, the bits of each, and how far they are apart.  For 4 million elements on one core, ONNX
# Runtime takes 53 ms like this, 218 if every element draws, and 198 if neighbours share (it broadcasts run by run).
_LANES, _LANE_BITS, _LANE_SHIFT = 4, 16, 16
_BLOCK = _LANES * _LANE_SHIFT
_PARTS = 2**_LANE_BITS

# A tensor, or a numpy scalar of uint64: both have the operators that mixing needs.
_Bits = TypeVar("_Bits")


@example(
    'nn.dropout([1.0, 2.0, 3.0, 4.0], 0.5, seed=7, layer="mlp").compute()',
    "array([0., 4., 6., 0.], dtype=float32)",
)
def dropout(
    input: TensorLike,
    p: float = 0.5,
    *,
    seed: TensorLike,
    layer: int | str,
    step: TensorLike = 0,
    rows: TensorLike | None = None,
) -> Tensor:
    """Return the input with each element set to 0 with probability p, and the others divided by 1 - p.

    The same seed, layer and step give the same elements, whatever the plan, the engine or the number of ranks.  For
    inference, leave the call out or give a p of 0.

    Parameters
    ----------
    input : Tensor
    p : float, optional
        Probability from 0 to 1, rounded to a multiple of 2 ** -16.
    seed, step : int or Tensor
        Integer scalars: the seed of the whole run, and an argument that counts the steps of training, so that each
        step drops other places.
    layer : int or str
        Number or name that distinguishes this call from the others of a step: two calls with one layer drop the same
        places.
    rows : Tensor, optional
        The number of each row (dimension 0) in the whole batch, integers of (rows).  Needed if the graph sees only a
        part of the batch: an argument that is cut into chunks or micro-batches like the input.  0, 1, ... by default.
    """
    x = floating(input, "dropout")
    if not 0 <= p <= 1:
        raise InputError(f"dropout: p: got {p!r}, wanted a number from 0 to 1")
    dropped = round(p * _PARTS)
    if dropped in (0, _PARTS):
        return x if dropped == 0 else x * 0.0
    key = _key(_scalar(seed, "seed"), layer, _scalar(step, "step"))
    if rows is not None:
        rows = cast(integers(rows, "dropout: rows"), _INT64)
        check_shape("dropout: rows", rows, x.shape[:1], f"the number of each row of {x!r}")
    return xp.where(_mask(x, key, dropped, rows), x * (_PARTS / (_PARTS - dropped)), 0.0)


def _scalar(value: TensorLike, name: str) -> Tensor | np.ndarray[tuple[()], np.dtype[np.uint64]]:
    """Return a scalar of uint64: a number if it is known, else a tensor."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return np.asarray(int(value) % _WORD, np.uint64)
    scalar = integers(value, f"dropout: {name}")
    check_shape(f"dropout: {name}", scalar, (), "one integer")
    return cast(scalar, _UINT64)


def _mix(x: _Bits) -> _Bits:
    """Return 64 bits of which each depends on all bits of `x` (the finalizer of SplitMix64)."""
    for shift, weight in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ (x >> np.asarray(shift, np.uint64))) * weight  # type: ignore[operator]
    return x ^ (x >> np.asarray(31, np.uint64))  # type: ignore[no-any-return, operator]


def _key(seed: _Bits, layer: int | str, step: _Bits) -> _Bits:
    text = str(layer).encode()
    label = np.asarray(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"), np.uint64)
    with np.errstate(over="ignore"):
        key = _mix(_mix(seed + _GOLDEN) ^ label)  # type: ignore[operator]
        mixed = _mix(key + step * _GOLDEN)  # type: ignore[operator]
        # Odd, as the generator requires: an even key would lose the counter's upper bits.
        return mixed | np.asarray(1, np.uint64)  # type: ignore[no-any-return, operator]


def _mask(x: Tensor, key: TensorLike, dropped: int, rows: Tensor | None) -> Tensor:
    """Return which elements are kept: their 16 bits are at or above `dropped`."""
    if not x.ndim:
        return xp.reshape(_mask(xp.reshape(x, (1,)), key, dropped, rows), ())
    shifts = np.arange(_LANES, dtype=np.uint64) * np.uint64(_LANE_BITS)
    # Compared in place: taking the bits of a lane out would be one more pass over all elements.
    masks, bounds = np.uint64(_PARTS - 1) << shifts, np.uint64(dropped) << shifts
    last, row = x.shape[-1], x.ndim - 1
    if row and isinstance(last, int) and last and last % _BLOCK == 0:
        blocks = last // _BLOCK
        place = ints(range(blocks * _LANE_SHIFT)).reshape(blocks, _LANE_SHIFT) + _groups_before(
            x, ints([blocks * _LANE_SHIFT]), rows, 2
        )
        parted = _reshape_last(x, (blocks, _LANES, _LANE_SHIFT))
        bits = xp.expand_dims(_squares(_broadcast_index(parted[..., 0, :], place), key), axis=-2)
        return _reshape_last((bits & masks[:, None]) >= bounds[:, None], (last,), 3)
    place = rows if rows is not None and not row else positions(x, row)
    inside, lane = place % _LANE_SHIFT, place % _BLOCK // _LANE_SHIFT
    groups = (size_of(x, row) + (_BLOCK - 1)) // _BLOCK * _LANE_SHIFT
    group = place // _BLOCK * _LANE_SHIFT + inside + _groups_before(x, groups, rows, 1)
    bits = _squares(_broadcast_index(x, group), key)
    return (bits & xp.take(masks, lane)) >= xp.take(bounds, lane)


def _reshape_last(x: Tensor, shape: tuple[int, ...], replaced: int = 1) -> Tensor:
    """Return `x` with its last dimensions in another shape, the others unchanged, known or not."""
    first = x.shape[: x.ndim - replaced]
    return emit("Reshape", [x, ints([*(0 for _ in first), *shape])], (*first, *shape))


def _groups_before(x: Tensor, groups: Tensor, rows: Tensor | None, behind: int) -> Tensor:
    """Return the number of groups before each row of the last dimension, with `behind` dimensions of size 1 behind."""
    total, stride = ints([0]), groups
    for axis in reversed(range(x.ndim - 1)):
        place = positions(x, axis) if axis or rows is None else rows
        total = total + xp.expand_dims(place * stride, axis=list(range(1, x.ndim - 2 - axis + behind + 1)))
        stride = stride * size_of(x, axis)
    return total


def _broadcast_index(x: Tensor, index: Tensor) -> Tensor:
    """Return an index broadcast to the shape of `x`, as uint64.

    Both branches are the same: the condition only ties the result to `x`, so that ranks which have a part of `x`
    compute the bits of that part.
    """
    return cast(xp.where(xp.isnan(x), index, index), _UINT64)


def _squares(counter: Tensor, key: TensorLike) -> Tensor:
    """Return 64 random bits for each counter (`squares64` of the paper)."""
    y = counter * key
    z = y + key
    x = last = y
    for shift in (y, z, y, z):
        last = x * x + shift
        # The halves exchanged; a product moves bits up in half the time of a shift.
        x = (last >> _HALF) + last * np.asarray(2**32, np.uint64)
    return last ^ ((x * x + y) >> _HALF)
