"""Check results of tasks, copy shared memory, send small arrays as stacks, and join chunks to one array.

An output of a chunk has as many rows as the chunk's inputs, and a dask array has the shape that it was created with.
In a call on all rows an output may have any shape; if shape inference knows it, a different shape is an engine's
fault, and the remaining rows may belong to other inputs.  A declared shape may be wrong, so the task infers without
declared shapes before it refuses such an output.

Dask sends a tuple or a dict array by array: a header, a frame and a copy of the array's type each, at both ends and
once more at the scheduler.  Sending and receiving 1,280 arrays of 1 kB takes 57 ms this way, 29 if the tuple is
pickled whole, and 5 if arrays of one dtype and shape are stacked first.  Arrays over `MAX_COPY` are not copied.
Results that are not numpy arrays are left to Dask's serializers (for a device's memory, for one).

The array table returns views (Identity, Reshape, Slice, Expand), and a model may return an input or a weight
unchanged.  In this process a caller's array is the task's own argument, so that writing to a result would change the
input, and the results of the next call.  Results that may share memory are copied: memory bounds are compared, which
takes a fraction of a microsecond, and interleaved views count as sharing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from dask_ferro.errors import InputError, ModelError

if TYPE_CHECKING:
    from dask_ferro.graph.ir.inference import ValueType

# Bytes: above this, a copy costs more than a frame of its own, and large arrays are few.
MAX_COPY = 64 * 1024
# Positions of arrays, and their stack; a single array is as it is.
Stack: TypeAlias = tuple[list[int], np.ndarray]
# Shapes of a model's inputs, by name; None: not known.
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...] | None], ...]
# Sizes of an output; None: any size, or any rank.
Sizes: TypeAlias = tuple[int | None, ...] | None


class OutputCheck(NamedTuple):
    """Requirements on the results of a bundle that are outputs of the model.

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
        In a call of arrays on all rows: the shapes of the model's inputs; empty: `outputs` decide.
    are_arrays : bool
        Whether the outputs became dask arrays, so that their number of axes is binding in any case.
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
    InputError
        If an output of a chunk has another number of rows, or the rows of inputs differ from the rows of the chunk.
    ModelError
        If an output has other sizes than the known sizes.
    """
    if wanted.is_cut:
        _check_rows(wanted, results, list(arrays.values()), rows)
    shapes = tuple((n, getattr(arrays.get(n), "shape", shape)) for n, shape in wanted.shapes)
    # Sizes that depend on a lazy input were not known when the graph was built.
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
                "this follows from the inputs"
                f" ({', '.join(f'{n}: {list(shape or ())}' for n, shape in shapes)}), so an engine dropped"
                " or added rows, and the others may belong to other inputs; rewrite the operator that does"
                " (mostly one on texts), or export the model again"
                if is_inferred
                else "the dask array was created with the shape that the model declares; correct or remove the declared"
                " shape of this output, or use model.predict(x), whose results have the shapes that are"
                " computed"
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
            raise InputError(
                f"model {wanted.model!r}: output {name!r} has {what} for a chunk of {rows} rows, wanted"
                f" {rows}: it does not have one row per input row, so the batch cannot be cut; run it on all"
                " rows in one task (no batch_size=, dask arrays of one chunk along axis 0)"
            )


def _rows_read(wanted: OutputCheck, arrays: Sequence[Any], rows: int | None) -> int | None:
    """Return the rows of the inputs that carry the chunk, `rows` if none does; one row may be broadcast."""
    read, is_one = None, False
    for position in wanted.reads:
        length = _length(arrays[position])
        # It may be broadcast over the rows of another input, so other inputs decide if there are any.
        if length == 1:
            is_one = True
        elif length is not None:
            read = length
            break
    if read is None:
        return rows if rows is not None or not is_one else 1
    # Dask does not check the declared lengths of chunks: after `map_blocks` without `chunks=` they may be wrong.
    if rows is not None and read != rows:
        raise InputError(
            f"model {wanted.model!r}: got {read} rows for a chunk of {rows}: a dask array's chunk is not as"
            " long as the array declares; correct the chunks= of the call that created it (map_blocks or"
            " from_delayed)"
        )
    return read


def _length(value: Any) -> int | None:
    """Return the length of an array along axis 0, or of a list; None for a scalar."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    return len(value) if isinstance(value, list) else None


