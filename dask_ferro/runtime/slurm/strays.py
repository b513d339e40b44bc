"""Jobs of ours in the queue that nobody follows: submissions whose answer was lost, and jobs that were thought gone.

Decides which of them are taken up again and which end; asks and ends nothing itself.  One that was followed, and was
given up because SLURM knew it no more, is followed again.  All others have to be seen in two looks some seconds apart:
what `squeue` says may be half a minute old.  Points in time are epoch seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from dask_ferro.runtime.slurm.parsing import ENDING, OVER, QueueRow

# Between the first look at a stray and its cancellation.
_SEEN = 3.0
# Jobs that are remembered after they were over.
_REMEMBERED = 2000


class Found(NamedTuple):
    """What is to be done with strays.

    Attributes
    ----------
    back : list of BatchJob
        To follow again.
    ends : dict
        To end, by id; with the job where it was followed once.
    """

    back: list[BatchJob]
    ends: dict[str, BatchJob | None]


class Strays:
    """The strays that were seen, and the jobs that are followed no more."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        # By id.  Lost ones are few, and no number of jobs that ended makes them forgotten.
        self._lost: dict[str, BatchJob] = {}
        self._ended: dict[str, BatchJob] = {}

    def forget(self, job: BatchJob, *, is_lost: bool = False) -> None:
        """Follow a job no more.

        Parameters
        ----------
        is_lost : bool
            It is over because SLURM knew it no more, and not by its own or anybody's wish.
        """
        if not job.job_id:
            return
        kept, other = (self._lost, self._ended) if is_lost else (self._ended, self._lost)
        other.pop(job.job_id, None)
        kept[job.job_id] = job
        if len(kept) > _REMEMBERED:
            del kept[next(iter(kept))]

    def look(self, rows: Mapping[str, QueueRow], followed: Collection[str], now: float) -> Found:
        """Take in a look at the queue.

        Parameters
        ----------
        followed : collection of str
            The ids of jobs that are followed, or are being ended.
        """
        alive = (row.job_id for row in rows.values() if row.phase not in (ENDING, OVER))
        there = [job_id for job_id in alive if job_id not in followed]
        back = [self._lost[job_id] for job_id in there if job_id in self._lost]
        for job in back:
            job.warned_at.clear()
            del self._lost[job.job_id]
        followed_again = {job.job_id for job in back}
        self._seen = {i: self._seen.get(i, now) for i in there if i not in followed_again}
        ripe = [job_id for job_id, at in self._seen.items() if now - at >= _SEEN]
        return Found(back, {job_id: self._ended.get(job_id) for job_id in ripe})
