"""The scheduler plugin that counts finished tasks by worker and publishes the records of all jobs.

    ferro_jobs()             the records, in the form of `JobRecord.as_dict`
    ferro_jobs_told(...)     takes the cluster's changed records; returns the tasks by worker

    client.sync(client.scheduler.ferro_jobs)

It is separate because a cluster may have no other plugin of ours; its hooks cost as little as empty ones.  It is
bounded like the records: for workers that are gone and whose job is over or unknown, only the newest counts are kept.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dask.typing import Key
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_ferro.runtime.records.record import JobBook, JobRecord

logger = logging.getLogger(__name__)

# The most absent workers whose counts are kept, since their job may be reported later.
_GONE = 1000
NAME = "ferro-jobs"
JOBS, TOLD = "ferro_jobs", "ferro_jobs_told"


class JobCounts(SchedulerPlugin):
    """A counter of tasks by worker that also answers `ferro_jobs`."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._done: Counter[str] = Counter()
        # The jobs of workers, as far as they are not over; and the workers that are gone.
        self._job_of: dict[str, str] = {}
        self._gone: dict[str, None] = {}
        self._book = JobBook()

    async def start(self, scheduler: Scheduler) -> None:
        """Count from now on."""
        self._names = {address: str(ws.name) for address, ws in scheduler.workers.items()}
        scheduler.handlers.update({JOBS: self.jobs, TOLD: self.told})

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Learn a worker's name."""
        self._names[worker] = str(scheduler.workers[worker].name)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: object) -> None:
        """Forget a worker; the count of its tasks is kept until its job is over."""
        name = self._names.pop(worker, None)
        if name is not None and name in self._done:
            self._gone.pop(name, None)
            self._gone[name] = None
        while len(self._gone) > _GONE:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            if oldest not in self._job_of:
                self._done.pop(oldest, None)

    def transition(self, key: Key, start: str, finish: str, *args: object, **kwargs: Any) -> None:
        """Count a task that finished without error."""
        if start == "processing" and finish == "memory":
            name = self._names.get(kwargs.get("worker", ""))
            if name is not None:
                self._done[name] += 1

    def told(self, records: Iterable[Mapping[str, object]], comm: object = None) -> dict[str, int]:
        """Take in changed records; return the task counts of all workers whose jobs are not over."""
        for told in records:
            try:
                record = JobRecord.from_dict(told)
            # A record of another version, for instance, is skipped; the others count.
            except (ValueError, TypeError) as error:
                logger.warning("dask_ferro: a record of a job is left out: %s", error)
                continue
            before = self._book.get(record.name)
            self._book.put(record)
            now = () if record.is_over else record.workers
            self._job_of.update(dict.fromkeys(now, record.name))
            for worker in {*record.workers, *(before.workers if before else ())}.difference(now):
                self._job_of.pop(worker, None)
                self._done.pop(worker, None)
        # Changes are not needed here and would accumulate.
        self._book.changed()
        return dict(self._done)

    def jobs(self, comm: object = None) -> list[dict[str, object]]:
        """Return all records, in the order of the requests."""
        self._book.tally(self._done)
        return [record.as_dict() for record in self._book.records]
