"""The values of a model's keys: run where the caller says, and again where what was sent to workers is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dask.base import get_scheduler
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_ferro.errors import ConfigError
from dask_ferro.lower.crash_notes import explained
from dask_ferro.lower.inputs.keys import is_future
from dask_ferro.lower.model.lowering import Lowered
from dask_ferro.lower.retry import retried


def results_of(
    collection: Any,
    name: str,
    lowered_for: Callable[[Any], Lowered],
    wanted: Callable[[Lowered], tuple[HighLevelGraph, list[Any]]],
    kwargs: dict[str, Any],
    *,
    is_persisted: bool,
) -> Any:
    """Return the values of a collection's keys, straight from the scheduler that is to run it.

    Parameters
    ----------
    collection : ModelGraph or OutputGraph
    name : str
        The model's, for an error.
    lowered_for : callable
        From a client, or None, to the model on its inputs for that client's workers.
    wanted : callable
        Graph and keys, of the model as it is lowered for that scheduler.
    kwargs : dict
        Of `compute`.
    is_persisted : bool
        Whether its values lie on workers already, so that nothing can be sent again.

    Raises
    ------
    ConfigError
        A persisted collection, which lies on workers, in a scheduler of this process.
    """
    kwargs = dict(kwargs)
    kwargs.pop("optimize_graph", None)  # there is nothing that an optimizer could merge
    schedule = get_scheduler(scheduler=kwargs.pop("scheduler", None), collections=[collection])
    owner = getattr(schedule, "__self__", None)  # a client's `get`, or one of Dask's own functions
    client = owner if hasattr(owner, "scatter") else None
    made = lowered_for(client)

    def run() -> Any:
        graph, keys = wanted(made)
        if client is None and _is_away(graph):
            raise ConfigError(
                f"model {name!r}: it, or an input, lies on a cluster's workers; compute it there, without"
                " scheduler=, or bring it here by its client first: x.result(), y.compute()"
            )
        return schedule(graph, keys, **kwargs)

    def send_again() -> None:
        nonlocal made
        if made.is_there or is_persisted:
            raise  # cancelled by somebody, or nothing that can be sent again
        made = lowered_for(client)

    try:
        return retried(run, send_again)
    except Exception as error:
        told = explained(error, name)
        if told is error:
            raise
        raise told from error


def _is_away(graph: HighLevelGraph) -> bool:
    """Whether something in the graph is a value that workers hold alone."""
    layers = (layer.mapping for layer in graph.layers.values() if isinstance(layer, MaterializedLayer))
    return any(is_future(value) for held in layers for value in held.values())
