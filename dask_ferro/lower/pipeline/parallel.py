"""`parallel`: a model as a function of batches, over the workers and in the order that a plan and a schedule give."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dask_ferro.graph.parallel.config import PlanFile, read_plan
from dask_ferro.graph.pipeline.named import NAMES
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.stages import Signals
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.pipeline.pipeline import pipeline
from dask_ferro.lower.pipeline.staged import Pipeline


def parallel(
    graph: Any,
    plan: str | os.PathLike[str] | Mapping[str, Any] | PlanFile | None = None,
    params: Tree | None = None,
    *,
    optimizer: Optimizer | None = None,
    micro_batches: int | None = None,
    schedule: str | os.PathLike[str] | Schedule = "1f1b",
    stages: int | Signals | None = None,
    batched: Sequence[str] | None = None,
    reduction: str = "mean",
    workers: Sequence[str | int] | None = None,
) -> Pipeline:
    """Return a model as a function of batches: sharded by a plan, in the stages of a plan or a schedule.

    Without parameters a call computes the outputs, with them the loss and its gradients, and with an optimizer a whole
    training step.  Whatever the plan and the schedule, the model is the same and so are the results.

    Parameters
    ----------
    graph, params, optimizer, batched, reduction, workers
        As `pipeline` takes them.
    plan : path, mapping or PlanFile, optional
        How values are split, and the stages, as `apply` takes it; by default nothing is split.
    micro_batches : int, optional
        The number of parts of a batch, as `pipeline` takes it; 1 if not given, for a schedule by name.
    schedule : str, path or Schedule, optional
        The order of the stages' actions.
    stages : int or sequence, optional
        Stages, as `pipeline` takes them; by default those of the plan, or one.

    Raises
    ------
    ConfigError, UnsupportedOp
        As `pipeline` and `apply`.

    Examples
    --------
    >>> infer = parallel("model.onnx", "plan.yaml")  # doctest: +SKIP
    >>> y = infer(x).compute()  # doctest: +SKIP
    >>> step = parallel(loss, "plan.yaml", weights, optimizer=Adam(1e-3), micro_batches=8)  # doctest: +SKIP
    >>> now = step(x=images, labels=labels).submit()  # doctest: +SKIP
    """
    sharding = plan if plan is None or isinstance(plan, PlanFile) else read_plan(plan)
    if isinstance(schedule, str) and schedule in NAMES:
        micro_batches = 1 if micro_batches is None else micro_batches
        # A plan without stages splits values and nothing else.
        cuts = sharding is not None and sharding.enabled and sharding.has_stages
        stages = 1 if stages is None and not cuts else stages
    return pipeline(
        *(graph, params),
        stages=stages,
        micro_batches=micro_batches,
        schedule=schedule,
        batched=batched,
        reduction=reduction,
        optimizer=optimizer,
        workers=workers,
        plan=sharding,
    )
