"""The values of a model's keys: run where the caller says, and again where what was sent to workers is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import dask
from dask.base import get_scheduler
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_ferro.errors import ConfigError
from dask_ferro.lower.crash_notes import explained
from dask_ferro.lower.inputs.keys import is_future
from dask_ferro.lower.model.bound import bind_checked
from dask_ferro.lower.model.bundles import plan_bundles
from dask_ferro.lower.model.lowering import lower
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.retry import retried

# A graph, and the keys whose values are wanted.
Request = tuple[HighLevelGraph, list[Any]]


class SchedulerCall(NamedTuple):
    """Where a graph runs: a scheduler's `get`, the client whose it is (None: this process), and its arguments."""

    get: Callable[..., Any]
    client: Any
    kwargs: Mapping[str, Any]


def target_of(collection: Any, kwargs: Mapping[str, Any]) -> SchedulerCall:
    """Return where `collection.compute(**kwargs)` runs."""
    kept = dict(kwargs)
    kept.pop("optimize_graph", None)  # there is nothing that an optimizer could merge
    get = get_scheduler(scheduler=kept.pop("scheduler", None), collections=[collection])
    owner = getattr(get, "__self__", None)  # a client's `get`, or one of Dask's own functions
    return SchedulerCall(get, owner if hasattr(owner, "scatter") else None, kept)


def execute(target: SchedulerCall, request: Request, model: str, again: Callable[[], Request | None]) -> Any:
    """Return the values of the keys of a request, straight from the scheduler that runs it.

    Parameters
    ----------
    target : SchedulerCall
    request : (HighLevelGraph, list of keys)
    model : str
        Its name, for an error.
    again : callable
        Returns the request with what was lost sent again; None where nothing can be sent.

    Raises
    ------
    ConfigError
        A persisted collection, which lies on workers, in a scheduler of this process.
    """
    if target.client is None and _is_away(request[0]):
        raise ConfigError(
            f"model {model!r}: it, or an input, lies on a cluster's workers; compute it there, without"
            " scheduler=, or bring it here by its client first: x.result(), y.compute()"
        )

    def send_again() -> Callable[[], Any]:
        new = again()
        if new is None:
            raise  # cancelled by somebody, or nothing that can be sent again
        return partial(target.get, *new, **target.kwargs)

    try:
        return retried(partial(target.get, *request, **target.kwargs), send_again)
    except Exception as error:
        told = explained(error, model)
        if told is error:
            raise
        raise told from error


def run_here(model: PreparedModel, arrays: Mapping[str, Any]) -> Any:
    """Return the outputs of a model for all rows of `arrays` at once, computed in this process."""
    made = lower(plan_bundles(bind_checked(model, arrays, None, "model")), None)
    rebuild, arguments = made.rebuilding(model.name)
    return rebuild(dask.get(made.graph, made.keys), *arguments)  # type: ignore[attr-defined]


def _is_away(graph: HighLevelGraph) -> bool:
    """Whether something in the graph is a value that workers hold alone."""
    layers = [layer.mapping for layer in graph.layers.values() if isinstance(layer, MaterializedLayer)]
    return any(any(map(is_future, held.values())) for held in layers)
