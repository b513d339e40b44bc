"""The record of each job that a cluster requested, and the book of all records.

The book is updated from jobs as `slurm.job_lifecycle` follows them, and reports changed records; it asks no other
source.  It is bounded: of the jobs that are over, only the newest are kept.  Durations are seconds, points in time
epoch seconds.

    submitting -> pending -> booting -> running -> ended        (pending again when SLURM requeues it)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import UnionType
from typing import Any

from dask_ferro.policy.scaling.facts import BOOTING, PENDING, RUNNING
from dask_ferro.runtime.site_jobs import DEFAULT
from dask_ferro.runtime.slurm.job_lifecycle import SUBMITTING, BatchJob

ENDED = "ended"
# In the order of a job's life.
STATES = (SUBMITTING, PENDING, BOOTING, RUNNING, ENDED)
# The most records kept of jobs that are over: 10 MB.
KEPT = 10_000

# The most names kept of workers from before a requeue.
_FORMER_WORKERS = 50


@dataclass(frozen=True)
class JobRecord:
    """A requested job, from the reason for the request to the reason of its end.

    Attributes
    ----------
    name, pool, job_id : str
        Its name here, its pool, and SLURM's id; an empty id means that SLURM never had it.
    workers : tuple of str
        The names of its workers at the scheduler, including those before a requeue; if there are many, the newest.
    why : str
        Why it was requested.
    state : str
        "submitting", "pending", "booting", "running" or "ended".
    asked, submitted, started, connected, ended : float or None
        When it was requested, entered the queue, started, had all its workers connected, and was over.
    ending : str
        Why it is over; empty: it is not over.
    nodes, processes, restarts : int
        Nodes that it runs on, worker processes, and how often SLURM requeued it.
    before : float
        Node-seconds of its runs before the newest requeue.
    tasks : int
        Number of tasks that its workers finished without error.
    order : int
        Its number in its cluster, never reused.
    seen : float
        The time of this record.
    """

    name: str
    pool: str = DEFAULT
    job_id: str = ""
    workers: tuple[str, ...] = ()
    why: str = ""
    state: str = SUBMITTING
    asked: float = 0.0
    submitted: float | None = None
    started: float | None = None
    connected: float | None = None
    ended: float | None = None
    ending: str = ""
    nodes: int = 1
    processes: int = 1
    restarts: int = 0
    before: float = 0.0
    tasks: int = 0
    order: int = 0
    seen: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it is over."""
        return self.state == ENDED

    def node_seconds(self, now: float | None = None) -> float:
        """Return the seconds that it ran, times its nodes.

        Parameters
        ----------
        now : float, optional
            The end of the interval for a running job; default: the time of this record.
        """
        if self.started is None:
            return self.before
        until = self.ended if self.ended is not None else self.seen if now is None else now
        return self.before + max(until - self.started, 0.0) * self.nodes

    def as_dict(self) -> dict[str, object]:
        """Return the record in JSON's types."""
        return {**asdict(self), "workers": list(self.workers)}

    @staticmethod
    def from_dict(told: Mapping[str, Any]) -> JobRecord:
        """Return the record for the output of `as_dict`; unknown keys of a newer version are ignored.

        Raises
        ------
        ValueError
            If it is not a valid record.
        """
        own = {"name": "", **{f.name: told[f.name] for f in fields(JobRecord) if f.name in told}}
        for field in fields(JobRecord):
            value, kinds = own.get(field.name, field.default), _KINDS[field.type]
            if isinstance(value, bool) or not isinstance(value, kinds) or not is_said(value):
                raise ValueError(f"no record of a job: {field.name} is {value!r}")
        record = JobRecord(**{**own, "workers": tuple(map(str, own.get("workers", ())))})
        if not record.name or record.state not in STATES:
            raise ValueError(f"no record of a job: {record.name!r} is {record.state!r}")
        return record


def is_said(value: object) -> bool:
    """Return whether a value is valid in a record: not NaN, and not excessively large."""
    return not isinstance(value, int | float) or -_MOST < value < _MOST


# The bound of all numbers in a record.
_MOST = 1e100
# By a field's annotation, the types of its JSON value, where tuples are lists and a whole float may come as an int.
_KINDS: Mapping[object, type | UnionType] = {
    "str": str,
    "int": int,
    "float": int | float,
    "float | None": int | float | None,
    "tuple[str, ...]": list | tuple,
}


