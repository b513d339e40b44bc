"""The current distributed client, and the number of worker threads that a model is cut for."""

from __future__ import annotations

from typing import Any

import dask
from dask.system import CPU_COUNT

from dask_ferro import config


def current_client() -> Any:
    """Return the distributed client that a computation would go to by default, or None."""
    import sys

    # Importing distributed takes a third of a second; where nothing has imported it, there is no client.
    if "distributed" not in sys.modules:
        return None
    if dask.config.get("scheduler", None) not in (None, "dask.distributed", "distributed"):
        return None
    from distributed import default_client

    try:
        return default_client()
    except ValueError:
        return None


def slots(client: Any = None) -> int:
    """Return the number of threads to cut a model for: `bundle.workers`, the cluster's, or this machine's cores."""
    wanted = config.value("bundle.workers")
    if wanted is not None:
        return wanted
    client = current_client() if client is None else client
    # The methods of an asynchronous client return coroutines, which cannot be awaited here.
    if client is None or client.asynchronous:
        return int(CPU_COUNT)
    # The size of a cluster without workers is not known yet.
    return sum(client.nthreads().values()) or int(CPU_COUNT)
