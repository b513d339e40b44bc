"""The recording of one cluster's jobs: in memory, and on the scheduler.

`ff.SLURMCluster` reports events; this class forwards them, and asks the scheduler for the tasks of workers.  If a
scheduler does not answer, the recording is incomplete, but the cluster works.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any

from distributed.metrics import time
from distributed.protocol.pickle import dumps

from dask_ferro.runtime.records.counts import NAME, JobCounts
from dask_ferro.runtime.records.record import JobBook, JobRecord, gone_by_us
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from dask_ferro.runtime.slurm.parsing import exit_status
from dask_ferro.runtime.slurm.watched_site import WatchedSite

logger = logging.getLogger(__name__)

# Seconds for the scheduler's answer.
_TOLD = 2.0
# A job requested within this time after another ended by itself is its replacement.
_REPLACES = 60.0
# The most jobs of a pool whose replacement is awaited.
_MISSED = 100
# The most failed jobs whose exit status is being queried at a time.
_EXITS = 4

Tell = Callable[[list[dict[str, Any]]], Awaitable[Mapping[str, int]]]


class Recording:
    """The recording of one cluster.

    Parameters
    ----------
    site : WatchedSite
        Is asked for the exit status of failed jobs.
    begin : callable
        Runs a coroutine in the background.
    """

    def __init__(self, site: WatchedSite, begin: Callable[[Coroutine[object, object, None]], None]) -> None:
        self.book = JobBook()
        self._site, self._begin, self._exits = site, begin, 0
        self._tell: Tell | None = None
        # Whether the scheduler accepts no plugin.
        self._is_alone = False
        self._because = ""
        self._ends_because: dict[str, str] = {}
        self._told: dict[str, JobRecord] = {}
        self._missed: dict[str, deque[tuple[float, str]]] = defaultdict(lambda: deque(maxlen=_MISSED))

    # -- the beginning and the end ---------------------------------------------------------------------------

    async def connect(self, scheduler: Any) -> None:
        """Publish the records on the scheduler from now on."""
        try:
            await scheduler.register_scheduler_plugin(plugin=dumps(JobCounts()), name=NAME, idempotent=True)
        except Exception as error:  # noqa: BLE001 - a scheduler that takes no plugins still works
            logger.info("dask_ferro: the scheduler keeps no record of jobs: %r", error)
            self._is_alone = True
            self._told.clear()
            return
        self._tell = lambda records: scheduler.ferro_jobs_told(records=records)

    def end(self) -> None:
        """Record that all jobs are over, since their cluster is."""
        for record in self.book.records:
            if not record.is_over:
                self.book.over(record.name, "its cluster ended", time())

    # -- what happens ----------------------------------------------------------------------------------------

    def because(self, why: str, jobs: Iterable[str] = ()) -> None:
        """Set the reason why the next jobs are requested, or why the named ones are released."""
        names = list(jobs)
        self._ends_because.update(dict.fromkeys(names, why))
        if not names:
            self._because = why

    def asked(self, jobs: Iterable[BatchJob]) -> None:
        """Record requested jobs."""
        now, why, self._because = time(), self._because, ""
        for job in jobs:
            missed = self._missed[job.pool]
            while missed and now - missed[0][0] > _REPLACES:
                missed.popleft()
            replaces = f"replaces {missed.popleft()[1]}" if missed else ""
            self.book.asked([job], "; ".join(filter(None, (why, replaces))), now)
        self.write()

    def note(self, job: BatchJob, connected: float | None = None) -> None:
        """Record a job's present state; `write` follows."""
        self.book.note(job, time(), connected)

    def given_back(self, job: BatchJob) -> None:
        """Record that this cluster has ended a job."""
        self.over(job, gone_by_us(job, self._ends_because.get(job.name, "")), by_us=True)

    def over(self, job: BatchJob, ending: str, *, by_us: bool, state: str = "") -> None:
        """Record that a job is over.

        Parameters
        ----------
        by_us : bool
            Whether this cluster ended it.
        state : str
            The batch system's state for its end, if known.
        """
        now = time()
        self._ends_because.pop(job.name, None)
        if not by_us:
            ending = "cancelled, and not by this cluster" if state == "CANCELLED" else ending
            self._missed[job.pool].append((now, f"job {job.job_id or job.name}: {ending}"))
        self.book.over(job.name, ending, now, job.ran)
        self.write()
        if state == "FAILED" and self._exits < _EXITS:
            self._exits += 1
            self._begin(self._learn_exit(job))

    async def _learn_exit(self, job: BatchJob) -> None:
        try:
            shown = await self._site.ask("scontrol", "--oneliner", "show", "job", job.job_id)
        except Refused:
            return  # then only the reason is known
        finally:
            self._exits -= 1
        if status := exit_status(shown):
            self.book.amend(job.name, status)
            self.write()

    def write(self) -> None:
        """Collect changed records for the scheduler."""
        changed = self.book.changed()
        if not self._is_alone:
            self._told.update((record.name, record) for record in changed)

    # -- what is asked ---------------------------------------------------------------------------------------

    async def exchange(self, *, only_news: bool = False) -> None:
        """Send changed records to the scheduler, and fetch the task counts of workers.

        Parameters
        ----------
        only_news : bool
            Whether to skip this if no record changed.
        """
        if self._tell is None or (only_news and not self._told):
            return
        told, self._told = self._told, {}
        try:
            async with asyncio.timeout(_TOLD):
                tasks = await self._tell([record.as_dict() for record in told.values()])
        except Exception as error:  # noqa: BLE001 - the scheduler is closing or busy; records go with the next exchange
            logger.debug("dask_ferro: the scheduler was not told of jobs: %r", error)
            # Newer records replace those that failed; records dropped from the book are not sent again.
            waiting = told | self._told
            self._told = {name: one for name, one in waiting.items() if self.book.get(name) is not None}
            return
        # Dask returns None for an unknown call.
        if isinstance(tasks, Mapping):
            self.book.tally(tasks)

    async def records(self) -> tuple[JobRecord, ...]:
        """Return all jobs in their present state."""
        await self.exchange()
        now = time()
        return tuple(one if one.is_over else replace(one, seen=now) for one in self.book.records)
