"""The common base of batch systems other than SLURM, for the jobs of one cluster: submit, list, cancel.

It has the methods of `slurm.site.SlurmSite`, so that pools, lost submissions, strays, cancellations and bounds share
one implementation.  Each job is one submission.  A cluster's jobs are recognised by their ids, and by an identifier
in the submission, where the listing shows it.  There are three answers about a job: a row, "no such job", and none at
all, which proves nothing.  Jobs that are over are not asked for again.  The watchdog is a Python process with the
same commands (`guard`).  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dask_ferro.runtime.slurm import parsing
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.orphan_guard import Watchdog
from dask_ferro.runtime.slurm.parsing import ENDING, OVER, PENDING, STARTED, QueueRow
from dask_ferro.runtime.slurm.watched_site import WatchedSite

logger = logging.getLogger(__name__)

# Seconds between two searches for jobs of lost submissions, which need another command.
_STRAYS = 3.0
# For a silent batch system, the listings without a cancelled job after which it counts as gone.
_MISSES = 3
# The most jobs remembered after their end.
_REMEMBERED = 2000
_GUARD = "dask_ferro.runtime.sites.guard"
# The guard's import path, wherever this process found the package.
_PATH = str(Path(__file__).resolve().parents[3])


class Answer(NamedTuple):
    """A batch system's answer about jobs: rows by id, and unknown ids."""

    rows: Mapping[str, QueueRow]
    unknown: frozenset[str] = frozenset()


