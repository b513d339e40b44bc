"""`pipeline`: a model over stages of workers, its micro-batches in the order of a schedule.

    graph --cut--> chunks --schedule--> one task an action, with its worker, its priority and what it waits for

Called on a batch it gives a `PipelineRun`, a collection: loss and gradients, or the outputs where nothing is to be
learned.  Gradients of micro-batches are added in the order of micro-batches, whatever the schedule, so every schedule
gives the same bits.  Which tasks there are is said by `tasks`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.model.load import load
from dask_ferro.graph.parallel.config import PlanFile, read_plan
from dask_ferro.graph.parallel.pipeline_ranks import plan_signals
from dask_ferro.graph.pipeline.named import NAMES, known, usual_chunks
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.stages import LOSS, Signals, staged
from dask_ferro.graph.tensor.from_model import from_model
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor
from dask_ferro.lower.limits import limits
from dask_ferro.lower.pipeline.parts import parts_of
from dask_ferro.lower.pipeline.ranks import RankPipeline
from dask_ferro.lower.pipeline.run import form_of
from dask_ferro.lower.pipeline.staged import Pipeline


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
        each parameter is updated on the stage where its gradient is made, with a plan on the rank that holds its
        part.  Arguments that it reads (a rate that changes) are inputs of each call, by name.
    workers : sequence of str or int, optional
        The address or name of each stage's worker, or its number in the order of names; without them those of the
        cluster, in the order of addresses.
    edges : {"window", "chain", "queue"}, optional
        What keeps the order of a schedule; `graph.pipeline.order_edges` says what each is for, and chooses
        otherwise, by the projected seconds of the shortest action.
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
    _check_options(reduction, params, optimizer)
    sharding = _sharding(plan, params)
    cuts = sharding is not None and any(region.stage is not None for region in sharding.regions)
    # Regions that have stages say where to cut, whatever the schedule; a schedule by name needs the number of stages.
    if sharding is not None and stages is None and (cuts or schedule in NAMES):
        stages = plan_signals(_outputs(graph, params)[LOSS], params, sharding)
    order = _schedule(schedule, stages, micro_batches, chunks)
    trains = any(action.kind != "F" for action in chain.from_iterable(order.stages))
    # Without parameters there is nothing to differentiate with respect to: the forwards of the lists are left.
    if params is None:
        order = order.forward() if trains else order
    elif not trains:
        raise ConfigError(
            f"schedule {order.name!r} has forwards alone; leave out the parameters, or add backwards"
        )
    signals = None if stages is None or isinstance(stages, int) else stages
    model = staged(_outputs(graph, params), params, chunks=order.chunks, signals=signals)
    parts = parts_of(
        *(model, form_of(params), order), reduction=reduction, workers=workers, edges=edges, batch=batch
    )
    if optimizer is not None and params is not None:
        parts = parts.updated(optimizer, params)
    return Pipeline(parts) if sharding is None else RankPipeline(Pipeline(parts), model, sharding)


def _check_options(reduction: str, params: Tree | None, optimizer: Optimizer | None) -> None:
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"pipeline: reduction: got {reduction!r}, wanted 'mean' or 'sum'")
    if optimizer is not None and params is None:
        raise ConfigError("pipeline: optimizer: there are no parameters; give them too")


def _sharding(plan: Any, params: Tree | None) -> PlanFile | None:
    """Return the plan if one is given and enabled."""
    found = plan if plan is None or isinstance(plan, PlanFile) else read_plan(plan)
    if found is None or not found.enabled:
        return None
    if params is None:
        raise ConfigError(
            "pipeline: plan: there are no parameters; without a backward no schedule is needed: Ranks.of(apply(model,"
            " plan)) gives a function, and its calls follow each other through the stages"
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
    # Lists say their own counts; one that is given beside them and differs is a mistake in either.
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


def _outputs(graph: Any, params: Tree | None) -> dict[str, Tensor]:
    """Return the outputs to compute, by name."""
    if isinstance(graph, Tensor):
        return {LOSS if params is not None else "y": graph}
    if params is not None:
        raise ConfigError(f"pipeline: with parameters wanted a Tensor, the loss, got {type(graph).__name__}")
    if isinstance(graph, Mapping):
        return dict(graph)
    bounds = limits()
    model = graph if isinstance(graph, ir.Model) else load(graph, limits=bounds).model
    return from_model(model, longest=bounds.sleep_seconds).outputs
