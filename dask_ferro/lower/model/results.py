"""Execution of a lowered model: on the scheduler that the caller names, and again where sent inputs are lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import dask
import dask.local
import dask.multiprocessing
import dask.threaded
from dask.base import get_scheduler
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from dask.system import CPU_COUNT

from dask_ferro.errors import ConfigError
from dask_ferro.lower.absent import absence
from dask_ferro.lower.client import pool_threads
from dask_ferro.lower.inputs.keys import is_future
from dask_ferro.lower.layer import Key
from dask_ferro.lower.model.bound import bind_checked
from dask_ferro.lower.model.bundles import plan_bundles
from dask_ferro.lower.model.lowering import lower
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.retry import retried

# A graph, and the keys whose values are wanted.
Request = tuple[HighLevelGraph, list[Key]]


class SchedulerCall(NamedTuple):
    """A scheduler's `get`, its client (None: a scheduler of this process), and further arguments.

    `threads` are those of a scheduler of this process, where it says so.
    """

    get: Callable[..., Any]
    client: Any
    kwargs: Mapping[str, Any]
    threads: int | None = None


def target_of(collection: Any, kwargs: Mapping[str, Any]) -> SchedulerCall:
    """Return the scheduler call of `collection.compute(**kwargs)`."""
    kept = dict(kwargs)
    # A lowered graph has nothing that an optimizer could merge.
    kept.pop("optimize_graph", None)
    get = get_scheduler(scheduler=kept.pop("scheduler", None), collections=[collection])
    # A client's `get` is a bound method; Dask's own schedulers are plain functions.
    owner = getattr(get, "__self__", None)
    client = owner if hasattr(owner, "scatter") else None
    return SchedulerCall(get, client, kept, local_threads(get, kept) if client is None else None)


def local_threads(get: Callable[..., Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the threads that a local scheduler of Dask will use, as it finds them; None: it does not say.

    Parameters
    ----------
    get : callable
        The scheduler: of threads, of processes, of an executor, or of this thread.
    kwargs : mapping
        Its arguments, `num_workers` and `pool` among them.
    """
    # Dask makes this of an executor: `partial(get_async, submit, num_workers)`.
    if isinstance(get, partial) and get.func is dask.local.get_async:
        return int(get.args[1])
    if get is dask.local.get_sync:
        return 1
    if get not in (dask.threaded.get, dask.multiprocessing.get):
        return None
    return pool_threads(kwargs.get("pool"), kwargs.get("num_workers")) or int(CPU_COUNT)


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
        A persisted collection, which lies on workers, in a scheduler of this process; or a scheduler that cannot import
        dask_ferro.
    """
    if target.client is None and _is_away(request[0]):
        raise ConfigError(
            f"model {model!r}: it, or an input, lies on a cluster's workers; compute it there, without"
            " scheduler=, or bring it here by its client first: x.result(), y.compute()"
        )

    def send_again() -> Callable[[], Any]:
        new = again()
        if new is None:
            # The caller cancelled it, or its data cannot be sent again.
            raise
        return partial(target.get, *new, **target.kwargs)

    try:
        return retried(partial(target.get, *request, **target.kwargs), send_again)
    except Exception as error:
        missing = absence(error, "the scheduler")
        if missing is not None:
            raise missing from error
        # Compared by name: the schedulers of one machine do without distributed.
        if type(error).__name__ == "KilledWorker":
            error.add_note(
                f"the task computes model {model!r}; the logs of its workers show why they ended (out of memory, or an"
                ' engine that aborted); smaller chunks or granularity="op" narrow down where'
            )
        raise


def run_here(model: PreparedModel, arrays: Mapping[str, Any]) -> Any:
    """Return the outputs of a model for all rows of `arrays` at once, computed in this process."""
    made = lower(plan_bundles(bind_checked(model, arrays, None, "model")), None)
    rebuild, arguments = made.rebuilding(model.name)
    return rebuild(dask.get(made.graph, made.keys), *arguments)  # type: ignore[attr-defined]


def _is_away(graph: HighLevelGraph) -> bool:
    """Whether something in the graph is a value that workers hold alone."""
    layers = [layer.mapping for layer in graph.layers.values() if isinstance(layer, MaterializedLayer)]
    return any(any(map(is_future, held.values())) for held in layers)
