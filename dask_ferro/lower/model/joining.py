"""Assembly of a model's outputs from those of its chunks, in the process that wants the result.

What each task gives has its chunk's rows (`row_count`).  Whether chunks agree in the other dimensions is seen here, by
whoever has several: a list of texts that is as wide as its longest row has another width in each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from dask.core import flatten

from dask_ferro.errors import ConfigError
from dask_ferro.lower.worker.outputs import together_by_name


def join(parts: Any, along_rows: bool, model: str, output: str) -> Any:
    """Return the chunks of one output as one array.

    Parameters
    ----------
    parts : sequence of array or list
    along_rows : bool
        Whether the output carries the batch.
    model, output : str
        Names, for an error.

    Raises
    ------
    ConfigError
        They cannot be joined.
    """
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    # A sequence has no array to concatenate: ZipMap gives a list of dicts, one a row.
    if all(isinstance(part, list) for part in parts):
        return list(chain.from_iterable(parts))
    if not along_rows:
        raise ConfigError(
            f"model {model!r}: output {output!r} does not carry the batch axis, so it cannot be joined from several"
            " chunks; run without batch="
        )
    check_alike(parts, model, output)
    return np.concatenate(parts, axis=0)


def check_alike(parts: Sequence[Any], model: str, output: str) -> None:
    """Raise `ConfigError` where chunks of an output differ in more than their rows."""
    shapes = [part.shape for part in parts if isinstance(part, np.ndarray)]
    for before, after in pairwise(shapes):
        if before[1:] != after[1:]:
            raise ConfigError(
                f"model {model!r}: output {output!r} has shape {before} of a chunk and {after} of the next, wanted the"
                f" same but for axis 0, {before[1:]}: its other axes depend on which rows are computed together, so it"
                " is not to be cut; run it on all rows at once (no batch=, dask arrays of one chunk along axis 0,"
                " without empty chunks)"
            )


def assemble(
    results: Any,
    names: tuple[str, ...],
    places: tuple[tuple[int, int], ...],
    gives: tuple[bool, ...],
    model: str,
) -> Any:
    """Return one array, or a dict of arrays by name, from the values of the collection's keys.

    Parameters
    ----------
    results : list of lists
        One list per key series (a bundle or an input), a value per chunk.
    names : tuple of str
        Of the outputs.
    places : tuple of (series, index)
        Where each output lies; index -1: the value itself.
    gives : tuple of bool
        Whether each output carries the batch.
    model : str
        Its name.
    """
    joined: dict[str, Any] = {}
    for name, (series, index), along in zip(names, places, gives, strict=True):
        parts = results[series] if index < 0 else [value[index] for value in results[series]]
        joined[name] = join(parts, along, model, name)
    return joined[names[0]] if len(names) == 1 else together_by_name(joined)


def rebuilt(
    results: Any, rebuild: Callable[..., Any], arguments: Iterable[Any], model: str, output: str
) -> Any:
    """Return a dask array's value, rebuilt from chunks whose shapes agree."""
    if isinstance(results, list):
        check_alike(list(flatten(results)), model, output)
    return rebuild(results, *arguments)
