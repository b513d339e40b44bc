"""A batch system other than SLURM, for the jobs of one cluster: submit, list, cancel, with what its commands can do.

It has the methods of `slurm.site.Site`, so that pools, lost submissions, strays, cancellations and bounds are one code.
Each job is one submission.  A cluster's jobs are known by their ids, and by a word that a submission carries, where the
listing shows it.  Three answers about a job: a row, "no such job", and none at all, which proves nothing.
What is over stays over: it is not asked for again.  The watchdog is a Python process with the same commands (`guard`).
Durations are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dask_ferro.runtime.slurm import logs, parsing
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.orphan_guard import Watchdog
from dask_ferro.runtime.slurm.parsing import ENDING, OVER, PENDING, STARTED, Row

logger = logging.getLogger(__name__)

# Between two looks for jobs of lost submissions, which need a command more.
_STRAYS = 3.0
# While all jobs are ended: the first pause between two looks, and the longest.
_LOOK, _LOOK_MOST = 0.1, 2.0
# A silent batch system's job is gone that was cancelled and is not listed in so many looks.
_MISSES = 3
# Jobs that are over and remembered.
_REMEMBERED = 2000
_GUARD = "dask_ferro.runtime.sites.guard"
# What the guard is started from, wherever this process found it.
_PATH = str(Path(__file__).resolve().parents[3])


class Answer(NamedTuple):
    """What a batch system says of jobs: rows by id, and those that it does not know."""

    rows: Mapping[str, Row]
    unknown: frozenset[str] = frozenset()


class BatchSite(ABC):
    """The commands of a batch system.

    Parameters
    ----------
    job_name : str
        Which all jobs of this cluster have, and others may have as well.
    tag : str
        A word that the submissions of this cluster have, and no others.
    """

    # What a log or an error calls it, and its commands.
    word, submits, lists = "the batch system", "the submission", "the listing"
    # Jobs of one submission.
    elements = 1
    # Whether it says nothing of a job that is gone: then silence has to do.
    is_silent = False
    # Kinds of jobs that it may end without a warning: a pool says so itself.
    preemptible: frozenset[str] = frozenset()
    # The words of runs before this one whose jobs are looked after: none.
    former_tags: tuple[str, ...] = ()

    def __init__(self, job_name: str, tag: str) -> None:
        self.job_name, self.tag = job_name, tag
        self._ids: dict[str, None] = {}
        self._over: dict[str, Row] = {}
        self._others: dict[str, Row] = {}
        self._others_at = 0.0
        # Whether there may be jobs whose ids were never heard.
        self.is_unsure = False
        self._misses: dict[str, int] = {}
        self._watchdog: Watchdog | None = None
        self._turn = asyncio.Lock()

    # -- what each batch system does its own way -----------------------------------------------------------------

    @abstractmethod
    def described(self) -> dict[str, object]:
        """Return what `guard` makes another one of: "kind", and its options, as JSON can say them."""

    @abstractmethod
    async def _submit(self, script: str, known_by: str, pass_fds: Sequence[int]) -> str:
        """Submit a job; return its id.  Raises `Refused`."""

    @abstractmethod
    async def _shown(self, job_ids: Sequence[str]) -> Answer:
        """Return what is said of jobs by id.  Raises `Refused` without any answer."""

    @abstractmethod
    async def _own(self) -> Mapping[str, Row]:
        """Return the jobs there are that are the cluster's, by word or by id.  Raises `Refused`."""

    @abstractmethod
    async def _cancel(self, job_ids: Sequence[str]) -> None:
        """Ask that jobs end.  Raises `Refused`; some of them may be gone."""

    async def _all_own(self) -> Mapping[str, Row]:
        """Return the same by another command, which may cost more.  Raises `Refused`."""
        return {}

    async def last_output(self, job_id: str, script: str) -> logs.Log:
        """Return the end of what a job printed."""
        return logs.Log("", trouble="is not known")

    async def kill_wait(self) -> float | None:
        """Return the seconds from SIGTERM to SIGKILL; None where nobody says."""
        return None

    # -- what they have in common --------------------------------------------------------------------------------

    @property
    def was_used(self) -> bool:
        """Whether there may be jobs."""
        return self._watchdog is not None

    def knows(self, job_ids: Iterable[str]) -> None:
        """Take note of jobs that were submitted."""
        self._ids.update(dict.fromkeys(job_ids))

    async def graces(self) -> dict[str, float]:
        """Return the seconds that kinds of jobs have when they are preempted: nobody says."""
        return {}

    async def ask(self, *command: str, stdin: str = "") -> str:
        """Raise `Refused`: nobody is asked whether jobs would ever start, for SLURM alone says it."""
        raise Refused(f"{command[0]} is SLURM's", parsing.PERMANENT)

    async def draining(self) -> frozenset[str]:
        """Return the nodes that are to be left: nobody says."""
        return frozenset()

    async def submit(self, script: str, offsets: Sequence[int], nonce: str = "") -> str:
        """Submit one job; return its id.

        Raises
        ------
        Refused
            With the batch system's words.
        """
        assert list(offsets) == [0], offsets
        if self._watchdog is None:
            self._watchdog = self._guard()
        try:
            job_id = await self._submit(script, f"{self.tag}.{nonce}", (self._watchdog.fd,))
        except Refused as refused:
            if refused.kind in (parsing.TRANSIENT, parsing.UNKNOWN):
                self.is_unsure = True
            raise
        except asyncio.CancelledError:
            self.is_unsure = True
            raise
        self.knows([job_id])
        self._watchdog.note(job_id)
        return job_id

    async def queue(self) -> dict[str, Row]:
        """Return what is said of the cluster's jobs, by id, those that are over included.

        Raises
        ------
        Refused
            When nothing answers.
        """
        async with self._turn:  # commands that hang do not pile up
            asked = [job_id for job_id in self._ids if job_id not in self._over]
            rows = dict((await self._shown(asked)).rows) if asked else {}
            if self.is_unsure:
                rows = {**await self._strays(), **rows}
        self._remember(rows)
        return {**self._over, **rows}

    async def _strays(self) -> Mapping[str, Row]:
        """Return the jobs that carry the cluster's word: a look now and then, and what it said since."""
        now = asyncio.get_running_loop().time()
        if now >= self._others_at + _STRAYS:
            self._others_at = now
            try:
                self._others = dict(await self._own())
            except Refused as refused:
                logger.debug("dask_ferro: lost submissions were not looked for: %s", refused.words)
        return self._others

    def _remember(self, rows: Mapping[str, Row]) -> None:
        self._over.update((job_id, row) for job_id, row in rows.items() if row.phase == OVER)
        while len(self._over) > _REMEMBERED:
            job_id = next(iter(self._over))
            del self._over[job_id]
            self._ids.pop(job_id, None)

    async def unlisted(self, job_ids: Iterable[str]) -> dict[str, Row | None]:
        """Return what is said of jobs, each asked for by its id.

        None: there is no such job; of a job that is left out, nothing was said.
        """
        wanted = list(dict.fromkeys(job_ids))
        try:
            answer = await self._shown(wanted)
        except Refused as refused:
            logger.warning("dask_ferro: %s failed: %s", self.lists, refused.words)
            return {}
        self._remember(answer.rows)
        found: dict[str, Row | None] = dict.fromkeys(answer.unknown)
        return {job_id: row for job_id, row in {**found, **answer.rows}.items() if job_id in wanted}

    async def find(self, nonce: str) -> str | None:
        """Return the job that a submission became; None where it waits or runs nowhere.

        Raises
        ------
        Refused
            When nothing answers.
        """
        own = await self._own()
        found = self._known_by(nonce, own) or self._known_by(nonce, await self._all_own())
        if found is None:
            await self._doubt(own)
            return None
        self.knows([found])
        if self._watchdog is not None:
            self._watchdog.note(found)
        return found

    def _known_by(self, nonce: str, rows: Mapping[str, Row]) -> str | None:
        there = (row for row in rows.values() if row.phase in (PENDING, STARTED))
        return next((row.job_id for row in there if row.comment == f"{self.tag}.{nonce}"), None)

    async def _doubt(self, own: Mapping[str, Row]) -> None:
        """Raise `Refused` for a listing that leaves out jobs that are there: it would leave out others too."""
        missing = [job_id for job_id in self._ids if job_id not in self._over and job_id not in own]
        if missing:
            answer = await self._shown(missing)
            self._remember(answer.rows)
            ends = {job_id for job_id, row in answer.rows.items() if row.phase not in (PENDING, STARTED)}
            said = answer.rows.keys() if self.is_silent else set(missing)
            if there := said - ends - answer.unknown:
                raise Refused(f"{self.lists} leaves out jobs, such as {min(there)}", parsing.TRANSIENT)

    async def cancel(self, job_ids: Sequence[str], level: int = logging.WARNING) -> None:
        """Ask that jobs end; failures are logged, for the caller looks in any case."""
        if not job_ids:
            return
        try:
            await self._cancel(job_ids)
        except Refused as refused:
            logger.log(level, "dask_ferro: a cancellation failed: %s", refused.words)

    async def cancel_all(self, patience: float, job_ids: Iterable[str] = ()) -> bool:
        """End every job of the cluster; return whether none is left within so many seconds.

        Parameters
        ----------
        job_ids : iterable of str
            Those that were there: that they are not listed does not say that they are gone.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                return await self._cancel_all(set(job_ids))
        return False

    async def _cancel_all(self, job_ids: set[str]) -> bool:
        pause = _LOOK
        left = {job_id for job_id in job_ids | self._ids.keys() if job_id not in self._over}
        await self.cancel(sorted(left), level=logging.DEBUG)
        while True:
            left = await self._are_left(left)
            others = await self._strays_left() if self.is_unsure else []
            if not left and others == []:
                return True
            await self.cancel([*sorted(left), *(others or [])], level=logging.DEBUG)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LOOK_MOST)

    async def _are_left(self, job_ids: set[str]) -> set[str]:
        """Return the jobs that may be there still."""
        if not job_ids:
            return set()
        try:
            answer = await self._shown(sorted(job_ids))
        except Refused as refused:
            logger.debug("dask_ferro: %s failed: %s", self.lists, refused.words)
            return job_ids
        self._remember(answer.rows)
        left = set()
        for job_id in job_ids - answer.unknown:
            row = answer.rows.get(job_id)
            self._misses[job_id] = self._misses.get(job_id, 0) + 1 if row is None else 0
            is_gone = self.is_silent and self._misses[job_id] >= _MISSES if row is None else row.phase == OVER
            if not is_gone:
                left.add(job_id)
        return left

    async def _strays_left(self) -> list[str] | None:
        """Return the jobs that carry the cluster's word and are not ending; None: nobody says."""
        try:
            own = await self._own()
        except Refused:
            return None
        return [job_id for job_id, row in own.items() if row.phase not in (ENDING, OVER)]

    def close(self, *, jobs_left: bool = False) -> None:
        """End the watchdog, or leave the jobs that are left to it."""
        if self._watchdog is not None:
            self._watchdog.close(jobs_left=jobs_left)

    def _guard(self) -> Watchdog:
        told = json.dumps(self.described() | {"job_name": self.job_name, "tag": self.tag})
        # Its working folder is another; what is relative there is nothing to it.
        paths = [_PATH, *filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = (sys.executable, "-m", _GUARD, "dask-ferro-watchdog", self.job_name, told)
        try:
            return Watchdog(self.job_name, self.tag, environment, command=command)
        except OSError as error:
            raise Refused(f"no watchdog could be started: {error}", parsing.TRANSIENT) from None
