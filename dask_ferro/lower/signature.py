"""The signature of a model, its inputs and outputs; checks arrays against it.

The batch axis is axis 0 of the first input whose axis 0 is open, or has the size 1: the inputs whose axis 0 has the
same symbol (or the same fixed size) carry the batch with it.  For others whose axis 0 is open, the arrays of the call
decide (`model.bound`); the rest are passed whole to every chunk.  All problems of a call are reported together,
before a graph is built.

A call immediately checks inputs that have a shape and a dtype.  A delayed value or a future has neither before it is
computed, and a chunk of a dask array may differ from the array's declaration; an engine would read big-endian bytes
as other numbers, drop a mask, or broadcast.  So each task checks the model's own inputs again, by the same rules.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from dask.base import is_dask_collection

from dask_ferro.errors import InputError
from dask_ferro.lower.upstream import is_masked
from dask_ferro.words import limit_texts, pluralize

if TYPE_CHECKING:
    import onnx_ir as ir

    from dask_ferro.graph.ir.inference import ValueType

Dim = int | str | None
# Labels of columns that a model's text shows; some classifiers have thousands of classes.
_LABELS_SHOWN = 10
# The entry of a model's metadata with the names of its input's columns; ONNX has no other place for them.
FEATURE_NAMES = "feature_names"


class ValueSpec(NamedTuple):
    """Name, numpy dtype (None: not a tensor, or unknown) and shape (None: rank unknown) of an input or output.

    `classes` are the labels of the columns of a classifier's scores, if the model's ZipMap has them; `columns` are
    the names of an input's columns, if the model's metadata has them.
    """

    name: str
    dtype: np.dtype[Any] | None
    shape: tuple[Dim, ...] | None
    kind: str = "tensor"
    classes: tuple[str | int, ...] = ()
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind != "tensor" or self.dtype is None:
            return f"{self.name}: {self.kind}"
        dims = "?" if self.shape is None else ", ".join("?" if d is None else str(d) for d in self.shape)
        labels = self.classes or self.columns
        columns = f" (columns: {', '.join(limit_texts(_LABELS_SHOWN, map(repr, labels)))})" if labels else ""
        return f"{self.name}: {self.dtype.name}[{dims}]{columns}"


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a model in order, and the values that carry the batch axis.

    Attributes
    ----------
    batch : int, str or None
        Size of axis 0 of the inputs that carry the batch: a fixed size, a symbol, or None when there is no such
        axis or its size is not declared.
    carries : tuple of bool
        Which inputs carry the batch.
    gives : tuple of bool
        Which outputs may carry the batch.  If the batch is open, all: declared shapes may be wrong, and
        `graph.batch_independence` traces the rows.  If it is fixed, the outputs whose axis 0 has its size or none.
    """

    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    batch: Dim
    carries: tuple[bool, ...]
    gives: tuple[bool, ...]

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """The names of the inputs that carry the batch."""
        return tuple(s.name for s, carries in zip(self.inputs, self.carries, strict=True) if carries)

    @cached_property
    def fixed_rows(self) -> int:
        """1 for a model whose batch size is fixed at 1, so that it is run row by row; else 0."""
        return 1 if self.batch == 1 else 0

    @property
    def held_elsewhere(self) -> str:
        """Text about an axis that has the name of the batch axis and is not cut with it; "" if there is none."""
        cut = [s.shape for s in self.inputs if s.name in self.carried and s.shape]
        names = {shape[0] for shape in cut if isinstance(shape[0], str)}
        for spec in self.inputs:
            for axis, dim in enumerate(spec.shape or ()):
                if dim in names and (axis or spec.name not in self.carried):
                    return f"axis {axis} of input {spec.name!r} is {dim!r} too, the number of all rows"
        return ""


