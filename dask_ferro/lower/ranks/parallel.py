"""`parallelize`: a model as a function of batches, on the workers and in the order of a plan and a schedule.

    graph --cut--> chunks --schedule--> the tasks of each action, with their member, order and dependencies

A call on a batch returns a `PipelineRun`, a Dask collection of loss and gradients, or of outputs.  Gradients of
micro-batches are added in the order of micro-batches, whatever the schedule, so every schedule gives the same bits.
`schedule` defines the tasks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.model.load import load
from dask_ferro.graph.parallel.config import PlanFile, read_plan
from dask_ferro.graph.parallel.pipeline_ranks import plan_regions
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.schedules import make_schedule as named_schedule
from dask_ferro.graph.pipeline.schedules import usual_chunks
from dask_ferro.graph.pipeline.stages import LOSS, RegionCuts, cut_stages
from dask_ferro.graph.pipeline.update import UpdateGraph, update_graph, whole_step
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.from_model import from_model
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor
from dask_ferro.lower.ranks.pipeline import Pipeline
from dask_ferro.lower.worker.models import limits


def parallelize(
    graph: Any,
    plan: str | os.PathLike[str] | Mapping[str, Any] | PlanFile | None = None,
    params: Tree | None = None,
    *,
    optimizer: Optimizer | None = None,
    micro_batches: int | None = None,
    schedule: str | Schedule | None = None,
    chunks: int | None = None,
    stages: int | RegionCuts | None = None,
    batch_inputs: Sequence[str] | None = None,
    reduction: str = "mean",
    workers: Sequence[str | int] | None = None,
) -> Pipeline:
    """Return a model as a function of batches: sharded by a plan, in the stages of a plan or a schedule.

    A call computes the outputs; with parameters it computes the loss and its gradients, and with an optimizer a whole
    training step.  Whatever the plan and the schedule, the model is the same and so are the results.

    Parameters
    ----------
    graph : Tensor, mapping of str to Tensor, or any model that `from_onnx` takes
        If `params` is passed, the scalar loss of one micro-batch, or a mapping of "loss" to it and of other names to
        metrics: scalars that are combined over micro-batches like the loss.  Otherwise the outputs to compute.
    plan : path, mapping or PlanFile, optional
        How values are split, the stages and their schedule, as in `apply`; by default nothing is split.  A stage has
        as many workers as the plan's mesh has ranks, and `workers` lists the workers of all stages, stage by stage.
        Keywords override its `schedule`, `micro_batches`, `chunks` and `stages`.
    params : Tensor, or lists and dicts of Tensor, optional
        The tensors to differentiate the loss with respect to: constants, which become inputs bound to their values,
        or arguments.  Without them only the schedule's forwards run.
    optimizer : Optimizer, optional
        Turns a call into a whole training step, which returns the new parameters and state instead of gradients.
        Each parameter is updated on the stage that computes its gradient, or with a plan on the rank that holds its
        part.  Arguments that it reads (a learning rate that changes) are inputs of each call, by name.  A step of one
        stage and one micro-batch is one graph.
    micro_batches : int, optional
        The number of parts of a batch, which have the same rows; 1 by default.  A batch of other rows is refused.  A
        complete schedule has its own number.
    schedule : str or Schedule, optional
        The order of the stages' actions: a name that `schedule` accepts, or a schedule; "1f1b" by default.
    chunks : int, optional
        For a schedule by name: chunks of the model on each stage, as in `schedule`.
    stages : int or sequence, optional
        The number of stages, for a cut according to projected costs, or the regions to cut at: one entry per chunk,
        each one name or several.  By default the stages of the plan, on the workers that it numbers, or one.  A
        complete schedule has its own number of stages.
    batch_inputs : sequence of str, optional
        The arguments whose axis 0 is the batch; by default the first one, and all whose axis 0 has the same name or
        size.
    reduction : {"mean", "sum"}, optional
        How the losses of micro-batches are combined into the loss of the batch.
    workers : sequence of str or int, optional
        The address or name of each stage's worker, or its number in the order of names; by default the cluster's
        workers, in the order of names.

    Raises
    ------
    InputError
        If stages, micro-batches, chunks, regions or a schedule contradict each other, or `batch_inputs` is empty.
    UnsupportedOpError
        If an op has no gradient or no engine.

    Examples
    --------
    >>> infer = parallel("model.onnx", "plan.yaml")  # doctest: +SKIP
    >>> y = infer(x).compute()  # doctest: +SKIP
    >>> step = parallel(loss, params=weights, stages=4, micro_batches=16, schedule="zb-h1")  # doctest: +SKIP
    >>> value, gradients = step(x=images, labels=labels).compute()  # doctest: +SKIP

    Parameters that stay on the stages from step to step:

    >>> step = parallel(loss, "plan.yaml", weights, optimizer=SGD(0.1), micro_batches=16)  # doctest: +SKIP
    >>> now = step(x=images, labels=labels).submit()  # doctest: +SKIP
    >>> now = step(x=images, labels=labels, params=now.params, state=now.state).submit()  # doctest: +SKIP

    A learning rate that changes from step to step:

    >>> step = parallel(loss, None, weights, optimizer=SGD(ft.input("rate", ())))  # doctest: +SKIP
    >>> now = step(x=images, labels=labels, rate=0.1).submit()  # doctest: +SKIP
    """
    if reduction not in ("mean", "sum"):
        raise InputError(f"parallelize: reduction: got {reduction!r}, wanted 'mean' or 'sum'")
    if optimizer is not None and params is None:
        raise InputError("parallelize: optimizer: there are no parameters; pass params too")
    if params is not None and not pytree.leaves(params):
        raise InputError(
            "parallelize: params: got no tensors, wanted the tensors to differentiate with respect to;"
            " leave it out to run only forwards"
        )
    sharding = plan if plan is None or isinstance(plan, PlanFile) else read_plan(plan)
    if sharding is not None and not sharding.enabled:
        sharding = None
    outputs = _outputs(graph, params)
    # A complete schedule has its own numbers.
    if sharding is not None and not isinstance(schedule, Schedule):
        chunks = sharding.chunks if chunks is None else chunks
        schedule = sharding.schedule if schedule is None else schedule
        micro_batches = sharding.micro_batches if micro_batches is None else micro_batches
        stages = sharding.stages if stages is None else stages
    if stages is None and sharding is not None and sharding.has_stages:
        stages = plan_regions(outputs, params, sharding)
    order = _schedule("1f1b" if schedule is None else schedule, stages, micro_batches, chunks)
    trains = any(order.peaks)
    # Without parameters nothing is differentiated: only the forwards of the lists are kept.
    if params is None:
        order = order.forward() if trains else order
    elif not trains:
        raise InputError(
            f"schedule {order.name!r} has only forwards; leave out the parameters, or add backwards"
        )
    cuts = None if stages is None or isinstance(stages, int) else stages
    update: UpdateGraph | None = None
    if optimizer is not None and params is not None and (order.chunks, order.micro_batches) == (1, 1):
        model, update = whole_step(outputs, params, optimizer)
    else:
        model = cut_stages(outputs, params, chunks=order.chunks, cuts=cuts)
        if optimizer is not None and params is not None:
            update = update_graph(optimizer, params, model.params, model.grads)
    # Tensors are not sent to workers.
    form = None if params is None else pytree.map_leaves(lambda _: 0, params)
    return Pipeline(
        model,
        order,
        form,
        update=update,
        plan=sharding,
        reduction=reduction,
        workers=workers,
        batch_inputs=batch_inputs,
    )


def _schedule(
    schedule: str | Schedule, stages: int | RegionCuts | None, micro_batches: int | None, chunks: int | None
) -> Schedule:
    if not isinstance(schedule, Schedule):
        parts, count = micro_batches if micro_batches is not None else 1, 1 if stages is None else stages
        if isinstance(count, int):
            return named_schedule(schedule, count, parts, chunks)
        each = usual_chunks(schedule) if chunks is None else chunks
        if not isinstance(each, int) or each < 1 or len(count) % each:
            raise InputError(
                f"schedule {schedule!r}: got {len(count)} regions, wanted a multiple of the {each} chunks of"
                " each stage"
            )
        return named_schedule(schedule, len(count) // each, parts, chunks)
    # A schedule's lists fix its counts; a different count as an argument is a mistake in one of the two.
    if chunks is not None:
        raise InputError(
            f"schedule {schedule.name!r}: chunks: got {chunks!r}, but its lists define them; leave it out"
        )
    counts = [("micro_batches", micro_batches, schedule.micro_batches)]
    if isinstance(stages, int):
        counts.append(("stages", stages, len(schedule.stages)))
    elif stages is not None:
        counts.append(("regions", len(stages), schedule.chunks))
    for what, got, has in counts:
        if got is not None and got != has:
            raise InputError(f"schedule {schedule.name!r}: {what}: got {got}, but it has {has}; leave it out")
    return schedule


def _outputs(graph: Any, params: Tree | None) -> dict[str, Tensor]:
    """Return the outputs to compute, by name."""
    if isinstance(graph, Tensor):
        return {LOSS if params is not None else "y": graph}
    if params is not None:
        return _loss_and_metrics(graph)
    if isinstance(graph, Mapping):
        return dict(graph)
    return from_model(graph if isinstance(graph, ir.Model) else load(graph, limits=limits()).model).outputs


def _loss_and_metrics(graph: object) -> dict[str, Tensor]:
    """Return the loss and the metrics of a training step by name, the loss first."""
    if not isinstance(graph, Mapping) or LOSS not in graph:
        got = (
            f"a mapping of {', '.join(map(str, graph))}"
            if isinstance(graph, Mapping)
            else type(graph).__name__
        )
        raise InputError(
            f"parallelize: with parameters wanted a Tensor, the loss, or a mapping with 'loss', got {got}"
        )
    for name, value in graph.items():
        if not isinstance(value, Tensor) or value.ndim or not value.is_floating:
            raise InputError(
                f"parallelize: {name!r}: got {value!r}, wanted a floating point scalar, which is combined"
                " over micro-batches; take its mean or sum"
            )
    return {LOSS: graph[LOSS], **graph}
