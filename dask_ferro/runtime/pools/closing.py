"""The reaction to a closing pool of batch jobs: its reason is determined and reported once.

First the last output lines of a failed job are read.  Then a warning is logged, each client of the scheduler warns,
and an event of topic "ferro" is published; `pools()` has the reason from then on.  When the cluster starts, SLURM is
asked for each pool whether it would ever start its jobs (`dry_run`), and if it would not, once more when there are
some.  All of this runs in the background, with time limits of seconds.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine

from distributed.metrics import time

from dask_ferro.errors import ConfigError
from dask_ferro.policy.scaling.facts import BOOTING, RUNNING
from dask_ferro.runtime.pools import dry_run
from dask_ferro.runtime.pools.pool import JobPool
from dask_ferro.runtime.pools.providers import told_closed
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from dask_ferro.runtime.slurm.site import SlurmSite
from dask_ferro.runtime.telemetry.events import CLOSED, TOPIC

logger = logging.getLogger(__name__)

# Seconds for all of SLURM's answers about one kind of job.
_ASKED = 5.0
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
    refuse : callable
        Called with a pool whose jobs SLURM would never start, and with its message; returns whether such jobs were
        requested.
    """

    def __init__(
        self,
        site: SlurmSite,
        script: Callable[[str], str],
        publish: Callable[[str, object], Awaitable[None]],
        refuse: Callable[[str, str], bool],
    ) -> None:
        self._site, self._script, self._publish, self._refuse = site, script, publish, refuse
        self._asked: set[str] = set()
        self._foreseen: dict[str, asyncio.Task[None]] = {}
        self._refused: dict[str, str] = {}
        self._going: set[asyncio.Task[None]] = set()

    def tell(self, kind: JobPool, job_id: str = "") -> None:
        """Report that a pool has closed, with the last lines of the job that closed it, if there is one."""
        self.begin(self._tell(kind, job_id))

    def foresee(self, kind: JobPool) -> None:
        """Ask SLURM in the background whether it would ever start jobs of a pool, before there are any."""
        self._asked.add(kind.name)
        task = self._foreseen[kind.name] = asyncio.get_running_loop().create_task(
            self._check(kind, foreseen=True)
        )
        task.add_done_callback(self._ended)

    def check(self, kind: JobPool) -> None:
        """Do the same for a pool with jobs: once, and again if SLURM would not start them; `settled` waits for it."""
        task = self._foreseen.pop(kind.name, None)
        if task is not None and not task.done():
            self._going.add(task)
        elif kind.name not in self._asked:
            self._asked.add(kind.name)
            self.begin(self._check(kind))

    def is_asked(self, pool: str) -> None:
        """Record that SLURM would start jobs of a pool."""
        self._asked.add(pool)

    async def trial(self, script: str) -> str | None:
        """Return why SLURM would never start jobs with a script; empty: it would; None: no answer in time."""
        try:
            async with asyncio.timeout(_ASKED):
                return await dry_run.trial(self._site.ask, self._site.job_name, script)
        except (Refused, TimeoutError) as error:
            logger.info("dask_ferro: SLURM was not asked whether such jobs can start: %s", error)
            return None

    async def settled(self) -> list[str]:
        """Return the refusals not reported yet, once nothing is pending."""
        while self._going:
            await asyncio.wait(self._going)
        refused, self._refused = self._refused, {}
        return [f"SLURM would never start jobs of pool {pool!r}: {words}" for pool, words in refused.items()]

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
        going = self._going | set(self._foreseen.values())
        for task in going:
            task.cancel()
        if going:
            await asyncio.wait(going, timeout=1.0)

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

    async def _check(self, kind: JobPool, foreseen: bool = False) -> None:
        why = await self.trial(self._script(kind.name))
        if why is None and foreseen:
            self._asked.discard(kind.name)  # once more with its first jobs
        elif why:
            self._asked.discard(kind.name)
            if self._refuse(kind.name, why):
                self._refused[kind.name] = why


def is_young(job: BatchJob, now: float) -> bool:
    """Return whether a job may still prove to be broken: it has just started, or SLURM has not examined it yet."""
    if job.seems_over or job.state == BOOTING:
        return job.seems_over or now - job.since < _STARTED
    return job.state != RUNNING and not job.reason and now - job.since < _UNSEEN
