"""Remote access to the jobs of a cluster: it installs a handler on its scheduler, which a command calls.

The handler is installed only if the scheduler runs in the cluster's own process, as for `dask ferro cluster`.
"""

from __future__ import annotations

from collections.abc import Callable

from distributed import Scheduler

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.records.job_book import JobBook, JobRow
from dask_ferro.runtime.telemetry.top import SchedulerConnection

HANDLER = "ferro_jobs"


def serve(scheduler: object, book: JobBook) -> None:
    """Install the handler on a cluster's scheduler, and count the tasks of its workers there."""
    # A scheduler in another process cannot read the book.
    if isinstance(scheduler, Scheduler):
        scheduler.add_plugin(book.counts, name=book.counts.name)
        scheduler.handlers[HANDLER] = lambda comm=None: book.rows()


def _asked(dask_scheduler: Scheduler) -> dict[str, object]:
    """Call the cluster's handler; runs on the scheduler."""
    handler = dask_scheduler.handlers.get(HANDLER)
    return {"jobs": handler() if handler is not None else None}


async def call(where: Callable[[], str]) -> list[JobRow]:
    """Return the jobs of a running cluster.

    Parameters
    ----------
    where : callable
        Returns the scheduler's address.

    Raises
    ------
    ConfigError
        If no scheduler answers there, or it keeps no record.
    """
    line = SchedulerConnection(where)
    try:
        rows: list[JobRow] | None = (await line.ask(_asked))["jobs"]
    except (OSError, TimeoutError) as error:
        raise ConfigError(f"no scheduler answers: {error or type(error).__name__}") from error
    finally:
        await line.close()
    if rows is None:
        raise ConfigError(
            f"scheduler {where()!r} keeps no record of jobs: it does not belong to an ff.SLURMCluster"
        )
    return rows