class BatchSite(WatchedSite):
    """The commands of a batch system."""

    # Whether it reports nothing about jobs that are gone, so that silence has to count as an answer.
    is_silent = False

    def __init__(self, job_name: str, tag: str) -> None:
        super().__init__(job_name, tag)
        self._ids: dict[str, None] = {}
        self._over: dict[str, QueueRow] = {}
        self._others: dict[str, QueueRow] = {}
        self._others_at = 0.0
        # Whether there may be jobs whose ids are unknown.
        self.is_unsure = False
        self._misses: dict[str, int] = {}

    # -- what each batch system does its own way -----------------------------------------------------------------

    @abstractmethod
    def described(self) -> dict[str, object]:
        """Return the options from which `guard` makes the same site: "kind" and others, in JSON's types."""

    @abstractmethod
    async def _submit(self, script: str, known_by: str, pass_fds: Sequence[int]) -> str:
        """Submit a job; return its id.  Raises `Refused`."""

    @abstractmethod
    async def _shown(self, job_ids: Sequence[str]) -> Answer:
        """Return the rows of jobs by id.  Raises `Refused` without any answer."""

    @abstractmethod
    async def _own(self) -> Mapping[str, QueueRow]:
        """Return the rows of the cluster's own jobs, by identifier or by id.  Raises `Refused`."""

    async def _all_own(self) -> Mapping[str, QueueRow]:
        """Return the same by another command, which may cost more.  Raises `Refused`."""
        return {}

    # -- what they have in common --------------------------------------------------------------------------------

    def knows(self, job_ids: Iterable[str]) -> None:
        """Record the ids of submitted jobs."""
        self._ids.update(dict.fromkeys(job_ids))

    async def submit(self, script: str, offsets: Sequence[int], nonce: str = "") -> str:
        """Submit one job; return its id."""
        assert list(offsets) == [0], offsets
        watchdog = self.guarded()
        try:
            job_id = await self._submit(script, f"{self.tag}.{nonce}", (watchdog.fd,))
        except Refused as refused:
            if refused.kind in (parsing.TRANSIENT, parsing.UNKNOWN):
                self.is_unsure = True
            raise
        except asyncio.CancelledError:
            self.is_unsure = True
            raise
        self.knows([job_id])
        watchdog.note(job_id)
        return job_id

    async def queue(self) -> dict[str, QueueRow]:
        """Return the rows of the cluster's jobs, including those that are over."""
        async with self._turn:
            asked = [job_id for job_id in self._ids if job_id not in self._over]
            rows = dict((await self._shown(asked)).rows) if asked else {}
            if self.is_unsure:
                rows = {**await self._strays(), **rows}
        self._remember(rows)
        return {**self._over, **rows}

    async def _strays(self) -> Mapping[str, QueueRow]:
        """Return the jobs with the cluster's identifier, searched at intervals; the last answer holds in between."""
        now = asyncio.get_running_loop().time()
        if now >= self._others_at + _STRAYS:
            self._others_at = now
            try:
                self._others = dict(await self._own())
            except Refused as refused:
                logger.debug("dask_ferro: lost submissions were not looked for: %s", refused.words)
        return self._others

    def _remember(self, rows: Mapping[str, QueueRow]) -> None:
        self._over.update((job_id, row) for job_id, row in rows.items() if row.phase == OVER)
        while len(self._over) > _REMEMBERED:
            job_id = next(iter(self._over))
            del self._over[job_id]
            self._ids.pop(job_id, None)

    async def unlisted(self, job_ids: Iterable[str]) -> dict[str, QueueRow | None]:
        """Return the rows of jobs, each queried by its id."""
        wanted = list(dict.fromkeys(job_ids))
        try:
            answer = await self._shown(wanted)
        except Refused as refused:
            logger.warning("dask_ferro: %s failed: %s", self.lists, refused.words)
            return {}
        self._remember(answer.rows)
        found: dict[str, QueueRow | None] = dict.fromkeys(answer.unknown)
        return {job_id: row for job_id, row in {**found, **answer.rows}.items() if job_id in wanted}

    async def find(self, nonce: str) -> str | None:
        """Return the job that a submission created; None if it is neither pending nor running."""
        own = await self._own()
        found = self._known_by(nonce, own) or self._known_by(nonce, await self._all_own())
        if found is None:
            await self._doubt(own)
            return None
        self.knows([found])
        self.guarded().note(found)
        return found

    def _known_by(self, nonce: str, rows: Mapping[str, QueueRow]) -> str | None:
        there = (row for row in rows.values() if row.phase in (PENDING, STARTED))
        return next((row.job_id for row in there if row.comment == f"{self.tag}.{nonce}"), None)

    async def _doubt(self, own: Mapping[str, QueueRow]) -> None:
        """Raise `Refused` if a listing leaves out existing jobs, since it may leave out others too."""
        missing = [job_id for job_id in self._ids if job_id not in self._over and job_id not in own]
        if missing:
            answer = await self._shown(missing)
            self._remember(answer.rows)
            ends = {job_id for job_id, row in answer.rows.items() if row.phase not in (PENDING, STARTED)}
            said = answer.rows.keys() if self.is_silent else set(missing)
            if there := said - ends - answer.unknown:
                raise Refused(f"{self.lists} leaves out jobs, such as {min(there)}", parsing.TRANSIENT)

    async def _cancel_known(self, job_ids: set[str]) -> None:
        # In place: `|=` would create a new set, and leave the caller's unchanged.
        job_ids.update(self._ids)
        job_ids.difference_update(self._over)
        await self.cancel(sorted(job_ids), level=logging.DEBUG)

    async def _are_gone(self, job_ids: set[str]) -> bool:
        job_ids.intersection_update(await self._are_left(job_ids))
        others = await self._strays_left() if self.is_unsure else []
        if not job_ids and others == []:
            return True
        await self.cancel([*sorted(job_ids), *(others or [])], level=logging.DEBUG)
        return False

    async def _are_left(self, job_ids: set[str]) -> set[str]:
        """Return the jobs that may still exist."""
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
        """Return the jobs with the cluster's identifier that are not ending; None: no answer."""
        try:
            own = await self._own()
        except Refused:
            return None
        return [job_id for job_id, row in own.items() if row.phase not in (ENDING, OVER)]

    def _watch(self) -> Watchdog:
        told = json.dumps(self.described() | {"job_name": self.job_name, "tag": self.tag})
        # The watchdog runs in another folder, where relative paths are useless.
        paths = [_PATH, *filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = (sys.executable, "-m", _GUARD, "dask-ferro-watchdog", self.job_name, told)
        return Watchdog(self.job_name, self.tag, environment, command=command)
