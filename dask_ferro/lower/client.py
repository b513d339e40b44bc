"""Find the current distributed client, and the number of worker threads that a model is cut for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import dask
from dask.system import CPU_COUNT

from dask_ferro import config
from dask_ferro.lower.upstream import pool_size

# The client that graphs are written for inside a block, in a tuple; None: the default client.
_CURRENT_CLIENT: ContextVar[tuple[Any] | None] = ContextVar("dask_ferro_client", default=None)


@contextmanager
def use_client(client: Any) -> Iterator[None]:
    """Let a client, or None for this process, be the current client inside a block."""
    token = _CURRENT_CLIENT.set((client,))
    try:
        yield
    finally:
        _CURRENT_CLIENT.reset(token)


def client_of(schedule: Any) -> Any:
    """Return the client whose `get` a Dask scheduler function is, or None."""
    owner = getattr(schedule, "__self__", None)
    # Other schedulers have no workers to which data could be sent.
    return owner if hasattr(owner, "scatter") else None


def live_client() -> Any:
    """Return the current client; None without one, or if it is asynchronous and its methods return coroutines."""
    client = current_client()
    return None if client is None or client.asynchronous else client


def current_client() -> Any:
    """Return the distributed client that a computation would go to by default, or None."""
    chosen = _CURRENT_CLIENT.get()
    if chosen is not None:
        return chosen[0]

    # Importing distributed takes a third of a second; if nothing has imported it, there is no client.
    if "distributed" not in sys.modules:
        return None
    if dask.config.get("scheduler", None) not in (None, "dask.distributed", "distributed"):
        return None
    from distributed import default_client

    try:
        return default_client()
    except ValueError:
        return None


def slots() -> int:
    """Return the number of threads to cut a model for.

    `ferro.bundle.workers`; else the cluster's, or Dask's `pool` or `num_workers`, or this machine's cores.
    """
    wanted = config.value("bundle.workers")
    if wanted is not None:
        return wanted
    client = live_client()
    if client is None:
        found = pool_size(dask.config.get("pool", None)) or dask.config.get("num_workers", None)
    else:
        found = sum(client.nthreads().values())
    # The size of a cluster without workers is not known yet.
    return found or int(CPU_COUNT)
