"""Remote access to `cluster.pools`: the cluster installs a handler on its scheduler, which a command calls.

The handler is installed only if the scheduler runs in the cluster's own process, as for `dask ferro cluster`;
otherwise the caller gets an error.  Errors are sent as text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypedDict

from distributed import Scheduler

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.telemetry.top import SchedulerConnection

HANDLER = "ferro_pools"
LIST, PAUSE, RESUME = "list", "pause", "resume"


class PoolRow(TypedDict):
    """A row of the table of pools: jobs by state; `maximum` is None without one."""

    name: str
    state: str
    why: str
    until: float | None
    jobs: dict[str, int]
    minimum: float
    maximum: float | None
    processes: int
    threads: int
    queue: str


class PoolsAnswer(TypedDict, total=False):
    """The pools, or the reason why an operation is refused."""

    pools: list[PoolRow]
    error: str


def serve(
    scheduler: object,
    carry_out: Callable[[str, str], Awaitable[None]],
    rows: Callable[[], list[PoolRow]],
) -> None:
    """Install the handler for a cluster's pools on its scheduler, if that is in this process.

    Parameters
    ----------
    carry_out : callable
        Pauses or resumes a pool: (what, name).
    rows : callable
        Returns the rows of the table.
    """

    async def answer(comm: object = None, what: str = LIST, name: str = "") -> PoolsAnswer:
        try:
            if what != LIST:
                await carry_out(what, name)
            return {"pools": rows()}
        except ConfigError as error:
            return {"error": str(error)}

    if isinstance(scheduler, Scheduler):
        scheduler.handlers[HANDLER] = answer


async def _asked(dask_scheduler: Scheduler, what: str, name: str) -> PoolsAnswer:
    """Call the cluster's handler; runs on the scheduler."""
    handler = dask_scheduler.handlers.get(HANDLER)
    if handler is None:
        return {"error": f"scheduler {dask_scheduler.address}: no cluster answers for its pools; wanted one that "
                "`dask ferro cluster` or ff.SLURMCluster started on SLURM"}  # fmt: skip
    return await handler(what=what, name=name)


async def call(where: Callable[[], str], what: str, name: str = "") -> list[PoolRow]:
    """Return the pools of a running cluster as rows, after one of them was paused or resumed.

    Parameters
    ----------
    where : callable
        Returns the scheduler's address.
    what : str
        "list", "pause" or "resume".

    Raises
    ------
    ConfigError
        For a scheduler that does not answer, and for operations that the cluster refuses.
    """
    line = SchedulerConnection(where)
    try:
        answer = await line.ask(_asked, what=what, name=name)
    except (OSError, TimeoutError) as error:
        raise ConfigError(f"cannot ask the cluster: {error or type(error).__name__}") from error
    finally:
        await line.close()
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer["pools"]
