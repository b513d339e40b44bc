"""Bundles on arrays without elements, such as a chunk of no rows.

ONNX Runtime ends the process on a GRU without rows, and refuses some operators.  So a bundle runs on one and on three
made-up rows in their place: an axis that is three times as long then is the axis of the rows, and has none.

    x [0, 5, 3] --GRU--> y: [1, 5, 4] of one row, [3, 5, 4] of three, so it is [0, 5, 4]

A result that has elements all the same (a mean over the rows, or their number) is left to the engines, with the arrays
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

# Three, not two: an axis that is halved and padded has one element for one row, two for two, and one for none.
_ROWS = (1, 3)


def reads_nothing(arrays: Iterable[Any]) -> bool:
    """Return whether one of the arrays has no elements."""
    for value in arrays:  # noqa: SIM110 - runs for each task: `any` takes three times as long
        if type(value) is np.ndarray and value.size == 0:
            return True
    return False


def run_on_nothing(run: Callable[..., tuple[Any, ...]], arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a bundle computes from arrays some of which have no elements."""
    try:
        one, three = (run(*[_filled(value, rows) for value in arrays]) for rows in _ROWS)
    except Exception:  # noqa: BLE001 - made-up rows may not fit sizes that come from other bundles
        return run(*arrays)
    made = tuple(map(_without_rows, one, three))
    return run(*arrays) if any(value is None for value in made) else made


def _filled(value: Any, rows: int) -> Any:
    """Return an array with made-up rows along its axes without elements; every other value as it is."""
    if type(value) is not np.ndarray or value.size:
        return value
    filler = "a" if value.dtype.hasobject else 0
    return np.full([size or rows for size in value.shape], filler, value.dtype)


def _without_rows(one: Any, three: Any) -> Any:
    """Return a result of no rows by those of one and three; None if it has elements, or may have."""
    if isinstance(one, list):
        return [] if (len(one), len(three)) == _ROWS else None
    if type(one) is not np.ndarray or one.ndim != three.ndim:
        return None
    sizes = [0 if longer == 3 * size else size for size, longer in zip(one.shape, three.shape, strict=True)]
    changed = any(size and size != longer for size, longer in zip(sizes, three.shape, strict=True))
    return None if changed or 0 not in sizes else np.empty(sizes, one.dtype)
