"""Writes a cluster's journal in a thread of its own: a file server that hangs must not stop the scheduler's event loop.

What is done is done in the order in which it was asked for, by one thread.  Records that come while it writes go into
the file together, by one write: the newest of each job, for a line tells all of it.  Nobody waits for it but for the
start, and for some seconds at the end.  A thread that hangs ends with its process.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from distributed.threadpoolexecutor import ThreadPoolExecutor

from dask_ferro.runtime.records.journal import JobJournal, Told
from dask_ferro.runtime.records.record import JobRecord

logger = logging.getLogger(__name__)

# For which the end waits for the last lines: a file server that hangs may do so for hours.
_LAST = 5.0


class JournalWriter:
    """The thread, which is there from the beginning of the run to its end.

    Parameters
    ----------
    journal : JobJournal
        Which nobody else uses.
    """

    def __init__(self, journal: JobJournal) -> None:
        self.path, self.address_file = journal.path, journal.address_file
        self._journal, self._last = journal, _LAST
        # Dask's executor, whose threads are daemons: the standard library's would keep a process from its end.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ferro-journal")
        self._lock = threading.Lock()
        self._news: dict[str, JobRecord] = {}
        self._is_due = False
        self._begun: Future[Told] | None = None
        self._is_on = False
        self._pid = os.getpid()

    # -- the beginning and the end ---------------------------------------------------------------------------

    async def begin(self, job_name: str, now: float) -> Told:
        """Take the journal, and return what it told before this run.

        Raises
        ------
        ConfigError
            When another cluster has it, or it is none, or cannot be written.
        """
        self._is_on = True
        self._begun = self._thread.submit(self._journal.begin, job_name, now)
        return await asyncio.wrap_future(self._begun)

    async def announce(self, address: str) -> None:
        """Tell jobs and watchdogs who looks after them now.

        Raises
        ------
        ConfigError
            When that cannot be written.
        """
        await asyncio.wrap_future(self._thread.submit(self._journal.announce, address))

    async def release(self, now: float) -> None:
        """Let others have the journal, since the cluster did not start; one that is still being taken, when it is."""
        waits = self._begun is not None and self._begun.done()
        await self._finish(partial(self._journal.abandon, now), self._last if waits else 0.0)

    async def end(self, now: float, *, jobs_left: bool) -> None:
        """Write what is left and that the run ended, and let the journal go."""
        await self._finish(partial(self._journal.end, now, jobs_left=jobs_left), self._last)

    async def _finish(self, last: Callable[[], None], patience: float) -> None:
        if not self._is_on or os.getpid() != self._pid:
            return
        self._is_on = False
        over = self._thread.submit(last)
        self._thread.shutdown(wait=False)
        _, late = await asyncio.wait({asyncio.wrap_future(over)}, timeout=patience)
        if late and patience:
            logger.warning(
                "dask_ferro: journal %s: its file system does not answer; the end of this run may be missing",
                self.path,
            )

    # -- what happens ----------------------------------------------------------------------------------------

    def add(self, records: Iterable[JobRecord]) -> None:
        """Have records written; what the disk does not take now goes with the next ones."""
        if not self._is_on or os.getpid() != self._pid:
            return
        with self._lock:
            self._news.update((record.name, record) for record in records)
            if self._is_due or not (self._news or self._journal.is_late):
                return
            self._is_due = True
        self._thread.submit(self._write)

    def drop(self, tags: Iterable[str], now: float) -> None:
        """Have it written that runs before this one have no jobs left."""
        if self._is_on and os.getpid() == self._pid:
            self._thread.submit(self._journal.drop, tuple(tags), now)

    # -- in the thread ---------------------------------------------------------------------------------------

    def _write(self) -> None:
        with self._lock:
            news, self._news, self._is_due = self._news, {}, False
        try:
            self._journal.add(news.values())
        # Nobody waits for this; the thread has to go on.
        except Exception:
            logger.exception("dask_ferro: journal %s", self.path)
