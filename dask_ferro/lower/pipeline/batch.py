"""The inputs of a pipeline's call: names and shapes are checked, and the rows of a micro-batch are counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dask_ferro.engines.executable import nodes_between
from dask_ferro.errors import ConfigError
from dask_ferro.graph.cost.roofline import costs, seconds
from dask_ferro.graph.pipeline.action import BACKWARD
from dask_ferro.graph.pipeline.order_edges import Lowering, lowering
from dask_ferro.graph.pipeline.stages import ActionBoundary
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.pipeline.parts import PipelineParts
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.signature import as_array, check_arrays, shape_of

# Seconds from the end of a task to the start of one that waits for it: design.md, section 4.
_HOP_S = 6e-3
_NAMED = "name in batched=[...] the inputs that carry the batch, if not these"


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The inputs of a call, checked.

    Attributes
    ----------
    arrays : mapping of str to array
        All inputs by name: of the model, of the optimizer, and its state.
    rows : tuple of int
        Rows of each micro-batch.
    lowering : Lowering
        The schedule as edges and priorities.
    """

    arrays: Arrays
    rows: tuple[int, ...]
    lowering: Lowering


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
        self._lowered: dict[Any, Lowering] = {}

    def of(
        self, inputs: Any, params: Tree | None, state: Tree | None, named: Mapping[str, Any]
    ) -> StepInputs:
        """Return the inputs of a call; parameters and errors are those of `Pipeline.__call__`."""
        arrays = dict(self.parts.bound)
        if params is not None:
            arrays |= zip(self.parts.params, arrays_like(self.parts.form, params, "params"), strict=True)
        arrays |= {**self._given(inputs), **named}
        settings = None if self.parts.update is None else self.parts.update.settings
        specs = {s.name: s for s in (() if settings is None else settings.inputs)}
        specs |= {s.name: s for s in self.parts.opened.signature.inputs}
        unknown, missing = sorted(arrays.keys() - specs.keys()), sorted(specs.keys() - arrays.keys())
        if unknown or missing:
            listed = [f"unknown input {n!r}" for n in unknown] + [f"missing input {n!r}" for n in missing]
            raise ConfigError(
                f"pipeline: {', '.join(listed)}; it takes {', '.join(self.parts.inputs) or 'none'}"
            )
        arrays = {name: as_array(spec, arrays[name], "pipeline") for name, spec in specs.items()}
        rows = self._rows(arrays)
        largest, *others = (self._first(arrays, count) for count in dict.fromkeys(rows))
        for one in (largest, *others):
            check_arrays(self.parts.opened.signature, one, "pipeline")
        if settings is not None:
            check_arrays(settings, largest, "pipeline: optimizer")
        return StepInputs(arrays | self._state(state), rows, self._lowering(largest))

    def _first(self, arrays: Arrays, rows: int) -> Arrays:
        """Return arrays like those of a micro-batch of `rows` rows."""
        return {name: value[:rows] if name in self.parts.batch else value for name, value in arrays.items()}

    def _state(self, state: Tree | None) -> dict[str, Any]:
        if self.parts.update is None:
            if state is not None:
                raise ConfigError("pipeline: state: the pipeline has no optimizer; leave it out, or pass one")
            return {}
        # The initial state is sent like any input, for the first step alone.
        if state is None:
            return dict(self.parts.update.graph.start)
        update = self.parts.update
        specs = update.state.inputs
        given = zip(specs, arrays_like(update.graph.form, state, "state"), strict=True)
        found = {spec.name: as_array(spec, value, "pipeline") for spec, value in given}
        check_arrays(update.state, found, "pipeline")
        return dict(zip(update.graph.state, found.values(), strict=True))

    def _given(self, inputs: Any) -> dict[str, Any]:
        if inputs is None:
            return {}
        if isinstance(inputs, Mapping):
            return dict(inputs)
        if len(self.parts.own) != 1:
            raise ConfigError(
                f"pipeline: got one array, wanted {', '.join(self.parts.inputs)}; pass a dict by name"
            )
        return {self.parts.own[0]: inputs}

    def _rows(self, arrays: Arrays) -> tuple[int, ...]:
        """Return the rows of each micro-batch."""
        lengths = {}
        for name in self.parts.batch:
            shape = shape_of(arrays[name])
            if not shape:
                raise ConfigError(
                    f"pipeline: input {name!r} carries the batch and has no rows to cut; pass an array"
                )
            lengths[name] = shape[0]
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"pipeline: got rows {lengths}, wanted one number; {_NAMED}")
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
                f"pipeline: got rows {dict(lengths)}, wanted a row or more for each of the {m} micro-batches; pass"
                f" more rows, or take fewer of them; {_NAMED}"
            )
        unit = self._row_ranks(rows // m) if lengths else 1
        return cut_rows(rows, m, unit)

    def _lowering(self, one: Arrays) -> Lowering:
        """Return the schedule as edges and priorities, for arrays like those of one micro-batch."""
        # Costs depend on shapes alone, which are the same in every step of a training loop.
        key = tuple(shape_of(value) for value in one.values())
        if key not in self._lowered:
            shortest = min(self._seconds(one), default=0.0)
            hop = _HOP_S / shortest if shortest else math.inf
            self._lowered[key] = lowering(self.parts.schedule, self.parts.edges, hop=hop)
        return self._lowered[key]

    def _seconds(self, one: Arrays) -> list[float]:
        """Return the projected seconds of each chunk's actions that compute anything."""
        model = self.parts.opened.loaded.model
        types = self.parts.opened.types(one, None)
        nodes = zip(model.graph, costs(model, types), strict=True)
        each = {node: seconds(node, cost, types=types) for node, cost in nodes}
        whole = any(action.kind == BACKWARD for action in self.parts.schedule.actions)

        def taken_by(part: ActionBoundary) -> float:
            return sum(each[node] for node in nodes_between(model, part.inputs, part.outputs))

        found = []
        for piece in self.parts.pieces:
            parts = zip("FIW", piece[:3], strict=True)
            taken = {kind: taken_by(part) for kind, part in parts if part.outputs}
            # A whole backward is one task, so there is no hop between its two parts.
            backward = [taken[kind] for kind in "IW" if kind in taken]
            found += [taken["F"]] if "F" in taken else []
            found += [sum(backward)] if whole and backward else backward
        return found


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
        raise ConfigError(f"pipeline: {what}: got {_sketch(values)}, wanted {_sketch(form)}, as it was made")
    pairs = [(form[k], values[k]) for k in form] if named else list(zip(form, values, strict=True))
    return list(chain.from_iterable(arrays_like(part, value, what) for part, value in pairs))


def _sketch(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    return f"a list of {len(value)}" if isinstance(value, (list, tuple)) else f"one {type(value).__name__}"
