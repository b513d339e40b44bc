"""Map the dimensions of xarray's arrays to axes of inputs, and label results with dimensions and coordinates.

    DataArray            the one input, or one of several in a tuple, a dict or keywords, also with plain arrays
    Dataset              each input takes the variable of its name; other variables are left alone

The first axis of an input is the batch.  An axis of an output keeps the dimension, and with it the coordinates, of the
input axis to which it corresponds: the batch, or an axis of the same name in the model.  Every other axis gets its
name in the model or, if it has none or that is in use, ``<output>_dim_<axis>``; the axis of a classifier's scores has
the classes as its coordinate.  An ambiguous input is refused.

xarray is never imported here: a caller that passes its arrays has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence, Set
from itertools import chain
from math import nan
from typing import Any, NamedTuple

from dask_ferro.errors import InputError
from dask_ferro.lower.signature import Signature, ValueSpec, by_name, shape_of

Dims = tuple[Hashable, ...]


class LabelledInputs(NamedTuple):
    """The labels of a call's inputs, for its results."""

    # The DataArrays by name, with the dimensions in the order of the model's axes.
    labelled: Mapping[str, Any]
    title: str
    # Whether the inputs are variables of a Dataset.
    dataset: Any = None

    def results(self, sig: Signature, arrays: Mapping[str, Any], *, cut: bool) -> Any:
        """Return a model's outputs with dimensions and coordinates: a DataArray for one output, a Dataset for several.

        Attributes follow xarray's option ``keep_attrs``.  `sig` has the inputs of this call that carry the batch, and
        `cut` states whether each output is known to carry it because it is computed chunk by chunk.

        Raises
        ------
        InputError
            If a size is not known before the model runs, or the inputs disagree on the name of a dimension.
        """
        shapes = {spec.name: shape_of(arrays[spec.name]) or (nan,) for spec in sig.outputs}
        # Sizes that dask does not know are nan, and so is their sum; a delayed value has no shape.
        if unknown := [s for s in sig.outputs if sum(shapes[s.name]) != sum(shapes[s.name])]:
            raise InputError(
                f"{self.title}: the shape of output {unknown[0]} is not known before it runs, and xarray"
                " needs it: pass the data without labels (x.data), or choose other outputs with"
                " from_onnx(outputs=)"
            )
        dims = [
            self._dims(sig, spec, shapes[spec.name], _has_batch(sig, place, cut=cut))
            for place, spec in enumerate(sig.outputs)
        ]
        found = self._labelled(dict(arrays), dims)
        classes = {d[-1]: list(s.classes) for s, d in zip(sig.outputs, dims, strict=True) if s.classes}
        return found.assign_coords({d: c for d, c in classes.items() if d not in _names_of(self.labelled)})

    def _labelled(self, arrays: dict[str, Any], dims: list[Dims]) -> Any:
        xr, values = sys.modules["xarray"], tuple(arrays.values())
        # It computes nothing: xarray's own rules decide which coordinates and attributes the values have.
        found = xr.apply_ufunc(
            lambda *_: values if len(values) > 1 else values[0],
            *self.labelled.values(),
            input_core_dims=[list(one.dims) for one in self.labelled.values()],
            output_core_dims=dims,
            dask="allowed",
        )
        if len(values) == 1:
            return found.rename(*arrays)
        whole = xr.Dataset(dict(zip(arrays, found, strict=True)))
        if self.dataset is None:
            return whole
        # An option of xarray, whose default depends on its release, decides whether attributes are kept.
        return whole.assign_attrs(xr.apply_ufunc(lambda x: x, xr.Dataset(attrs=self.dataset.attrs)).attrs)

    def _dims(self, sig: Signature, spec: ValueSpec, shape: Sequence[int], batch: bool) -> Dims:
        found: list[Hashable] = []
        taken = _names_of(self.labelled)
        batch_dims = {one.dims[0]: one.shape[0] for name, one in self.labelled.items() if name in sig.carried}
        for axis, size in enumerate(shape):
            declared = spec.shape[axis] if spec.shape and axis < len(spec.shape) else None
            candidates = batch_dims if batch and axis == 0 else self._dims_of(sig, declared)
            fitting = [d for d, known in candidates.items() if known == size and d not in found]
            if len(fitting) > 1:
                raise InputError(
                    f"{self.title}: axis {axis} of output {spec} could be {' or '.join(map(repr, fitting))},"
                    " as inputs name the same axis differently: rename them alike,"
                    f" x.rename({{{fitting[1]!r}: {fitting[0]!r}}})"
                )
            found.append(fitting[0] if fitting else _new_name(spec, axis, declared, taken.union(found)))
        return tuple(found)

    def _dims_of(self, sig: Signature, symbol: object) -> dict[Hashable, int]:
        """Return the dimensions that inputs have for an axis of this name in the model, with their sizes."""
        found: dict[Hashable, int] = {}
        for spec in sig.inputs:
            one = self.labelled.get(spec.name)
            if one is not None and isinstance(symbol, str) and spec.shape and len(spec.shape) == one.ndim:
                axes = zip(spec.shape, one.dims, one.shape, strict=True)
                found |= {dim: size for name, dim, size in axes if name == symbol}
        return found


def _names_of(labelled: Mapping[str, Any]) -> set[Hashable]:
    """Return the names of the dimensions and coordinates of inputs."""
    return set(chain.from_iterable((*one.dims, *one.coords) for one in labelled.values()))


def _new_name(spec: ValueSpec, axis: int, declared: object, taken: Set[Hashable]) -> str:
    if isinstance(declared, str) and declared.isidentifier() and declared not in taken:
        return declared
    name = f"{spec.name}_dim_{axis}"
    while name in taken:
        name += "_"
    return name