class JobBook:
    """The records of one cluster.

    Parameters
    ----------
    most : int
        The most records kept of jobs that are over.
    """

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._records: dict[str, JobRecord] = {}
        self._over: dict[str, None] = {}
        self._changed: dict[str, None] = {}
        self._noted: dict[str, tuple[object, ...]] = {}
        self._tasks: Mapping[str, int] = {}
        # Task counts of workers whose names are forgotten, by job.
        self._tasks_before: dict[str, int] = {}

    @property
    def records(self) -> tuple[JobRecord, ...]:
        """All records, in the order of the requests."""
        return tuple(one if one.name in self._over else self._counted(one) for one in self._records.values())

    def get(self, name: str) -> JobRecord | None:
        """Return a job's record, if it is kept."""
        return self._records.get(name)

    def changed(self) -> list[JobRecord]:
        """Return the records that changed since the last call."""
        names, self._changed = self._changed, {}
        return [self._records[name] for name in names if name in self._records]

    def put(self, record: JobRecord) -> None:
        """Add a record as it is."""
        self._records[record.name] = record
        self._changed[record.name] = None
        if record.is_over:
            self._over[record.name] = None
            while len(self._over) > self._most:
                oldest = next(iter(self._over))
                del self._over[oldest], self._records[oldest]
                for facts in (self._changed, self._noted, self._tasks_before):
                    facts.pop(oldest, None)  # type: ignore[attr-defined]

    def asked(self, jobs: Iterable[BatchJob], why: str, now: float) -> None:
        """Record requested jobs."""
        for job in jobs:
            asked = JobRecord(
                job.name, job.pool, workers=job.workers, processes=job.processes, order=job.order
            )
            self.put(replace(asked, why=why, asked=now, seen=now))

    def note(self, job: BatchJob, now: float, connected: float | None = None) -> None:
        """Update a job's record.

        Parameters
        ----------
        connected : float, optional
            When the last of its workers connected.
        """
        facts = (job.job_id, job.state, job.restarts, job.submitted_at, job.started_at, job.nodes)
        record = self._records.get(job.name)
        # The usual case: most jobs have not changed.
        if record is None or self._noted.get(job.name) == facts:
            return
        self._noted[job.name] = facts
        if job.restarts > record.restarts:
            record = self._bounded(_requeued(record, job, now), job)
        # The newest workers are those of its script, with the names that its shell has given them.
        earlier = record.workers[: len(record.workers) - len(job.workers)]
        new = replace(
            record,
            job_id=job.job_id,
            state=job.state,
            submitted=record.submitted if job.submitted_at is None else job.submitted_at,
            started=job.started_at if job.state in (BOOTING, RUNNING) else None,
            connected=record.connected if job.state != RUNNING else record.connected or connected or now,
            workers=earlier + job.workers,
            nodes=job.nodes,
            ended=None,
            ending="",
        )
        if new != record:
            # It was considered over, but SLURM still knows it.
            self._over.pop(job.name, None)
            self.put(replace(self._counted(new), seen=now))

    def tally(self, tasks: Mapping[str, int]) -> None:
        """Take the task counts by worker name; this alone marks no record as changed."""
        self._tasks = tasks

    def _bounded(self, record: JobRecord, job: BatchJob) -> JobRecord:
        """Forget the oldest workers of a job that was requeued often; their tasks still count."""
        many = len(record.workers) - len(job.workers) - _FORMER_WORKERS
        if many <= 0:
            return record
        forgotten = sum(self._tasks.get(worker, 0) for worker in record.workers[:many])
        self._tasks_before[record.name] = self._tasks_before.get(record.name, 0) + forgotten
        return replace(record, workers=record.workers[many:])

    def _counted(self, record: JobRecord) -> JobRecord:
        """Return a job's record with its current task count."""
        done = sum(self._tasks.get(worker, 0) for worker in record.workers)
        done += self._tasks_before.get(record.name, 0)
        return record if done <= record.tasks else replace(record, tasks=done)

    def over(
        self, name: str, ending: str, now: float, ran: tuple[float | None, float | None] = (None, None)
    ) -> None:
        """Record the end of a job, unless it is already over.

        Parameters
        ----------
        ran : tuple of float or None
            Its start and end, where SLURM reports them.
        """
        record = self._records.get(name)
        if record is None or record.is_over:
            return
        self._noted.pop(name, None)
        started = record.started if ran[0] is None or not record.job_id else ran[0]
        ended = now if ran[1] is None else min(max(ran[1], started or ran[1]), now)
        record = self._counted(record)
        self.put(replace(record, state=ENDED, ending=ending, started=started, ended=ended, seen=now))

    def amend(self, name: str, words: str) -> None:
        """Append to the reason why a job is over."""
        record = self._records.get(name)
        if record is not None and record.is_over:
            self.put(replace(record, ending=f"{record.ending}, {words}"))


def _requeued(record: JobRecord, job: BatchJob, now: float) -> JobRecord:
    """Return a record with the node-seconds before a requeue added up."""
    return replace(
        record, before=record.node_seconds(now), started=None, connected=None, restarts=job.restarts,
        workers=record.workers + job.workers,
    )  # fmt: skip


def gone_by_us(job: BatchJob, why: str) -> str:
    """Return the reason for the end of a job that its cluster released.

    >>> gone_by_us(BatchJob("a-1", "a", 1, 1, 0.0, state=PENDING), "adapt: no work")
    'taken back before it started: adapt: no work'
    """
    done = "drained" if job.state in (BOOTING, RUNNING) else "taken back before it started"
    return f"{done}: {why}" if why else done
