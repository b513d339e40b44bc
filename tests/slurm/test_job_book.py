"""The book of a cluster's jobs: why each was requested, and why it is over."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dask_ferro.slurm.job_book import JobBook
from dask_ferro.slurm.job_lifecycle import BatchJob, JobState, Patience
from dask_ferro.slurm.parsing import QueueRow

STATES = [state for state in JobState if state not in (JobState.LEAVING, JobState.ENDED)]


def job(number: int = 0, **facts: Any) -> BatchJob:
    return BatchJob(f"a-{number}", "a", number, 1, 0.0, **facts)


def booked(*jobs: BatchJob, most: int = 100) -> JobBook:
    book = JobBook(most)
    book.request(jobs)
    return book


def lived() -> tuple[JobBook, BatchJob]:
    """A job that runs on two nodes since 110, after it ran on one from 20 to 50."""
    one, patience = job(job_id="7"), Patience()
    book = booked(one)
    for now, row, worker in [
        (12.0, QueueRow("7", "PENDING", submitted=11.0), ""),
        (25.0, QueueRow("7", "RUNNING", submitted=11.0, starts=20.0, node="c1"), "a-0"),
        (50.0, QueueRow("7", "PENDING", restarts=1, submitted=11.0), ""),
        (
            111.0,
            QueueRow("7", "RUNNING", restarts=1, submitted=11.0, starts=110.0, node="c[1-2]", nodes=2),
            "",
        ),
    ]:
        assert one.follow(row, {worker}, now, patience) is None
    return book, one


def test_a_life_is_told_from_the_reason_why_to_the_end() -> None:
    book, one = lived()
    last = QueueRow("7", "NODE_FAIL", restarts=1, submitted=11.0, starts=110.0, ends=140.0)
    ending = one.follow(last, (), 141.0, Patience())
    assert ending is not None
    book.end(one, ending.why)
    (row,) = book.rows()
    assert row["workers"] == ["a-0", "a-0.1"]
    assert (row["ending"], row["state"]) == ("NODE_FAIL", "ended")
    assert (row["submitted_at"], row["started_at"], row["ended_at"]) == (11.0, 110.0, 140.0)
    assert row["node_seconds"] == 30 + 2 * 30
    assert json.loads(json.dumps(row)) == row


def test_node_seconds_of_one_that_runs_are_those_until_now() -> None:
    assert lived()[1].node_seconds(120.0) == 30 + 2 * 10


@pytest.mark.parametrize("state", STATES)
def test_a_released_job_is_not_followed_and_its_end_says_whether_it_had_started(state: JobState) -> None:
    one = job(state=state)
    book = booked(one)
    book.because("no work", ["a-0", "never-was"])
    assert book.release(["a-0", "never-was"]) == [one]
    assert (book.followed, book.leaving, one.state) == ([], [one], "leaving")
    assert book.release(["a-0"]) == []
    book.end(one)
    assert (list(book.jobs), list(book.over)) == ([], ["a-0"])
    done = "drained" if state in ("booting", "running") else "taken back before it started"
    assert one.ending == f"{done}: no work"


def test_a_job_ends_once() -> None:
    one = job()
    book = booked(one)
    book.end(one, "first")
    book.end(one, "second")
    assert one.ending == "first"


def test_of_jobs_that_are_over_the_newest_are_kept_and_of_others_all() -> None:
    jobs = [job(n) for n in range(6)]
    book = booked(*jobs, most=2)
    for n in (1, 0, 2, 4):
        book.end(jobs[n], "done")
    assert [one.name for one in book.copies()] == ["a-2", "a-3", "a-4", "a-5"]
