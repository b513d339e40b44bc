"""The decision on the jobs of a previous run that did not end in order: adopt them, or end them.

Started jobs are useless, since a worker ends when its scheduler is gone.  A pending job looks for its scheduler's
address when it starts, and keeps its place in the queue: it is adopted if its script is what this run would submit.
So is one that started while SLURM was asked, if one of its workers is connected here.  Job numbers are reused some
day: a row of SLURM belongs to a job only if the tag in its comment matches, or its number and time of submission.
This module only decides.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from dask_ferro.runtime.records.record import JobRecord
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from dask_ferro.runtime.slurm.parsing import ENDING, HELD, OVER, PENDING, QueueRow

ADOPT, END, GONE, ASK = "adopt", "end", "gone", "ask"
# The largest difference between the times of a submission by SLURM's clock and by ours.
_CLOCKS = 60.0
# Seconds until a job that cannot be identified counts as foreign.
_ASKED = 60.0


class Verdict(NamedTuple):
    """The decision on an inherited job: "adopt" it, "end" it, it is "gone", or "ask" again; with the reason."""

    what: str
    why: str


def verdict(
    record: JobRecord,
    row: QueueRow | None,
    answered: bool,
    tags: Collection[str],
    kind: str | None,
    since: float,
    *,
    is_connected: bool = False,
    is_new: bool = False,
) -> Verdict:
    """Decide on an inherited job.

    Parameters
    ----------
    row : QueueRow or None
        SLURM's row for its number.
    answered : bool
        For a missing row: whether SLURM knows no such job, or did not answer.
    tags : collection of str
        The tags of previous runs.
    kind : str or None
        The digest of its pool's present script; None: there is no such pool.
    since : float
        Seconds for which it has been asked about.
    is_connected, is_new : bool
        For a running job: whether one of its workers is connected to this run's scheduler, and whether it started
        after this scheduler's address was published.
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


def is_own(record: JobRecord, row: QueueRow, tags: Collection[str]) -> bool:
    """Return whether SLURM's row is of this job, and not of a later one with the same number."""
    if any(f"{tag}." in row.comment for tag in tags):
        return True
    if row.submitted is None or record.submitted is None:
        return False
    return abs(row.submitted - record.submitted) <= _CLOCKS


def taken_up(record: JobRecord) -> BatchJob:
    """Return a job to follow, made from its record."""
    return BatchJob(
        record.name, record.pool, record.order, record.processes, record.seen, job_id=record.job_id, state="pending",
        restarts=record.restarts, submitted_at=record.submitted, was_listed=True,
    )  # fmt: skip


def told(record: JobRecord, decision: Verdict) -> str:
    """Return the decision on a job as one line."""
    words = {ADOPT: "is adopted", END: "is ended", GONE: "is over"}[decision.what]
    return f"job {record.job_id} ({record.name}) of the run before {words}: {decision.why}"
