"""`bind`: a model on inputs that fit it, as a value: which inputs are cut, the rows of each chunk, and its bundles."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundling.plan import Bundle, Plan
from dask_ferro.graph.bundling.select import Granularity
from dask_ferro.lower.inputs.batching import cut
from dask_ferro.lower.prepared.opening import with_defaults_replaced
from dask_ferro.lower.prepared.prepared import PreparedModel, SizedModel
from dask_ferro.lower.signature import Signature, as_array, by_name, check_arrays, is_dask_array, shape_of


class BoundModel:
    """A model on its inputs, before it is lowered to a Dask graph.

    Parameters
    ----------
    model : PreparedModel
        With the inputs of this call that carry the batch.
    arrays : mapping of str to array
        Checked inputs by name.
    rows : tuple of int or None
        Rows of each chunk, nan where dask does not know them; None: inputs are taken whole.
    granularity : Granularity
        As the caller asked.

    Attributes
    ----------
    chunks : int
    has_dask_rows : bool
        Whether an input that is cut is a dask array.
    splits : bool
        Whether a task runs the model's fixed batch size slice by slice.
    """

    def __init__(
        self,
        model: PreparedModel,
        arrays: Mapping[str, Any],
        rows: tuple[int, ...] | None,
        granularity: Granularity,
    ) -> None:
        self.model, self.arrays, self.rows, self.granularity = model, arrays, rows, granularity
        self.chunks = 1 if rows is None else len(rows)
        fixed, carried = model.signature.fixed_rows, [arrays[name] for name in model.signature.carried]
        self.has_dask_rows = any(map(is_dask_array, carried))
        lengths = rows or tuple(len(array) for array in carried if shape_of(array))
        self.splits = bool(fixed) and any(n != fixed for n in lengths)
        # Dask's unknown sizes are nan.
        self._largest_chunk = max((n for n in rows or () if n == n), default=None)

    @cached_property
    def sized(self) -> SizedModel:
        """Types and costs of the largest chunk."""
        return self.model.sized(self.arrays, self._largest_chunk)

    @cached_property
    def plan(self) -> Plan:
        """The bundles of one chunk, and where the outputs come from.

        A model that is run slice by slice is one bundle: its values do not leave the slice.  So is one of chunks whose
        sizes are not known: the task that gives the outputs has to see their rows.
        """
        has_unknown_rows = any(n != n for n in self.rows or ())
        granularity = "model" if self.splits or has_unknown_rows else self.granularity
        return self.model.plan(self.arrays, self._largest_chunk, max(1, self.chunks), granularity)

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles of one chunk."""
        return self.plan.bundles


def inputs_by_name(
    sig: Signature, args: tuple[object, ...], named: dict[str, object], options: dict[str, object], title: str
) -> Any:
    """Return the inputs of a call as `bind` takes them; raises `ConfigError` where they and options are mixed up."""
    names = {spec.name for spec in sig.inputs}
    if clashes := [option for option, value in options.items() if option in names and shape_of(value)]:
        raise ConfigError(
            f"{title}: {clashes[0]!r} is an input and an argument; pass inputs as a dict by name"
        )
    if not (args and named):
        return named if named else (args[0] if len(args) == 1 else args)
    unknown = ", ".join(name for name in named if name not in names)
    why = f"{unknown} is no input, and options of a call are {', '.join(options)}; from_onnx has others"
    raise ConfigError(f"{title}: {why if unknown else 'pass inputs by position or by name, not both'}")


def bind(
    model: PreparedModel,
    given: Any,
    *,
    batch: int | None,
    batched: Collection[str] | None,
    granularity: Granularity,
) -> BoundModel:
    """Return a model on its inputs: an array, a mapping of arrays by name, or a tuple of them.

    Parameters
    ----------
    batch : int or None
        Rows of a chunk.
    batched : collection of str or None
        The inputs that are cut, where the caller says so.

    Raises
    ------
    ConfigError
        Names, dtypes, shapes or chunks that do not fit the model; all of them at once.
    """
    names = frozenset(given if isinstance(given, Mapping) else ()) - {s.name for s in model.signature.inputs}
    if names:
        model = with_defaults_replaced(model, names)
    sig, title = model.signature, f"model {model.name!r}"
    named = by_name(sig, given, title)
    arrays = {spec.name: as_array(spec, named[spec.name], title) for spec in sig.inputs}
    check_arrays(sig, arrays, title)
    return BoundModel(*cut(model, arrays, batched, batch), granularity)


def checked_batch(batch: Any, title: str) -> int | None:
    """Return `batch` as an int, or None; raise `ConfigError` where it is no number of rows."""
    if batch is None:
        return None
    # A bool is an int to Python, and an integer of numpy is none: so `__index__`, and no bool.
    if isinstance(batch, bool) or not hasattr(batch, "__index__") or batch < 1:
        raise ConfigError(f"{title}: batch={batch!r}, wanted a number of rows of at least 1, or None")
    return operator.index(batch)
