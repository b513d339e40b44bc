"""Remote access to the jobs and the pools of an `ff.SLURMCluster`, for `dask ferro jobs` and `dask ferro pools`.

A cluster answers if its scheduler runs in its own process, as for `dask ferro cluster`.  Errors are sent as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distributed import Scheduler

from dask_ferro.errors import InputError
from dask_ferro.observe.top import ask

# The names of the calls that the cluster adds to its scheduler.
JOBS, POOLS = "ferro_jobs", "ferro_pools"


async def _call_handler(dask_scheduler: Scheduler, table: str, words: Mapping[str, str]) -> dict[str, object]:
    """Call the cluster's handler; runs on the scheduler."""
    if (handler := dask_scheduler.handlers.get(table)) is None:
        return {"error": f"scheduler {dask_scheduler.address}: no cluster answers for its jobs and pools; wanted one "
                "that `dask ferro cluster` or ff.SLURMCluster started on SLURM"}  # fmt: skip
    try:
        return {"rows": await handler(**words)}
    except InputError as error:
        return {"error": str(error)}


async def fetch_table(where: Callable[[], str], table: str, **words: str) -> list[Any]:
    """Return the rows of a running cluster's table.

    Parameters
    ----------
    where : callable
        Returns the scheduler's address.
    table : str
        JOBS or POOLS.
    **words
        Arguments for the cluster's function, such as the pool to pause.

    Raises
    ------
    InputError
        For a scheduler that does not answer or has no such cluster, and for operations that the cluster refuses.
    """
    try:
        answer = await ask(where, _call_handler, table=table, words=words)
    except OSError as error:
        raise InputError(f"no scheduler answers: {error or type(error).__name__}") from error
    if "error" in answer:
        raise InputError(answer["error"])
    rows: list[Any] = answer["rows"]
    return rows