def signature(model: ir.Model, types: Mapping[str, ValueType]) -> Signature:
    """Return the signature of a loaded model whose values have `types`."""
    inputs = tuple(spec_of(v, types[str(v.name)]) for v in model.graph.inputs)
    if len(inputs) == 1 and (names := model.metadata_props.get(FEATURE_NAMES)):
        inputs = (_with_columns(inputs[0], names),)
    outputs = tuple(spec_of(v, types[str(v.name)]) for v in model.graph.outputs)
    ranked = [s for s in inputs if s.shape]
    first = next((s for s in ranked if _is_open(s)), ranked[0] if ranked else None)
    if first is None or first.shape is None:
        return Signature(inputs, outputs, None, (False,) * len(inputs), (False,) * len(outputs))
    batch = first.shape[0]
    # Dimensions without a name may differ, so only one input has an unnamed batch axis.
    named = {s.name for s in inputs if batch is not None and (s.shape or ())[:1] == (batch,)}
    return with_batch(Signature(inputs, outputs, batch, (), ()), {first.name} | named)


def _is_open(spec: ValueSpec) -> bool:
    first = spec.shape[0] if spec.shape else 0
    # Exporters that fix the batch size write 1 for any number of rows.
    return first == 1 or not isinstance(first, int)


def may_carry(spec: ValueSpec) -> bool:
    """Whether an input can be cut along its axis 0: it is open, or not known."""
    if spec.kind != "tensor" or spec.shape == ():
        return False
    return spec.shape is None or not isinstance(spec.shape[0], int)


def with_batch(sig: Signature, names: Collection[str]) -> Signature:
    """Return the signature with the batch on axis 0 of these inputs."""
    carrying = [s for s in sig.inputs if s.name in names]
    batch = next((s.shape[0] for s in carrying if s.shape and s.shape[0] is not None), None)
    carries = tuple(s.name in names for s in sig.inputs)
    is_open = not isinstance(batch, int)
    gives = tuple(is_open or s.shape is None or s.shape[:1] in ((batch,), (None,)) for s in sig.outputs)
    return Signature(sig.inputs, sig.outputs, batch, carries, gives)


def spec_of(value: ir.Value, its: ValueType) -> ValueSpec:
    """Return the specification of an input or output of a type."""
    # Tasks import this module; onnx_ir and what it imports take a second.
    from dask_ferro.graph.ir import ml_types
    from dask_ferro.graph.ir.dtypes import array_dtype

    dtype = array_dtype(its.dtype) if its.dtype is not None and its.kind == "tensor" else None
    return ValueSpec(str(value.name), dtype, its.shape, its.kind, value.meta.get(ml_types.CLASSES, ()))


def _with_columns(spec: ValueSpec, text: str) -> ValueSpec:
    """Return a matrix with the names of its columns: a JSON list, or separated by commas; unchanged if none fit."""
    try:
        names = json.loads(text) if text.startswith("[") else [name.strip() for name in text.split(",")]
    except (ValueError, RecursionError):
        return spec
    width = (spec.shape or ())[1:]
    fits = len(width) == 1 and (width[0] == len(names) or not isinstance(width[0], int))
    are_names = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    return spec._replace(columns=tuple(names)) if fits and are_names else spec


# ---- the inputs of a call ----------------------------------------------------------------------------------


def call_arrays(sig: Signature, given: Any, title: str) -> dict[str, Any]:
    """Return the inputs of a call as arrays by name, which fit the signature.

    Raises
    ------
    InputError
        If names, dtypes or shapes do not fit; the message lists all of them.
    """
    named = by_name(sig, given, title)
    arrays = {spec.name: as_array(spec, named[spec.name], title) for spec in sig.inputs}
    check_arrays(sig, arrays, title)
    return arrays


def by_name(sig: Signature, given: Any, title: str) -> dict[str, Any]:
    """Return the inputs as a dict by name: one array of a model with one input, a mapping, or a tuple in its order.

    Raises
    ------
    InputError
        If names are missing or unknown, or there are too many.
    """
    names = [s.name for s in sig.inputs]
    if isinstance(given, Mapping):
        unknown = [f"unknown input {name!r}" for name in sorted(set(given) - set(names))]
        problem = ", ".join(unknown + [f"missing input {name!r}" for name in names if name not in given])
    else:
        values = given if isinstance(given, tuple) else (given,)
        given = dict(zip(names, values, strict=False))
        problem = (
            f"got {pluralize(len(values), 'input')}, wanted {len(names)}" if len(values) != len(names) else ""
        )
    if problem:
        raise InputError(
            f"{title}: {problem}; the model takes {'; '.join(map(str, sig.inputs)) or 'no inputs'}"
        )
    return {name: given[name] for name in names}