# ---- memory of their own -----------------------------------------------------------------------------------


def copy_shared(results: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results, copied if they may share memory with an input, a weight or an earlier result.

    Parameters
    ----------
    results : sequence of array, or of lists of arrays
    inputs : sequence
        The values from which they were computed.
    """
    taken = list(_arrays(inputs))
    return tuple([_copy_result(result, taken) for result in results])


def _copy_result(result: Any, taken: list[np.ndarray]) -> Any:
    if isinstance(result, list):
        return [_copy_result(item, taken) for item in result]
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


# ---- on their way to other processes -----------------------------------------------------------------------


class Outputs(tuple[Any, ...]):
    """The results of a task, by position."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return unstack_arrays, (stack_arrays(self),)


class NamedOutputs(dict[str, Any]):
    """The results of a task, by name; unpickled, they are a plain dict."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _name_outputs, (list(self), Outputs(self.values()))


def pack_results(results: Sequence[Any]) -> tuple[Any, ...]:
    """Return `results` as a tuple with a compact pickle; a tuple of device arrays stays as it is."""
    return Outputs(results) if _are_arrays(results) else tuple(results)


def together_by_name(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return `results` as a dict with a compact pickle."""
    return NamedOutputs(results) if _are_arrays(results.values()) else dict(results)


def _are_arrays(values: Iterable[Any]) -> bool:
    return all(type(v) is np.ndarray for v in values)


def _name_outputs(names: list[str], values: Outputs) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def stack_arrays(arrays: Sequence[np.ndarray]) -> list[Stack]:
    """Return arrays with their positions, small ones of one dtype and shape as a stack.

    >>> unstack_arrays(stack_arrays([np.arange(2), np.zeros(1), np.ones(2, int)]))
    (array([0, 1]), array([0.]), array([1, 1]))
    """
    places: dict[Hashable, list[int]] = {}
    for i, x in enumerate(arrays):
        places.setdefault((x.dtype, x.shape) if x.nbytes <= MAX_COPY else i, []).append(i)
    return [
        # The dtype is explicit, because a stack would have the machine's byte order.
        (at, arrays[at[0]] if len(at) == 1 else np.stack([arrays[i] for i in at], dtype=arrays[at[0]].dtype))
        for at in places.values()
    ]


def unstack_arrays(stacks: Sequence[Stack]) -> Outputs:
    """Return the arrays that `stack_arrays` packed."""
    found = {i: stack if len(at) == 1 else stack[k, ...] for at, stack in stacks for k, i in enumerate(at)}
    return Outputs(found[i] for i in range(len(found)))


# ---- chunks put together -----------------------------------------------------------------------------------


def join_chunks(values: Sequence[Any], place: int | None, model: str, output: str) -> Any:
    """Return the chunks of one output as one array, or list; each is the item of a value at a place, or the value."""
    parts = list(values) if place is None else [value[place] for value in values]
    if len(parts) == 1:
        return parts[0]
    # A sequence has no array to concatenate: ZipMap returns a list of dicts, one a row.
    if all(isinstance(part, list) for part in parts):
        return list(chain.from_iterable(parts))
    for before, after in pairwise(parts):
        check_alike(after, np.shape(before), model, output)
    return np.concatenate(parts, axis=0)


def check_alike(part: Any, shape: Sequence[int], model: str, output: str) -> None:
    """Raise `InputError` if a chunk differs from the shape of another in more than its rows."""
    got = np.shape(part)
    if got[1:] != tuple(shape[1:]):
        raise InputError(
            f"model {model!r}: output {output!r} has shape {tuple(shape)} of a chunk and {got} of another,"
            f" but only axis 0 may differ: its other axes depend on which rows are computed together, so the"
            " batch cannot be cut; run it on all rows in one task (no batch_size=, dask"
            " arrays of one chunk along axis 0, without empty chunks)"
        )


def pick(value: Any, place: int | None, shape: Sequence[int] | None = None, *names: str) -> Any:
    """Return one output of a chunk; its shape has to agree with the first chunk's shape, if that is passed."""
    found = value if place is None else value[place]
    if shape is not None:
        check_alike(found, shape, *names)
    return found


def shape_at(value: Any, place: int | None) -> tuple[int, ...]:
    """Return the shape of one output of a chunk."""
    return np.shape(pick(value, place))
