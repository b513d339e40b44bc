"""One sentence where a scheduler or workers have no dask_ferro, or another release than the client."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from distributed import Client

from dask_ferro.errors import ConfigError
from dask_ferro.lower.absent import NONE, own_version, remedy
from dask_ferro.runtime.check.asking import ask_scheduler_version, ask_worker_versions
from dask_ferro.runtime.check.findings import releases_differ
from dask_ferro.runtime.telemetry.findings import fault

# The releases of dask_ferro of workers by address; None: it cannot be imported.
Releases = Mapping[str, str | None]


async def refuse_scheduler(client: Client, call: str, seconds: float) -> None:
    """Raise an error if the scheduler cannot do what `call` asks for.

    Raises
    ------
    ConfigError
        If the scheduler has no dask_ferro, or a release that does not work with this one.

    Warns
    -----
    RuntimeWarning
        If it has another release that works with this one.
    """
    answer = await ask_scheduler_version(client, seconds)
    # What answers nothing will do so to the call itself, which has its own message.
    if answer.failure:
        return
    for one in releases_differ({"scheduler": answer.facts["version"]}, own_version()):
        if one.severity == "error":
            raise ConfigError(f"{call}: {one}")
        warnings.warn(f"{call}: {one}", RuntimeWarning, stacklevel=2)


@contextmanager
def importing(call: str) -> Iterator[None]:
    """Raise a `ConfigError` in place of the error of a scheduler that cannot import dask_ferro, or what that needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        wanted = own_version()
        (lack,) = fault("error", "dask_ferro", {"scheduler": f"{NONE} ({error})"}, wanted, remedy(wanted))
        raise ConfigError(f"{call}: {lack}") from error


async def worker_releases(client: Client, seconds: float) -> Releases:
    """Return the releases of dask_ferro of the workers that answer in time."""
    answers = await ask_worker_versions(client, seconds)
    return {where: answer.facts["version"] for where, answer in answers.items() if not answer.failure}


def warn_of_workers(releases: Releases, call: str) -> None:
    """Warn of workers with another release of dask_ferro, or none."""
    for one in releases_differ(releases, own_version()):
        warnings.warn(f"{call}: {one}", RuntimeWarning, stacklevel=2)
