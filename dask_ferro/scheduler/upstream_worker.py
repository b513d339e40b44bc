"""Access to private or undocumented names of Dask's workers and nannies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict, cast

from distributed import Nanny, Worker


class Transfer(TypedDict):
    """A transfer from another worker, of `total` bytes."""

    who: str
    total: int
    start: float
    stop: float


def address_of(server: Worker | Nanny) -> str | None:
    """Return the address at which the scheduler knows a worker, or a nanny's worker; None: there is none yet."""
    return server.worker_address if isinstance(server, Nanny) else server.contact_address


def workers_here() -> list[Worker]:
    """Return the workers of this process."""
    # Dask keeps them in a weak set, which may shrink during a loop.
    return list(Worker._instances)


def publish(worker: Worker, name: str, figures: Callable[[Worker], object]) -> None:
    """Add `figures(worker)` to each heartbeat under a name."""
    worker.metrics[name] = figures


def unpublish(worker: Worker, name: str) -> object:
    """Remove a function from the heartbeats; return it, or None."""
    return worker.metrics.pop(name, None)


def declare(worker: Worker, name: str, fact: Callable[[Worker], object]) -> None:
    """Add `fact(worker)` to the worker's registration under a name."""
    worker.startup_information[name] = fact


def transfers(worker: Worker) -> Sequence[Transfer]:
    """Return the newest transfers from other workers, the oldest first."""
    return cast(Sequence[Transfer], worker.transfer_incoming_log)


def put_sends(worker: Worker, seconds: float) -> float:
    """Set the interval at which messages to the scheduler are sent; return the previous one."""
    stream = worker.batched_stream
    before: float = stream.interval
    stream.interval = seconds
    return before
