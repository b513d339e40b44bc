"""The row count check of tasks of chunks: an output has as many rows as its chunk's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dask_ferro.errors import ConfigError


class RowCount(NamedTuple):
    """The outputs of a bundle whose rows are checked, and the inputs that its chunk's rows are counted in.

    Attributes
    ----------
    model : str
        Its name.
    outputs : tuple of (position, name)
        Those of the bundle's results that are outputs of the model.
    reads : tuple of int
        Which of its inputs have the rows of the chunk.
    """

    model: str
    outputs: tuple[tuple[int, str], ...]
    reads: tuple[int, ...] = ()


def check_count(wanted: RowCount, results: Sequence[Any], arrays: Sequence[Any], rows: int | None) -> None:
    """Check that each output has a row for each row of the chunk.

    Parameters
    ----------
    wanted : RowCount
    results : sequence of array or list
        Of the bundle.
    arrays : sequence of array
        Its inputs.
    rows : int or None
        Of the chunk, as the graph was built for; None: not known.

    Raises
    ------
    ConfigError
        Naming model, output, what it has and what it should have; or the rows that came for a chunk of others.
    """
    rows = _rows_read(wanted, arrays, rows)
    if rows is None:
        return
    for position, name in wanted.outputs:
        got = _length(results[position])
        if got != rows:
            shape = getattr(results[position], "shape", ())
            what = "no axis of rows" if got is None else f"{got} rows (shape {tuple(shape)})"
            raise ConfigError(
                f"model {wanted.model!r}: output {name!r} has {what} for a chunk of {rows} rows, wanted {rows}: it"
                " has no row for each row of the input, so it is not to be cut; run it on all rows at once (no"
                " batch=, dask arrays of one chunk along axis 0)"
            )


def _rows_read(wanted: RowCount, arrays: Sequence[Any], rows: int | None) -> int | None:
    """Return the rows of the inputs that carry the chunk, `rows` where none does; an input of one row serves all."""
    read, is_one = None, False
    for position in wanted.reads:
        length = _length(arrays[position])
        # It may be broadcast over the rows of another input, so it tells nothing while there are others.
        if length == 1:
            is_one = True
        elif length is not None:
            read = length
            break
    if read is None:
        return rows if rows is not None or not is_one else 1
    # A dask array says how long its chunks are, and nothing checks it: `map_blocks` without `chunks=` may be wrong.
    if rows is not None and read != rows:
        raise ConfigError(
            f"model {wanted.model!r}: {read} rows came for a chunk of {rows}: a dask array's chunk is not as long as"
            " the array says; mend what makes it (chunks= of map_blocks or from_delayed)"
        )
    return read


def _length(value: Any) -> int | None:
    """Return the rows of an array, or of a list of them; None of a single number."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    return len(value) if isinstance(value, list) else None
