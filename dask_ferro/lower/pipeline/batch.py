"""The inputs of a pipeline's call: names and shapes are checked, and the rows of a micro-batch are counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.pipeline.parts import PipelineParts
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.signature import as_array, check_arrays, shape_of

_NAMED = "name in batched=[...] the inputs that carry the batch, if not these"


class Batches:
    """The check of a pipeline's calls.

    Parameters
    ----------
    parts : PipelineParts
    row_ranks : callable (int) -> int
        Returns the number of ranks over which a plan splits the rows, of at least so many in a micro-batch.
    """

    def __init__(self, parts: PipelineParts, row_ranks: Callable[[int], int]) -> None:
        self.parts, self._row_ranks = parts, row_ranks

    def of(
        self, inputs: Any, params: Tree | None, state: Tree | None, named: Mapping[str, Any]
    ) -> tuple[Arrays, tuple[int, ...]]:
        """Return all inputs of a call by name, those of the optimizer too, and the rows of each micro-batch.

        Parameters and errors are those of `Pipeline.__call__`.
        """
        update = self.parts.update
        arrays = ({} if update is None else update.graph.bound) | self.parts.staged.bound
        if params is not None:
            arrays |= zip(
                self.parts.staged.params, arrays_like(self.parts.form, params, "params"), strict=True
            )
        arrays |= {**self._given(inputs), **named}
        settings = None if update is None else update.settings
        specs = {s.name: s for s in (() if settings is None else settings.inputs)}
        specs |= {s.name: s for s in self.parts.opened.signature.inputs}
        unknown, missing = sorted(arrays.keys() - specs.keys()), sorted(specs.keys() - arrays.keys())
        if unknown or missing:
            listed = [f"unknown input {n!r}" for n in unknown] + [f"missing input {n!r}" for n in missing]
            raise ConfigError(
                f"parallel: {', '.join(listed)}; it takes {', '.join(self.parts.inputs) or 'none'}"
            )
        arrays = {name: as_array(spec, arrays[name], "parallel") for name, spec in specs.items()}
        rows = self._rows(arrays)
        for count in dict.fromkeys(rows):
            own = {name: x[:count] if name in self.parts.batch else x for name, x in arrays.items()}
            check_arrays(self.parts.opened.signature, own, "parallel")
        if settings is not None:
            check_arrays(settings, arrays, "parallel: optimizer")
        return arrays | self._state(state), rows

    def _state(self, state: Tree | None) -> dict[str, Any]:
        if self.parts.update is None:
            if state is not None:
                raise ConfigError("parallel: state: the pipeline has no optimizer; leave it out, or pass one")
            return {}
        # The initial state is sent like any input, for the first step alone.
        if state is None:
            return dict(self.parts.update.graph.start)
        update = self.parts.update
        specs = update.state.inputs
        given = zip(specs, arrays_like(update.graph.form, state, "state"), strict=True)
        found = {spec.name: as_array(spec, value, "parallel") for spec, value in given}
        check_arrays(update.state, found, "parallel")
        return dict(zip(update.graph.state, found.values(), strict=True))

    def _given(self, inputs: Any) -> dict[str, Any]:
        if inputs is None:
            return {}
        if isinstance(inputs, Mapping):
            return dict(inputs)
        if len(self.parts.own) != 1:
            raise ConfigError(
                f"parallel: got one array, wanted {', '.join(self.parts.inputs)}; pass a dict by name"
            )
        return {self.parts.own[0]: inputs}

    def _rows(self, arrays: Arrays) -> tuple[int, ...]:
        """Return the rows of each micro-batch."""
        lengths = {}
        for name in self.parts.batch:
            shape = shape_of(arrays[name])
            if not shape:
                raise ConfigError(
                    f"parallel: input {name!r} carries the batch and has no rows to cut; pass an array"
                )
            lengths[name] = shape[0]
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"parallel: got rows {lengths}, wanted one number; {_NAMED}")
        return self.cut(lengths)

    def cut(self, lengths: Mapping[str, int]) -> tuple[int, ...]:
        """Return the rows of each micro-batch, for inputs of one number of rows, by name.

        Raises
        ------
        ConfigError
            They are fewer than micro-batches.
        """
        m, rows = self.parts.schedule.micro_batches, next(iter(lengths.values()), 0)
        if lengths and rows < m:
            raise ConfigError(
                f"parallel: got rows {dict(lengths)}, wanted a row or more for each of the {m} micro-batches; pass"
                f" more rows, or take fewer of them; {_NAMED}"
            )
        unit = self._row_ranks(rows // m) if lengths else 1
        return cut_rows(rows, m, unit)


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


def form_of(params: Tree | None) -> Any:
    """Return the form of a tree, with a position in place of each tensor, since tensors are not sent to workers."""
    return None if params is None else pytree.like(params, range(len(pytree.leaves(params))))


def arrays_like(form: Any, values: Any, what: str) -> list[Any]:
    """Return the arrays of a tree of the given form, in order.

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
