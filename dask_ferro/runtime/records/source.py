"""The records of a cluster's jobs, read from its running scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from distributed import Security, rpc

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.records.record import JobRecord

# A running scheduler accepts a connection at once, and sends 10,000 records within a second.
_CONNECT, _PATIENCE = 3.0, 15.0


async def of_scheduler(where: Callable[[], str]) -> tuple[JobRecord, ...]:
    """Return the records that a scheduler has.

    Parameters
    ----------
    where : callable
        Returns its address.

    Raises
    ------
    ConfigError
        If no scheduler answers there, or it keeps no record.
    """
    try:
        address = where()
        scheduler = rpc(address, timeout=_CONNECT, connection_args=Security().get_connection_args("client"))
        try:
            told: Sequence[dict[str, object]] | None = await asyncio.wait_for(
                scheduler.ferro_jobs(), _PATIENCE
            )
        finally:
            await scheduler.close_rpc()
    except (OSError, TimeoutError) as error:
        raise ConfigError(f"no scheduler answers: {error}") from error
    except (KeyError, AttributeError):
        # Dask's answer to an unknown call.
        told = None
    if told is None:
        raise ConfigError(
            f"scheduler {address!r} keeps no record of jobs: it does not belong to an ff.SLURMCluster"
        )
    return tuple(JobRecord.from_dict(one) for one in told)
