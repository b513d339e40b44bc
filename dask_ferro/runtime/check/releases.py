"""One sentence where a scheduler or workers have no dask_ferro, or another release than the client."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from distributed import Client

from dask_ferro.errors import ConfigError
from dask_ferro.lower.absent import own_version
from dask_ferro.runtime.check.asking import ask_scheduler_version, ask_worker_versions
from dask_ferro.runtime.check.findings import ClusterFinding, missing_ferro, other_ferro

# Worker addresses by the release that they have; None: it cannot be imported.
Releases = Mapping[str | None, list[str]]


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
    for found in _finding(answer.facts["version"], ["scheduler"]):
        if found.severity == "error":
            raise ConfigError(f"{call}: {found}")
        warnings.warn(f"{call}: {found}", RuntimeWarning, stacklevel=2)


@contextmanager
def importing(call: str) -> Iterator[None]:
    """Raise a `ConfigError` in place of the error of a scheduler that cannot import dask_ferro, or what that needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        found = missing_ferro(["scheduler"], own_version())
        raise ConfigError(f"{call}: {replace(found, got=f'{found.got} ({error})')}") from error


async def worker_releases(client: Client, seconds: float) -> Releases:
    """Return the workers that answer in time, by their releases of dask_ferro."""
    releases: dict[str | None, list[str]] = defaultdict(list)
    for address, answer in (await ask_worker_versions(client, seconds)).items():
        if not answer.failure:
            releases[answer.facts["version"]].append(address)
    return releases


def warn_of_workers(releases: Releases, call: str) -> None:
    """Warn of workers with another release of dask_ferro, or none."""
    for got, workers in releases.items():
        for found in _finding(got, workers):
            warnings.warn(f"{call}: {found}", RuntimeWarning, stacklevel=2)


def _finding(got: str | None, where: list[str]) -> Iterator[ClusterFinding]:
    wanted = own_version()
    if got is None:
        yield missing_ferro(where, wanted)
    elif got and wanted and got != wanted:
        yield other_ferro(where, got, wanted)
