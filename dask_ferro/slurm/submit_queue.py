"""The submission of jobs to SLURM: one `sbatch` at a time, with an array for several jobs.

It decides what follows a refusal: a retry with back-off, smaller portions, or giving up with SLURM's message.  After
a lost answer SLURM is asked for the jobs before anything else is submitted, so that nothing is submitted twice, not
even while no command answers.  It knows neither Dask nor whether a job is worth having.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dask_ferro.slurm import parsing
from dask_ferro.slurm.commands import RefusedError
from dask_ferro.slurm.job_lifecycle import BatchJob
from dask_ferro.slurm.site import ELEMENTS, SlurmSite

logger = logging.getLogger(__name__)

# The first pause after a failure, and the longest.
_PAUSE, _PAUSE_MOST = 0.5, 30.0
# The number of attempts after an unknown refusal: 3.5 s.
_TRIES = 4
# Seconds between two queries for a submission without an answer.
_QUERY_INTERVAL = 2.0
# Kinds after which the job may be in the queue all the same: the answer was lost, `sbatch` was killed, or printed no
# id.
_UNSURE = (parsing.TRANSIENT, parsing.UNKNOWN)


@dataclass
class _Attempts:
    """The failed attempts of one pool, with SLURM's message, and the number of jobs in its next submission."""

    portion: int = ELEMENTS
    failed: int = 0
    until: float = 0.0
    words: str = ""


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
        # The jobs of one pool in the present `sbatch`, until it is known what became of them.
        self._flying: list[BatchJob] = []
        self._landed, self._woken = asyncio.Event(), asyncio.Event()
        self._attempts: dict[str, _Attempts] = {}
        self._task: asyncio.Task[None] | None = None
        self._errors: dict[str, str] = {}
        self._is_closed = self._is_unsure = False
        # The number of calls of sbatch, and whether SLURM may have a job.
        self.calls = 0
        self.had_jobs = False

    @property
    def in_flight(self) -> bool:
        """Whether the queue may contain jobs whose ids are not known yet."""
        return bool(self._flying)

    def add(self, jobs: Iterable[BatchJob]) -> None:
        """Add jobs; they are submitted in the background, all of one iteration of the loop together."""
        self._waiting.update((job.name, job) for job in jobs)
        self._woken.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._submit_all())

    def trouble(self, pool: str) -> str:
        """Return why jobs of a pool wait for another attempt; empty: none does."""
        waits = any(job.pool == pool for job in (*self._waiting.values(), *self._flying))
        return self._tries(pool).words if waits else ""

    def retry(self, pool: str) -> None:
        """Forget the failures of a pool, so that the next attempt is made at once."""
        self._attempts.pop(pool, None)
        self._woken.set()

    async def withdraw(self, jobs: Iterable[BatchJob]) -> None:
        """Forget jobs that are not submitted yet; wait for those whose submission is undecided."""
        names = {job.name for job in jobs}
        while True:
            for name in names:
                self._waiting.pop(name, None)
            self._woken.set()
            if not any(job.name in names for job in self._flying):
                return
            await self._landed.wait()  # it may be refused, and wait again

    async def settled(self) -> list[str]:
        """Return the permanent refusals that no later success has replaced, once nothing waits any more."""
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task})
        errors, self._errors = self._errors, {}
        return [f"SLURM refuses jobs of pool {pool!r}: {words}" for pool, words in errors.items()]

    async def close(self, patience: float) -> bool:
        """Submit nothing more; return whether what the last `sbatch` did is known within `patience` seconds."""
        self._is_closed = True
        self._woken.set()
        if self._task is None:
            return True
        await asyncio.wait({self._task}, timeout=patience)
        if self._task.done():
            return not self._is_unsure
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=1.0)
        return False

    def _tries(self, pool: str) -> _Attempts:
        return self._attempts.setdefault(pool, _Attempts())

    def _of_pool(self, pool: str) -> list[BatchJob]:
        return [job for job in self._waiting.values() if job.pool == pool]

    async def _submit_all(self) -> None:
        while self._waiting and not self._is_closed:
            pools = dict.fromkeys(job.pool for job in self._waiting.values())
            pool = min(pools, key=lambda name: self._tries(name).until)
            seconds = self._tries(pool).until - asyncio.get_running_loop().time()
            if seconds > 0:
                await self._sleep(seconds)
            else:
                await self._fly(self._batch(pool))

    async def _sleep(self, seconds: float) -> None:
        """Wait until an order comes, or for some seconds."""
        self._woken.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)

    def _batch(self, pool: str) -> list[BatchJob]:
        """Return the oldest jobs of a pool, as many as fit in one array."""
        jobs = sorted(self._of_pool(pool), key=lambda job: job.order)
        return [job for job in jobs[: self._tries(pool).portion] if job.order - jobs[0].order < ELEMENTS]

    async def _fly(self, batch: list[BatchJob]) -> None:
        for job in batch:
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
            self._flying = []
            self._landed.set()

    async def _submit(self, batch: list[BatchJob]) -> None:
        pool, first = batch[0].pool, batch[0].order
        # A single job is no array.
        offsets = [job.order - first for job in batch]
        nonce = uuid.uuid4().hex[:12]
        self.calls += 1
        array: str | None = None
        try:
            array = await self._site.submit(self._script(pool, first), offsets, nonce)
        except RefusedError as refused:
            if refused.kind in _UNSURE:
                self.had_jobs = True  # even one that is not found may appear later
                self._blame(batch, refused.words)
                array = await self._outcome(nonce)
            if array is None:
                self._refuse(batch, refused)
                return
        self.had_jobs = True
        attempts = self._tries(pool)
        self._attempts[pool] = _Attempts(min(attempts.portion * 2, ELEMENTS))
        self._errors.pop(pool, None)
        for job, offset in zip(batch, offsets, strict=True):
            job.job_id = array if len(batch) == 1 else f"{array}_{offset}"
        self._accepted(batch)

    async def _outcome(self, nonce: str) -> str | None:
        """Return the array of a submission without an answer as soon as SLURM tells; None: there is none."""
        self._is_unsure = True
        while True:
            try:
                array = await self._site.find(nonce)
                self._is_unsure = False
                return array
            except RefusedError as refused:
                logger.info("dask_ferro: scontrol: %s", refused.words)
            if self._is_closed:
                return None
            await self._sleep(_QUERY_INTERVAL)

    def _blame(self, batch: Sequence[BatchJob], words: str) -> None:
        self._tries(batch[0].pool).words = words
        for job in batch:
            job.reason = words

    def _refuse(self, batch: list[BatchJob], refused: RefusedError) -> None:
        attempts = self._tries(batch[0].pool)
        attempts.failed += 1
        is_tired = refused.kind == parsing.UNKNOWN and attempts.failed >= _TRIES
        if is_tired or refused.kind == parsing.PERMANENT:
            self._give_up(batch, refused.words)
            return
        seconds = min(_PAUSE * 2 ** min(attempts.failed - 1, 10), _PAUSE_MOST)
        attempts.until = asyncio.get_running_loop().time() + seconds
        if refused.kind == parsing.LIMIT:
            attempts.portion = max(1, len(batch) // 2)
        text = "dask_ferro: sbatch failed %d times, the next try in %.1f s: %s"
        logger.warning(text, attempts.failed, seconds, refused.words)
        self._blame(batch, refused.words)
        self._waiting.update((job.name, job) for job in batch)

    def _give_up(self, batch: list[BatchJob], words: str) -> None:
        """Refuse all of the pool's waiting jobs, which would get the same answer."""
        pool = batch[0].pool
        self._attempts.pop(pool, None)
        waiting = self._of_pool(pool)
        for job in waiting:
            del self._waiting[job.name]
        self._errors[pool] = words
        self._refused([*batch, *waiting], words)
