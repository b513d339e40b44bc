"""Writes a cluster's journal in its own thread, so that a hanging file server cannot block the scheduler's event loop.

One thread carries out all operations in order.  Records that arrive while it writes are written together afterwards,
the newest of each job, since a line is complete.  Callers wait only at the start, and for some seconds at the end.  A
thread that hangs ends with its process.  Durations are seconds.
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

# Seconds for which the end waits for the last lines; a hanging file server may take hours.
_LAST = 5.0


class JournalWriter:
    """The writer thread, from the beginning of the run to its end.

    Parameters
    ----------
    journal : JobJournal
        The journal, which must not be used otherwise.
    """

    def __init__(self, journal: JobJournal) -> None:
        self.path, self.address_file = journal.path, journal.address_file
        self._journal, self._last = journal, _LAST
        # Dask's executor has daemon threads; the standard library's would keep the process from exiting.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ferro-journal")
        self._lock = threading.Lock()
        self._news: dict[str, JobRecord] = {}
        self._is_due = False
        self._begun: Future[Told] | None = None
        self._is_on = False
        self._pid = os.getpid()

    # -- the beginning and the end ---------------------------------------------------------------------------

    async def begin(self, job_name: str, now: float) -> Told:
        """Lock the journal, and return its content from before this run.

        Raises
        ------
        ConfigError
            If another cluster uses it, if it is not a journal, or if it cannot be written.
        """
        self._is_on = True
        self._begun = self._thread.submit(self._journal.begin, job_name, now)
        return await asyncio.wrap_future(self._begun)

    async def announce(self, address: str) -> None:
        """Publish this run's scheduler address for jobs and watchdogs.

        Raises
        ------
        ConfigError
            If the file cannot be written.
        """
        await asyncio.wrap_future(self._thread.submit(self._journal.announce, address))

    async def release(self, now: float) -> None:
        """Release the journal since the cluster did not start; if it is still being locked, release it after that."""
        waits = self._begun is not None and self._begun.done()
        await self._finish(partial(self._journal.abandon, now), self._last if waits else 0.0)

    async def end(self, now: float, *, jobs_left: bool) -> None:
        """Write the remaining records and the end of the run, and release the journal."""
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
        """Queue records for writing; those that the disk refuses are written with the next ones."""
        if not self._is_on or os.getpid() != self._pid:
            return
        with self._lock:
            self._news.update((record.name, record) for record in records)
            if self._is_due or not (self._news or self._journal.is_late):
                return
            self._is_due = True
        self._thread.submit(self._write)

    def drop(self, tags: Iterable[str], now: float) -> None:
        """Queue a note that previous runs have no jobs left."""
        if self._is_on and os.getpid() == self._pid:
            self._thread.submit(self._journal.drop, tuple(tags), now)

    # -- in the thread ---------------------------------------------------------------------------------------

    def _write(self) -> None:
        with self._lock:
            news, self._news, self._is_due = self._news, {}, False
        try:
            self._journal.add(news.values())
        # The result is not awaited, and the thread has to continue.
        except Exception:
            logger.exception("dask_ferro: journal %s", self.path)
