"""`pipeline`: a model over stages of workers, its micro-batches in the order of a schedule.

    graph --cut--> chunks --schedule--> one task an action, with its worker, its priority and what it waits for

Called on a batch it gives a `PipelineRun`, a collection: loss and gradients, or the outputs where nothing is to be
learned.  Gradients of micro-batches are added in the order of micro-batches, whatever the schedule, so every schedule
gives the same bits.  Which tasks there are is said by `tasks`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from dask_ferro.engines.executable import nodes_between
from dask_ferro.errors import ConfigError
from dask_ferro.graph.cost.roofline import costs, seconds
from dask_ferro.graph.model.load import load
from dask_ferro.graph.model.self_contained import content
from dask_ferro.graph.parallel.config import PlanFile, read_plan
from dask_ferro.graph.parallel.pipeline_ranks import plan_signals
from dask_ferro.graph.pipeline.action import BACKWARD
from dask_ferro.graph.pipeline.named import NAMES, known, usual_chunks
from dask_ferro.graph.pipeline.order_edges import Lowering, check_form, lowering
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.stages import LOSS, Piece, Signals, Staged, pieces, staged
from dask_ferro.graph.tensor.core import Tensor
from dask_ferro.graph.tensor.from_model import from_model
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.inputs.signature import as_array, check_arrays, shape_of, types_for
from dask_ferro.lower.limits import limits
from dask_ferro.lower.model.prepared import Opened
from dask_ferro.lower.pipeline.ranks import RankPipeline
from dask_ferro.lower.pipeline.run import PipelineRun, arrays_like, form_of
from dask_ferro.lower.pipeline.tasks import action_refs, action_regions
from dask_ferro.lower.pipeline.update import Update, update

# From the end of a task until one that waited for it starts: design.md, section 4.
_HOP_S = 6e-3


def pipeline(
    graph: Any,
    params: Tree | None = None,
    *,
    stages: int | Signals | None = None,
    micro_batches: int | None = None,
    schedule: str | os.PathLike[str] | Schedule = "1f1b",
    chunks: int | None = None,
    batch: Sequence[str] | None = None,
    reduction: str = "mean",
    optimizer: Optimizer | None = None,
    workers: Sequence[str | int] | None = None,
    edges: str | None = None,
    plan: str | os.PathLike[str] | Mapping[str, Any] | PlanFile | None = None,
) -> Pipeline | RankPipeline:
    """Return a model as a pipeline: a function of batches.

    Parameters
    ----------
    graph : Tensor, mapping of str to Tensor, or what `from_onnx` takes
        With `params` the loss of one micro-batch, a scalar; otherwise what to compute.
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
    chunks : int, optional
        Of a schedule by name: pieces of the model on each stage, 2 or more for "interleaved" (2 if not given).
    batch : sequence of str, optional
        The arguments of which axis 0 is the batch; without it the first one, and all of which axis 0 has the same
        name or size.
    reduction : {"mean", "sum"}, optional
        How the losses of micro-batches make the loss of the batch.
    optimizer : Optimizer, optional
        With it a call is a whole training step, and gives parameters and state after it in the place of gradients;
        each parameter is updated on the stage where its gradient is made.  Arguments that it reads (a rate that
        changes) are inputs of each call, by name.
    workers : sequence of str or int, optional
        The address or name of each stage's worker, or its number in the order of names; without them those of the
        cluster, in the order of addresses.
    edges : {"window", "chain", "queue"}, optional
        What keeps the order of a schedule; `graph.pipeline.order_edges` says what each is for, and chooses otherwise, by
        the projected seconds of the shortest action.
    plan : path, mapping or PlanFile, optional
        How values are split in each stage, as `apply` takes it.  A stage then is as many workers as the plan's mesh
        has ranks, and `workers` names those of all stages, one after the other.  Where `stages` is left out, the
        plan's stages are the chunks, on the workers that it numbers.  The result is a `RankPipeline`.

    Raises
    ------
    ConfigError
        Stages, micro-batches, chunks, signals or schedule that do not go together, or a batch of no arguments.
    UnsupportedOp
        Some op has no gradient, or no engine.

    Examples
    --------
    >>> step = pipeline(loss, weights, stages=4, micro_batches=16, schedule="zb-h1")  # doctest: +SKIP
    >>> value, gradients = step(x=images, labels=labels).compute()  # doctest: +SKIP

    Parameters that stay on the stages from step to step:

    >>> step = pipeline(loss, weights, stages=4, micro_batches=16, optimizer=SGD(0.1))  # doctest: +SKIP
    >>> now = step(x=images, labels=labels).submit()  # doctest: +SKIP
    >>> now = step(x=images, labels=labels, params=now.params, state=now.state).submit()  # doctest: +SKIP

    A rate that changes from step to step:

    >>> step = pipeline(loss, weights, stages=4, micro_batches=16, optimizer=SGD(ff.argument("rate", ())))
    ... # doctest: +SKIP
    >>> now = step(x=images, labels=labels, rate=0.1).submit()  # doctest: +SKIP
    """
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"pipeline: reduction: got {reduction!r}, wanted 'mean' or 'sum'")
    sharding = _sharding(plan, params, optimizer)
    cuts = sharding is not None and any(region.stage is not None for region in sharding.regions)
    if sharding is not None and stages is None and (cuts or schedule in NAMES):
        stages = plan_signals(_outputs(graph, params)[LOSS], params, sharding)
    order = _schedule(schedule, stages, micro_batches, chunks)
    trains = any(action.kind != "F" for row in order.stages for action in row)
    if params is None:
        order = order.forward() if trains else order
    elif not trains:
        raise ConfigError(
            f"schedule {order.name!r} has forwards alone; leave out the parameters, or add backwards"
        )
    signals = None if stages is None or isinstance(stages, int) else stages
    if optimizer is not None and params is None:
        raise ConfigError("pipeline: optimizer: there are no parameters; give them too")
    model = staged(_outputs(graph, params), params, chunks=order.chunks, signals=signals)
    made = Pipeline(
        *(model, form_of(params), order), reduction=reduction, workers=workers, edges=edges, batch=batch
    )
    if sharding is not None:
        return RankPipeline(made, model, sharding)
    if optimizer is not None:
        made.updates(optimizer, params)
    return made


def _sharding(plan: Any, params: Tree | None, optimizer: Optimizer | None) -> PlanFile | None:
    """The plan, where there is one that is enabled."""
    found = plan if plan is None or isinstance(plan, PlanFile) else read_plan(plan)
    if found is None or not found.enabled:
        return None
    if params is None:
        raise ConfigError(
            "pipeline: plan: there are no parameters; without a backward no schedule is needed: Ranks.of(apply(model,"
            " plan)) gives a function, and its calls follow each other through the stages"
        )
    if optimizer is not None:
        raise ConfigError(
            "pipeline: optimizer: a plan's gradients stay in shards, and their step is a graph of its own: build it of"
            " parameters and gradients, and call Ranks.of(apply(step, plan)) on them"
        )
    return found


def _schedule(schedule: Any, stages: Any, micro_batches: int | None, chunks: int | None) -> Schedule:
    if isinstance(schedule, str) and schedule in NAMES:
        if stages is None or micro_batches is None:
            raise ConfigError(f"schedule {schedule!r}: wanted stages and micro_batches, got neither or one")
        each = usual_chunks(schedule) if chunks is None else chunks
        count = stages if isinstance(stages, int) else len(stages)
        if isinstance(stages, int):
            return known(schedule, count, micro_batches, chunks)
        if not isinstance(each, int) or each < 1 or count % each:
            raise ConfigError(
                f"schedule {schedule!r}: got {count} signals, wanted a multiple of the {each} chunks of each stage"
            )
        return known(schedule, count // each, micro_batches, chunks)
    if isinstance(schedule, str) and not os.path.exists(schedule):
        raise ConfigError(f"schedule: got {schedule!r}, wanted one of {', '.join(NAMES)}, or a CSV file")
    found = schedule if isinstance(schedule, Schedule) else Schedule.load(schedule)
    _check_count("micro_batches", micro_batches, found.micro_batches, found)
    if chunks is not None:
        raise ConfigError(
            f"schedule {found.name!r}: chunks: got {chunks!r}, but its lists say it; leave it out"
        )
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
    reduction, workers, edges, batch
        Those of `pipeline`.

    Attributes
    ----------
    schedule : Schedule
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
        workers: Sequence[str | int] | None = None,
        edges: str | None = None,
        batch: Sequence[str] | None = None,
    ) -> None:
        check_form(edges)
        self.schedule, self._edges = schedule, edges
        self._form, self._reduction, self._workers = form, reduction, workers
        self._params, self._grads, self._bound = model.params, model.grads, model.bound
        self._opened = _opened(model.model)
        self.pieces: tuple[Piece, ...] = pieces(self._opened.loaded.model, schedule.chunks)
        self._refs = action_refs(self._opened, self.pieces)
        self._regions = action_regions(self._opened, self._refs)
        self._batch = self._carriers() if batch is None else self._named(batch)
        self._lowered: dict[Any, Lowering] = {}
        self._update: Update | None = None
        self._home = self._homes()

    def updates(self, optimizer: Optimizer, params: Tree) -> None:
        """Let each call be a whole training step; `params` are the tensors that the pipeline was made with."""
        self._update = update(optimizer, params, self._params, self._grads, self.pieces, _opened)
        settings = [spec.name for spec in self._update.settings.inputs]
        if cut := sorted(self._batch.intersection(settings)):
            raise ConfigError(
                f"pipeline: optimizer: it reads the argument {cut}, which carries the batch and comes in"
                " micro-batches; give it an argument of another name, or say with batch=[...] what carries the batch"
            )
        self._bound = self._update.bound | self._bound
        names = [*self._update.params, *self._update.state, *(n for n in settings if n not in self._home)]
        self._home |= {name: self._update.chunk_of(name) for name in names}

    def _homes(self) -> dict[str, int]:
        """The chunk that each input had best lie with: for a parameter that of its gradient, else the first reader."""
        made = {name: c for c, piece in enumerate(self.pieces) for name in piece.results}
        first = {n: c for c, p in reversed([*enumerate(self.pieces)]) for part in p[:3] for n in part.inputs}
        return first | {w: made[g] for w, g in zip(self._params, self._grads, strict=False) if g in made}

    def __repr__(self) -> str:
        return f"<Pipeline of {self.schedule.chunks} chunks, {self.schedule.name}\n{self.schedule}>"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that are no parameters: the model's, and what else the optimizer reads."""
        settings = () if self._update is None else self._update.settings.inputs
        return tuple(dict.fromkeys((*self._own, *(spec.name for spec in settings))))

    @property
    def _own(self) -> tuple[str, ...]:
        return tuple(s.name for s in self._opened.signature.inputs if s.name not in self._params)

    def _named(self, batch: Sequence[str]) -> frozenset[str]:
        names = [batch] if isinstance(batch, str) else list(batch)
        if not names or (unknown := [name for name in names if name not in self._own]):
            got = f"the model has no argument {unknown}" if names else "got no arguments"
            raise ConfigError(f"pipeline: batch: {got}; it has {', '.join(self._own) or 'none'}")
        return frozenset(names)

    def _carriers(self) -> frozenset[str]:
        """The inputs that carry the batch, where nobody says: the first one, and those that look like it."""
        shapes = {
            s.name: s.shape for s in self._opened.signature.inputs if s.name not in self._params and s.shape
        }
        batch = next((shape[0] for shape in shapes.values() if shape), None)
        return frozenset(name for name, shape in shapes.items() if shape and shape[0] == batch is not None)

    def __call__(
        self, inputs: Any = None, *, params: Tree | None = None, state: Tree | None = None, **named: Any
    ) -> PipelineRun:
        """Return the pipeline on a batch.

        Parameters
        ----------
        inputs : array or mapping of str to array, optional
            One array where the model has one input; what an argument is bound to need not be given.
        params : tree of arrays or futures, optional
            Values of the parameters, in the form that they were given in, in the place of those of the constants.
            Futures stay where they are.
        state : tree of arrays or futures, optional
            Of the optimizer, as the step before gave it; without it the one to start from.
        **named
            Inputs by name.

        Raises
        ------
        ConfigError
            Names, dtypes or shapes that do not fit, or rows that are no multiple of the micro-batches.
        """
        arrays = dict(self._bound)
        if params is not None:
            arrays |= zip(self._params, arrays_like(self._form, params, "params"), strict=True)
        arrays |= self._given(inputs) | named
        settings = None if self._update is None else self._update.settings
        specs = {s.name: s for s in (() if settings is None else settings.inputs)}
        specs |= {s.name: s for s in self._opened.signature.inputs}
        unknown, missing = sorted(arrays.keys() - specs.keys()), sorted(specs.keys() - arrays.keys())
        if unknown or missing:
            listed = [f"unknown input {n!r}" for n in unknown] + [f"missing input {n!r}" for n in missing]
            raise ConfigError(f"pipeline: {', '.join(listed)}; it takes {', '.join(self.inputs) or 'none'}")
        arrays = {name: as_array(spec, arrays[name], "pipeline") for name, spec in specs.items()}
        rows = self._rows(arrays)
        one = {name: value[:rows] if name in self._batch else value for name, value in arrays.items()}
        check_arrays(self._opened.signature, one, "pipeline")
        if settings is not None:
            check_arrays(settings, one, "pipeline: optimizer")
        return PipelineRun(self, arrays | self._state(state), rows, self._lowering(one))

    def _state(self, state: Tree | None) -> dict[str, Any]:
        if self._update is None:
            if state is not None:
                raise ConfigError("pipeline: state: there is no optimizer whose state it could be; give one")
            return {}
        if state is None:
            return dict(self._update.start)
        found = arrays_like(self._update.form, state, "state")
        return dict(zip(self._update.state, found, strict=True))

    def _given(self, inputs: Any) -> dict[str, Any]:
        if inputs is None:
            return {}
        if isinstance(inputs, Mapping):
            return dict(inputs)
        if len(self._own) != 1:
            raise ConfigError(
                f"pipeline: got one array, wanted {', '.join(self.inputs)}; pass a dict by name"
            )
        return {self._own[0]: inputs}

    def _rows(self, arrays: dict[str, Any]) -> int:
        """The rows of a micro-batch."""
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
                f"pipeline: got rows {lengths}, wanted one number, a multiple of {m} micro-batches; say with batch="
                "[...] which inputs carry the batch, if not these"
            )
        return next(iter(lengths.values()), 0) // m

    def _lowering(self, one: Mapping[str, Any]) -> Lowering:
        """The schedule as edges and priorities, for arrays like those of one micro-batch."""
        key = tuple(shape_of(value) for value in one.values())
        if key not in self._lowered:
            shortest = min(self._seconds(one), default=0.0)
            hop = _HOP_S / shortest if shortest else math.inf
            self._lowered[key] = lowering(self.schedule, self._edges, hop=hop)
        return self._lowered[key]

    def _seconds(self, one: Mapping[str, Any]) -> list[float]:
        """Projected seconds of each chunk's actions, of those that compute anything."""
        model = self._opened.loaded.model
        types = types_for(self._opened.inference, self._opened.signature, one, None)
        nodes = zip(model.graph, costs(model, types), strict=True)
        each = {node: seconds(node, cost, types=types) for node, cost in nodes}
        whole = any(action.kind == BACKWARD for row in self.schedule.stages for action in row)
        found = []
        for refs in self._refs:
            taken = {
                kind: sum(each[n] for n in nodes_between(model, r.inputs, r.outputs))
                for kind, r in refs.items()
            }
            backward = [taken[kind] for kind in "IW" if kind in taken]
            found += [taken["F"]] if "F" in taken else []
            found += [sum(backward)] if whole and backward else backward
        return found


def _outputs(graph: Any, params: Tree | None) -> dict[str, Tensor]:
    """What is to be computed, by name."""
    if isinstance(graph, Tensor):
        return {LOSS if params is not None else "y": graph}
    if params is not None:
        raise ConfigError(f"pipeline: with parameters wanted a Tensor, the loss, got {type(graph).__name__}")
    if isinstance(graph, Mapping):
        return dict(graph)
    bounds = limits()
    model = graph if isinstance(graph, ir.Model) else load(graph, limits=bounds).model
    return from_model(model, longest=bounds.sleep_seconds).outputs


def _opened(model: ir.Model) -> Opened:
    """The model as a file of its own."""
    from dask_ferro.lower import _open

    return _open(content(model), ours=True)  # type: ignore[no-any-return]
