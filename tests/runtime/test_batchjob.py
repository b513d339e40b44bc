"""A batch job's life, look by look."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.runtime.batchjob import BatchJob, Patience
from dask_ferro.runtime.squeue import Row

PATIENCE = Patience(ending=2, stuck=30, boot=600, lost=60, drained=20)
BOTH = {"gpu-7-0", "gpu-7-1"}


def row(state: str, reason: str = "", restarts: int = 0) -> Row:
    started = state not in ("PENDING", "CANCELLED")
    return Row(
        "12", state, restarts, 900.0, 950.0 if started else None, 4550.0 if started else None, "c1", reason
    )


class Life:
    """A job of two processes, looked at again and again."""

    def __init__(self) -> None:
        self.job = BatchJob("gpu-7", "gpu", 7, 2, since=900.0, job_id="12")
        self.now = 1000.0

    def look(self, seen: Row | None, connected: Any = (), after: float = 1.0, draining: Any = ()) -> Any:
        """Return the state, or the ending."""
        self.now += after
        return self.job.follow(seen, connected, self.now, PATIENCE, draining) or self.job.state


def test_a_job_waits_boots_and_runs():
    life = Life()
    assert [
        life.look(row("PENDING", "Priority")),
        life.look(row("PENDING", "Resources")),
        life.look(row("CONFIGURING")),
        life.look(row("RUNNING")),
        life.look(row("RUNNING"), {"gpu-7-1"}),
        life.look(row("RUNNING"), BOTH | {"other"}),
        life.look(row("RUNNING"), BOTH),
    ] == ["pending", "pending", "booting", "booting", "booting", "running", "running"]
    assert life.job.seen() == ("gpu-7", "gpu", "12", "running", ("gpu-7-0", "gpu-7-1"), 1006.0, 7, 4550.0, "")


@pytest.mark.parametrize(
    ("looks", "why", "failed", "refused"),
    [
        pytest.param([(None, 1), (None, 2)], "SLURM knows it no more", False, False, id="gone"),
        pytest.param([(row("CANCELLED"), 1)], "CANCELLED", False, False, id="cancelled while it waited"),
        pytest.param([(row("RUNNING"), 1), (row("CANCELLED"), 1)], "CANCELLED", False, False, id="cancelled"),
        pytest.param([(row("NODE_FAIL"), 1)], "NODE_FAIL", False, False, id="its node failed: not its pool's fault"),
        pytest.param(
            [(row("FAILED", "NonZeroExitCode"), 1)], "FAILED (NonZeroExitCode)", True, False, id="its script failed"
        ),
        pytest.param([(row("COMPLETED"), 1)], "COMPLETED", True, False, id="its worker ended before it came"),
        pytest.param([(row("PENDING", "JobHeldUser"), 1)], "PENDING (JobHeldUser)", True, False, id="held"),
        pytest.param(
            [(row("RUNNING"), 1), (row("PENDING", "launch_failed_requeued_held", 1), 1)],
            "PENDING (launch_failed_requeued_held)", True, False, id="held, for it could not be started",
        ),
        pytest.param(
            [(row("PENDING", "PartitionConfig"), 1), (row("PENDING", "PartitionConfig"), 30)],
            "PENDING (PartitionConfig)", False, True, id="impossible for long",
        ),
        pytest.param([(row("COMPLETING"), 1), (row("COMPLETING"), 2)], "COMPLETING", False, False, id="ends slowly"),
        pytest.param(
            [(row("RUNNING"), 1), (row("RUNNING"), 600)], "none of its workers is connected for 600 s", True, False,
            id="no worker came",
        ),
    ],
)  # fmt: skip
def test_a_job_is_over(looks, why, failed, refused):
    life = Life()
    *before, last = [life.look(seen, after=after) for seen, after in looks]
    assert all(isinstance(state, str) for state in before)
    assert last == (why, failed, refused)


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([None, row("PENDING")], id="squeue that missed it once"),
        pytest.param(
            [row("COMPLETING"), row("PENDING", "BeginTime", 1)], id="a requeue looks like an end at first"
        ),
        pytest.param(
            [row("PENDING", "PartitionConfig"), row("PENDING", "Priority")], id="a request that can be met"
        ),
        pytest.param([row("PENDING", "Priority")] * 100, id="a long queue"),
    ],
)
def test_a_job_is_not_given_up_for(looks):
    life = Life()
    for seen in looks:
        state = life.look(seen)
    assert state == "pending"


def test_a_condition_that_passed_starts_anew():
    life = Life()
    for _ in range(5):
        assert life.look(row("PENDING", "PartitionConfig"), after=20) == "pending"
        assert life.look(row("PENDING", "Priority"), after=20) == "pending"


@pytest.mark.parametrize(
    "blinks",
    [
        pytest.param([None], id="missed by one squeue"),
        pytest.param([row("COMPLETING"), row("PENDING", "BeginTime", 1)], id="being requeued"),
    ],
)
def test_a_job_that_boots_for_long_is_not_given_up_for_an_instant_in_which_it_seems_to_end(blinks):
    life = Life()
    life.look(row("RUNNING"))
    assert life.look(row("RUNNING"), after=300) == "booting"
    assert {life.look(seen) for seen in blinks} <= {"booting", "pending"}


def test_squeue_that_misses_a_job_now_and_then_does_not_prolong_its_start():
    life = Life()
    life.look(row("RUNNING"))
    for seen in [None, row("RUNNING")] * 3:
        assert life.look(seen, after=99) == "booting"
    over = ("none of its workers is connected for 600 s", True, False)
    assert life.look(row("RUNNING"), after=6) == over


def test_a_condition_has_its_own_patience_and_not_what_another_left():
    life = Life()
    assert life.look(row("PENDING", "PartitionConfig")) == "pending"
    assert life.look(row("PENDING", "PartitionConfig"), after=29) == "pending"
    assert life.look(row("COMPLETING")) == "pending"
    assert life.look(row("COMPLETING")) == "pending"
    assert life.look(row("COMPLETING")) == ("COMPLETING", False, False)


def test_a_requeued_job_that_is_held_was_whole_before_and_is_not_its_pools_fault():
    life = Life()
    life.look(row("RUNNING"), BOTH)
    held = row("PENDING", "job requeued in held state", 1)
    assert life.look(held, BOTH) == ("PENDING (job requeued in held state)", False, False)


def test_a_requeued_job_has_other_workers():
    life = Life()
    life.look(row("RUNNING"), BOTH)
    assert life.look(row("PENDING", "BeginTime", 1), BOTH) == "pending"
    assert life.job.workers == ("gpu-7.1-0", "gpu-7.1-1")
    assert life.look(row("RUNNING", "", 1), BOTH) == "booting"  # those are the old ones
    assert life.look(row("RUNNING", "", 1), set(life.job.workers)) == "running"


def test_a_job_that_lost_one_of_two_workers_ends_early_unless_it_comes_back():
    life = Life()
    life.look(row("RUNNING"), BOTH)
    ends = []
    for connected, after in [
        ({"gpu-7-0"}, 1),
        ({"gpu-7-0"}, 59),
        ({"gpu-7-0"}, 1),
        ({"gpu-7-0"}, 9),
        (BOTH, 1),
    ]:
        assert life.look(row("RUNNING"), connected, after) == "running"
        ends.append((life.job.seen().ends_at, life.job.seen().reason))
    short = (1002.0 + 60 + 20, "1 of its 2 workers are connected")
    assert ends == [(4550.0, ""), (4550.0, ""), short, short, (4550.0, "")]


def test_a_job_that_lost_both_workers_is_given_a_minute():
    life = Life()
    life.look(row("RUNNING"), BOTH)
    assert life.look(row("RUNNING")) == "booting"
    assert life.look(row("RUNNING"), after=59) == "booting"
    assert life.look(row("RUNNING"), after=1) == ("none of its workers is connected for 60 s", False, False)


def test_half_a_job_counts_as_one_when_the_other_half_does_not_come():
    life = Life()
    assert life.look(row("RUNNING"), {"gpu-7-0"}) == "booting"
    assert life.look(row("RUNNING"), {"gpu-7-0"}, after=601) == "running"
    assert life.look(row("RUNNING"), {"gpu-7-0"}, after=900) == "running"
    assert life.job.seen().ends_at == 4550.0  # it never had more


def test_a_job_leaves_a_node_that_is_being_drained_and_stays_where_that_is_taken_back():
    life = Life()
    life.look(row("RUNNING"), BOTH)
    life.look(row("RUNNING"), BOTH, draining={"c1"})
    first = life.job.seen()
    life.look(row("RUNNING"), BOTH, draining={"c1"}, after=5)
    assert (first.ends_at, first.reason) == (1022.0, "its node is being drained")
    assert life.job.seen().ends_at == 1022.0
    life.look(row("RUNNING"), BOTH, draining={"c2"})
    assert life.job.seen().ends_at == 4550.0


STATES = ["PENDING", "RUNNING", "COMPLETING", "CANCELLED", "FAILED", "CONFIGURING", "SUSPENDED"]
SEEN = st.one_of(st.none(), st.builds(row, st.sampled_from(STATES), st.sampled_from(["", "JobHeldUser"])))


@given(st.lists(st.tuples(SEEN, st.sets(st.sampled_from(sorted(BOTH))), st.floats(0, 100))))
def test_any_life_has_a_state_and_its_beginning(looks):
    life = Life()
    for seen, connected, after in looks:
        state = life.look(seen, connected, after)
        if not isinstance(state, str):
            break
        assert state in ("submitting", "pending", "booting", "running")
        assert life.job.since <= life.now
