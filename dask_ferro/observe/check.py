"""`ff.check_cluster`: the facts of a cluster, with those of each process, in one table, and what is wrong with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from distributed import Client

from dask_ferro import config
from dask_ferro.errors import InputError
from dask_ferro.observe import process_facts
from dask_ferro.observe.facts import ClusterFacts, ProcessFacts
from dask_ferro.observe.findings import ClusterFinding
from dask_ferro.observe.processes import (
    QUERIES,
    answer,
    ask_scheduler,
    ask_workers,
    resolve_client,
)
from dask_ferro.observe.rules import findings
from dask_ferro.observe.snapshot import snapshot


@dataclass(frozen=True)
class ClusterCheck:
    """The result of `ff.check_cluster`: printed, it is one table and the findings, each with its remedy."""

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
        """Return findings and the facts of each process in types that JSON has."""
        return {
            "ok": self.ok,
            "findings": [asdict(one) for one in self.findings],
            "processes": {at: asdict(one) for at, one in self.facts.processes.items()},
        }

    def __repr__(self) -> str:
        from dask_ferro.views.check import draw_check

        return draw_check(self.facts, self.findings)


def check_cluster(client: Client | None = None, *, timeout: float | None = None) -> Any:
    """Compare the client, the scheduler and the workers of a cluster, and say what is wrong and what to do.

    It compares versions and GPUs, states whether the plugin is installed, and has the findings of the overview: what is
    stuck and why.  It also works if dask_ferro is not installed on the cluster, and changes nothing.

    Parameters
    ----------
    client : distributed.Client, optional
        Synchronous or asynchronous; with the latter, await what this returns.  Default: the current client.
    timeout : float, optional
        Seconds to wait for each process; one that does not answer is a finding.  Default: `ferro.scheduler.timeout`.

    Returns
    -------
    ClusterCheck
        Printed, it is one table with the findings below; `ok` is False if one of `findings` is an error.

    Raises
    ------
    InputError
        If there is no client, or `timeout` is not positive.

    Examples
    --------
    >>> ff.check_cluster(client)                # doctest: +SKIP
    >>> assert ff.check_cluster(client).ok      # doctest: +SKIP
    """
    client = resolve_client(client, "ff.check_cluster")
    seconds = config.value("scheduler.timeout") if timeout is None else timeout
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise InputError(f"ff.check_cluster: timeout={timeout!r}, wanted seconds above 0")
    return client.sync(_check, client, float(seconds))


async def _check(client: Client, seconds: float) -> ClusterCheck:
    here = ProcessFacts(**await asyncio.to_thread(process_facts.process_facts, QUERIES))
    scheduler, addresses = await ask_scheduler(client, seconds)
    state, failure = ClusterFacts(), scheduler.failure
    # Another release may have other facts, and differs: that is to be mended first.
    if not failure and scheduler.versions["dask_ferro"] == here.versions["dask_ferro"]:
        found = await answer(client.run_on_scheduler(snapshot), seconds)
        state, failure = (state, found["failure"]) if isinstance(found, dict) else (found, "")
    workers = await ask_workers(client, addresses, seconds)
    processes = {"client": here, "scheduler": replace(scheduler, failure=failure), **workers}
    return ClusterCheck(replace(state, processes=processes, patience=seconds))
