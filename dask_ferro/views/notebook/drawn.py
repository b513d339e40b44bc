"""The function of each kind of value that a notebook shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dask_ferro.views.notebook import bars, check, clusters, model, plans, schedules, traces

# A kind is what a class passes to `drawings.registry.in_notebook`.
DRAWN: Mapping[str, Callable[..., str]] = {
    "model": model.model,
    "output": model.output,
    "trace": traces.trace,
    "tape": traces.tape,
    "schedule": schedules.schedule,
    "proposals": plans.proposals,
    "applied": plans.applied,
    "cluster": clusters.cluster,
    "check": check.check,
    "futures": bars.futures,
    "rows": bars.rows,
}