def shape_of(value: Any) -> tuple[Any, ...] | None:
    """Return the shape of an array; None for a future or a delayed value, whose shape is not known."""
    shape = getattr(value, "shape", None)
    return shape if isinstance(shape, tuple) else None


def check_arrays(sig: Signature, arrays: Mapping[str, Any], title: str) -> None:
    """Raise `InputError` that lists every mismatch of dtype, rank or size.

    Values without a shape (futures, delayed values) are not checked.
    """
    problems: list[str] = []
    symbols: dict[str, tuple[int, str]] = {}
    for spec, carries in zip(sig.inputs, sig.carries, strict=True):
        given = arrays[spec.name]
        if spec.kind != "tensor":
            problems += _unreadable(spec, given)
        elif shape_of(given) is None and comes_later(given):
            continue
        elif shape_of(given) is None or not hasattr(given, "dtype"):
            problems.append(
                f"input {spec.name!r} is a {type(given).__name__}, wanted an array: {spec}; pass a numpy"
                " array, a dask array, a delayed value or a future"
            )
        else:
            problems += _dtype_problem(spec, given) or _unreadable(spec, given)
            problems += _shape_problems(spec, given, symbols, free_rows=carries and bool(sig.fixed_rows))
    if problems:
        raise InputError(f"{title}: " + "; ".join(problems))


def _unreadable(spec: ValueSpec, given: Any) -> list[str]:
    """Return descriptions of arrays that an engine would misread: foreign byte order, a mask, items other than text."""
    if isinstance(given, (list, tuple)):
        return list(dict.fromkeys(chain.from_iterable(_unreadable(spec, item) for item in given)))
    found: list[str] = []
    remedy = ""
    if isinstance(given, np.ma.MaskedArray) or (is_dask_array(given) and is_masked(given)):
        found, remedy = ["a masked array"], "models do not support masks, fill it with .filled(value)"
    elif isinstance(given, np.ndarray) and not given.dtype.isnative:
        found = [f"an array of {given.dtype}"]
        remedy = f"convert it with .astype({given.dtype.newbyteorder('=').name!r})"
    elif isinstance(given, np.ndarray) and given.dtype == np.dtype(object):
        # An array that represents a source is one element, whatever its number of rows.
        elements = given.flat if any(given.strides) else given.flat[:1]
        kinds = sorted({k.__name__ for k in set(map(type, elements)) if not issubclass(k, str)})
        found = [f"{k} among its texts, which would be read as a text" for k in kinds]
        remedy = "fill or drop missing values first, and convert others with str()"
    return [f"input {spec.name!r} holds {what}: {remedy}" for what in found]


def _dtype_problem(spec: ValueSpec, given: Any) -> list[str]:
    is_text = spec.dtype == np.dtype(object) and given.dtype.kind in "OUT"
    if spec.dtype is None or given.dtype == spec.dtype or is_text:
        return []
    return [
        f"input {spec.name!r} has dtype {given.dtype}, wanted {spec.dtype}: convert it with"
        f" .astype({spec.dtype.name!r})"
    ]


def _shape_problems(
    spec: ValueSpec, given: Any, symbols: dict[str, tuple[int, str]], *, free_rows: bool
) -> list[str]:
    if spec.shape is None:
        return []
    got = tuple(given.shape)
    if len(got) != len(spec.shape):
        return [f"input {spec.name!r} has shape {got}, wanted {len(spec.shape)} axes: {spec}"]
    problems = []
    for axis, (size, wanted) in enumerate(zip(got, spec.shape, strict=True)):
        if axis == 0 and free_rows:
            continue
        if isinstance(wanted, int) and size != wanted:
            remedy = "" if axis else f"; {batch_remedy(spec)}"
            problems.append(f"input {spec.name!r} has {size} on axis {axis}, wanted {wanted}: {spec}{remedy}")
        elif isinstance(wanted, str) and size == size:
            # A size that dask does not know is nan, which equals no value, and is not compared.
            known = symbols.setdefault(wanted, (size, spec.name))
            if known[0] != size:
                problems.append(
                    f"input {spec.name!r} has {size} on axis {axis} ({wanted!r}), but {known[1]!r} has"
                    f" {known[0]}"
                )
    return problems


