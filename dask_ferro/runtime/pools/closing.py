"""The reaction to a closing pool of batch jobs: its reason is determined and reported once.

First the last output lines of a failed job are read.  Then a warning is logged, each client of the scheduler warns,
and an event of topic "ferro" is published; `pools()` has the reason from then on.  All of this runs in the background,
with time limits of seconds.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine

from distributed.metrics import time

from dask_ferro.errors import ConfigError
from dask_ferro.policy.scaling.facts import BOOTING, RUNNING
from dask_ferro.runtime.pools.pool import JobPool
from dask_ferro.runtime.pools.shortage import told_closed
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from dask_ferro.runtime.slurm.site import SlurmSite
from dask_ferro.runtime.telemetry.events import CLOSED, TOPIC

logger = logging.getLogger(__name__)

# Seconds after its start within which a job with a broken script ends, and within which SLURM starts a pending job or
# gives a reason.
_STARTED, _UNSEEN = 1.0, 2.5
# Seconds between two checks whether a pool has closed, for callers that wait for workers.
_LOOK = 0.1
# Seconds for the scheduler, which usually runs in this process.
_TOLD = 5.0


class Closings:
    """Determines and reports why pools close.

    Parameters
    ----------
    site : SlurmSite
    script : callable
        Returns the job script of a pool.
    publish : callable
        Logs an event on the scheduler: (topic, message).
    """

    def __init__(
        self,
        site: SlurmSite,
        script: Callable[[str], str],
        publish: Callable[[str, object], Awaitable[None]],
    ) -> None:
        self._site, self._script, self._publish = site, script, publish
        self._going: set[asyncio.Task[None]] = set()

    def tell(self, kind: JobPool, job_id: str = "") -> None:
        """Report that a pool has closed, with the last lines of the job that closed it, if there is one."""
        self.begin(self._tell(kind, job_id))

    async def settled(self) -> None:
        """Return when everything is reported."""
        while self._going:
            await asyncio.wait(self._going)

    async def unless_closed(self, what: Awaitable[object], why: Callable[[], str]) -> None:
        """Wait for an awaitable, unless `why` returns a reason not to.

        Raises
        ------
        ConfigError
            With that reason.
        """
        waits = asyncio.ensure_future(what)
        try:
            while not (await asyncio.wait({waits}, timeout=_LOOK))[0]:
                if said := why():
                    raise ConfigError(said)
            await waits
        finally:
            waits.cancel()

    async def close(self) -> None:
        """Stop reporting."""
        for task in self._going:
            task.cancel()
        if self._going:
            await asyncio.wait(self._going, timeout=1.0)

    def begin(self, what: Coroutine[object, object, None]) -> None:
        """Run a coroutine in the background, for which `settled` waits."""
        task = asyncio.get_running_loop().create_task(what)
        self._going.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._going.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("dask_ferro: reporting a closed pool failed: %r", error)

    async def _tell(self, kind: JobPool, job_id: str) -> None:
        log = None
        if job_id:
            script = self._script(kind.name)
            log = await self._site.last_output(job_id, script)
            kind.explain(log.brief(), log.shown())
        else:
            kind.explain()
        text = f"dask_ferro: pool {told_closed([kind.pool(time(), '')])}"
        logger.warning("%s", text)
        message = {
            "action": CLOSED,
            "time": time(),
            "pool": kind.name,
            "why": kind.closed,
            "until": kind.closed_until,
            "job": job_id,
            "log": log.path if log else "",
            "lines": list(log.lines) if log else [],
        }
        try:
            async with asyncio.timeout(_TOLD):
                await self._publish(TOPIC, message)
                await self._publish("warn", text)  # each client warns, however it is connected
        except Exception as error:  # noqa: BLE001 - it was logged; the scheduler may be going
            logger.info("dask_ferro: the clients were not told: %r", error)


def is_young(job: BatchJob, now: float) -> bool:
    """Return whether a job may still prove to be broken: it has just started, or SLURM has not examined it yet."""
    if job.seems_over or job.state == BOOTING:
        return job.seems_over or now - job.since < _STARTED
    return job.state != RUNNING and not job.reason and now - job.since < _UNSEEN
