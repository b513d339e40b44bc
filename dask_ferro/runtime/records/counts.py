"""On the scheduler: how many tasks each job's workers ended, and the record of all jobs, for whoever asks.

    ferro_jobs()             the records, as `JobRecord.as_dict` tells them
    ferro_jobs_told(...)     what the cluster tells of its jobs; answers with tasks by worker

    client.sync(client.scheduler.ferro_jobs)

A plugin of its own, since not each cluster has another of ours; its calls cost what those of an empty one do.  It is
bounded like the record itself: of workers that are gone and whose job is over, or that have none, the newest count.
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

# Workers that are gone and whose tasks count all the same: their job may be told of later.
_GONE = 1000
NAME = "ferro-jobs"
JOBS, TOLD = "ferro_jobs", "ferro_jobs_told"


class JobCounts(SchedulerPlugin):
    """Counts tasks by worker, and answers `ferro_jobs`."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._done: Counter[str] = Counter()
        # The jobs of workers, of those that are not over; and the workers that are gone.
        self._job_of: dict[str, str] = {}
        self._gone: dict[str, None] = {}
        self._book = JobBook("")

    async def start(self, scheduler: Scheduler) -> None:
        """Count from now on."""
        self._names = {address: str(ws.name) for address, ws in scheduler.workers.items()}
        scheduler.handlers.update({JOBS: self.jobs, TOLD: self.told})

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Learn a worker's name."""
        self._names[worker] = str(scheduler.workers[worker].name)

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: object) -> None:
        """Forget a worker; its tasks are counted until its job is over."""
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
        """Count a task that ended well."""
        if start == "processing" and finish == "memory":
            name = self._names.get(kwargs.get("worker", ""))
            if name is not None:
                self._done[name] += 1

    def told(self, records: Iterable[Mapping[str, object]], comm: object = None) -> dict[str, int]:
        """Take in records that changed; return the tasks of all workers whose jobs are not over."""
        for told in records:
            try:
                record = JobRecord.from_dict(told)
            # Of another version, as it may be: the other records count.
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
        # Nobody asks for these here: they would pile up.
        self._book.changed()
        return dict(self._done)

    def jobs(self, comm: object = None) -> list[dict[str, object]]:
        """Return all records, in the order in which the jobs were asked for."""
        self._book.tally(self._done)
        return [record.as_dict() for record in self._book.records]
