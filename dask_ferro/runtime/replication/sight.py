"""What one look at a scheduler sees: which results only preemptible jobs hold, found when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from distributed import Scheduler, Status
from distributed.scheduler import TaskState, WorkerState


class Sight:
    """Who alone holds results, as of one moment.

    Parameters
    ----------
    scheduler : Scheduler
    job_of : callable
        The job that a worker may be preempted with; empty: it is safe.
    """

    def __init__(self, scheduler: Scheduler, job_of: Callable[[WorkerState], str]) -> None:
        self._job_of = job_of
        # A result on two jobs is exposed only while somebody safe could have it: they insure each other.
        self._any_safe = any(not job_of(ws) for ws in scheduler.running)
        self._seen: dict[TaskState, str | None] = {}

    def is_exposed(self, ts: TaskState) -> bool:
        """Whether only preemptible jobs hold a result, and somebody else could."""
        return self.job(ts) is not None

    def job(self, ts: TaskState) -> str | None:
        """Return the job that alone holds a result; empty: several do; None: it is not exposed."""
        if ts not in self._seen:
            self._seen[ts] = self._job(ts)
        return self._seen[ts]

    def _job(self, ts: TaskState) -> str | None:
        jobs = {self._job_of(ws) for ws in ts.who_has or () if stays(ws)}
        if ts.actor or not jobs or "" in jobs or (len(jobs) > 1 and not self._any_safe):
            return None
        return jobs.pop() if len(jobs) == 1 else ""


def stays(ws: WorkerState) -> bool:
    """Whether a worker is not about to close."""
    return ws.status in (Status.running, Status.paused)
