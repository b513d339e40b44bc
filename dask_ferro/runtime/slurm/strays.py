"""Jobs of ours in the queue that are not followed: submissions without an answer, and jobs that were thought gone.

It decides which of them are followed again and which are ended, and acts on none itself.  A job that was given up
because SLURM did not list it any more is followed again.  All others have to be seen in two listings some seconds
apart, since `squeue` may be half a minute old.  Points in time are epoch seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from dask_ferro.runtime.slurm.parsing import ENDING, OVER, QueueRow

# Seconds between the first sight of a stray and its cancellation.
_SEEN = 3.0
# The most jobs remembered after their end.
_REMEMBERED = 2000


class Found(NamedTuple):
    """The decision on strays.

    Attributes
    ----------
    back : list of BatchJob
        Jobs to follow again.
    ends : dict
        Jobs to end, by id; with the job if it was followed before.
    """

    back: list[BatchJob]
    ends: dict[str, BatchJob | None]


class Strays:
    """The strays seen so far, and the jobs that are not followed any more."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        # By id.  Lost jobs are few, and are not displaced by ended ones.
        self._lost: dict[str, BatchJob] = {}
        self._ended: dict[str, BatchJob] = {}

    def forget(self, job: BatchJob, *, is_lost: bool = False) -> None:
        """Stop following a job.

        Parameters
        ----------
        is_lost : bool
            Whether it is over only because SLURM did not list it any more.
        """
        if not job.job_id:
            return
        kept, other = (self._lost, self._ended) if is_lost else (self._ended, self._lost)
        other.pop(job.job_id, None)
        kept[job.job_id] = job
        if len(kept) > _REMEMBERED:
            del kept[next(iter(kept))]

    def look(self, rows: Mapping[str, QueueRow], followed: Collection[str], now: float) -> Found:
        """Process a listing of the queue.

        Parameters
        ----------
        followed : collection of str
            The ids of jobs that are followed or being ended.
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
