"""Access to private or undocumented names of Dask's workers and nannies."""

from __future__ import annotations

from distributed import Nanny, Worker


def address_of(server: Worker | Nanny) -> str | None:
    """Return the address at which the scheduler knows a worker, or a nanny's worker; None: there is none yet."""
    return server.worker_address if isinstance(server, Nanny) else server.contact_address


def put_sends(worker: Worker, seconds: float) -> float:
    """Set the interval at which messages to the scheduler are sent; return the previous one."""
    stream = worker.batched_stream
    before: float = stream.interval
    stream.interval = seconds
    return before