def _has_batch(sig: Signature, place: int, *, cut: bool) -> bool:
    """Return whether axis 0 of an output is treated as the batch."""
    if cut:
        return True
    shape = sig.outputs[place].shape
    # A first axis of a fixed size may be anything: the channels of one image.
    is_open = not isinstance(sig.batch, int) or bool(sig.fixed_rows)
    return is_open and sig.gives[place] and (not shape or shape[0] in (sig.batch, None))


def read_labelled(given: Any, sig: Signature, dims: object, title: str) -> tuple[Any, LabelledInputs | None]:
    """Return the inputs of a call as arrays, and their labels; unchanged, and None, if none is an xarray object.

    `dims` is the batch dimension, or all dimensions in the order of the model's axes.

    Raises
    ------
    InputError
        If variables are missing, dimensions do not fit the axes, or coordinates differ between inputs.
    """
    xr = sys.modules.get("xarray")
    named = None if xr is None else _labelled_by_name(given, sig, xr, title)
    if xr is None or named is None:
        if dims is not None:
            raise InputError(f"{title}: dims={dims!r} names dimensions of xarray inputs, and no input is one")
        return given, None
    order = [dims] if isinstance(dims, str) else dims
    if order is not None and (not isinstance(order, (list, tuple)) or len(set(order)) < len(order)):
        raise InputError(
            f"{title}: dims={dims!r}, wanted the batch dimension, or a list of dimensions in order"
        )
    problems: list[str] = []
    labelled = {
        spec.name: _order_dims(spec, named[spec.name], order, problems)
        for spec in sig.inputs
        if isinstance(named[spec.name], xr.DataArray)
    }
    known = set(chain.from_iterable(one.dims for one in labelled.values()))
    unknown = [d for d in order or () if d not in known]
    problems += [f"dims= names {d!r}, and the inputs have {sorted(map(str, known))}" for d in unknown]
    clashes = _names_of(labelled).intersection(s.name for s in sig.outputs) if len(sig.outputs) > 1 else ()
    problems += [
        f"output {name!r} has the name of a coordinate or dimension of the inputs, and both would be in one"
        f" Dataset: rename that, x.rename({{{name!r}: ...}})"
        for name in clashes
    ]
    if problems:
        raise InputError(f"{title}: {'; '.join(problems)}")
    try:
        xr.align(*labelled.values(), join="exact", copy=False)
    except ValueError as error:
        sizes = ", ".join(f"{name}: {dict(one.sizes)}" for name, one in labelled.items())
        raise InputError(
            f"{title}: inputs have different coordinates or sizes ({sizes}), and rows would be combined that"
            f" differ ({str(error).partition(chr(10))[0]}); align them first, xr.align(a, b, join='inner'),"
            " or rename one"
        ) from error
    arrays = {**named, **{name: one.data for name, one in labelled.items()}}
    return arrays, LabelledInputs(labelled, title, given if isinstance(given, xr.Dataset) else None)


def _labelled_by_name(given: Any, sig: Signature, xr: Any, title: str) -> Mapping[str, Any] | None:
    if isinstance(given, xr.Dataset):
        missing = [s for s in sig.inputs if s.name not in given.variables]
        if missing:
            raise InputError(
                f"{title}: the Dataset has no variable for"
                f" {', '.join(f'input {s.name!r}' for s in missing)}; it has"
                f" {', '.join(map(repr, given.data_vars))}: name the variables as the inputs,"
                f" ds.rename({{...: {missing[0].name!r}}}), or pass DataArrays"
            )
        return {s.name: given[s.name] for s in sig.inputs}
    if isinstance(given, Mapping):
        values = list(given.values())
    else:
        values = list(given) if isinstance(given, tuple) else [given]
    if any(isinstance(value, xr.Dataset) for value in values):
        raise InputError(
            f"{title}: a Dataset is one of several inputs: pass only the Dataset, model(ds), or its variables"
        )
    return by_name(sig, given, title) if any(isinstance(value, xr.DataArray) for value in values) else None


def _order_dims(spec: ValueSpec, array: Any, dims: Sequence[Hashable] | None, problems: list[str]) -> Any:
    """Return an array with its dimensions in the order of the input's axes; problems are added to `problems`."""
    rank, order = len(spec.shape or ()), array.dims
    if dims is not None:
        order = (*(d for d in dims if d in array.dims), *(d for d in array.dims if d not in dims))
    elif spec.shape and set(spec.shape) == set(array.dims) and len(spec.shape) == array.ndim:
        order = spec.shape
    behind = zip((spec.shape or ())[1:], [array.sizes[d] for d in order[1:]], strict=False)
    what = f"input {spec.name!r} has dimensions {dict(array.sizes)}, wanted {spec}"
    if spec.shape is not None and rank < array.ndim and rank > 0:
        rest, stacked = array.dims[array.ndim - rank + 1 :], array.dims[: array.ndim - rank + 1]
        problems.append(
            f"{what}: if each position along {', '.join(map(repr, stacked))} is a row, stack them,"
            f" x.stack(row={stacked!r}).transpose({', '.join(map(repr, ('row', *rest)))}), and"
            " result.unstack('row'); otherwise select one with x.isel"
        )
    elif spec.shape is not None and rank != array.ndim:
        problems.append(f"{what}: add the missing dimension with x.expand_dims")
    elif dims is None and any(isinstance(wanted, int) and wanted != size for wanted, size in behind):
        problems.append(
            f"{what}: name the batch dimension, as dims={array.dims[-1]!r}, or transpose the array"
        )
    moved = array.transpose(*order)
    # Read once, if it is not in memory yet and not a dask array.
    return moved.copy(deep=False, data=moved.data)
