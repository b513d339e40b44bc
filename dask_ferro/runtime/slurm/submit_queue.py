"""The submission of jobs to SLURM: one `sbatch` at a time, with an array for several jobs.

It decides what follows a refusal: a retry with back-off, smaller portions, or giving up with SLURM's message.  After
a lost answer the queue is searched before anything else is submitted, so that nothing is submitted twice, not even
while no command answers.  It knows neither Dask nor whether a job is worth having.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from dask_ferro.runtime.slurm import parsing
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from dask_ferro.runtime.slurm.site import ELEMENTS, SlurmSite

logger = logging.getLogger(__name__)

# Seconds between two calls of sbatch: 5 a second are no load for a controller, and make 2500 jobs.
_SPACING = 0.2
# The first pause after a failure, and the longest.
_PAUSE, _PAUSE_MOST = 0.5, 30.0
# The number of attempts after an unknown refusal: 3.5 s.
_TRIES = 4
# Seconds between two queries about a submission that is being withdrawn.
_ASKED = 2.0
# Kinds after which the job may be in the queue all the same: the answer was lost, `sbatch` was killed, or printed no
# id.
_UNSURE = (parsing.TRANSIENT, parsing.UNKNOWN)


class Batch(NamedTuple):
    """Jobs of one pool for one `sbatch`."""

    jobs: tuple[BatchJob, ...]

    @property
    def pool(self) -> str:
        """Its pool."""
        return self.jobs[0].pool

    @property
    def first(self) -> int:
        """The number of element 0."""
        return self.jobs[0].order

    @property
    def offsets(self) -> list[int]:
        """Indices in the array; a single job is no array."""
        return [job.order - self.first for job in self.jobs]

    def identify(self, array: str) -> None:
        """Set the ids of the jobs."""
        alone = len(self.jobs) == 1
        for job, offset in zip(self.jobs, self.offsets, strict=True):
            job.job_id = array if alone else f"{array}_{offset}"


@dataclass
class _Pause:
    """The back-off of one pool's submissions, and the number of jobs in one submission."""

    portion: int
    most: int
    tries: int = 0
    until: float = 0.0
    words: str = ""

    def fail(self, refused: Refused, count: int, now: float) -> float:
        """Return the seconds until the next attempt."""
        seconds = min(_PAUSE * 2 ** min(self.tries, 10), _PAUSE_MOST)
        self.until, self.words = now + seconds, refused.words
        self.tries += 1
        if refused.kind == parsing.LIMIT:
            self.portion = max(1, count // 2)
            if "array" in refused.words:  # the site's own limit, which does not pass
                self.most = self.portion
        return seconds

    def succeed(self) -> None:
        self.tries, self.until, self.words = 0, 0.0, ""
        self.portion = min(self.portion * 2, self.most)


class Submission:
    """The requested jobs that are not in the queue yet.

    Parameters
    ----------
    site : SlurmSite
    script : callable
        Returns the batch script for a pool and the number of element 0.
    accepted : callable
        Called with jobs that got their ids.
    refused : callable
        Called with jobs that will never get one, and SLURM's message.
    """

    def __init__(
        self,
        site: SlurmSite,
        script: Callable[[str, int], str],
        accepted: Callable[[Iterable[BatchJob]], None],
        refused: Callable[[Sequence[BatchJob], str], None],
    ) -> None:
        self._site, self._script, self._accepted, self._refused = site, script, accepted, refused
        self._waiting: dict[str, BatchJob] = {}
        self._flying: Batch | None = None
        self._landed = asyncio.Event()
        self._woken = asyncio.Event()
        self._pauses: dict[str, _Pause] = {}
        self._task: asyncio.Task[None] | None = None
        self._errors: dict[str, str] = {}
        self._is_closed = False
        self._not_before = 0.0
        # Ids of everything submitted here, the number of attempts, and whether one may have succeeded without an
        # answer.
        self.arrays: set[str] = set()
        self.attempts = 0
        self._is_unsure = False
        # Submissions without an answer, by their nonce, until SLURM reports their outcome.
        self._unclear: dict[str, Batch] = {}

    @property
    def in_flight(self) -> bool:
        """Whether `sbatch` runs: then the queue may contain jobs whose ids are not known yet."""
        return self._flying is not None

    @property
    def had_jobs(self) -> bool:
        """Whether SLURM may have a job."""
        return bool(self.arrays or self._unclear) or self._is_unsure or self.in_flight

    def add(self, jobs: Iterable[BatchJob]) -> None:
        """Add jobs; they are submitted in the background, all of one iteration of the loop together."""
        self._waiting.update((job.name, job) for job in jobs)
        self._woken.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._submit_all())

    def trouble(self, pool: str) -> str:
        """Return why jobs of a pool wait for another attempt; empty: none does."""
        return self._pause(pool).words if self.waiting(pool) else ""

    def waiting(self, pool: str) -> list[BatchJob]:
        """Return the jobs of a pool that are not in an `sbatch`."""
        return [job for job in self._waiting.values() if job.pool == pool]

    def retry(self, pool: str) -> None:
        """Forget the failures of a pool, so that the next attempt is made at once."""
        self._pauses.pop(pool, None)
        self._woken.set()

    async def withdraw(self, jobs: Iterable[BatchJob]) -> None:
        """Forget jobs that are not submitted yet; wait for those whose submission is undecided."""
        names = {job.name for job in jobs}
        while True:
            for name in names:
                self._waiting.pop(name, None)
            self._woken.set()
            if self._flying is not None and any(job.name in names for job in self._flying.jobs):
                await self._landed.wait()  # it may be refused, and wait again
                continue
            lost = chain.from_iterable(batch.jobs for batch in self._unclear.values())
            if self._is_closed or not any(job.name in names for job in lost):
                return
            try:
                await self._clear_up()
            except Refused:
                await asyncio.sleep(_ASKED)

    async def settled(self) -> list[str]:
        """Return the permanent refusals that no later success has replaced, once nothing waits any more."""
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task})
        errors, self._errors = self._errors, {}
        return [f"SLURM refuses jobs of pool {pool!r}: {words}" for pool, words in errors.items()]

    async def close(self, patience: float) -> bool:
        """Submit nothing more; return whether the last `sbatch` ended within `patience` seconds."""
        self._is_closed = True
        self._woken.set()
        if self._task is None:
            return True
        await asyncio.wait({self._task}, timeout=patience)
        if self._task.done():
            return True
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=1.0)
        return False

    async def _submit_all(self) -> None:
        while self._waiting and not self._is_closed:
            now = asyncio.get_running_loop().time()
            pool, at = self._next_pool(now)
            if at > now:
                self._woken.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), at - now)
            else:
                self._not_before = now + _SPACING
                await self._fly(self._batch(pool))

    async def _fly(self, batch: Batch) -> None:
        for job in batch.jobs:
            del self._waiting[job.name]
        self._flying = batch
        self._landed.clear()
        try:
            await self._submit(batch)
        except Exception as error:
            # Whatever the error, callers must not wait for these jobs for ever.
            logger.exception("dask_ferro: submission failed")
            self._give_up(batch, repr(error))
        finally:
            self._flying = None
            self._landed.set()

    def _next_pool(self, now: float) -> tuple[str, float]:
        """Return the pool that is next, and when."""
        pauses = {job.pool: self._pause(job.pool) for job in self._waiting.values()}
        pool = min(pauses, key=lambda name: max(pauses[name].until, now))
        return pool, max(pauses[pool].until, self._not_before)

    def _pause(self, pool: str) -> _Pause:
        return self._pauses.setdefault(pool, _Pause(ELEMENTS, ELEMENTS))

    def _batch(self, pool: str) -> Batch:
        """Return the oldest jobs of a pool, as many as fit in one array."""
        jobs = sorted(self.waiting(pool), key=lambda job: job.order)
        most = self._pause(pool).portion
        return Batch(tuple(job for job in jobs[:most] if job.order - jobs[0].order < ELEMENTS))

    async def _submit(self, batch: Batch) -> None:
        try:
            await self._clear_up()
        except Refused as refused:
            words = f"an earlier submission may be in the queue, and it is not known whether: {refused.words}"
            self._refuse(_left(batch), Refused(words, parsing.TRANSIENT))
            return
        if left := _left(batch):
            await self._attempt(Batch(left))

    async def _attempt(self, batch: Batch) -> None:
        self.attempts += 1
        nonce = uuid.uuid4().hex[:12]
        try:
            array = await self._site.submit(self._script(batch.pool, batch.first), batch.offsets, nonce)
        except Refused as refused:
            if refused.kind in _UNSURE:
                self._unclear[nonce] = batch
                with contextlib.suppress(Refused):  # nothing answers now
                    await self._clear_up()
            self._refuse(_left(batch), refused)
        else:
            self._accept(batch, array)

    async def _clear_up(self) -> None:
        """Determine the outcome of submissions without an answer, and accept those that succeeded.

        Raises
        ------
        Refused
            If SLURM does not answer.
        """
        for nonce, batch in list(self._unclear.items()):
            array = await self._site.find(nonce)
            if self._unclear.pop(nonce, None) is None:
                continue  # another task has asked meanwhile
            if array is None:
                self._is_unsure = True  # it may still appear, as the controller itself was not asked
            else:
                for job in batch.jobs:
                    self._waiting.pop(job.name, None)
                self._accept(batch, array)

    def _accept(self, batch: Batch, array: str) -> None:
        self.arrays.add(array)
        self._pause(batch.pool).succeed()
        self._errors.pop(batch.pool, None)
        batch.identify(array)
        self._accepted(batch.jobs)

    def _refuse(self, jobs: Sequence[BatchJob], refused: Refused) -> None:
        if not jobs:
            return
        batch = Batch(tuple(jobs))
        pause = self._pause(batch.pool)
        seconds = pause.fail(refused, len(batch.jobs), asyncio.get_running_loop().time())
        tired = refused.kind == parsing.UNKNOWN and pause.tries >= _TRIES
        if tired or refused.kind == parsing.PERMANENT:
            self._give_up(batch, refused.words)
            return
        text = "dask_ferro: sbatch failed %d times, the next try in %.1f s: %s"
        logger.warning(text, pause.tries, seconds, refused.words)
        for job in batch.jobs:
            job.reason = refused.words
        self._waiting.update((job.name, job) for job in batch.jobs)

    def _give_up(self, batch: Batch, words: str) -> None:
        """Refuse all of the pool's waiting jobs, which would get the same answer."""
        self._pauses.pop(batch.pool, None)
        waiting = self.waiting(batch.pool)
        for job in waiting:
            del self._waiting[job.name]
        self._errors[batch.pool] = words
        self._refused([*batch.jobs, *waiting], words)


def _left(batch: Batch) -> tuple[BatchJob, ...]:
    """Return the jobs that have no id yet."""
    return tuple(job for job in batch.jobs if not job.job_id)
