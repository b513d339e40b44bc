"""Jobs of a run that did not end in order, as the next run on the same journal finds them: adopted, or ended.

A worker ends when its scheduler is gone, so that what had started is of no use.  A job that still waits looks for its
scheduler's address when it starts, and keeps its place in the queue: it is adopted if its script is what this run would
submit.  So is one that started while SLURM was asked, if a worker of it is connected here.  A job's number is used
again some day: a row of SLURM's is believed to be of a job only by the tag in its comment, or its number and the time
of its submission.  It decides, and does nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from dask_ferro.runtime.records.record import JobRecord
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from dask_ferro.runtime.slurm.parsing import ENDING, HELD, OVER, PENDING, Row

ADOPT, END, GONE, ASK = "adopt", "end", "gone", "ask"
# Between a submission's time by SLURM's clock and by ours.
_CLOCKS = 60.0
# Until a job that nobody knows for sure is none of ours.
_ASKED = 60.0


class Verdict(NamedTuple):
    """What is to be done with a job of before: "adopt" it, "end" it, it is "gone", or "ask" again; and why."""

    what: str
    why: str


def verdict(
    record: JobRecord,
    row: Row | None,
    answered: bool,
    tags: Collection[str],
    kind: str | None,
    since: float,
    *,
    is_connected: bool = False,
    is_new: bool = False,
) -> Verdict:
    """Return what is to be done with a job.

    Parameters
    ----------
    row : Row or None
        What SLURM says of its number.
    answered : bool
        Of no row: whether SLURM knows no such job, or did not answer.
    tags : collection of str
        Of the runs before.
    kind : str or None
        The digest of the script that its pool has now; None: there is no such pool.
    since : float
        Seconds for which it was asked for.
    is_connected, is_new : bool
        Of a job that runs: whether a worker of it is connected to this run's scheduler, and whether it started when
        that one's address stood where it looks for it.
    """
    if row is None:
        return Verdict(GONE, "SLURM knows it no more") if answered else Verdict(ASK, "SLURM does not answer")
    if not is_own(record, row, tags):
        if row.submitted is None and row.phase not in (ENDING, OVER) and since < _ASKED:
            return Verdict(ASK, "SLURM does not say when it was submitted")
        if row.submitted is None and row.phase in (ENDING, OVER):
            return Verdict(GONE, row.told)
        return Verdict(GONE, "its number is another job's now")
    if row.phase in (ENDING, OVER):
        return Verdict(GONE, row.told)
    if row.phase == HELD:
        return Verdict(END, "it is held")
    if row.phase != PENDING and not is_connected:
        if is_new and since < _ASKED:
            return Verdict(ASK, "its workers may be about to come")
        return Verdict(END, "it has started, and the scheduler of its workers is gone")
    if kind is None:
        return Verdict(END, f"there is no pool {record.pool!r} any more")
    if kind != record.kind:
        return Verdict(END, f"jobs of pool {record.pool!r} are described otherwise now")
    if row.phase != PENDING:
        return Verdict(ADOPT, "it has started, and found this scheduler")
    return Verdict(ADOPT, "it waits, and will look for this scheduler")


def is_own(record: JobRecord, row: Row, tags: Collection[str]) -> bool:
    """Whether what SLURM says is of this job, and of no later one of the same number."""
    if any(f"{tag}." in row.comment for tag in tags):
        return True
    if row.submitted is None or record.submitted is None:
        return False
    return abs(row.submitted - record.submitted) <= _CLOCKS


def taken_up(record: JobRecord) -> BatchJob:
    """Return a job to follow, of its record."""
    return BatchJob(
        record.name, record.pool, record.order, record.processes, record.seen, job_id=record.job_id, state="pending",
        restarts=record.restarts, submitted_at=record.submitted, was_listed=True,
    )  # fmt: skip


def told(record: JobRecord, decision: Verdict) -> str:
    """Return what is done with a job, on one line."""
    words = {ADOPT: "is adopted", END: "is ended", GONE: "is over"}[decision.what]
    return f"job {record.job_id} ({record.name}) of the run before {words}: {decision.why}"
