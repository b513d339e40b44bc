"""The watchdog for batch systems other than SLURM: `python -m dask_ferro.runtime.sites.guard WORDS... JSON`.

Like SLURM's (`slurm.orphan_guard`) it waits for the end of its standard input, which the kernel closes when the
cluster's process is gone, for whatever reason.  Lines are "job ID" and, at an orderly end, "closed".  Then it ends
the cluster's jobs with the same commands as the cluster, for up to half an hour.  It ignores signals that a terminal
or a batch system sends to a whole group, since that is when it is needed.  It imports neither Dask nor NumPy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterable
from typing import Any

from dask_ferro.runtime.sites.batchsite import BatchSite
from dask_ferro.runtime.sites.commands import CommandSite
from dask_ferro.runtime.sites.pbs import PBSSite

_KINDS: dict[str, type[Any]] = {"pbs": PBSSite, "commands": CommandSite}
_DEAF = tuple(
    getattr(signal, name)
    for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGPIPE")
    if hasattr(signal, name)
)
# Seconds for one attempt, and the first and longest pause between two: half an hour in total.
_TRY, _PAUSE, _PAUSE_MOST = 30.0, 1.0, 512.0


def site_of(told: str) -> BatchSite:
    """Return the site described by JSON."""
    options = json.loads(told)
    site: BatchSite = _KINDS[options.pop("kind")](**options)
    site.is_unsure = True  # the last answer may have been lost
    return site


def heard(lines: Iterable[str]) -> list[str] | None:
    """Return the ids reported until the end of the input; None: the cluster closed in order."""
    jobs = []
    for line in lines:
        word, _, job_id = line.strip().partition(" ")
        if word == "closed":
            return None
        if word == "job" and job_id:
            jobs.append(job_id)
    return jobs


async def end(site: BatchSite, jobs: Iterable[str]) -> None:
    """End the jobs of a cluster."""
    site.knows(jobs)
    pause = _PAUSE
    while pause <= _PAUSE_MOST and not await site.cancel_all(_TRY):
        await asyncio.sleep(pause)
        pause *= 2


def main() -> None:
    """Wait for the end of the input, and end the remaining jobs."""
    for number in _DEAF:
        signal.signal(number, signal.SIG_IGN)
    site = site_of(sys.argv[-1])
    with contextlib.suppress(KeyboardInterrupt):
        jobs = heard(sys.stdin)
        if jobs is not None:
            asyncio.run(end(site, jobs))


if __name__ == "__main__":
    main()
