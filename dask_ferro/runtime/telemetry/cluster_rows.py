"""Remote access to the jobs and the pools of an `ff.SLURMCluster`: it installs handlers on its scheduler.

The commands `dask ferro jobs` and `dask ferro pools` call them.  The handlers are installed only if the scheduler runs
in the cluster's own process, as for `dask ferro cluster`.  Errors are sent as text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.telemetry.top import ask

JOBS, POOLS = "ferro_jobs", "ferro_pools"

Rows = Callable[..., Awaitable[list[Any]]]


def serve(scheduler: object, counts: SchedulerPlugin, tables: Mapping[str, Rows]) -> None:
    """Install a handler for each table on a cluster's scheduler, and the plugin that counts its workers' tasks."""
    # A scheduler in another process cannot read the cluster.
    if isinstance(scheduler, Scheduler):
        scheduler.add_plugin(counts)
        scheduler.handlers.update({table: _handler(rows) for table, rows in tables.items()})


def _handler(rows: Rows) -> Callable[..., Awaitable[dict[str, object]]]:
    async def answer(comm: object = None, **words: str) -> dict[str, object]:
        try:
            return {"rows": await rows(**words)}
        except ConfigError as error:
            return {"error": str(error)}

    return answer


async def _asked(dask_scheduler: Scheduler, table: str, words: Mapping[str, str]) -> dict[str, object]:
    """Call the cluster's handler; runs on the scheduler."""
    if (handler := dask_scheduler.handlers.get(table)) is None:
        return {"error": f"scheduler {dask_scheduler.address}: no cluster answers for its jobs and pools; wanted one "
                "that `dask ferro cluster` or ff.SLURMCluster started on SLURM"}  # fmt: skip
    answer: dict[str, object] = await handler(**words)
    return answer


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
        answer = await ask(where, _asked, table=table, words=words)
    except OSError as error:
        raise ConfigError(f"no scheduler answers: {error or type(error).__name__}") from error
    if "error" in answer:
        raise ConfigError(answer["error"])
    rows: list[Any] = answer["rows"]
    return rows
