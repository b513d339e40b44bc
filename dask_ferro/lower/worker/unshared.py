"""Results that share no memory with the caller's input, a cached weight or each other.

The array table returns views (Identity, Reshape, Slice, Expand), and a model may return an input or a weight as it is.
In this process a caller's array is the task's own argument, so that writing to a result would change the input, and
the results of the next call.  Results that may share memory are copied: memory bounds are compared, which takes a
fraction of a microsecond, and interleaved views count as sharing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def unshared(results: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results, copied where they may share memory with an input, a weight or an earlier result.

    Parameters
    ----------
    results : sequence of array, or of lists of arrays
    inputs : sequence
        The values that they were computed from.
    """
    taken = list(inputs)
    for value in taken:
        if type(value) is not np.ndarray:
            taken = list(_arrays(inputs))
            break
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
