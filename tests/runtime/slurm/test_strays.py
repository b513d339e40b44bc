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


def over(job_id: str, *, is_lost: bool = False) -> BatchJob:
    return BatchJob(f"default-{job_id}", "default", int(job_id), 1, 0.0, job_id=job_id, is_lost=is_lost)


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
        found = strays.look(seen, {"1"}, (), now)
    assert (found.back, list(found.ends)) == ([], ends)


def test_a_job_that_was_thought_gone_is_followed_again() -> None:
    strays, lost = Strays(), over("7", is_lost=True)
    assert strays.look(rows(j7="RUNNING"), (), [over("6"), lost], 100.0) == ([lost], {})
    assert strays.look(rows(j7="RUNNING"), {"7"}, [over("6")], 200.0) == ([], {})


def test_a_job_that_was_given_back_ends_as_one_whose_workers_are_known() -> None:
    strays, given = Strays(), over("7")
    assert strays.look(rows(j7="RUNNING"), (), [given], 100.0) == ([], {})
    assert strays.look(rows(j7="RUNNING"), (), [given], 105.0) == ([], {"7": given})


def test_jobs_that_were_never_submitted_are_no_strays() -> None:
    assert Strays().look(rows(), (), [BatchJob("default-0", "default", 0, 1, since=0.0)], 0.0) == ([], {})
