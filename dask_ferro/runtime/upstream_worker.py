"""Access to Dask's workers and nannies by names that are no public interface; `upstream_names` lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed import Nanny, Worker


def address_of(server: Any) -> str | None:
    """Return the address by which the scheduler knows a worker, or a nanny's worker; None: there is none yet."""
    found: str | None = server.worker_address if isinstance(server, Nanny) else server.contact_address
    return found


def keywords_of(nanny: Nanny) -> Mapping[str, Any]:
    """Return the keywords with which a nanny makes its worker."""
    found: Mapping[str, Any] = nanny.worker_kwargs
    return found


def workers_here() -> list[Worker]:
    """Return the workers of this process."""
    return list(Worker._instances)


def publish(worker: Worker, name: str, figures: Callable[[Worker], Any]) -> None:
    """Have each heartbeat tell `figures(worker)`."""
    worker.metrics[name] = figures


def unpublish(worker: Worker, name: str) -> Any:
    """Have heartbeats tell it no more; return the function that told it, or None."""
    return worker.metrics.pop(name, None)


def declare(worker: Worker, name: str, fact: Callable[[Worker], Any]) -> None:
    """Have the worker tell `fact(worker)` when it registers."""
    worker.startup_information[name] = fact


def transfers(worker: Worker) -> Sequence[Mapping[str, Any]]:
    """Return the newest transfers from other workers, the oldest first: "who", "total" (bytes), "start", "stop"."""
    return worker.transfer_incoming_log


def result_types(worker: Worker) -> set[type]:
    """Return the types of the results that a worker holds, those that are spilled included."""
    return {ts.type for ts in worker.state.tasks.values() if ts.type is not None}


def put_sends(worker: Worker, seconds: float) -> float:
    """Set how long messages to the scheduler are gathered; return how long they were before."""
    stream = worker.batched_stream
    before: float = stream.interval
    stream.interval = seconds
    return before
