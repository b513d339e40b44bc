"""What is done when a pool of batch jobs closes: its reason is found out, and told once, to everybody who may wait.

A job that failed is asked for its last lines first.  Then a warning is logged, each client of the scheduler warns, and
an event of topic "ferro" is published; `pools()` has the reason from then on, for whoever asks.  The first time that a
pool's jobs are in the queue, SLURM is asked whether it would ever start them (`dryrun`).  All of it goes on in the
background, with a bound: who waits for it waits for seconds.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from distributed.metrics import time

from dask_ferro.errors import ConfigError
from dask_ferro.policy.staff import BOOTING, RUNNING
from dask_ferro.runtime import dryrun, joblogs
from dask_ferro.runtime.batchjob import BatchJob
from dask_ferro.runtime.events import CLOSED, TOPIC
from dask_ferro.runtime.jobpool import JobPool
from dask_ferro.runtime.pools import told_closed
from dask_ferro.runtime.slurmcommand import Refused
from dask_ferro.runtime.slurmsite import Site
from dask_ferro.runtime.squeue import HELD, Row

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
    site : Site
    script : callable
        What is submitted, by pool.
    publish : callable
        Logs an event on the scheduler: (topic, message).
    refuse : callable
        Called with a pool whose jobs SLURM would never start, and with its words.
    """

    def __init__(
        self,
        site: Site,
        script: Callable[[str], str],
        publish: Callable[[str, Any], Awaitable[None]],
        refuse: Callable[[str, str], None],
    ) -> None:
        self._site, self._script, self._publish, self._refuse = site, script, publish, refuse
        self._asked: set[str] = set()
        self._refused: dict[str, str] = {}
        self._going: set[asyncio.Task[None]] = set()

    def tell(self, kind: JobPool, job_id: str = "") -> None:
        """Tell that a pool has closed, with the last lines of the job that closed it, if there is one."""
        self.begin(self._tell(kind, job_id))

    def check(self, kind: JobPool) -> None:
        """Ask SLURM whether it would ever start jobs of a pool; once, and again where it would not."""
        if kind.name not in self._asked:
            self._asked.add(kind.name)
            self.begin(self._check(kind))

    async def settled(self) -> list[str]:
        """Return what SLURM would never start, and was not told yet, once nothing is going on any more."""
        while self._going:
            await asyncio.wait(self._going)
        refused, self._refused = self._refused, {}
        return [f"SLURM would never start jobs of pool {pool!r}: {words}" for pool, words in refused.items()]

    async def unless_closed(self, what: Awaitable[Any], why: Callable[[], str]) -> None:
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
        for task in self._going:
            task.cancel()
        if self._going:
            await asyncio.wait(self._going, timeout=1.0)

    def begin(self, what: Coroutine[Any, Any, None]) -> None:
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
            log = await joblogs.last_output(self._site.ask, job_id, script, self._site.job_name)
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

    async def _check(self, kind: JobPool) -> None:
        script = self._script(kind.name)
        refused = words = ""
        try:
            async with asyncio.timeout(_ASKED):
                try:
                    await self._site.ask(
                        "sbatch", "--test-only", f"--job-name={self._site.job_name}", stdin=script
                    )
                except Refused as error:
                    refused, words = error.words, error.kind
                limits = dryrun.partitions(
                    await self._site.ask("scontrol", "--oneliner", "show", "partition")
                )
                there = dryrun.nodes(
                    await self._site.ask("sinfo", "--noheader", "--Node", f"--format={dryrun.NODES}")
                )
        except (Refused, TimeoutError) as error:
            logger.info(
                "dask_ferro: SLURM was not asked whether jobs of pool %s can start: %s", kind.name, error
            )
            return
        if why := dryrun.verdict(refused, words, dryrun.request(script), limits, there):
            self._asked.discard(kind.name)
            self._refused[kind.name] = why
            self._refuse(kind.name, why)


def is_young(job: BatchJob, now: float) -> bool:
    """Whether a job may still turn out to be broken: it started a moment ago, or SLURM has not looked at it yet."""
    if job.seems_over or job.state == BOOTING:
        return job.seems_over or now - job.since < _STARTED
    return job.state != RUNNING and not job.reason and now - job.since < _UNSEEN


def never_ran(job: BatchJob) -> bool:
    """Whether a job that is over was held: it has no output."""
    return job.started_at is None and Row(job.job_id, "PENDING", reason=job.reason).phase == HELD
