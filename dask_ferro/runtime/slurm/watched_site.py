"""The common base of batch systems, for the jobs of one cluster.

The first submission starts the watchdog, so that no job is ever in the queue without one.  Retries are decided
elsewhere, except at the end of all jobs.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress

from dask_ferro.runtime.slurm import logs, parsing
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.orphan_guard import Watchdog
from dask_ferro.runtime.slurm.parsing import QueueRow

logger = logging.getLogger(__name__)

# Ids per cancellation: far below the limit of a command line, and one call costs as much as for one job.
_CANCELLED = 200
# Seconds between two checks while all jobs are ended, at first and at most.
_LOOK, _LOOK_MOST = 0.1, 2.0


class WatchedSite(ABC):
    """The commands of a batch system for the jobs of one cluster.

    Parameters
    ----------
    job_name : str
        The name of all jobs of this cluster, which others may have as well.
    tag : str
        A word in the submissions of this cluster, and no others.
    """

    # Names in logs and errors: the system, and its commands.
    word, submits, lists, cancels = "the batch system", "the submission", "the listing", "a cancellation"
    # The most jobs of one submission.
    elements = 1
    # Partitions or queues whose jobs may end without a warning.
    preemptible: frozenset[str] = frozenset()

    def __init__(self, job_name: str, tag: str) -> None:
        self.job_name, self.tag = job_name, tag
        self._watchdog: Watchdog | None = None
        # For listings, so that hanging commands do not accumulate.
        self._turn = asyncio.Lock()

    @abstractmethod
    async def submit(self, script: str, offsets: Sequence[int], nonce: str = "") -> str:
        """Submit one job, or an array of these elements; return its id.

        Parameters
        ----------
        nonce : str
            The identifier that listings show for the submission, after the tag.

        Raises
        ------
        Refused
            With the batch system's message.
        """

    @abstractmethod
    async def queue(self) -> dict[str, QueueRow]:
        """Return the rows of the cluster's jobs, by id, including those that are over.

        Raises
        ------
        Refused
            If the batch system does not answer.
        """

    @abstractmethod
    async def unlisted(self, job_ids: Iterable[str]) -> dict[str, QueueRow | None]:
        """Return the rows of jobs that a listing leaves out, each queried by its id.

        None: there is no such job; a missing entry: no answer.
        """

    @abstractmethod
    async def find(self, nonce: str) -> str | None:
        """Return the job or array that a submission created; None if none is pending or running.

        Raises
        ------
        Refused
            If the batch system does not answer.
        """

    @abstractmethod
    def _watch(self) -> Watchdog:
        """Start the watchdog."""

    @abstractmethod
    async def _cancel(self, job_ids: Sequence[str]) -> None:
        """Request the end of some jobs.  Raises `Refused`; some of them may be gone."""

    @abstractmethod
    async def _cancel_known(self, job_ids: set[str]) -> None:
        """Request the end of all known jobs, listed or not, and add those that may be left to `job_ids`."""

    @abstractmethod
    async def _are_gone(self, job_ids: set[str]) -> bool:
        """Return whether no job of the cluster is left, nor any of these; else request their end again."""

    @property
    def was_used(self) -> bool:
        """Whether there may be jobs."""
        return self._watchdog is not None

    def guarded(self) -> Watchdog:
        """Return the watchdog, started on the first call.

        Raises
        ------
        Refused
            If it could not be started: nothing would end the jobs after the death of this process.
        """
        if self._watchdog is None:
            try:
                self._watchdog = self._watch()
            except OSError as error:
                raise Refused(f"no watchdog could be started: {error}", parsing.TRANSIENT) from None
        return self._watchdog

    async def ask(self, *command: str, stdin: str = "") -> str:
        """Raise `Refused`: only SLURM can predict whether jobs would ever start."""
        raise Refused(f"{command[0]} is SLURM's", parsing.PERMANENT)

    async def last_output(self, job_id: str, script: str) -> logs.Log:
        """Return the end of a job's output."""
        return logs.Log("", trouble="is not known")

    async def graces(self) -> dict[str, float]:
        """Return the grace seconds of preempted jobs by kind; empty: unknown."""
        return {}

    async def kill_wait(self) -> float | None:
        """Return the seconds from SIGTERM to SIGKILL; None: unknown."""
        return None

    async def draining(self) -> frozenset[str]:
        """Return the nodes that are being drained; empty: unknown."""
        return frozenset()

    async def cancel(self, job_ids: Sequence[str], level: int = logging.WARNING) -> None:
        """Request the end of jobs; failures are logged, as the caller checks in any case."""
        for at in range(0, len(job_ids), _CANCELLED):
            try:
                await self._cancel(job_ids[at : at + _CANCELLED])
            except Refused as refused:
                logger.log(level, "dask_ferro: %s failed: %s", self.cancels, refused.words)

    async def cancel_all(self, patience: float, job_ids: Iterable[str] = ()) -> bool:
        """End every job of the cluster; return whether none is left within `patience` seconds.

        Parameters
        ----------
        job_ids : iterable of str
            Jobs that existed; their absence from a listing does not show that they are gone.
        """
        left, pause = set(job_ids), _LOOK
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._cancel_known(left)
                while not await self._are_gone(left):
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _LOOK_MOST)
                return True
        return False

    def close(self, *, jobs_left: bool = False) -> None:
        """End the watchdog, or let it cancel the remaining jobs."""
        if self._watchdog is not None:
            self._watchdog.close(jobs_left=jobs_left)
