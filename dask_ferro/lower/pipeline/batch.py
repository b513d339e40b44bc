"""Batches of a pipeline: the inputs that carry them, their rows in micro-batches, and trees of arrays by their form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.inference import Dim


def carriers(shapes: Mapping[str, tuple[Dim, ...] | None], batched: Sequence[str] | None) -> frozenset[str]:
    """Return the inputs that carry the batch, among those of these shapes: the named ones, or by their sizes.

    Raises
    ------
    ConfigError
        Names in `batched` that are no inputs, or none.
    """
    if batched is None:
        ranked = {name: shape for name, shape in shapes.items() if shape}
        rows = next((shape[0] for shape in ranked.values()), None)
        # A model's batch axis often has a size and no name, so equal sizes decide: only `batched` can tell a batch
        # of 8 rows from 8 weights.
        return frozenset(name for name, shape in ranked.items() if shape[0] == rows is not None)
    names = [batched] if isinstance(batched, str) else list(batched)
    if not names or (unknown := [name for name in names if name not in shapes]):
        got = f"the model has no argument {unknown}" if names else "got no arguments"
        raise ConfigError(f"parallel: batched: {got}; it has {', '.join(shapes) or 'none'}")
    return frozenset(names)


def cut_rows(rows: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    """Return the rows of each micro-batch: as many in each, or one unit more in the first ones.

    The last one has what is left of the last unit.

    Examples
    --------
    >>> cut_rows(10, 4), cut_rows(12, 5, unit=2)
    ((3, 3, 2, 2), (4, 2, 2, 2, 2))
    """
    units, rest = divmod(rows, unit)
    each = [unit * (units // parts + (i < units % parts)) for i in range(parts)]
    return (*each[:-1], each[-1] + rest)


def slices(rows: Sequence[int]) -> Iterator[slice]:
    """Yield the rows of a batch that each micro-batch has."""
    for count, stop in zip(rows, accumulate(rows), strict=True):
        yield slice(stop - count, stop)


def shares(rows: Sequence[int], reduction: str) -> tuple[tuple[int, ...], int]:
    """Return the weights of micro-batches and the divisor that make their sum the loss and gradients of the batch.

    A mean is over the rows of the batch, so a micro-batch weighs as much as it has rows.
    """
    ones = (1,) * len(rows)
    if reduction == "sum":
        return ones, 1
    # Equal micro-batches need no products, which would round.
    return (ones, len(rows)) if len(set(rows)) == 1 else (tuple(rows), sum(rows))


def arrays_like(form: Any, values: Any, what: str) -> list[Any]:
    """Return the arrays of a tree of the given form, whose leaves are numbers, in order.

    Raises
    ------
    ConfigError
        `values` has another form.
    """
    if isinstance(form, int):
        return [values]
    named = isinstance(form, Mapping)
    fits = isinstance(values, Mapping) == named and hasattr(values, "__len__") and len(values) == len(form)
    if not fits or (named and values.keys() != form.keys()):
        raise ConfigError(f"parallel: {what}: got {_sketch(values)}, wanted {_sketch(form)}, as it was made")
    pairs = [(form[k], values[k]) for k in form] if named else list(zip(form, values, strict=True))
    return list(chain.from_iterable(arrays_like(part, value, what) for part, value in pairs))


def _sketch(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    return f"a list of {len(value)}" if isinstance(value, (list, tuple)) else f"one {type(value).__name__}"
