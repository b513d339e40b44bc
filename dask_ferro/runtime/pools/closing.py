"""What is done when a pool of batch jobs closes: its reason is found out, and told once, to everybody who may wait.

A job that failed is asked for its last lines first.  Then a warning is logged, each client of the scheduler warns, and
an event of topic "ferro" is published; `pools()` has the reason from then on, for whoever asks.  When the cluster
starts, SLURM is asked of each pool whether it would ever start its jobs (`dry_run`), and where it would not, once more
when there are some.  All of it goes on in the background, with a bound: who waits for it waits for seconds.
Durations are seconds.
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
from dask_ferro.runtime.slurm.watched_site import WatchedSite
from dask_ferro.runtime.telemetry.events import CLOSED, TOPIC

logger = logging.getLogger(__name__)

# For all of SLURM's answers about one kind of job.
_ASKED = 5.0
# A script that is broken ends so soon after its start; SLURM says so soon why a job waits, or starts it.
_STARTED, _UNSEEN = 1.0, 2.5
# Between two looks whether a pool has closed, for those who wait for workers.
_LOOK = 0.1
# The scheduler runs in this process, as a rule.
_TOLD = 5.0


class Closings:
    """Finds out and tells why pools close.

    Parameters
    ----------
    site : WatchedSite
    script : callable
        What is submitted, by pool.
    publish : callable
        Logs an event on the scheduler: (topic, message).
    refuse : callable
        Called with a pool whose jobs SLURM would never start, and with its words; returns whether somebody asked for
        some.
    """

    def __init__(
        self,
        site: WatchedSite,
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
        """Tell that a pool has closed, with the last lines of the job that closed it, if there is one."""
        self.begin(self._tell(kind, job_id))

    def foresee(self, kind: JobPool) -> None:
        """Ask SLURM whether it would ever start jobs of a pool before there are any; nobody waits for that."""
        self._asked.add(kind.name)
        task = self._foreseen[kind.name] = asyncio.get_running_loop().create_task(
            self._check(kind, foreseen=True)
        )
        task.add_done_callback(self._ended)

    def check(self, kind: JobPool) -> None:
        """The same, of a pool that has jobs: once, and again where SLURM would not; `settled` waits for it."""
        task = self._foreseen.pop(kind.name, None)
        if task is not None and not task.done():
            self._going.add(task)
        elif kind.name not in self._asked:
            self._asked.add(kind.name)
            self.begin(self._check(kind))

    def is_asked(self, pool: str) -> None:
        """Take note that SLURM would start jobs of a pool."""
        self._asked.add(pool)

    async def trial(self, script: str) -> str | None:
        """Return why SLURM would never start jobs of a script; empty: it would; None: it did not say in time."""
        try:
            async with asyncio.timeout(_ASKED):
                return await dry_run.trial(self._site.ask, self._site.job_name, script)
        except (Refused, TimeoutError) as error:
            logger.info("dask_ferro: SLURM was not asked whether such jobs can start: %s", error)
            return None

    async def settled(self) -> list[str]:
        """Return what SLURM would never start, and was not told yet, once nothing is going on any more."""
        while self._going:
            await asyncio.wait(self._going)
        refused, self._refused = self._refused, {}
        return [f"SLURM would never start jobs of pool {pool!r}: {words}" for pool, words in refused.items()]

    async def unless_closed(self, what: Awaitable[object], why: Callable[[], str]) -> None:
        """Wait for something, unless there is a reason not to.

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
        """Tell nothing more."""
        going = self._going | set(self._foreseen.values())
        for task in going:
            task.cancel()
        if going:
            await asyncio.wait(going, timeout=1.0)

    def begin(self, what: Coroutine[object, object, None]) -> None:
        """Do something in the background, for which `settled` waits."""
        task = asyncio.get_running_loop().create_task(what)
        self._going.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._going.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("dask_ferro: what a closed pool needs was not all done: %r", error)

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
            self._asked.discard(kind.name)  # with its first jobs, once more
        elif why:
            self._asked.discard(kind.name)
            if self._refuse(kind.name, why):
                self._refused[kind.name] = why


def is_young(job: BatchJob, now: float) -> bool:
    """Whether a job may still turn out to be broken: it started a moment ago, or SLURM has not looked at it yet."""
    if job.seems_over or job.state == BOOTING:
        return job.seems_over or now - job.since < _STARTED
    return job.state != RUNNING and not job.reason and now - job.since < _UNSEEN
