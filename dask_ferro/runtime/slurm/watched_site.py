"""A batch system, for the jobs of one cluster: what SLURM and the others have in common.

The first submission starts the watchdog, so that nothing is ever in the queue without one.  What is tried again is
decided elsewhere, but for the end of all jobs.  Durations are seconds.
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

# Arguments of one cancellation: far below what a command line may have, and one call costs as much as one job.
_CANCELLED = 200
# While all jobs are ended: the first pause between two looks, and the longest.
_LOOK, _LOOK_MOST = 0.1, 2.0


class WatchedSite(ABC):
    """A batch system, as far as the jobs of one cluster are concerned.

    Parameters
    ----------
    job_name : str
        Which all jobs of this cluster have, and others may have as well.
    tag : str
        A word that the submissions of this cluster have, and no others.
    """

    # What a log or an error calls it, and its commands.
    word, submits, lists, cancels = "the batch system", "the submission", "the listing", "a cancellation"
    # Jobs of one submission.
    elements = 1
    # Kinds of jobs that it may end without a warning.
    preemptible: frozenset[str] = frozenset()
    # The words of runs before this one whose jobs are looked after.
    former_tags: tuple[str, ...] = ()

    def __init__(self, job_name: str, tag: str) -> None:
        self.job_name, self.tag = job_name, tag
        self._watchdog: Watchdog | None = None
        # Of listings: commands that hang do not pile up.
        self._turn = asyncio.Lock()

    @abstractmethod
    async def submit(self, script: str, offsets: Sequence[int], nonce: str = "") -> str:
        """Submit one job, or an array of these elements; return its id.

        Parameters
        ----------
        nonce : str
            What a listing will show the submission by, after the tag.

        Raises
        ------
        Refused
            With the batch system's words.
        """

    @abstractmethod
    async def queue(self) -> dict[str, QueueRow]:
        """Return what is said of the cluster's jobs, by id, those that are over included.

        Raises
        ------
        Refused
            When nothing answers.
        """

    @abstractmethod
    async def unlisted(self, job_ids: Iterable[str]) -> dict[str, QueueRow | None]:
        """Return what is said of jobs that a listing leaves out, each asked for by its id.

        None: there is no such job; of a job that is left out, nothing was said.
        """

    @abstractmethod
    async def find(self, nonce: str) -> str | None:
        """Return the job, or the array, that a submission became; None where it waits or runs nowhere.

        Raises
        ------
        Refused
            When nothing answers.
        """

    @abstractmethod
    def _watch(self) -> Watchdog:
        """Start the watchdog."""

    @abstractmethod
    async def _cancel(self, job_ids: Sequence[str]) -> None:
        """Ask that some jobs end.  Raises `Refused`; some of them may be gone."""

    @abstractmethod
    async def _cancel_known(self, job_ids: set[str]) -> None:
        """Ask that all jobs end that are known, whatever a listing says; those of them that may be left are added."""

    @abstractmethod
    async def _are_gone(self, job_ids: set[str]) -> bool:
        """Whether no job of the cluster is left, of these neither; else ask again that those end that are there."""

    @property
    def was_used(self) -> bool:
        """Whether there may be jobs."""
        return self._watchdog is not None or bool(self.former_tags)

    def guarded(self) -> Watchdog:
        """Return the watchdog, which is there from now on.

        Raises
        ------
        Refused
            When it could not be started: nobody would end jobs if this process died.
        """
        if self._watchdog is None:
            try:
                self._watchdog = self._watch()
            except OSError as error:
                raise Refused(f"no watchdog could be started: {error}", parsing.TRANSIENT) from None
        return self._watchdog

    async def ask(self, *command: str, stdin: str = "") -> str:
        """Raise `Refused`: nobody is asked whether jobs would ever start, for SLURM alone says it."""
        raise Refused(f"{command[0]} is SLURM's", parsing.PERMANENT)

    async def last_output(self, job_id: str, script: str) -> logs.Log:
        """Return the end of what a job printed."""
        return logs.Log("", trouble="is not known")

    async def graces(self) -> dict[str, float]:
        """Return the seconds that kinds of jobs have when they are preempted; empty: nobody says."""
        return {}

    async def kill_wait(self) -> float | None:
        """Return the seconds from SIGTERM to SIGKILL; None where nobody says."""
        return None

    async def draining(self) -> frozenset[str]:
        """Return the nodes that their administrator wants to have free; empty: nobody says."""
        return frozenset()

    async def cancel(self, job_ids: Sequence[str], level: int = logging.WARNING) -> None:
        """Ask that jobs end; failures are logged, for the caller looks in any case."""
        for at in range(0, len(job_ids), _CANCELLED):
            try:
                await self._cancel(job_ids[at : at + _CANCELLED])
            except Refused as refused:
                logger.log(level, "dask_ferro: %s failed: %s", self.cancels, refused.words)

    async def cancel_all(self, patience: float, job_ids: Iterable[str] = ()) -> bool:
        """End every job of the cluster; return whether none is left within so many seconds.

        Parameters
        ----------
        job_ids : iterable of str
            Those that were there: that they are not listed does not say that they are gone.
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
        """End the watchdog, or leave the jobs that are left to it."""
        if self._watchdog is not None:
            self._watchdog.close(jobs_left=jobs_left)
