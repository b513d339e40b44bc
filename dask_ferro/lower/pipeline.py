"""`pipeline`: a model over stages of workers, its micro-batches in the order of a schedule.

    graph --cut--> chunks --schedule--> one task an action, with its worker, its priority and what it waits for

Called on a batch it gives a `PipelineRun`, a collection: loss and gradients, or the outputs where nothing is to be
learned.  Gradients of micro-batches are added in the order of micro-batches, whatever the schedule, so every schedule
gives the same bits.  Which tasks there are is `pipeline_tasks`'.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.load import load
from dask_ferro.graph.pipeline import LOSS, Piece, Signals, Staged, pieces, staged
from dask_ferro.graph.schedule import Schedule
from dask_ferro.graph.schedules.edges import lowering
from dask_ferro.graph.schedules.known import NAMES, known
from dask_ferro.graph.tensor import Tensor
from dask_ferro.graph.tensor_import import from_model
from dask_ferro.graph.tree import Tree
from dask_ferro.lower.opened import Opened
from dask_ferro.lower.pipeline_run import PipelineRun, arrays_like, form_of
from dask_ferro.lower.pipeline_tasks import action_refs, action_regions
from dask_ferro.lower.signature import as_array, check_arrays, shape_of

_CHUNKS = {"interleaved": 2, "zb-v": 2}  # a stage, where nobody says otherwise


def pipeline(
    graph: Any,
    params: Tree | None = None,
    *,
    stages: int | Signals | None = None,
    micro_batches: int | None = None,
    schedule: str | os.PathLike[str] | Schedule = "1f1b",
    reduction: str = "mean",
    workers: Sequence[str] | None = None,
    edges: str | None = None,
) -> Pipeline:
    """Return a model as a pipeline: a function of batches.

    Parameters
    ----------
    graph : Tensor, mapping of str to Tensor, or what `from_onnx` takes
        With `params` the loss of one micro-batch, a scalar; otherwise what to compute.  The batch is axis 0 of its
        first argument, and of all arguments whose axis 0 has the same name or size.
    params : Tensor, or lists and dicts of Tensor, optional
        What to differentiate the loss with respect to: constants, which are then inputs bound to their values, or
        arguments.  Without them the schedule's forwards run.
    stages : int or sequence, optional
        How many stages, to cut by projected cost; or the signals to cut by, one entry a chunk, each a name or
        several.  A schedule that is given whole says itself how many there are.
    micro_batches : int, optional
        Equal parts of the batch.  A schedule that is given whole says it itself.
    schedule : str, path or Schedule
        "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", a CSV file, or a schedule.
    reduction : {"mean", "sum"}, optional
        How the losses of micro-batches make the loss of the batch.
    workers : sequence of str, optional
        The address or name of each stage's worker; without them those of the cluster, in the order of addresses.
    edges : {"window", "chain", "queue"}, optional
        What keeps the order of a schedule; `graph.schedules.edges` says what each is for, and chooses otherwise.

    Raises
    ------
    ConfigError
        Stages, micro-batches, signals or schedule that do not go together.
    UnsupportedOp
        Some op has no gradient, or no engine.

    Examples
    --------
    >>> step = pipeline(loss, weights, stages=4, micro_batches=16, schedule="zb-h1")  # doctest: +SKIP
    >>> value, gradients = step(x=images, labels=labels).compute()  # doctest: +SKIP
    """
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"pipeline: reduction: got {reduction!r}, wanted 'mean' or 'sum'")
    plan = _schedule(schedule, stages, micro_batches)
    trains = any(action.kind != "F" for row in plan.stages for action in row)
    if params is None:
        plan = plan.forward() if trains else plan
    elif not trains:
        raise ConfigError(
            f"schedule {plan.name!r} has forwards alone; leave out the parameters, or add backwards"
        )
    signals = None if stages is None or isinstance(stages, int) else stages
    model = staged(_outputs(graph, params), params, chunks=plan.chunks, signals=signals)
    return Pipeline(model, form_of(params), plan, reduction=reduction, workers=workers, edges=edges)


def _schedule(schedule: Any, stages: Any, micro_batches: int | None) -> Schedule:
    if isinstance(schedule, str) and schedule in NAMES:
        if stages is None or micro_batches is None:
            raise ConfigError(f"schedule {schedule!r}: wanted stages and micro_batches, got neither or one")
        each = _CHUNKS.get(schedule, 1)
        count = stages if isinstance(stages, int) else len(stages)
        if not isinstance(stages, int) and count % each:
            raise ConfigError(
                f"schedule {schedule!r}: got {count} signals, wanted a multiple of the {each} chunks of each stage"
            )
        return known(schedule, count if isinstance(stages, int) else count // each, micro_batches)
    if isinstance(schedule, str) and not os.path.exists(schedule):
        raise ConfigError(f"schedule: got {schedule!r}, wanted one of {', '.join(NAMES)}, or a CSV file")
    found = schedule if isinstance(schedule, Schedule) else Schedule.load(schedule)
    _check_count("micro_batches", micro_batches, found.micro_batches, found)
    if isinstance(stages, int):
        _check_count("stages", stages, len(found.stages), found)
    elif stages is not None:
        _check_count("signals", len(stages), found.chunks, found)
    return found


def _check_count(what: str, got: int | None, has: int, schedule: Schedule) -> None:
    if got is not None and got != has:
        raise ConfigError(f"schedule {schedule.name!r}: {what}: got {got}, but it has {has}; leave it out")


class Pipeline:
    """A model cut into chunks, and the schedule of its actions.  Made by `pipeline`.

    Parameters
    ----------
    model : Staged
    form : tree of int
        The form of the parameters, a position in the place of each; None where there are none.
    schedule : Schedule
    reduction, workers, edges
        Those of `pipeline`.

    Attributes
    ----------
    schedule : Schedule
    lowering : Lowering
        The schedule as edges and priorities.
    pieces : tuple of Piece
        Each chunk's actions by the values that they read and give.
    """

    def __init__(
        self,
        model: Staged,
        form: Any,
        schedule: Schedule,
        *,
        reduction: str = "mean",
        workers: Sequence[str] | None = None,
        edges: str | None = None,
    ) -> None:
        self.schedule, self.lowering = schedule, lowering(schedule, edges)
        self._form, self._reduction, self._workers = form, reduction, workers
        self._params, self._grads, self._bound = model.params, model.grads, model.bound
        self._opened = _opened(model.model)
        self.pieces: tuple[Piece, ...] = pieces(self._opened.loaded.model, schedule.chunks)
        self._refs = action_refs(self._opened, self.pieces)
        self._regions = action_regions(self._opened, self._refs)
        self._batch = self._carriers()

    def __repr__(self) -> str:
        form = self.lowering.form
        return f"<Pipeline of {self.schedule.chunks} chunks, {self.schedule.name}, {form} edges\n{self.schedule}>"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that are no parameters."""
        return tuple(s.name for s in self._opened.signature.inputs if s.name not in self._params)

    def _carriers(self) -> frozenset[str]:
        """The inputs that carry the batch."""
        shapes = {
            s.name: s.shape for s in self._opened.signature.inputs if s.name not in self._params and s.shape
        }
        batch = next((shape[0] for shape in shapes.values() if shape), None)
        return frozenset(name for name, shape in shapes.items() if shape and shape[0] == batch is not None)

    def __call__(self, inputs: Any = None, *, params: Tree | None = None, **named: Any) -> PipelineRun:
        """Return the pipeline on a batch.

        Parameters
        ----------
        inputs : array or mapping of str to array, optional
            One array where there is one input; what an argument is bound to need not be given.
        params : tree of arrays, optional
            Values of the parameters, in the form that they were given in, in the place of those of the constants.
        **named
            Inputs by name.

        Raises
        ------
        ConfigError
            Names, dtypes or shapes that do not fit, or rows that are no multiple of the micro-batches.
        """
        arrays = dict(self._bound)
        if params is not None:
            arrays |= zip(self._params, arrays_like(self._form, params), strict=True)
        arrays |= self._given(inputs) | named
        specs = {s.name: s for s in self._opened.signature.inputs}
        unknown, missing = sorted(arrays.keys() - specs.keys()), sorted(specs.keys() - arrays.keys())
        if unknown or missing:
            listed = [f"unknown input {n!r}" for n in unknown] + [f"missing input {n!r}" for n in missing]
            raise ConfigError(f"pipeline: {', '.join(listed)}; it takes {', '.join(self.inputs) or 'none'}")
        arrays = {name: as_array(spec, arrays[name]) for name, spec in specs.items()}
        return PipelineRun(self, arrays, self._rows(arrays))

    def _given(self, inputs: Any) -> dict[str, Any]:
        if inputs is None:
            return {}
        if isinstance(inputs, Mapping):
            return dict(inputs)
        if len(self.inputs) != 1:
            raise ConfigError(
                f"pipeline: got one array, wanted {', '.join(self.inputs)}; pass a dict by name"
            )
        return {self.inputs[0]: inputs}

    def _rows(self, arrays: dict[str, Any]) -> int:
        """The rows of a micro-batch, when the arrays have been checked."""
        m, lengths = self.schedule.micro_batches, {}
        for name in self._batch:
            shape = shape_of(arrays[name])
            if not shape:
                raise ConfigError(
                    f"pipeline: input {name!r} carries the batch and has no rows to cut; pass an array"
                )
            lengths[name] = shape[0]
        if len(set(lengths.values())) > 1 or any(n % m or not n for n in lengths.values()):
            raise ConfigError(
                f"pipeline: got rows {lengths}, wanted one number, a multiple of {m} micro-batches"
            )
        rows = next(iter(lengths.values()), 0) // m
        one = {name: value[:rows] if name in self._batch else value for name, value in arrays.items()}
        check_arrays(self._opened.signature, one, "pipeline")
        return rows


def _outputs(graph: Any, params: Tree | None) -> dict[str, Tensor]:
    """What is to be computed, by name."""
    if isinstance(graph, Tensor):
        return {LOSS if params is not None else "y": graph}
    if params is not None:
        raise ConfigError(f"pipeline: with parameters wanted a Tensor, the loss, got {type(graph).__name__}")
    if isinstance(graph, Mapping):
        return dict(graph)
    return from_model(graph if isinstance(graph, ir.Model) else load(graph).model).outputs


def _opened(model: ir.Model) -> Opened:
    from dask_ferro.lower import _open

    return _open(ir.to_proto(model))  # type: ignore[no-any-return]
