"""`Pipeline`: a model over stages of workers, one worker a stage, as a function of batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

from dask_ferro.engines.executable import nodes_between
from dask_ferro.errors import ConfigError
from dask_ferro.graph.cost.roofline import costs, seconds
from dask_ferro.graph.pipeline.action import BACKWARD
from dask_ferro.graph.pipeline.order_edges import Lowering, lowering
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.stages import ChunkActions
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.pipeline.parts import PipelineParts
from dask_ferro.lower.pipeline.run import PipelineRun, arrays_like
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.signature import as_array, check_arrays, shape_of
from dask_ferro.lower.worker.bundle_ref import BundleRef

# Seconds from the end of a task to the start of one that waits for it: design.md, section 4.
_HOP_S = 6e-3


class Pipeline:
    """A model cut into chunks, and the schedule of its actions.  Created by `pipeline`.

    Parameters
    ----------
    parts : PipelineParts
    """

    def __init__(self, parts: PipelineParts) -> None:
        self.parts = parts
        self._lowered: dict[Any, Lowering] = {}

    def __repr__(self) -> str:
        return repr(self.parts)

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.parts.schedule

    @property
    def pieces(self) -> tuple[ChunkActions, ...]:
        """Each chunk's actions, as the values that they read and make."""
        return self.parts.pieces

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that are not parameters: the model's, then the optimizer's settings."""
        return self.parts.inputs

    def __call__(
        self, inputs: Any = None, *, params: Tree | None = None, state: Tree | None = None, **named: Any
    ) -> PipelineRun:
        """Return the pipeline on a batch.

        Parameters
        ----------
        inputs : array or mapping of str to array, optional
            One array where the model has one input; inputs that are bound to values may be left out.
        params : tree of arrays or futures, optional
            Values of the parameters, in the form that the pipeline was made with, in place of the constants.
            Futures stay where they are.
        state : tree of arrays or futures, optional
            The optimizer's state, as the step before returned it; by default the initial state.
        **named
            Inputs by name.

        Raises
        ------
        ConfigError
            Names, dtypes or shapes that do not fit, or rows that are not a multiple of the micro-batches.
        """
        arrays = dict(self.parts.bound)
        if params is not None:
            arrays |= zip(self.parts.params, arrays_like(self.parts.form, params, "params"), strict=True)
        arrays |= self._given(inputs) | named
        settings = None if self.parts.update is None else self.parts.update.settings
        specs = {s.name: s for s in (() if settings is None else settings.inputs)}
        specs |= {s.name: s for s in self.parts.opened.signature.inputs}
        unknown, missing = sorted(arrays.keys() - specs.keys()), sorted(specs.keys() - arrays.keys())
        if unknown or missing:
            listed = [f"unknown input {n!r}" for n in unknown] + [f"missing input {n!r}" for n in missing]
            raise ConfigError(f"pipeline: {', '.join(listed)}; it takes {', '.join(self.inputs) or 'none'}")
        arrays = {name: as_array(spec, arrays[name], "pipeline") for name, spec in specs.items()}
        rows = self._rows(arrays)
        one = {name: value[:rows] if name in self.parts.batch else value for name, value in arrays.items()}
        check_arrays(self.parts.opened.signature, one, "pipeline")
        if settings is not None:
            check_arrays(settings, one, "pipeline: optimizer")
        return PipelineRun(self.parts, arrays | self._state(state), rows, self._lowering(one))

    def _state(self, state: Tree | None) -> dict[str, Any]:
        if self.parts.update is None:
            if state is not None:
                raise ConfigError("pipeline: state: the pipeline has no optimizer; leave it out, or pass one")
            return {}
        # The initial state is sent like any input, for the first step alone.
        if state is None:
            return dict(self.parts.update.graph.start)
        found = arrays_like(self.parts.update.graph.form, state, "state")
        return dict(zip(self.parts.update.graph.state, found, strict=True))

    def _given(self, inputs: Any) -> dict[str, Any]:
        if inputs is None:
            return {}
        if isinstance(inputs, Mapping):
            return dict(inputs)
        if len(self.parts.own) != 1:
            raise ConfigError(
                f"pipeline: got one array, wanted {', '.join(self.inputs)}; pass a dict by name"
            )
        return {self.parts.own[0]: inputs}

    def _rows(self, arrays: Arrays) -> int:
        """Return the rows of a micro-batch."""
        m, lengths = self.schedule.micro_batches, {}
        for name in self.parts.batch:
            shape = shape_of(arrays[name])
            if not shape:
                raise ConfigError(
                    f"pipeline: input {name!r} carries the batch and has no rows to cut; pass an array"
                )
            lengths[name] = shape[0]
        if len(set(lengths.values())) > 1 or any(n % m or not n for n in lengths.values()):
            raise ConfigError(
                f"pipeline: got rows {lengths}, wanted one number, a multiple of {m} micro-batches; name in batch="
                "[...] the inputs that carry the batch, if not these"
            )
        return next(iter(lengths.values()), 0) // m

    def _lowering(self, one: Arrays) -> Lowering:
        """Return the schedule as edges and priorities, for arrays like those of one micro-batch."""
        # Costs depend on shapes alone, which are the same in every step of a training loop.
        key = tuple(shape_of(value) for value in one.values())
        if key not in self._lowered:
            shortest = min(self._seconds(one), default=0.0)
            hop = _HOP_S / shortest if shortest else math.inf
            self._lowered[key] = lowering(self.schedule, self.parts.edges, hop=hop)
        return self._lowered[key]

    def _seconds(self, one: Arrays) -> list[float]:
        """Return the projected seconds of each chunk's actions that compute anything."""
        model = self.parts.opened.loaded.model
        types = self.parts.opened.types(one, None)
        nodes = zip(model.graph, costs(model, types), strict=True)
        each = {node: seconds(node, cost, types=types) for node, cost in nodes}
        whole = any(action.kind == BACKWARD for action in chain.from_iterable(self.schedule.stages))

        def taken_by(ref: BundleRef) -> float:
            return sum(each[node] for node in nodes_between(model, ref.inputs, ref.outputs))

        found = []
        for refs in self.parts.refs:
            taken = {kind: taken_by(ref) for kind, ref in refs.items()}
            # A whole backward is one task, so there is no hop between its two parts.
            backward = [taken[kind] for kind in "IW" if kind in taken]
            found += [taken["F"]] if "F" in taken else []
            found += [sum(backward)] if whole and backward else backward
        return found
