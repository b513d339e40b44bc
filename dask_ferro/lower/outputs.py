"""Several results of one task, of which the small ones travel in one buffer.

Dask sends a tuple or a dict array by array: a header, a frame and a copy of the array's type each, some 35 us at
both ends and once more at the scheduler, so that 1,280 arrays of 1 kB took 50 ms from the workers to the client.
Together they are one frame and a line about each run of arrays alike.  Arrays over `LARGE` keep a frame of their
own: copying one costs more than that saves.

What comes out is what went in, as views of the buffer that came.  Results that are no numpy arrays stay with Dask,
which knows better how (a device's memory, for one).  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any, TypeAlias

import numpy as np
from distributed.protocol import dask_deserialize, dask_serialize, deserialize, serialize

LARGE = 64 * 1024  # copied twice in 20 us, about what a frame costs
ALIGNED = 16  # each run of arrays starts at a multiple of this
PLAIN = frozenset(map(np.dtype, np.typecodes["All"])) - frozenset(map(np.dtype, "SUVOMm"))  # a name says all

Run: TypeAlias = tuple[str, tuple[int, ...], int]  # dtype, shape, arrays; dtype "": that many large ones
Header: TypeAlias = dict[str, Any]


class Outputs(tuple[Any, ...]):
    """The results of a task, by position."""

    __slots__ = ()


class NamedOutputs(dict[str, Any]):
    """The results of a task, by name; sent somewhere, they arrive as a dict."""


def together(results: Sequence[Any]) -> tuple[Any, ...]:
    """Return `results` as a tuple that travels well."""
    return Outputs(results) if _are_arrays(results) else tuple(results)


def together_by_name(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return `results` as a dict that travels well."""
    return NamedOutputs(results) if _are_arrays(results.values()) else dict(results)


def _are_arrays(values: Iterable[Any]) -> bool:
    return all(type(v) is np.ndarray for v in values)


@dask_serialize.register(Outputs)  # type: ignore[untyped-decorator]
def _pack_tuple(outputs: Outputs) -> tuple[Header, list[Any]]:
    return pack(outputs)


@dask_deserialize.register(Outputs)  # type: ignore[untyped-decorator]
def _unpack_tuple(header: Header, frames: Sequence[Any]) -> Outputs:
    return Outputs(unpack(header, frames))


@dask_serialize.register(NamedOutputs)  # type: ignore[untyped-decorator]
def _pack_dict(outputs: NamedOutputs) -> tuple[Header, list[Any]]:
    header, frames = pack(list(outputs.values()))
    return {**header, "names": list(outputs)}, frames


@dask_deserialize.register(NamedOutputs)  # type: ignore[untyped-decorator]
def _unpack_dict(header: Header, frames: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(header["names"], unpack(header, frames), strict=True))


def pack(arrays: Sequence[np.ndarray]) -> tuple[Header, list[Any]]:
    """Return a header that msgpack can write, and frames: the small arrays' buffer, then those of large ones.

    Examples
    --------
    >>> header, frames = pack([np.arange(3), np.zeros(2)])
    >>> len(frames)
    1
    >>> unpack(header, frames)
    [array([0, 1, 2]), array([0., 0.])]
    """
    runs: list[Run] = []
    pieces: list[bytes] = []
    large: list[tuple[Header, int]] = []
    frames: list[Any] = []
    for (dtype, shape), alike in groupby(arrays, _kind):
        run = list(alike)
        runs.append((dtype, shape, len(run)))
        if dtype:
            pieces += [x.tobytes() for x in run]
            pieces.append(bytes(-sum(x.nbytes for x in run) % ALIGNED))
            continue
        for x in run:
            header, own = serialize(x)
            large.append((header, len(own)))
            frames += own
    return {"runs": runs, "large": large}, [b"".join(pieces), *frames]


def unpack(header: Header, frames: Sequence[Any]) -> list[np.ndarray]:
    """Return the arrays that `pack` was given; they can be written to, as what Dask sends can."""
    buffer, *rest = frames
    if memoryview(buffer).readonly:  # it came compressed, or from disk
        buffer = bytearray(buffer)
    return list(_unpacked(header, buffer, iter(rest)))


def _unpacked(header: Header, buffer: Any, frames: Iterator[Any]) -> Iterator[np.ndarray]:
    large = iter(header["large"])
    start = 0
    for dtype, shape, count in header["runs"]:
        if not dtype:
            for _ in range(count):
                own, number = next(large)
                yield deserialize(own, [next(frames) for _ in range(number)])
            continue
        items = count * prod(shape)
        flat = np.frombuffer(buffer, dtype, items, start) if items else np.empty(0, dtype)
        block = flat.reshape(count, *shape)
        yield from (block[i, ...] for i in range(count))
        start += -(-block.nbytes // ALIGNED) * ALIGNED


def _kind(x: np.ndarray) -> tuple[str, tuple[int, ...]]:
    """What arrays of one run have in common: dtype and shape of small ones; ("", ()) of all others."""
    return (x.dtype.str, x.shape) if x.dtype in PLAIN and x.nbytes <= LARGE else ("", ())
