"""The row count check of tasks.

An output of a chunk has as many rows as the chunk's inputs.  In a call on all rows at once an output may have any
number of rows.  Where shape inference knows that number, another one is an engine's fault, and the rows that are left
may belong to other inputs.  A declared shape may be wrong, so the task infers without them where an output differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from dask_ferro.errors import ConfigError, ModelError
from dask_ferro.graph.ir.inference import ValueType

# Shapes of a model's inputs, by name; None: not known.
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...] | None], ...]


class RowCount(NamedTuple):
    """The outputs of a bundle whose rows are checked, and the inputs in which the chunk's rows are counted.

    Attributes
    ----------
    model : str
        The model's name.
    outputs : tuple of (position, name)
        The bundle's results that are outputs of the model.
    reads : tuple of int
        Positions of the inputs that have the rows of the chunk.
    shapes : tuple of (name, shape), optional
        In a call on all rows at once: the shapes of the model's inputs.
    rows : tuple of int or None
        The rows of each output for these shapes; None: not known.
    """

    model: str
    outputs: tuple[tuple[int, str], ...]
    reads: tuple[int, ...] = ()
    shapes: Shapes | None = None
    rows: tuple[int | None, ...] = ()


def check_count(wanted: RowCount, results: Sequence[Any], arrays: Sequence[Any], rows: int | None) -> None:
    """Check that each output has a row for each row of the chunk.

    Parameters
    ----------
    wanted : RowCount
    results : sequence of array or list
        The bundle's results.
    arrays : sequence of array
        The bundle's inputs.
    rows : int or None
        Rows of the chunk when the graph was built; None: not known.

    Raises
    ------
    ConfigError
        An output with another number of rows, or inputs whose rows differ from those of the chunk.
    """
    rows = _rows_read(wanted, arrays, rows)
    if rows is None:
        return
    for position, name in wanted.outputs:
        got = _length(results[position])
        if got != rows:
            shape = getattr(results[position], "shape", ())
            what = "no row axis" if got is None else f"{got} rows (shape {tuple(shape)})"
            raise ConfigError(
                f"model {wanted.model!r}: output {name!r} has {what} for a chunk of {rows} rows, wanted {rows}: it"
                " does not have one row per input row, so the batch cannot be cut; run it on all rows at once (no"
                " batch=, dask arrays of one chunk along axis 0)"
            )


def check_whole(
    wanted: RowCount,
    results: Sequence[Any],
    infer: Callable[[Shapes], Mapping[str, ValueType]],
    arrays: Mapping[str, Any],
) -> None:
    """Raise `ModelError` where an output of a call on all rows has others than follow from the shapes of the inputs.

    `arrays` are the bundle's inputs by name; `infer` returns the types of the model's values.
    """
    shapes = tuple((n, getattr(arrays.get(n), "shape", shape)) for n, shape in wanted.shapes or ())
    lengths = {shape[0] for _, shape in shapes if shape}
    is_late = None in dict(wanted.shapes or ()).values()
    for (position, name), expected in zip(wanted.outputs, wanted.rows, strict=True):
        got = _length(results[position])
        fits = got in lengths if is_late else expected in (None, got)
        if got is None or fits or None in dict(shapes).values():
            continue
        rows = (infer(shapes)[name].shape or (None,))[0]
        if isinstance(rows, int) and got != rows:
            listed = ", ".join(f"{n}: {list(shape or ())}" for n, shape in shapes)
            raise ModelError(
                f"model {wanted.model!r}: output {name!r} has {got} rows, wanted {rows} for inputs of shapes {listed}",
                [
                    "an engine dropped or added rows, so that the others may belong to other inputs; rewrite the"
                    " operator that does (mostly one on texts), or export the model again"
                ],
            )


def _rows_read(wanted: RowCount, arrays: Sequence[Any], rows: int | None) -> int | None:
    """Return the rows of the inputs that carry the chunk, `rows` where none does; one row may be broadcast."""
    read, is_one = None, False
    for position in wanted.reads:
        length = _length(arrays[position])
        # It may be broadcast over the rows of another input, so other inputs decide where there are any.
        if length == 1:
            is_one = True
        elif length is not None:
            read = length
            break
    if read is None:
        return rows if rows is not None or not is_one else 1
    # Dask does not check the declared lengths of chunks: those of `map_blocks` without `chunks=` may be wrong.
    if rows is not None and read != rows:
        raise ConfigError(
            f"model {wanted.model!r}: got {read} rows for a chunk of {rows}: a dask array's chunk is not as long as"
            " the array declares; correct the chunks= of the call that made it (map_blocks or from_delayed)"
        )
    return read


def _length(value: Any) -> int | None:
    """Return the length of an array along axis 0, or of a list; None for a scalar."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    return len(value) if isinstance(value, list) else None
