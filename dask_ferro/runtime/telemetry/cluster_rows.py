"""The jobs and the pools of an `ff.SLURMCluster` for the commands `dask ferro jobs` and `dask ferro pools`.

They are served only if the scheduler runs in the cluster's own process, as for `dask ferro cluster`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.telemetry.top import ask

JOBS, POOLS = "jobs", "pools"
# The scheduler's extension with the functions that return the rows.
TABLES = "ferro-tables"

Rows = Callable[..., Awaitable[list[Any]]]


def serve(scheduler: object, counts: SchedulerPlugin, tables: Mapping[str, Rows]) -> None:
    """Let a cluster's scheduler answer for its tables, and add the plugin that counts its workers' tasks."""
    # A scheduler in another process cannot read the cluster.
    if isinstance(scheduler, Scheduler):
        scheduler.add_plugin(counts)
        scheduler.extensions[TABLES] = tables


async def _rows(dask_scheduler: Scheduler, table: str, words: Mapping[str, str]) -> dict[str, object]:
    """Return a table's rows, or the error as text; runs on the scheduler."""
    rows = dask_scheduler.extensions.get(TABLES, {}).get(table)
    if rows is None:
        return {"error": f"scheduler {dask_scheduler.address}: no cluster answers for its jobs and pools; wanted one "
                "that `dask ferro cluster` or ff.SLURMCluster started on SLURM"}  # fmt: skip
    try:
        return {"rows": await rows(**words)}
    except ConfigError as error:
        return {"error": str(error)}


async def call(where: Callable[[], str], table: str, **words: str) -> list[Any]:
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
    ConfigError
        For a scheduler that does not answer or has no such cluster, and for operations that the cluster refuses.
    """
    try:
        answer = await ask(where, _rows, table=table, words=words)
    except OSError as error:
        raise ConfigError(f"no scheduler answers: {error or type(error).__name__}") from error
    if "error" in answer:
        raise ConfigError(answer["error"])
    rows: list[Any] = answer["rows"]
    return rows
