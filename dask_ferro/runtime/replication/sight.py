"""The results that only preemptible jobs hold, evaluated on demand for one round."""

from __future__ import annotations

from collections.abc import Callable

from distributed import Scheduler, Status
from distributed.scheduler import TaskState, WorkerState


class Sight:
    """The exclusive holders of results, at one moment.

    Parameters
    ----------
    scheduler : Scheduler
    job_of : callable
        Returns the job with which a worker may be preempted; empty: it is safe.
    """

    def __init__(self, scheduler: Scheduler, job_of: Callable[[WorkerState], str]) -> None:
        self._job_of = job_of
        # A result held by two jobs is exposed only if a safe worker could take it, as the two insure each other.
        self._any_safe = any(not job_of(ws) for ws in scheduler.running)
        self._seen: dict[TaskState, str | None] = {}

    def is_exposed(self, ts: TaskState) -> bool:
        """Return whether only preemptible jobs hold a result, and another worker could."""
        return self.job(ts) is not None

    def job(self, ts: TaskState) -> str | None:
        """Return the only job that holds a result; empty: several do; None: it is not exposed."""
        if ts not in self._seen:
            self._seen[ts] = self._job(ts)
        return self._seen[ts]

    def _job(self, ts: TaskState) -> str | None:
        jobs = {self._job_of(ws) for ws in ts.who_has or () if stays(ws)}
        if ts.actor or not jobs or "" in jobs or (len(jobs) > 1 and not self._any_safe):
            return None
        return jobs.pop() if len(jobs) == 1 else ""


def stays(ws: WorkerState) -> bool:
    """Return whether a worker is not about to close."""
    return ws.status in (Status.running, Status.paused)
