"""A batch system other than SLURM, for the jobs of one cluster: submit, list, cancel, with what its commands can do.

It has the methods of `slurm.site.SlurmSite`, so that pools, lost submissions, strays, cancellations and bounds are one
code. Each job is one submission.  A cluster's jobs are known by their ids, and by a word that a submission carries,
where the listing shows it.  Three answers about a job: a row, "no such job", and none at all, which proves nothing.
What is over stays over: it is not asked for again.  The watchdog is a Python process with the same commands (`guard`).
Durations are seconds.
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

# Between two looks for jobs of lost submissions, which need a command more.
_STRAYS = 3.0
# A silent batch system's job is gone that was cancelled and is not listed in so many looks.
_MISSES = 3
# Jobs that are over and remembered.
_REMEMBERED = 2000
_GUARD = "dask_ferro.runtime.sites.guard"
# What the guard is started from, wherever this process found it.
_PATH = str(Path(__file__).resolve().parents[3])


class Answer(NamedTuple):
    """What a batch system says of jobs: rows by id, and those that it does not know."""

    rows: Mapping[str, QueueRow]
    unknown: frozenset[str] = frozenset()


class BatchSite(WatchedSite):
    """The commands of a batch system."""

    # Whether it says nothing of a job that is gone: then silence has to do.
    is_silent = False

    def __init__(self, job_name: str, tag: str) -> None:
        super().__init__(job_name, tag)
        self._ids: dict[str, None] = {}
        self._over: dict[str, QueueRow] = {}
        self._others: dict[str, QueueRow] = {}
        self._others_at = 0.0
        # Whether there may be jobs whose ids were never heard.
        self.is_unsure = False
        self._misses: dict[str, int] = {}

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
    async def _own(self) -> Mapping[str, QueueRow]:
        """Return the jobs there are that are the cluster's, by word or by id.  Raises `Refused`."""

    async def _all_own(self) -> Mapping[str, QueueRow]:
        """Return the same by another command, which may cost more.  Raises `Refused`."""
        return {}

    # -- what they have in common --------------------------------------------------------------------------------

    def knows(self, job_ids: Iterable[str]) -> None:
        """Take note of jobs that were submitted."""
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
        """Return what is said of the cluster's jobs, those that are over included."""
        async with self._turn:
            asked = [job_id for job_id in self._ids if job_id not in self._over]
            rows = dict((await self._shown(asked)).rows) if asked else {}
            if self.is_unsure:
                rows = {**await self._strays(), **rows}
        self._remember(rows)
        return {**self._over, **rows}

    async def _strays(self) -> Mapping[str, QueueRow]:
        """Return the jobs that carry the cluster's word: a look now and then, and what it said since."""
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
        """Return what is said of jobs, each asked for by its id."""
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
        """Return the job that a submission became; None where it waits or runs nowhere."""
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
        """Raise `Refused` for a listing that leaves out jobs that are there: it would leave out others too."""
        missing = [job_id for job_id in self._ids if job_id not in self._over and job_id not in own]
        if missing:
            answer = await self._shown(missing)
            self._remember(answer.rows)
            ends = {job_id for job_id, row in answer.rows.items() if row.phase not in (PENDING, STARTED)}
            said = answer.rows.keys() if self.is_silent else set(missing)
            if there := said - ends - answer.unknown:
                raise Refused(f"{self.lists} leaves out jobs, such as {min(there)}", parsing.TRANSIENT)

    async def _cancel_known(self, job_ids: set[str]) -> None:
        # By methods: of a dict's keys, `|=` makes another set, and the caller's stays as it is.
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

    def _watch(self) -> Watchdog:
        told = json.dumps(self.described() | {"job_name": self.job_name, "tag": self.tag})
        # Its working folder is another; what is relative there is nothing to it.
        paths = [_PATH, *filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = (sys.executable, "-m", _GUARD, "dask-ferro-watchdog", self.job_name, told)
        return Watchdog(self.job_name, self.tag, environment, command=command)
