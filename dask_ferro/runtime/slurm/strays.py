"""Jobs in the queue that nobody follows: submissions without an answer, jobs thought gone, and those of dead clusters.

It decides which of them are followed again and which are ended, and acts on none itself.  A job that was given up
because SLURM did not list it any more is followed again.  All others have to be seen in two listings some seconds
apart, since `squeue` may be half a minute old.  Points in time are epoch seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from dask_ferro.runtime.slurm.parsing import ENDING, OVER, QueueRow

# Seconds between the first sight of a stray and its cancellation.
_SEEN = 3.0


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
    """The strays seen so far."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def look(
        self, rows: Mapping[str, QueueRow], followed: Collection[str], over: Iterable[BatchJob], now: float
    ) -> Found:
        """Process a listing of the queue.

        Parameters
        ----------
        followed : collection of str
            The ids of jobs that are followed or being ended.
        over : iterable of BatchJob
            Jobs that are thought over.
        """
        alive = (row.job_id for row in rows.values() if row.phase not in (ENDING, OVER))
        there = {job_id for job_id in alive if job_id not in followed}
        former = {job.job_id: job for job in over if job.job_id in there} if there else {}
        # Others were ended by this cluster, or by SLURM's own word.
        back = [job for job in former.values() if job.is_lost]
        there.difference_update(job.job_id for job in back)
        self._seen = {job_id: self._seen.get(job_id, now) for job_id in sorted(there)}
        ripe = [job_id for job_id, at in self._seen.items() if now - at >= _SEEN]
        return Found(back, {job_id: former.get(job_id) for job_id in ripe})
