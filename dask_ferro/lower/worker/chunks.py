"""The chunks of an output: one output of a task's several, and all chunks as one array.

What each task gives has its chunk's rows (`output_check`).  Whether chunks agree in their other axes is seen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from dask_ferro.errors import ConfigError


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