def batch_remedy(spec: ValueSpec) -> str:
    """Return how to export a model without a fixed size on axis 0 of an input, for an error."""
    return (
        "the export fixed axis 0: if it is the batch, export the model again with an open one, in"
        f" torch.onnx.export dynamic_axes={{{spec.name!r}: {{0: 'batch'}}}}, or"
        f" dynamic_shapes=({{0: torch.export.Dim('batch')}},) with dynamo=True"
    )


def comes_later(value: Any) -> bool:
    """Whether `value` is a future or a Dask collection, such as a delayed value."""
    return is_dask_collection(value) or is_future(value)


def is_future(value: Any) -> bool:
    """Whether `value` is a distributed future; asks without importing distributed."""
    # Another thread may be importing it.
    return isinstance(value, getattr(sys.modules.get("distributed"), "Future", ()))


def is_dask_array(value: Any) -> bool:
    """Whether `value` is a dask.array."""
    return is_dask_collection(value) and isinstance(getattr(value, "chunks", None), tuple)


def as_array(spec: ValueSpec, given: Any, title: str) -> Any:
    """Return numbers, lists and other host arrays as numpy arrays; numpy arrays, futures and collections unchanged.

    Plain Python numbers are converted to the input's dtype if it can represent them.

    Raises
    ------
    InputError
        If they cannot be converted to an array, or the input's dtype cannot represent them.
    """
    if spec.kind != "tensor" or comes_later(given):
        return given
    if isinstance(given, np.ndarray):
        # Engines take no array of NumPy's StringDType.
        return given.astype(object) if given.dtype.kind == "T" and spec.dtype == np.dtype(object) else given
    if isinstance(given, np.generic):
        return np.asarray(given)
    if isinstance(given, (list, tuple, range, int, float, complex, str, bytes)):
        return _from_python(spec, given, title)
    is_on_host = hasattr(given, "__array__") and not hasattr(given, "__cuda_array_interface__")
    if is_on_host and hasattr(given, "dtype") and shape_of(given) is not None:
        return np.asarray(given)
    return given


def _from_python(spec: ValueSpec, given: Any, title: str) -> Any:
    what = f"{title}: input {spec.name!r}"
    if isinstance(given, (list, tuple)) and any(map(comes_later, given)):
        raise InputError(
            f"{what} is a {type(given).__name__} of values that are not computed yet, wanted one value:"
            f" {spec}; combine them with dask.array, or in a task"
        )
    try:
        found = np.asarray(given)
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(
            f"{what} is a {type(given).__name__} that cannot be converted to an array ({error}); wanted"
            f" {spec}"
        ) from error
    return convert(spec, found, what)


def convert(spec: ValueSpec, values: np.ndarray, what: str) -> np.ndarray:
    """Return values in the input's dtype; raise `InputError` if it cannot represent them."""
    dtype = spec.dtype
    if dtype is None or values.dtype == dtype:
        return values
    if values.size and not _holds(dtype, values):
        is_number = values.dtype.kind in "biufc"
        remedy = (
            f"convert it with .astype({dtype.name!r})"
            if is_number
            else "encode it, and fill in what is missing"
        )
        raise InputError(
            f"{what} holds {values.dtype}, which {dtype} cannot represent without loss, wanted {dtype}: {remedy}"
        )
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    if dtype.kind == "f" and np.isinf(cast).sum() > np.isinf(values).sum():
        raise InputError(f"{what} holds numbers that are too large for {dtype}: scale or clip them first")
    return cast


