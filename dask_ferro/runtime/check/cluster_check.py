"""`ff.check`: the facts of a cluster in one table, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from distributed import Client

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.runtime.check.asking import checked_client, gather
from dask_ferro.runtime.check.facts import ClusterFacts
from dask_ferro.runtime.check.findings import findings
from dask_ferro.runtime.telemetry.findings import ClusterFinding


@dataclass(frozen=True)
class ClusterCheck:
    """The result of `ff.check`: printed, it is one table and the findings, each with its remedy."""

    facts: ClusterFacts

    @cached_property
    def findings(self) -> Sequence[ClusterFinding]:
        """What is wrong, the most severe first: severity, where, what, sentence, remedy."""
        return findings(self.facts)

    @property
    def ok(self) -> bool:
        """Whether nothing is an error; warnings and what is slow may remain."""
        return all(found.severity != "error" for found in self.findings)

    def as_dict(self) -> dict[str, object]:
        """Return facts and findings in types that JSON has."""
        return {
            "ok": self.ok,
            "findings": [asdict(one) for one in self.findings],
            "facts": asdict(self.facts),
        }

    def __repr__(self) -> str:
        from dask_ferro.views.check import drawn

        return drawn(self.facts, self.findings)


def check(
    client: Client | None = None, path: str | PathLike[str] | None = None, *, answer: float | None = None
) -> Any:
    """Compare the client, the scheduler and the workers of a cluster, and say what is wrong and what to do.

    It compares versions, extras, clocks, threads, memory, devices and whether workers see the client's files; it tells
    whether the scheduler plugin is on, and what will be slow.  It works where dask_ferro is not installed, changes
    nothing, and writes one small file, which it removes, if `path` is a folder.

    Parameters
    ----------
    client : distributed.Client, optional
        Synchronous or asynchronous; with the latter, await what this returns.  Default: the current client.
    path : path, optional
        A file, such as a model, or a folder that the workers should see.  Default: the working directory.
    answer : float, optional
        Seconds to wait for each process; one that does not answer is a finding.  Default: `ferro.scheduler.answer`.

    Returns
    -------
    ClusterCheck
        Printed, it is one table with the findings below; `ok` is False if one of `findings` is an error.

    Raises
    ------
    ConfigError
        If there is no client, `path` does not exist, or `answer` is not positive.

    Examples
    --------
    >>> ff.check(client)                # doctest: +SKIP
    >>> assert ff.check(client).ok      # doctest: +SKIP
    """
    client = checked_client(client, "ff.check")
    where = Path(path if path is not None else ".").absolute()
    if not where.exists():
        raise ConfigError(f"ff.check: path={str(path)!r} does not exist; give a file or a folder")
    seconds = config.value("scheduler.answer") if answer is None else answer
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"ff.check: answer={answer!r}, wanted seconds above 0")
    return client.sync(_check, client, where, float(seconds))


async def _check(client: Client, path: Path, seconds: float) -> ClusterCheck:
    return ClusterCheck(await gather(client, path, seconds))
