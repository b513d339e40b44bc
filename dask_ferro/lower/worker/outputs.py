"""Results of a task with several outputs, whose small arrays are sent as few.

Dask sends a tuple or a dict array by array: a header, a frame and a copy of the array's type each, at both ends and
once more at the scheduler.  Of 1,280 arrays of 1 kB, sending and receiving takes 57 ms so, 29 if the tuple is pickled
whole, and 5 if arrays of one dtype and shape are stacked first.  Arrays over `LARGE` are not copied.

Results that are not numpy arrays are left to Dask's serializers (for a device's memory, for one).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

# Bytes: above this, a copy costs more than a frame of its own, and large arrays are few.
LARGE = 64 * 1024
# Positions of arrays, and their stack; a single array is as it is.
Stack: TypeAlias = tuple[list[int], np.ndarray]


class Outputs(tuple[Any, ...]):
    """The results of a task, by position."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _outputs, (stacked(self),)


class NamedOutputs(dict[str, Any]):
    """The results of a task, by name; unpickled, they are a plain dict."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (list(self), stacked(list(self.values())))


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


def _outputs(stacks: Sequence[Stack]) -> Outputs:
    return Outputs(unstacked(stacks))


def _named(names: list[str], stacks: Sequence[Stack]) -> dict[str, Any]:
    return dict(zip(names, unstacked(stacks), strict=True))


def stacked(arrays: Sequence[np.ndarray]) -> list[Stack]:
    """Return arrays with their positions, small ones of one dtype and shape as a stack.

    >>> unstacked(stacked([np.arange(2), np.zeros(1), np.ones(2, int)]))
    [array([0, 1]), array([0.]), array([1, 1])]
    """
    places: dict[Hashable, list[int]] = {}
    for i, x in enumerate(arrays):
        places.setdefault((x.dtype, x.shape) if x.nbytes <= LARGE else i, []).append(i)
    return [
        # The dtype is said, because a stack would have the machine's byte order.
        (at, arrays[at[0]] if len(at) == 1 else np.stack([arrays[i] for i in at], dtype=arrays[at[0]].dtype))
        for at in places.values()
    ]


def unstacked(stacks: Sequence[Stack]) -> list[np.ndarray]:
    """Return the arrays that `stacked` took."""
    found = {i: stack if len(at) == 1 else stack[k, ...] for at, stack in stacks for k, i in enumerate(at)}
    return [found[i] for i in range(len(found))]
