"""Submissions whose outcome is not clear, with commands that are scripts of the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dask_ferro.slurm.job_lifecycle import BatchJob
from dask_ferro.slurm.site import SlurmSite, _comment
from dask_ferro.slurm.submit_queue import Submission
from tests.on_slurm.tools import refuses
from tests.waiting import until_async


@asynccontextmanager
async def submitting_all(
    count: int, ended: Callable[[], object] = str
) -> AsyncIterator[tuple[Submission, list[BatchJob]]]:
    """Submit jobs; `ended` is called when some have an id, or are refused for good."""
    site = SlurmSite("test", "ferro-1234")
    jobs = [BatchJob(f"default-{i}", "default", i, 1, 0.0) for i in range(count)]
    submission = Submission(
        site, lambda pool, first: "#!/bin/sh\n", lambda jobs: ended(), lambda jobs, words: ended()
    )
    submission.add(jobs)
    try:
        yield submission, jobs
    finally:
        await submission.close(5.0)
        site.close()


@asynccontextmanager
async def submitting(ended: Callable[[], object] = str) -> AsyncIterator[tuple[Submission, BatchJob]]:
    """Submit one job."""
    async with submitting_all(1, ended) as (submission, (job,)):
        yield submission, job


async def one_submission() -> tuple[str, bool, bool]:
    """Submit a job, until it has an id or was refused for now.

    Return the id, whether SLURM may have a job, and whether what was submitted is known at the end.
    """
    ended = asyncio.Event()
    async with submitting(ended.set) as (submission, job):
        await until_async(lambda: ended.is_set() or submission.trouble("default"), "the end of a submission")
        is_known = await submission.close(5.0)
        return job.job_id, submission.had_jobs, is_known


UNCLEAR = {
    "prints no id": "echo 'job submitted, thank you'",
    "is killed": "kill -9 $$",
    "its answer is lost": refuses("Socket timed out on send/recv operation"),
    "it hangs": "sleep 33",
}
# A job with the comment that the submission had: its last word is what it is known by.
TOLD = 'echo "JobId=77 JobState=PENDING Reason=Priority Comment=$(cat comment)"'
NOTED = 'for word in "$@"; do case "$word" in --comment=*) echo "${word#--comment=}" > comment;; esac; done'


@pytest.mark.parametrize("outcome", UNCLEAR.values(), ids=UNCLEAR)
def test_where_nobody_knows_whether_a_job_was_submitted_there_may_be_one(
    command, outcome, monkeypatch
) -> None:
    monkeypatch.setattr("dask_ferro.slurm.commands._LIMITS", {"sbatch": 1.0})
    calls = command("sbatch", outcome)
    command("scontrol", "exit 1")
    assert asyncio.run(one_submission()) == ("", True, False)
    assert len(calls.read_text().splitlines()) == 1


@pytest.mark.parametrize("outcome", UNCLEAR.values(), ids=UNCLEAR)
def test_a_job_that_is_in_the_queue_all_the_same_is_found_there(command, outcome, monkeypatch) -> None:
    monkeypatch.setattr("dask_ferro.slurm.commands._LIMITS", {"sbatch": 1.0})
    command("sbatch", f"{NOTED}\n{outcome}")
    command("scontrol", TOLD)
    assert asyncio.run(one_submission()) == ("77", True, True)


async def given_back(heard: Callable[[], None]) -> tuple[bool, str]:
    """Withdraw a job whose answer was lost; return whether that was over before SLURM is heard again, and its id."""
    async with submitting() as (submission, job):
        await until_async(lambda: submission.trouble("default"), "a submission that failed")
        going = asyncio.ensure_future(submission.withdraw([job]))
        await asyncio.sleep(0.5)
        early = going.done()
        heard()
        await asyncio.wait_for(going, 20.0)
        return early, job.job_id


def test_a_job_that_may_be_in_the_queue_is_not_given_back_before_that_is_known(command, monkeypatch) -> None:
    """Once it was forgotten, and counted for nothing while it ran."""
    monkeypatch.setattr("dask_ferro.slurm.submit_queue._QUERY_INTERVAL", 0.1)
    command("sbatch", f"{NOTED}\n{refuses('Socket timed out on send/recv operation')}")
    command("scontrol", "exit 1")
    assert asyncio.run(given_back(lambda: command("scontrol", TOLD))) == (False, "77")


def at_first(times: int, outcome: str) -> str:
    """Return what a command does some times before it submits job 12, in a shell's words."""
    return f'[ "$(wc -l < sbatch.calls)" -gt {times} ] || {{ {outcome}; }}\necho 12'


