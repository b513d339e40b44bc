"""`install` and `uninstall`: the plugins on a cluster that runs, and off it again."""

from __future__ import annotations

import warnings
from typing import Any

from distributed import Client, Scheduler

from dask_ferro.errors import ConfigError
from dask_ferro.runtime import upstream
from dask_ferro.runtime.plugin.scheduler import (
    FIGURES,
    NAME,
    NOT_INSTALLED,
    REMOVE,
    FerroScheduler,
    PluginFigures,
    stays_off,
)
from dask_ferro.runtime.plugin.settings import Settings


def install(client: Client, **options: object) -> Any:
    """Put dask_ferro's stealing and placement on a client's cluster, for all its graphs.

    Parameters
    ----------
    client : distributed.Client
        Synchronous or asynchronous; with the latter, await what this returns.
    **options
        Settings by name, over those of the configuration (`ferro.scheduler`): ``stealing="none"``,
        ``placement=False``, ``threshold=0.01``.  Installing again changes nothing; with other options it
        replaces the first.

    Raises
    ------
    ConfigError
        An option that does not exist; or dask_ferro cannot be imported on the scheduler.

    Warns
    -----
    RuntimeWarning
        Workers that did not answer within `ferro.scheduler.answer`, by address; each is set up when it answers.  The
        scheduler's Dask lacks something that the plugin needs: stock Dask goes on.

    Examples
    --------
    >>> from distributed import Client
    >>> import dask_ferro as ff
    >>> client = Client()              # doctest: +SKIP
    >>> ff.install(client)             # doctest: +SKIP
    """
    _checked(client)
    return client.sync(_install, client, Settings.configured(**options))


def uninstall(client: Client) -> Any:
    """Give the client's cluster stock Dask back.  Nothing that runs or waits is lost.

    Parameters
    ----------
    client : distributed.Client
        Synchronous or asynchronous; with the latter, await what this returns.
    """
    _checked(client)
    return client.sync(_uninstall, client)


def figures(client: Client) -> Any:
    """Return what the plugin did: a dict with "counts" (requests, confirmed, ...), "thresholds" in seconds.

    Raises
    ------
    ConfigError
        When the plugin is not installed.
    """
    _checked(client)
    return client.sync(_figures, client)


def _checked(client: object) -> None:
    if not isinstance(client, Client):
        raise ConfigError(
            f"got {type(client).__name__}, wanted a distributed.Client: ff.install(Client(cluster))"
        )


async def _install(client: Client, settings: Settings) -> None:
    try:
        off, current = await client.run_on_scheduler(_state)
        if off:
            warnings.warn(off, RuntimeWarning, stacklevel=2)
            return
        if current != settings:
            await _uninstall(client)
            await client.register_plugin(FerroScheduler(settings))
            _tell(await client.run_on_scheduler(_late), "ff.install", "is set up", settings.answer)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the scheduler cannot import dask_ferro ({error}): install it in the scheduler's environment too"
        ) from error
    upstream.put_client_sends(client, settings.client_sends)


async def _uninstall(client: Client) -> None:
    upstream.put_client_sends(client, upstream.CLIENT_SENDS)
    settings = await client.run_on_scheduler(_settings)
    if settings is not None:
        late = await getattr(client.scheduler, REMOVE)()
        _tell(late, "ff.uninstall", "is what it was", settings.answer)


def _tell(late: list[str], call: str, becomes: str, seconds: float) -> None:
    """Warn of workers that hang."""
    if late:
        warnings.warn(
            f"{call}: {', '.join(late)} did not answer within {seconds:g} s (ferro.scheduler.answer); each {becomes}"
            " when it answers, and the others are already",
            RuntimeWarning,
            stacklevel=2,
        )


async def _figures(client: Client) -> PluginFigures:
    if await client.run_on_scheduler(_settings) is None:
        raise ConfigError(NOT_INSTALLED)
    return await getattr(client.scheduler, FIGURES)()


def _late(*, dask_scheduler: Scheduler) -> list[str]:
    """Return the workers that the plugin still waits for."""
    plugin = dask_scheduler.plugins.get(NAME)
    return plugin.late if isinstance(plugin, FerroScheduler) else []


def _state(*, dask_scheduler: Scheduler) -> tuple[str, Settings | None]:
    """Return why a scheduler's Dask cannot have the plugin, or "", and the settings of the one that it has."""
    return stays_off(), _settings(dask_scheduler=dask_scheduler)


def _settings(*, dask_scheduler: Scheduler) -> Settings | None:
    """Return the settings of the plugin on a scheduler, or None where there is none."""
    plugin = dask_scheduler.plugins.get(NAME)
    return plugin.settings if isinstance(plugin, FerroScheduler) else None