def _holds(dtype: np.dtype[Any], found: Any) -> bool:
    """Return whether `dtype` can represent an array's numbers or strings; only floats may be rounded."""
    if dtype == np.dtype(object):
        return found.dtype.kind in "OUT"
    import ml_dtypes

    from dask_ferro.graph.ir.dtypes import is_integer

    if is_integer(dtype) and found.dtype.kind in "iu":
        limits = ml_dtypes.iinfo(dtype)
        return bool(found.min() >= limits.min and found.max() <= limits.max)
    # bfloat16 and similar types are extensions, and numpy has no casting rules for them.
    if dtype.isbuiltin != 1:
        return found.dtype.kind in ("biu" if is_integer(dtype) else "biuf")
    return np.can_cast(found.dtype, dtype, "same_kind")


# ---- the inputs of a task ----------------------------------------------------------------------------------


class LateInputs:
    """The model's own inputs among the inputs of a bundle, and the dtypes and shapes that fitted last.

    Chunks of a batch are nearly all alike, and only its dtype and shape decide whether an array fits: such a task
    takes two comparisons for each input.

    Parameters
    ----------
    declared : sequence of ValueSpec
        The model's inputs as it declares them.
    names : sequence of str
        The bundle's inputs; inputs that other bundles compute are not checked.
    free_rows : sequence of bool
        Which of them may have any number of rows, though the model declares one; (): none.
    """

    def __init__(
        self, declared: Sequence[ValueSpec], names: Sequence[str], free_rows: Sequence[bool]
    ) -> None:
        inputs = {spec.name: spec for spec in declared}
        self._places = [place for place, name in enumerate(names) if name in inputs]
        specs = tuple(inputs[names[place]] for place in self._places)
        carries = tuple(bool(free_rows) and free_rows[place] for place in self._places)
        self._signature = Signature(specs, (), 1 if any(carries) else None, carries, ())
        self._fitted: list[tuple[np.dtype[Any], tuple[int, ...]]] | None = None

    def checked(self, values: list[Any], model: str) -> list[Any]:
        """Return a task's values; the model's inputs among them are arrays that fit the model's declarations.

        Raises
        ------
        InputError
            If a dtype (byte order included), a rank, a size or a kind of value does not fit; the message lists all of
            them.
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
        # Each text is checked, because one may be missing, and each item of a sequence.
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


# ---- made-up inputs ----------------------------------------------------------------------------------------


def synthetic(sig: Signature, batch: int | None) -> dict[str, Any]:
    """Return seeded inputs: standard normal floats, small integers; open dimensions are 1, a batch axis `batch`."""
    made = {}
    for spec, carries in zip(sig.inputs, sig.carries, strict=True):
        if spec.kind != "tensor" or spec.dtype is None:
            kind = f"an {spec.kind}" if spec.kind[0] in "aeiou" else f"a {spec.kind}"
            raise InputError(
                f"input {spec.name!r} is {kind}: no synthetic input can be generated for it, pass inputs="
            )
        made[spec.name] = made_up_array(spec, batch if carries and batch and not sig.fixed_rows else None)
    return made


def made_up_array(spec: ValueSpec, rows: int | None) -> Any:
    """Return a seeded array for a tensor of known dtype; open dimensions are 1, and axis 0 is `rows` if passed."""
    shape = [d if isinstance(d, int) else 1 for d in spec.shape or ()]
    if rows is not None:
        shape[:1] = [rows]
    assert spec.dtype is not None
    # crc32 and not hash(), which differs from process to process.
    rng = np.random.default_rng(zlib.crc32(spec.name.encode()))
    if spec.dtype == np.dtype(object):
        return np.full(shape, "a", dtype=object)
    from dask_ferro.graph.ir.dtypes import is_integer

    if is_integer(spec.dtype) or spec.dtype == np.bool_:
        # Integers may be indices: 0 and 1 are in range for nearly every table.
        return rng.integers(0, 2, shape).astype(spec.dtype)
    return rng.standard_normal(shape).astype(spec.dtype)
