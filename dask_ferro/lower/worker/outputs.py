"""Results of a task with several outputs, whose small arrays are sent in one buffer.

Dask sends a tuple or a dict array by array: a header, a frame and a copy of the array's type each, at both ends and
once more at the scheduler, so that 1,280 arrays of 1 kB took 46 ms from the workers to the client.  These types define
their own pickle, which Dask uses for types without a serializer: one buffer of the small arrays, and one entry for
each run of arrays of equal dtype and shape, which took 10 ms.  Arrays over `LARGE` keep a buffer of their own, as
numpy pickles them.

Unpickled arrays equal the original ones and are views of the received buffer.  Results that are not numpy arrays are
left to Dask's serializers (for a device's memory, for one).  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from pickle import PickleBuffer
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

# Bytes: above this, a copy costs more than a frame of its own, and large arrays are few.
LARGE = 64 * 1024
# Bytes: runs of arrays start at multiples of this, the alignment of long doubles, the largest numbers.
ALIGNED = 16
# Dtypes that their name describes in full, so that the name is sent in their place.
PLAIN = frozenset(map(np.dtype, np.typecodes["All"])) - frozenset(map(np.dtype, "SUVOMm"))

# Dtype, shape and number of equal arrays in succession; with dtype "" the number of large arrays.
Run: TypeAlias = tuple[str, tuple[int, ...], int]
# Runs of arrays of one dtype and shape, one buffer of all small arrays, and the large arrays.
Packed: TypeAlias = tuple[list[Run], Any, list[np.ndarray]]


class Outputs(tuple[Any, ...]):
    """The results of a task, by position."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return _outputs, pack(self, protocol)


class NamedOutputs(dict[str, Any]):
    """The results of a task, by name; unpickled, they are a plain dict."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return _named, (list(self), *pack(list(self.values()), protocol))


def together(results: Sequence[Any]) -> tuple[Any, ...]:
    """Return `results` as a tuple with a compact pickle; a tuple of device arrays stays as it is."""
    if _are_arrays(results):
        return Outputs(results)
    return results if isinstance(results, tuple) else tuple(results)


def together_by_name(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return `results` as a dict with a compact pickle."""
    return NamedOutputs(results) if _are_arrays(results.values()) else dict(results)


def _are_arrays(values: Iterable[Any]) -> bool:
    return all(type(v) is np.ndarray for v in values)


def _outputs(runs: list[Run], buffer: Any, large: list[np.ndarray]) -> Outputs:
    return Outputs(unpack(runs, buffer, large))


def _named(names: list[str], runs: list[Run], buffer: Any, large: list[np.ndarray]) -> dict[str, Any]:
    return dict(zip(names, unpack(runs, buffer, large), strict=True))


def pack(arrays: Sequence[np.ndarray], protocol: SupportsIndex = 5) -> Packed:
    """Return runs of arrays of one dtype and shape, the small arrays' buffer, and the large arrays.

    Examples
    --------
    >>> runs, buffer, large = pack([np.arange(3), np.arange(2), np.zeros(2)])
    >>> runs
    [('<i8', (3,), 1), ('<i8', (2,), 1), ('<f8', (2,), 1)]
    >>> unpack(runs, buffer, large)
    [array([0, 1, 2]), array([0, 1]), array([0., 0.])]
    """
    runs: list[Run] = []
    pieces: list[bytes] = []
    large: list[np.ndarray] = []
    for (dtype, shape), alike in groupby(arrays, _kind):
        run = list(alike)
        runs.append((dtype, shape, len(run)))
        if dtype:
            pieces += [x.tobytes() for x in run]
            pieces.append(bytes(-sum(x.nbytes for x in run) % ALIGNED))
        else:
            large += run
    # A bytearray, as views of bytes would be read-only when received.
    buffer = bytearray().join(pieces)
    return runs, PickleBuffer(buffer) if int(protocol) >= 5 else buffer, large


def unpack(runs: Sequence[Run], buffer: Any, large: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays that `pack` took; they are writable, like arrays that Dask sends."""
    if memoryview(buffer).readonly:
        buffer = bytearray(buffer)
    return list(_unpacked(runs, buffer, iter(large)))


def _unpacked(runs: Sequence[Run], buffer: Any, large: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    start = 0
    for dtype, shape, count in runs:
        if not dtype:
            yield from (next(large) for _ in range(count))
            continue
        items = count * prod(shape)
        flat = np.frombuffer(buffer, dtype, items, start) if items else np.empty(0, dtype)
        block = flat.reshape(count, *shape)
        yield from (block[i, ...] for i in range(count))
        start += -(-block.nbytes // ALIGNED) * ALIGNED


def _kind(x: np.ndarray) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape of a small array of a plain dtype, by which runs are formed; else ("", ())."""
    return (x.dtype.str, x.shape) if x.dtype in PLAIN and x.nbytes <= LARGE else ("", ())
