"""The check of inputs that arrive in a task (delayed values, futures, chunks), by the rules of a call.

A call checks inputs that have a shape and a dtype when it is made.  A delayed value or a future has neither before it
is computed, and a chunk of a dask array may differ from what its array declares; an engine would read big-endian bytes
as other numbers, drop a mask, or broadcast.  So each task checks the model's own inputs again: where dtype and shape
are those of the last task, two comparisons per input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.ir.dtypes import array_dtype
from dask_ferro.graph.ir.inference import declared_type
from dask_ferro.lower.signature import Signature, ValueSpec, as_array, check_arrays, unreadable_items

# The number of bundles whose expectations a process keeps: names, and a tuple each.
_KEPT = 4096
Specs = tuple[ValueSpec | None, ...]


class BundleInputs(NamedTuple):
    """The inputs of one bundle: the digest of its model, their names, and whether each may have any number of rows.

    `free_rows` is empty where no input may.
    """

    digest: str
    names: tuple[str, ...]
    free_rows: tuple[bool, ...] = ()


class Expected:
    """The declared inputs of a bundle, and the last dtypes and shapes that were found to fit.

    Chunks of a batch are nearly all alike, and whether an array fits is a matter of its dtype and shape alone.

    Parameters
    ----------
    specs : tuple of ValueSpec or None
        The model's declaration of each input of the bundle; None: not checked, as the graph computes it.
    free_rows : tuple of bool
        Whether each may have any number of rows, though the model declares one; (): none may.
    """

    def __init__(self, specs: Specs, free_rows: tuple[bool, ...] = ()) -> None:
        self.specs = specs
        self.free_rows = free_rows or (False,) * len(specs)
        self._are_tensors = all(s is None or s.kind == "tensor" for s in specs)
        self._fitted: tuple[tuple[np.dtype[Any], tuple[int, ...]] | None, ...] | None = None

    def are_as_before(self, values: Sequence[Any]) -> bool:
        """Whether all are arrays of the dtypes and shapes that `keep` recorded."""
        if self._fitted is None:
            return False
        for value, fitted in zip(values, self._fitted, strict=True):
            if fitted is not None and (
                type(value) is not np.ndarray or value.shape != fitted[1] or value.dtype != fitted[0]
            ):
                return False
        return True

    def keep(self, values: Sequence[Any]) -> None:
        """Record the dtypes and shapes of values that fit, where all are arrays."""
        pairs = [(s, v) for s, v in zip(self.specs, values, strict=True) if s is not None]
        # Each text is looked at: one may be missing.
        if self._are_tensors and all(type(v) is np.ndarray and v.dtype != object for _, v in pairs):
            self._fitted = tuple(
                None if s is None else (v.dtype, v.shape) for s, v in zip(self.specs, values, strict=True)
            )


class Expectations:
    """The declared inputs of bundles, looked up once for each bundle."""

    def __init__(self) -> None:
        self._known: dict[BundleInputs, Expected] = {}

    def known(self, bundle: BundleInputs) -> Expected | None:
        """Return the expectations of a bundle's inputs; None where they are not known yet."""
        return self._known.get(bundle)

    def learn(self, bundle: BundleInputs, model: ir.Model) -> Expected:
        """Return the expectations of a bundle's inputs by its model, and remember them."""
        given = {v.name: v for v in model.graph.inputs}
        specs = tuple(_spec(given[name]) if name in given else None for name in bundle.names)
        if len(self._known) >= _KEPT:
            # All at once: bundles that still run are looked up again with their next task.
            self._known.clear()
        return self._known.setdefault(bundle, Expected(specs, bundle.free_rows))


def _spec(value: ir.Value) -> ValueSpec:
    found = declared_type(value)
    dtype = None
    if found.dtype is not None and found.kind == "tensor":
        dtype = array_dtype(found.dtype)
    return ValueSpec(str(value.name), dtype, found.shape, found.kind)


def arrived(expected: Expected, values: list[Any], model: str) -> list[Any]:
    """Return the values as arrays, each of which fits what the model declares.

    Parameters
    ----------
    expected : Expected
    values : list
        As the task received them.
    model : str
        The model's path, for an error.

    Raises
    ------
    ConfigError
        A dtype (byte order included), a rank, a size or a kind of value that does not fit; it lists all of them.
    """
    if expected.are_as_before(values):
        return values
    specs, title = expected.specs, f"model {model!r}"
    if any(expected.free_rows) or not _agree(specs, values):
        looked_at = {
            s.name: as_array(s, v, title) for s, v in zip(specs, values, strict=True) if s is not None
        }
        check_arrays(_signature(specs, expected.free_rows), looked_at, f"{title}, when the task ran")
        values = [v if s is None else looked_at[s.name] for s, v in zip(specs, values, strict=True)]
    expected.keep(values)
    return values


def _agree(specs: Specs, values: Sequence[Any]) -> bool:
    """Whether all values are exactly as declared: the fast path of nearly every task."""
    named: dict[str, int] = {}
    for spec, value in zip(specs, values, strict=True):
        if spec is None:
            continue
        if spec.kind != "tensor":
            if unreadable_items(value):
                return False
            continue
        if type(value) is not np.ndarray or value.dtype != spec.dtype:
            return False
        if value.dtype == object and unreadable_items(value):
            return False
        if spec.shape is None:
            continue
        if len(spec.shape) != value.ndim:
            return False
        for wanted, size in zip(spec.shape, value.shape, strict=True):
            if wanted is not None and size != (
                wanted if isinstance(wanted, int) else named.setdefault(wanted, size)
            ):
                return False
    return True


def _signature(specs: Specs, free_rows: Sequence[bool]) -> Signature:
    kept = [(s, free) for s, free in zip(specs, free_rows, strict=True) if s is not None]
    inputs, carries = tuple(s for s, _ in kept), tuple(free for _, free in kept)
    return Signature(inputs, (), 1 if any(carries) else None, carries, ())
