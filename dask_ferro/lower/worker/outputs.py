"""Results of tasks: they share no memory, small arrays are sent as few, and chunks become one array.

Dask sends a tuple or a dict array by array: a header, a frame and a copy of the array's type each, at both ends and
once more at the scheduler.  Of 1,280 arrays of 1 kB, sending and receiving takes 57 ms so, 29 if the tuple is pickled
whole, and 5 if arrays of one dtype and shape are stacked first.  Arrays over `LARGE` are not copied.  Results that are
not numpy arrays are left to Dask's serializers (for a device's memory, for one).

The array table returns views (Identity, Reshape, Slice, Expand), and a model may return an input or a weight as it is.
In this process a caller's array is the task's own argument, so that writing to a result would change the input, and
the results of the next call.  Results that may share memory are copied: memory bounds are compared, which takes a
fraction of a microsecond, and interleaved views count as sharing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, TypeAlias

import numpy as np

from dask_ferro.errors import ConfigError

# Bytes: above this, a copy costs more than a frame of its own, and large arrays are few.
LARGE = 64 * 1024
# Positions of arrays, and their stack; a single array is as it is.
Stack: TypeAlias = tuple[list[int], np.ndarray]


class Outputs(tuple[Any, ...]):
    """The results of a task, by position."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return unstacked, (stacked(self),)


class NamedOutputs(dict[str, Any]):
    """The results of a task, by name; unpickled, they are a plain dict."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (list(self), Outputs(self.values()))


def together(results: Sequence[Any]) -> tuple[Any, ...]:
    """Return `results` as a tuple with a compact pickle; a tuple of device arrays stays as it is."""
    return Outputs(results) if _are_arrays(results) else tuple(results)


def together_by_name(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return `results` as a dict with a compact pickle."""
    return NamedOutputs(results) if _are_arrays(results.values()) else dict(results)


def _are_arrays(values: Iterable[Any]) -> bool:
    return all(type(v) is np.ndarray for v in values)


def _named(names: list[str], values: Outputs) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def stacked(arrays: Sequence[np.ndarray]) -> list[Stack]:
    """Return arrays with their positions, small ones of one dtype and shape as a stack.

    >>> unstacked(stacked([np.arange(2), np.zeros(1), np.ones(2, int)]))
    (array([0, 1]), array([0.]), array([1, 1]))
    """
    places: dict[Hashable, list[int]] = {}
    for i, x in enumerate(arrays):
        places.setdefault((x.dtype, x.shape) if x.nbytes <= LARGE else i, []).append(i)
    return [
        # The dtype is said, because a stack would have the machine's byte order.
        (at, arrays[at[0]] if len(at) == 1 else np.stack([arrays[i] for i in at], dtype=arrays[at[0]].dtype))
        for at in places.values()
    ]


def unstacked(stacks: Sequence[Stack]) -> Outputs:
    """Return the arrays that `stacked` took."""
    found = {i: stack if len(at) == 1 else stack[k, ...] for at, stack in stacks for k, i in enumerate(at)}
    return Outputs(found[i] for i in range(len(found)))


def unshared(results: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results, copied where they may share memory with an input, a weight or an earlier result.

    Parameters
    ----------
    results : sequence of array, or of lists of arrays
    inputs : sequence
        The values that they were computed from.
    """
    taken = list(_arrays(inputs))
    return tuple([_own(result, taken) for result in results])


def _own(result: Any, taken: list[np.ndarray]) -> Any:
    if isinstance(result, list):
        return [_own(item, taken) for item in result]
    if type(result) is not np.ndarray:
        return result
    # A weight is read-only, and so is a view in which one element appears in several places.
    shared = not result.flags.writeable
    if not shared:
        for other in taken:
            if np.may_share_memory(result, other):
                shared = True
                break
    mine = result.copy() if shared else result
    taken.append(mine)
    return mine


def _arrays(values: Sequence[Any]) -> Iterator[np.ndarray]:
    for value in values:
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _arrays(value)


def joined(values: Sequence[Any], place: int | None, model: str, output: str) -> Any:
    """Return the chunks of one output as one array, or list: of each value the item at a place, or the value."""
    parts = list(values) if place is None else [value[place] for value in values]
    if len(parts) == 1:
        return parts[0]
    # A sequence has no array to concatenate: ZipMap gives a list of dicts, one a row.
    if all(isinstance(part, list) for part in parts):
        return list(chain.from_iterable(parts))
    for before, after in pairwise(parts):
        check_alike(after, np.shape(before), model, output)
    return np.concatenate(parts, axis=0)


def check_alike(part: Any, shape: Sequence[int], model: str, output: str) -> None:
    """Raise `ConfigError` where a chunk differs from the shape of another in more than its rows."""
    got = np.shape(part)
    if got[1:] != tuple(shape[1:]):
        raise ConfigError(
            f"model {model!r}: output {output!r} has shape {tuple(shape)} of a chunk and {got} of another, wanted the"
            f" same but for axis 0, {tuple(shape[1:])}: its other axes depend on which rows are computed together, so"
            " it is not to be cut; run it on all rows at once (no batch=, dask arrays of one chunk along axis 0,"
            " without empty chunks)"
        )


def pick(value: Any, place: int | None, shape: Sequence[int] | None = None, *names: str) -> Any:
    """Return one output of a chunk; where a shape is given, that of the first chunk, it has to agree with it."""
    found = value if place is None else value[place]
    if shape is not None:
        check_alike(found, shape, *names)
    return found


def shape_at(value: Any, place: int | None) -> tuple[int, ...]:
    """Return the shape of one output of a chunk."""
    return np.shape(pick(value, place))
