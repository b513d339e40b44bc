"""The record of a job's life, and the book of them; and what the scheduler counts of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dask_ferro as ff
from dask_ferro.policy.scaling.facts import BOOTING, PENDING, RUNNING
from dask_ferro.runtime.jobs.keywords import ClusterKeywords, read
from dask_ferro.runtime.records.counts import JobCounts
from dask_ferro.runtime.records.record import ENDED, STATES, JobBook, JobRecord
from dask_ferro.runtime.records.recorded_cluster import recording_of
from dask_ferro.runtime.records.recording import Recording
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob


def job(number: int = 0, **facts: Any) -> BatchJob:
    return BatchJob(f"a-{number}", "a", number, 1, 0.0, **facts)


def lived() -> tuple[JobBook, BatchJob]:
    """A job that runs on two nodes since 110, after it ran on one from 20 to 50."""
    book, one = JobBook("r"), job()
    book.asked([one], "adapt: work", 10.0)
    one.job_id, one.state, one.submitted_at = "7", PENDING, 11.0
    book.note(one, 12.0)
    one.state, one.started_at = RUNNING, 20.0
    book.note(one, 25.0, connected=24.0)
    one.state, one.restarts, one.started_at = PENDING, 1, None
    book.note(one, 50.0)
    one.state, one.started_at, one.nodes = BOOTING, 110.0, 2
    book.note(one, 111.0)
    return book, one


def test_a_life_is_told_from_the_reason_why_to_the_end() -> None:
    book, one = lived()
    one.ran = (110.0, 140.0)
    book.tally({"a-0": 3, "a-0.1": 4, "other": 9})
    book.over("a-0", "NODE_FAIL", 141.0, one.ran)
    (record,) = book.records
    assert record.workers == ("a-0", "a-0.1")
    assert (record.why, record.ending, record.state) == ("adapt: work", "NODE_FAIL", ENDED)
    assert (record.asked, record.submitted, record.started, record.ended) == (10.0, 11.0, 110.0, 140.0)
    assert record.tasks == 7
    assert record.node_seconds() == 30 + 2 * 30


def test_node_seconds_of_one_that_runs_are_those_until_it_was_seen() -> None:
    (record,) = lived()[0].records
    assert (record.node_seconds(), record.node_seconds(120.0)) == (30 + 2, 30 + 20)


def test_only_what_changed_is_told() -> None:
    book, one = lived()
    assert len(book.changed()) == 1
    book.note(one, 200.0)
    book.tally({"a-0.1": 1})
    assert book.changed() == []


def test_one_that_was_thought_over_lives_again() -> None:
    book, one = lived()
    book.over("a-0", "SLURM knows it no more", 120.0)
    book.note(one, 125.0)
    (record,) = book.records
    assert (record.state, record.ended, record.ending) == (BOOTING, None, "")


def test_of_jobs_that_are_over_the_newest_are_kept_and_of_others_all() -> None:
    book = JobBook("r", most=2)
    book.asked([job(n) for n in range(6)], "", 0.0)
    for n in (1, 0, 2, 4):
        book.over(f"a-{n}", "done", 1.0)
    assert [record.name for record in book.records] == ["a-2", "a-3", "a-4", "a-5"]


@given(
    st.builds(
        JobRecord, name=st.text(min_size=1), state=st.sampled_from(STATES), workers=st.tuples(st.text()), why=st.text(),
        started=st.none() | st.floats(0, 1e10), order=st.integers(0), tasks=st.integers(0),
    )
)  # fmt: skip
def test_a_record_comes_back_from_json(record: JobRecord) -> None:
    assert JobRecord.from_dict(json.loads(json.dumps({**record.as_dict(), "newer": 1}))) == record


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"name": 7},
        {"name": ""},
        {"name": "a", "state": "x"},
        {"name": "a", "asked": "1"},
        {"name": "a", "tasks": True},
    ],
)
def test_what_is_no_record_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no record of a job"):
        JobRecord.from_dict(told)


def test_a_job_tells_which_one_it_replaces() -> None:
    recording = Recording("r")
    recording.asked([job(0), job(1)], "k")
    lost = job(0, job_id="7")
    recording.over(lost, "CANCELLED", by_us=False, state="CANCELLED")
    recording.given_back(job(1, job_id="8", state=RUNNING))
    recording.because("adapt: 8 s of work")
    recording.asked([job(2), job(3)], "k")
    records = {record.name: record for record in recording.book.records}
    assert records["a-0"].ending == "cancelled, and not by this cluster"
    assert records["a-1"].ending == "drained"
    assert records["a-2"].why == "adapt: 8 s of work; replaces job 7: cancelled, and not by this cluster"
    assert records["a-3"].why == "adapt: 8 s of work"


def test_the_scheduler_counts_tasks_until_their_job_is_over() -> None:
    counts = JobCounts()
    counts._names = {"tcp://1": "a-0", "tcp://2": "b"}
    for start, finish, worker in [
        ("processing", "memory", "tcp://1"), ("processing", "memory", "tcp://1"), ("processing", "erred", "tcp://1"),
        ("waiting", "processing", "tcp://1"), ("processing", "memory", "tcp://2"), ("processing", "memory", "tcp://3"),
    ]:  # fmt: skip
        counts.transition("x", start, finish, worker=worker)
    record = JobRecord("a-0", workers=("a-0",), state=RUNNING)
    assert counts.told([record.as_dict()]) == {"a-0": 2, "b": 1}
    assert [told["tasks"] for told in counts.jobs()] == [2]
    ended = JobRecord("a-0", workers=("a-0",), state=ENDED, tasks=2)
    assert counts.told([ended.as_dict()]) == {"b": 1}
    assert [told["tasks"] for told in counts.jobs()] == [2]


def test_a_record_that_is_none_costs_nobody_else_his() -> None:
    """It failed the whole batch, which was sent again and again."""
    counts = JobCounts()
    good = JobRecord("a-0", workers=("a-0",), state=RUNNING).as_dict()
    counts.told([{"name": ""}, good | {"state": "newer"}, 7, good])  # type: ignore[list-item]
    assert [told["name"] for told in counts.jobs()] == ["a-0"]


def test_on_the_scheduler_nothing_grows_without_end() -> None:
    counts, most = JobCounts(), 1000
    counts._book = JobBook("", most=10)
    live = JobRecord("live", workers=("live",), state=RUNNING)
    workers = ["live", *(f"w-{n}" for n in range(most + 500))]
    for name in workers:
        counts._names[name] = name
        counts.transition("x", "processing", "memory", worker=name)
        counts.told([live.as_dict()])
        counts.remove_worker(None, name)  # type: ignore[arg-type]
    assert len(counts._done) <= most + 1
    assert counts._done["live"] == 1
    for n in range(100):
        counts.told([JobRecord(f"a-{n}", workers=(f"a-{n}",), state=ENDED).as_dict()])
    assert counts._book.changed() == []
    assert len(counts._book.records) == 11


def test_a_job_that_is_requeued_again_and_again_keeps_its_newest_workers_and_all_tasks() -> None:
    book, one = JobBook("r"), job(job_id="7", state=RUNNING)
    book.asked([one], "", 0.0)
    for restarts in range(300):
        one.restarts = restarts
        book.note(one, float(restarts))
        book.tally({f"a-0.{n}" if n else "a-0": 2 for n in range(max(0, restarts - 60), restarts + 1)})
    (record,) = book.records
    assert len(record.workers) == 51
    assert record.workers[-1] == "a-0.299"
    assert record.tasks == 600


def test_forgotten_jobs_leave_nothing_behind() -> None:
    book = JobBook("r", most=3)
    for n in range(20):
        one = job(n, job_id=str(n), state=PENDING)
        book.asked([one], "", 0.0)
        book.note(one, 1.0)
        book.over(one.name, "done", 2.0)
    assert len(book._records) == len(book._changed) == 3
    assert not book._noted


async def test_for_a_scheduler_that_takes_no_plugin_nothing_is_kept() -> None:
    recording = Recording("r")
    await recording.connect(None, "tcp://a:1")
    recording.asked([job(n) for n in range(5)], "k")
    assert not recording._told


def test_a_scheduler_that_does_not_answer_is_told_later() -> None:
    told: list[list[dict[str, Any]]] = []

    async def fails(records: list[dict[str, Any]]) -> dict[str, int]:
        raise OSError("closed")

    async def answers(records: list[dict[str, Any]]) -> dict[str, int]:
        told.append(records)
        return {"a-0": 5}

    async def play() -> None:
        recording = Recording("r")
        recording._tell = fails
        recording.asked([job()], "k")
        await recording.exchange()
        recording._tell = answers
        await recording.exchange(only_news=True)
        await recording.exchange(only_news=True)
        assert [[one["name"] for one in records] for records in told] == [["a-0"]]
        assert recording.book.records[0].tasks == 5

    asyncio.run(play())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": 5}, "keep needs journal"),
        ({"journal": "x", "keep": -1}, "got keep=-1, wanted a duration .* number of seconds, of at least 0"),
        ({"journal": "x", "keep": float("inf")}, "got keep=inf"),
        ({"journal": "x", "keep": True}, "got keep=True"),
        ({"journal": 3}, "got journal=3, wanted a path"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    def opened() -> None:
        own = read(ClusterKeywords, "ff.SLURMCluster", options)
        recording_of("r", own.journal, own.keep)

    with pytest.raises(ff.ConfigError, match=said):
        opened()
