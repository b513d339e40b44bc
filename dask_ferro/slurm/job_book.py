"""All jobs of a cluster in one place, with the reason why each was requested and why it is over.

    jobs      may exist: they are followed, or being ended (state "leaving")
    over      the newest of those that are over

A job ends in `JobBook.end`, and nowhere else.  The book asks no other source.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from distributed.metrics import time

from dask_ferro.scheduler.plugin import Part
from dask_ferro.slurm.job_lifecycle import BatchJob, JobState

# The most jobs kept that are over: 10 MB.
MOST_OVER = 10_000


class ClusterTables(Part):
    """The part of the scheduler plugin that answers clients of a cluster.

    Parameters
    ----------
    tables : mapping of str to callable
        What clients may ask for, by the name of the call (`observe.cluster_rows`).
    """

    name = "jobs"

    def __init__(self, tables: Mapping[str, Callable[..., Awaitable[object]]]) -> None:
        self.tables = tables

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        """Return the tables."""
        return self.tables


class JobBook:
    """The jobs of one cluster.

    Parameters
    ----------
    most : int
        The most jobs kept that are over.
    """

    def __init__(self, most: int = MOST_OVER) -> None:
        self.jobs: dict[str, BatchJob] = {}
        self.over: dict[str, BatchJob] = {}
        self._most, self._because = most, ""

    @property
    def followed(self) -> list[BatchJob]:
        """The jobs that are neither over nor released."""
        return [job for job in self.jobs.values() if job.state != JobState.LEAVING]

    @property
    def leaving(self) -> list[BatchJob]:
        """The jobs that are released, and may still exist."""
        return [job for job in self.jobs.values() if job.state == JobState.LEAVING]

    def because(self, why: str, jobs: Iterable[str] = ()) -> None:
        """Set the reason why the next jobs are requested, or why the named ones are released."""
        names = list(jobs)
        for name in names:
            if name in self.jobs:
                self.jobs[name].leaves_because = why
        if not names:
            self._because = why

    def request(self, jobs: Iterable[BatchJob]) -> None:
        """Add requested jobs."""
        now, why, self._because = time(), self._because, ""
        for job in jobs:
            job.asked_at, job.why = now, why
            self.jobs[job.name] = job

    def release(self, names: Iterable[str]) -> list[BatchJob]:
        """Stop following some jobs, which are to end; return those that were followed."""
        named = set(names)
        jobs = [job for job in self.followed if job.name in named]
        for job in jobs:
            done = (
                "drained"
                if job.state in (JobState.BOOTING, JobState.RUNNING)
                else "taken back before it started"
            )
            job.ending = f"{done}: {job.leaves_because}" if job.leaves_because else done
            job.enter(JobState.LEAVING, time())
        return jobs

    def end(self, job: BatchJob, why: str = "") -> None:
        """Record that a job is over, and why; by default the reason of its release."""
        # It may have ended by itself while its release was confirmed: the first reason holds.
        if self.jobs.pop(job.name, None) is None:
            return
        now = time()
        job.ending = why or job.ending
        # Clocks of two machines may differ.
        job.ended_at = now if job.ended_at is None else min(max(job.ended_at, job.started_at or 0.0), now)
        job.enter(JobState.ENDED, now)
        self.over[job.name] = job
        if len(self.over) > self._most:
            del self.over[next(iter(self.over))]

    def copies(self) -> tuple[BatchJob, ...]:
        """Return all jobs in their present state, in the order of the requests."""
        # Jobs that are over are in the order of their ends.
        every = sorted((*self.over.values(), *self.jobs.values()), key=lambda job: job.order)
        return tuple(map(replace, every))

    def rows(self) -> list[dict[str, Any]]:
        """Return all jobs in the order of the requests, in the types of msgpack and JSON.

        Their attributes by name, with the names of all their workers and their node-seconds so far.
        """
        now = time()
        return [
            {
                **vars(job),
                "state": str(job.state),
                "workers": list(job.every_worker),
                "node_seconds": job.node_seconds(now),
            }
            for job in self.copies()
        ]
