"""Jobs in the queue that no cluster follows."""

from __future__ import annotations

import pytest

from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from dask_ferro.runtime.slurm.parsing import QueueRow
from dask_ferro.runtime.slurm.strays import Strays


def rows(**states: str) -> dict[str, QueueRow]:
    return {
        job_id: QueueRow(job_id, state)
        for job_id, state in ((i.removeprefix("j"), s) for i, s in states.items())
    }


def job(job_id: str) -> BatchJob:
    return BatchJob(f"default-{job_id}", "default", int(job_id), 1, since=0.0, job_id=job_id)


@pytest.mark.parametrize(
    ("looks", "ends"),
    [
        pytest.param([(0.0, rows(j7="RUNNING"))], [], id="seen once"),
        pytest.param([(0.0, rows(j7="RUNNING")), (2.0, rows(j7="RUNNING"))], [], id="seen for two seconds"),
        pytest.param([(0.0, rows(j7="RUNNING")), (4.0, rows(j7="RUNNING"))], ["7"], id="seen for four"),
        pytest.param([(0.0, rows(j7="PENDING")), (4.0, rows(j7="PENDING"))], ["7"], id="one that waits"),
        pytest.param([(0.0, rows(j7="RUNNING")), (2.0, rows()), (4.0, rows(j7="RUNNING"))], [], id="gone in between"),
        pytest.param([(0.0, rows(j7="RUNNING")), (4.0, rows(j7="COMPLETING"))], [], id="about to end"),
        pytest.param([(0.0, rows(j1="RUNNING")), (4.0, rows(j1="RUNNING"))], [], id="one that is followed"),
    ],
)  # fmt: skip
def test_a_stray_ends(looks, ends) -> None:
    strays = Strays()
    for now, seen in looks:
        found = strays.look(seen, {"1"}, now)
    assert (found.back, list(found.ends)) == ([], ends)


def test_a_job_that_was_thought_gone_is_followed_again() -> None:
    strays, lost = Strays(), job("7")
    lost.warned_at["missing"] = 1.0
    strays.forget(lost, is_lost=True)
    assert strays.look(rows(j7="RUNNING"), (), 100.0) == ([lost], {})
    assert lost.warned_at == {}
    assert strays.look(rows(j7="RUNNING"), {"7"}, 200.0) == ([], {})


def test_a_job_that_was_thought_gone_is_remembered_however_many_end() -> None:
    strays, lost = Strays(), job("7")
    strays.forget(lost, is_lost=True)
    for number in range(3000):
        strays.forget(job(f"1{number}"))
    assert strays.look(rows(j7="RUNNING"), (), 100.0) == ([lost], {})


def test_a_job_that_was_given_back_ends_as_one_whose_workers_are_known() -> None:
    strays, given = Strays(), job("7")
    strays.forget(given)
    assert strays.look(rows(j7="RUNNING"), (), 100.0) == ([], {})
    assert strays.look(rows(j7="RUNNING"), (), 105.0) == ([], {"7": given})


def test_jobs_that_were_never_submitted_are_not_remembered() -> None:
    strays, never = Strays(), BatchJob("default-0", "default", 0, 1, since=0.0)
    strays.forget(never)
    assert strays.look(rows(), (), 0.0) == ([], {})
