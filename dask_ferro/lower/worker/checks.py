"""The checks of a task: of the inputs that arrive in it, and of the shapes that it computes.

A call checks inputs that have a shape and a dtype when it is made.  A delayed value or a future has neither before it
is computed, and a chunk of a dask array may differ from what its array declares; an engine would read big-endian bytes
as other numbers, drop a mask, or broadcast.  So each task checks the model's own inputs again, by the rules of a call.

An output of a chunk has as many rows as the chunk's inputs, and a dask array has the shape that it was made with.  In a
call on all rows at once an output may have any shape; where shape inference knows it, another one is an engine's fault,
and the rows that are left may belong to other inputs.  A declared shape may be wrong, so the task infers without the
declared ones before it refuses such an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import ConfigError, ModelError
from dask_ferro.graph.ir.inference import ValueType, declared_type
from dask_ferro.lower.signature import Signature, as_array, check_arrays, spec_of

# Shapes of a model's inputs, by name; None: not known.
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...] | None], ...]
# Sizes of an output; None: any size, or any rank.
Sizes: TypeAlias = tuple[int | None, ...] | None


class LateInputs:
    """The model's own inputs among those of a bundle, and the dtypes and shapes that fitted last.

    Chunks of a batch are nearly all alike, and whether an array fits is a matter of its dtype and shape alone: such a
    task takes two comparisons for each input.

    Parameters
    ----------
    model : onnx_ir.Model
    names : sequence of str
        The bundle's inputs; those that other bundles compute are not checked.
    free_rows : sequence of bool
        Which of them may have any number of rows, though the model declares one; (): none.
    """

    def __init__(self, model: ir.Model, names: Sequence[str], free_rows: Sequence[bool]) -> None:
        declared = {str(v.name): spec_of(v, declared_type(v)) for v in model.graph.inputs}
        self._places = [place for place, name in enumerate(names) if name in declared]
        specs = tuple(declared[names[place]] for place in self._places)
        carries = tuple(bool(free_rows) and free_rows[place] for place in self._places)
        self._signature = Signature(specs, (), 1 if any(carries) else None, carries, ())
        self._fitted: list[tuple[np.dtype[Any], tuple[int, ...]]] | None = None

    def checked(self, values: list[Any], model: str) -> list[Any]:
        """Return a task's values, of which the model's inputs are arrays that fit what it declares.

        Raises
        ------
        ConfigError
            A dtype (byte order included), a rank, a size or a kind of value that does not fit; it lists all of them.
        """
        if self._are_as_before(values):
            return values
        title, specs = f"model {model!r}", self._signature.inputs
        arrays = {
            spec.name: as_array(spec, values[place], title)
            for spec, place in zip(specs, self._places, strict=True)
        }
        check_arrays(self._signature, arrays, f"{title}, when the task ran")
        for place, array in zip(self._places, arrays.values(), strict=True):
            values[place] = array
        # Each text is looked at, as one may be missing, and each item of a sequence.
        if all(type(a) is np.ndarray and a.dtype != object for a in arrays.values()):
            self._fitted = [(array.dtype, array.shape) for array in arrays.values()]
        return values

    def _are_as_before(self, values: Sequence[Any]) -> bool:
        if self._fitted is None:
            return False
        for place, (dtype, shape) in zip(self._places, self._fitted, strict=True):
            value = values[place]
            if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
                return False
        return True


class OutputCheck(NamedTuple):
    """What the results of a bundle that are outputs of the model have to be.

    Attributes
    ----------
    model : str
        The model's name.
    outputs : tuple of (position, name, sizes)
        The results, and their sizes as far as they are known.
    reads : tuple of int
        Positions of the inputs that have the rows of the chunk.
    is_cut : bool
        Whether outputs have a row for each row of the chunk.
    shapes : tuple of (name, shape)
        In a call of arrays on all rows at once: the shapes of the model's inputs; empty: `outputs` have the last word.
    are_arrays : bool
        Whether dask arrays were made of the outputs, so that their number of axes holds in any case.
    """

    model: str
    outputs: tuple[tuple[int, str, Sizes], ...]
    reads: tuple[int, ...] = ()
    is_cut: bool = False
    shapes: Shapes = ()
    are_arrays: bool = False


def check_outputs(
    wanted: OutputCheck,
    results: Sequence[Any],
    arrays: Mapping[str, Any],
    rows: int | None,
    infer: Callable[[Shapes], Mapping[str, ValueType]],
) -> None:
    """Check the shapes of a bundle's results.

    Parameters
    ----------
    wanted : OutputCheck
    results : sequence of array or list
        The bundle's results.
    arrays : mapping of str to array
        The bundle's inputs by name, in their order.
    rows : int or None
        Rows of the chunk when the graph was built; None: not known.
    infer : callable
        Returns the types of the model's values for shapes of its inputs, without those that the model declares.

    Raises
    ------
    ConfigError
        An output of a chunk with another number of rows, or inputs whose rows differ from those of the chunk.
    ModelError
        An output with other sizes than are known.
    """
    if wanted.is_cut:
        _check_rows(wanted, results, list(arrays.values()), rows)
    shapes = tuple((n, getattr(arrays.get(n), "shape", shape)) for n, shape in wanted.shapes)
    # Sizes that follow from an input which comes later were not known when the graph was built.
    is_late = None in dict(wanted.shapes).values()
    lengths = {shape[0] for _, shape in shapes if shape}
    for position, name, sizes in wanted.outputs:
        got = getattr(results[position], "shape", None)
        if got is None or (_fits(got, sizes) and not (is_late and got and got[0] not in lengths)):
            continue
        inferred = infer(shapes)[name].shape if shapes and None not in dict(shapes).values() else None
        has_axes = not wanted.are_arrays or sizes is None or len(got) == len(sizes)
        is_inferred = not _fits(got, inferred)
        if shapes and has_axes and not is_inferred:
            continue
        needed: Sequence[object] | None = inferred if is_inferred else sizes
        text = ", ".join(str(size) if isinstance(size, int) else "?" for size in needed or ())
        raise ModelError(
            f"model {wanted.model!r}: output {name!r} has shape {tuple(got)}, wanted [{text}]",
            [
                f"this follows from the inputs ({', '.join(f'{n}: {list(shape or ())}' for n, shape in shapes)}), so an"
                " engine dropped or added rows, and the others may belong to other inputs; rewrite the operator that"
                " does (mostly one on texts), or export the model again"
                if is_inferred
                else "the dask array was made with the shape that the model declares; correct or remove the declared"
                " shape of this output, or use model.predict(x), whose results have the shapes that are computed"
            ],
        )


def _fits(got: Sequence[int], sizes: Sequence[Any] | None) -> bool:
    if sizes is None:
        return True
    known = (not isinstance(size, int) or size == n for n, size in zip(got, sizes, strict=False))
    return len(got) == len(sizes) and all(known)


def _check_rows(wanted: OutputCheck, results: Sequence[Any], arrays: Sequence[Any], rows: int | None) -> None:
    rows = _rows_read(wanted, arrays, rows)
    if rows is None:
        return
    for position, name, _ in wanted.outputs:
        got = _length(results[position])
        if got != rows:
            shape = getattr(results[position], "shape", ())
            what = "no row axis" if got is None else f"{got} rows (shape {tuple(shape)})"
            raise ConfigError(
                f"model {wanted.model!r}: output {name!r} has {what} for a chunk of {rows} rows, wanted {rows}: it"
                " does not have one row per input row, so the batch cannot be cut; run it on all rows at once (no"
                " batch=, dask arrays of one chunk along axis 0)"
            )


def _rows_read(wanted: OutputCheck, arrays: Sequence[Any], rows: int | None) -> int | None:
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