def portions(calls: Path) -> list[str]:
    return [line.partition("--array=")[2].split(" ")[0] for line in calls.read_text().splitlines()]


async def test_a_submission_that_fails_three_times_is_tried_again_and_says_why_meanwhile(
    command, monkeypatch
) -> None:
    monkeypatch.setattr("dask_ferro.slurm.submit_queue._PAUSE", 0.1)
    calls = command("sbatch", at_first(3, refuses("Resource temporarily unavailable")))
    command("scontrol", "echo No jobs in the system")
    async with submitting_all(2) as (submission, jobs):
        words = await until_async(lambda: submission.trouble("default"), "a submission that failed")
        assert words == "Resource temporarily unavailable"
        assert await submission.settled() == []
        assert [job.job_id for job in jobs] == ["12_0", "12_1"]
        assert submission.trouble("default") == ""
    assert len(calls.read_text().splitlines()) == 4


async def test_a_limit_of_jobs_is_met_in_smaller_portions(command, monkeypatch) -> None:
    monkeypatch.setattr("dask_ferro.slurm.submit_queue._PAUSE", 0.1)
    calls = command("sbatch", at_first(2, refuses("QOSMaxSubmitJobPerUserLimit")))
    async with submitting_all(8) as (submission, jobs):
        assert await submission.settled() == []
        assert all(job.job_id for job in jobs)
    assert portions(calls) == ["0-7", "0-3", "0-1", "0-3", "0-1"]


async def test_a_close_does_not_wait_for_submissions_that_are_tried_again(command, monkeypatch) -> None:
    calls = command("sbatch", refuses("words of another year"))
    monkeypatch.setattr("dask_ferro.slurm.submit_queue._PAUSE", 30.0)
    command("scontrol", "echo No jobs in the system")
    async with submitting() as (submission, _):
        await until_async(lambda: submission.trouble("default"), "a submission that failed")
        await until_async(lambda: not submission.in_flight, "the pause before the next try")
        assert await submission.close(5.0)
    assert len(calls.read_text().splitlines()) == 1


async def test_without_slurm_the_missing_command_is_named(command, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with submitting() as (submission, _):
        (words,) = await submission.settled()
    assert words.startswith("SLURM refuses jobs of pool 'default': sbatch is not on the PATH")


async def test_nothing_is_submitted_again_while_nobody_says_what_became_of_it(command, monkeypatch) -> None:
    monkeypatch.setattr("dask_ferro.slurm.submit_queue._QUERY_INTERVAL", 0.1)
    calls = command("sbatch", f"{NOTED}\n{refuses('Socket timed out on send/recv operation')}")
    asked = command("scontrol", "exit 1")
    async with submitting() as (submission, job):
        await until_async(
            lambda: len(asked.read_text().splitlines()) >= 3, "three questions without an answer"
        )
        assert submission.trouble("default")
        command("sbatch", "echo 12")
        command("scontrol", TOLD)
        assert await submission.settled() == []
        assert job.job_id == "77"
    assert len(calls.read_text().splitlines()) == 1


def test_a_clear_refusal_leaves_no_job(command) -> None:
    command("sbatch", refuses("invalid partition specified: x"))
    command("scontrol", TOLD)
    assert asyncio.run(one_submission()) == ("", False, True)


@pytest.mark.parametrize(
    ("directive", "comment"),
    [
        pytest.param("", "ferro-a.b", id="none of the user's"),
        pytest.param("#SBATCH --comment=mine", "mine ferro-a.b", id="after the user's"),
        pytest.param('#SBATCH --comment "for us"', "for us ferro-a.b", id="in quotes"),
        pytest.param(f"#SBATCH --comment={'x' * 200}", f"ferro-a.b {'x' * 200}", id="before one that fills the column"),
    ],
)  # fmt: skip
def test_a_submission_is_known_by_a_word_that_squeues_column_has_room_for(directive, comment) -> None:
    assert _comment(f"#!/bin/sh\n{directive}\ntrue\n", "ferro-a.b") == comment
    assert "ferro-a.b" in comment[:200]
