"""`install` and `uninstall` add the plugins to a running cluster and remove them."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

from distributed import Client, Scheduler

from dask_ferro.errors import InputError
from dask_ferro.observe.processes import (
    importing,
    refuse_scheduler,
    resolve_client,
    warn_of_workers,
    worker_releases,
)
from dask_ferro.scheduler import bundling as bundling
from dask_ferro.scheduler import reach, upstream
from dask_ferro.scheduler.plugin import part_of, put_on, take_off
from dask_ferro.scheduler.scheduling import Scheduling, stays_off
from dask_ferro.scheduler.settings import Settings

# Seconds for which a client that installed the plugin batches messages to the scheduler; Dask: 10 ms.
_CLIENT_SENDS = 0.002
# What happens to workers that have not answered.
_LATER = "; each {} when it answers, and the others are already"


def install(client: Client | None = None, *, bundles: bool | None = None, **options: object) -> Any:
    """Install dask_ferro's stealing and placement on a client's cluster, for all its graphs.

    Parameters
    ----------
    client : distributed.Client, optional
        Synchronous or asynchronous; with the latter, await what this returns.  Default: the current client.
    bundles : bool, optional
        Whether to bundle cheap tasks in every graph of this client; if False, only where `ff.bundle_tasks` is used.
        Default: keep the current setting, which is initially False.
    **options
        Settings by name, which override the configuration (`ferro.scheduler`): ``stealing="none"``,
        ``placement=False``, ``rank=False``.  A second call with the same options changes nothing; with other options it
        replaces the first.

    Raises
    ------
    InputError
        If an option is unknown, if there is no client, or if the scheduler has no dask_ferro, or a release that does
        not work with this one.

    Warns
    -----
    RuntimeWarning
        If workers did not answer within `ferro.scheduler.timeout`, with their addresses; each worker is set up when it
        answers.  If the scheduler's Dask lacks something that the plugin needs; stock Dask then continues.  Or if the
        scheduler or a worker has a different release of dask_ferro, or a worker has none.

    Examples
    --------
    >>> from distributed import Client
    >>> import dask_ferro as ff
    >>> client = Client()              # doctest: +SKIP
    >>> ff.install()                   # doctest: +SKIP
    """
    client = resolve_client(client)
    if bundles is not None and not isinstance(bundles, bool):
        raise InputError(f"ff.install: bundles={bundles!r}, wanted True, False or None")
    return client.sync(_install, client, Settings.configured(**options), bundles)


def uninstall(client: Client | None = None) -> Any:
    """Restore stock Dask on the client's cluster.  No running or waiting task is lost.

    Parameters
    ----------
    client : distributed.Client, optional
        Synchronous or asynchronous; with the latter, await what this returns.  Default: the current client.

    Raises
    ------
    InputError
        If there is no client, or the scheduler has no dask_ferro.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.install(client)             # doctest: +SKIP
    >>> ff.uninstall(client)           # doctest: +SKIP
    """
    client = resolve_client(client)
    return client.sync(_uninstall, client)


async def _install(client: Client, settings: Settings, bundles: bool | None) -> None:
    await refuse_scheduler(client, "ff.install", settings.timeout)
    with importing("ff.install"):
        if bundles is not None:
            await bundling.enable(client, always=bundles)
        if off := await client.run_on_scheduler(stays_off):
            warnings.warn(off, RuntimeWarning, stacklevel=2)
            return
        # A plugin with the same settings stays: a replacement would forget what was learned, and ask workers again.
        if not await client.run_on_scheduler(_has, settings=settings):
            await _put_on(client, settings)
    # The interval belongs to the client, so that a second client needs it too.
    upstream.put_client_sends(client, _CLIENT_SENDS)


async def _put_on(client: Client, settings: Settings) -> None:
    # At the same time as the installation: a worker that hangs is waited for once.
    releases = asyncio.create_task(worker_releases(client, settings.timeout))
    try:
        await client.run_on_scheduler(put_on, part=Scheduling(settings))
        late = await client.run_on_scheduler(_late_workers)
        reach.warn("ff.install", late, settings.timeout, _LATER.format("is set up"))
        warn_of_workers(await releases, "ff.install")
    finally:
        releases.cancel()


async def _uninstall(client: Client) -> None:
    with importing("ff.uninstall"):
        await bundling.disable(client)
        await _take_off(client)


async def _take_off(client: Client) -> None:
    upstream.put_client_sends(client, upstream.CLIENT_SENDS)
    late, seconds = await client.run_on_scheduler(_remove)
    reach.warn("ff.uninstall", late, seconds, _LATER.format("is restored"))


# No handlers of the scheduler: Dask keeps each one that it has called for as long as the process lives.
async def _remove(*, dask_scheduler: Scheduler) -> tuple[list[str], float]:
    scheduling = part_of(dask_scheduler, Scheduling)
    await take_off(Scheduling.name, dask_scheduler=dask_scheduler)
    return ([], 0.0) if scheduling is None else (scheduling.late, scheduling.settings.timeout)


# Answers are plain values: a client may accept nothing else (`Client(deserializers=["msgpack"])`).
def _has(*, settings: Settings, dask_scheduler: Scheduler) -> bool:
    scheduling = part_of(dask_scheduler, Scheduling)
    return scheduling is not None and scheduling.settings == settings


def _late_workers(*, dask_scheduler: Scheduler) -> list[str]:
    scheduling = part_of(dask_scheduler, Scheduling)
    return [] if scheduling is None else scheduling.late
