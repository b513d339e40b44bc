"""Inputs as they arrive in a task: what came late (delayed, futures, chunks) is checked here, by the rules of a call.

A call checks what has a shape and a dtype when it is made.  A delayed value or a future tells nothing before it is
there, and a chunk of a dask array may differ from what its array promised; an engine would take big-endian bytes for
other numbers, drop a mask, or broadcast.  So each task checks the model's own inputs again: a look at two attributes
where they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from dask_ferro.graph.shapes import declared_type
from dask_ferro.lower.signature import Signature, ValueSpec, as_array, check_arrays, unreadable_items

# Bundles whose expectations a process keeps: names, and a tuple each.
_KEPT = 4096
Specs = tuple[ValueSpec | None, ...]


class Expectations:
    """What bundles expect of the model's own inputs, found out once for each bundle."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[str, ...]], Specs] = {}

    def of(self, digest: str, inputs: tuple[str, ...], model: Callable[[], ir.Model]) -> Specs:
        """Return the specification of each input, None for a value that the graph computes.

        Parameters
        ----------
        digest : str
            Of the model.
        inputs : tuple of str
            Of the bundle.
        model : callable
            Opens the model, where the answer is not known yet.
        """
        known = self._known.get((digest, inputs))
        if known is None:
            given = {v.name: v for v in model().graph.inputs}
            known = tuple(_spec(given[name]) if name in given else None for name in inputs)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[digest, inputs] = known
        return known


def _spec(value: ir.Value) -> ValueSpec:
    found = declared_type(value)
    dtype = None
    if found.dtype is not None and found.kind == "tensor":
        dtype = np.dtype(object) if found.dtype == ir.DataType.STRING else found.dtype.numpy()
    return ValueSpec(str(value.name), dtype, found.shape, found.kind)


def arrived(specs: Specs, values: Sequence[Any], *, free_rows: Sequence[bool], title: str) -> list[Any]:
    """Return the values as arrays, each of which fits what the model declares.

    Parameters
    ----------
    specs : tuple of ValueSpec or None
        What the model declares of each; None: not looked at.
    values : sequence
        As the task was handed them.
    free_rows : sequence of bool
        Which may have any number of rows, though the model declares one.
    title : str
        What an error says first.

    Raises
    ------
    ConfigError
        A dtype (byte order included), a rank, a size or a kind of value that does not fit; all of them at once.
    """
    if not any(free_rows) and _agree(specs, values):
        return list(values)
    looked_at = {s.name: as_array(s, v, title) for s, v in zip(specs, values, strict=True) if s is not None}
    sig = _signature(specs, free_rows)
    check_arrays(sig, looked_at, f"{title}, when the task ran")
    return [v if s is None else looked_at[s.name] for s, v in zip(specs, values, strict=True)]


def _agree(specs: Specs, values: Sequence[Any]) -> bool:
    """Whether all is just as declared: the way that nearly every task takes."""
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
