"""Submissions whose outcome is not clear, with commands that are scripts of the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from dask_ferro.slurm.job_lifecycle import BatchJob
from dask_ferro.slurm.site import SlurmSite, _comment
from dask_ferro.slurm.submit_queue import Submission
from tests.on_slurm.tools import refuses
from tests.waiting import until_async


@asynccontextmanager
async def submitting(ended: Callable[[], object] = str) -> AsyncIterator[tuple[Submission, BatchJob]]:
    """Submit a job; `ended` is called when it has an id, or is refused for good."""
    site, job = SlurmSite("test", "ferro-1234"), BatchJob("default-0", "default", 0, 1, 0.0)
    submission = Submission(
        site, lambda pool, first: "#!/bin/sh\n", lambda jobs: ended(), lambda jobs, words: ended()
    )
    submission.add([job])
    try:
        yield submission, job
    finally:
        await submission.close(5.0)
        site.close()


async def one_submission() -> tuple[str, bool, bool]:
    """Submit a job, until it has an id or was refused for now.

    Return the id, whether SLURM may have a job, and whether what was submitted is known at the end.
    """
    ended = asyncio.Event()
    async with submitting(ended.set) as (submission, job):
        await until_async(lambda: ended.is_set() or submission.trouble("default"), "the end of a submission")
        is_known = await submission.close(5.0)
        return job.job_id, submission.had_jobs, is_known


UNCLEAR = {"prints no id": "echo 'job submitted, thank you'", "is killed": "kill -9 $$"}
# A job with the comment that the submission had: its last word is what it is known by.
TOLD = 'echo "JobId=77 JobState=PENDING Reason=Priority Comment=$(cat comment)"'
NOTED = 'for word in "$@"; do case "$word" in --comment=*) echo "${word#--comment=}" > comment;; esac; done'


@pytest.mark.parametrize("outcome", UNCLEAR.values(), ids=UNCLEAR)
def test_where_nobody_knows_whether_a_job_was_submitted_there_may_be_one(command, outcome) -> None:
    command("sbatch", outcome)
    command("scontrol", "exit 1")
    assert asyncio.run(one_submission()) == ("", True, False)


@pytest.mark.parametrize("outcome", UNCLEAR.values(), ids=UNCLEAR)
def test_a_job_that_is_in_the_queue_all_the_same_is_found_there(command, outcome) -> None:
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
    monkeypatch.setattr("dask_ferro.slurm.submit_queue._ASKED", 0.1)
    command("sbatch", f"{NOTED}\n{refuses('Socket timed out on send/recv operation')}")
    command("scontrol", "exit 1")
    assert asyncio.run(given_back(lambda: command("scontrol", TOLD))) == (False, "77")


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
