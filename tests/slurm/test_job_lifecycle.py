"""A batch job's life, look by look."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.slurm.job_lifecycle import BatchJob, JobEnd, Patience
from dask_ferro.slurm.parsing import QueueRow

PATIENCE = Patience(ending=2, stuck=30, boot=600, lost=60, drained=20, missing=30, unseen=300)
BOTH = {"gpu-7-0", "gpu-7-1"}


def row(state: str, reason: str = "", restarts: int = 0) -> QueueRow:
    started = state not in ("PENDING", "CANCELLED")
    return QueueRow(
        "12", state, restarts, 900.0, 950.0 if started else None, 4550.0 if started else None, "c1", reason
    )


class Life:
    """A job of two processes, looked at again and again."""

    def __init__(self) -> None:
        self.job = BatchJob("gpu-7", "gpu", 7, 2, since=900.0, job_id="12")
        self.now = 1000.0

    def look(
        self,
        seen: QueueRow | None,
        connected: Any = (),
        after: float = 1.0,
        draining: Any = (),
        is_sure: bool = True,
    ) -> Any:
        """Return the state, or the ending."""
        self.now += after
        ending = self.job.follow(seen, connected, self.now, PATIENCE, draining, is_sure=is_sure)
        return ending or self.job.state


@pytest.fixture
def life() -> Life:
    """A job that was asked for."""
    return Life()


@pytest.fixture
def running(life: Life) -> Life:
    """The same, once both of its workers are connected."""
    life.look(row("RUNNING"), BOTH)
    return life


def test_a_job_waits_boots_and_runs(life):
    assert [
        life.look(row("PENDING", "Priority")),
        life.look(row("PENDING", "Resources")),
        life.look(row("CONFIGURING")),
        life.look(row("RUNNING")),
        life.look(row("RUNNING"), {"gpu-7-1"}),
        life.look(row("RUNNING"), BOTH | {"other"}),
        life.look(row("RUNNING"), BOTH),
    ] == ["pending", "pending", "booting", "booting", "booting", "running", "running"]
    assert life.job.site_job() == ("gpu-7", "gpu", "running", ("gpu-7-0", "gpu-7-1"), 1006.0, 7, 4550.0, "")


@pytest.mark.parametrize(
    ("looks", "why", "failed", "refused"),
    [
        pytest.param([(row("PENDING"), 1), (None, 1), (None, 30)], "SLURM knows it no more", False, False, id="gone"),
        pytest.param([(None, 1), (None, 299), (None, 1)], "SLURM does not know it", False, False, id="never there"),
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
            [(row("COMPLETING", "NonZeroExitCode"), 1), (row("COMPLETING", "NonZeroExitCode"), 2)],
            "COMPLETING (NonZeroExitCode)", True, False, id="its script failed, and its epilog takes long",
        ),
        pytest.param(
            [(row("RUNNING"), 1), (row("RUNNING"), 600)], "none of its workers is connected for 600 s", True, False,
            id="no worker came",
        ),
    ],
)  # fmt: skip
def test_a_job_is_over(life, looks, why, failed, refused):
    *before, last = [life.look(seen, after=after) for seen, after in looks]
    assert all(isinstance(state, str) for state in before)
    row = looks[-1][0]
    of_its_row = row is not None and row.state != "RUNNING"
    state = row.state if of_its_row else ""
    assert last == JobEnd(why, state, failed, refused, is_held=of_its_row and row.phase == "held")


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([None, row("PENDING")], id="squeue that missed it once"),
        pytest.param([*[None] * 250, row("PENDING")], id="a queue that lists it late"),
        pytest.param([row("PENDING"), *[None] * 29, row("PENDING")], id="a queue that is empty for half a minute"),
        pytest.param([row("COMPLETING"), row("PENDING", "BeginTime", 1)], id="a requeue looks like an end at first"),
        pytest.param([row("PENDING", "PartitionConfig"), row("PENDING", "Priority")], id="a request that can be met"),
        pytest.param([row("PENDING", "Priority")] * 100, id="a long queue"),
    ],
)  # fmt: skip
def test_a_job_is_not_given_up_for(life, looks):
    for seen in looks:
        state = life.look(seen)
    assert state == "pending"


def test_where_one_command_alone_says_that_it_is_gone_a_job_has_as_long_as_one_never_seen(life):
    life.look(row("PENDING"))
    life.look(None, is_sure=False)
    assert life.look(None, after=299, is_sure=False) == "pending"
    assert life.look(None, after=1, is_sure=False) == JobEnd("SLURM knows it no more")


CONTRADICTIONS = {
    "no row, from two commands": None,
    "a row from before it started": row("PENDING", "Priority"),
    "a row from when it was held": row("PENDING", "JobHeldUser"),
    "a row from when no node could run it": row("PENDING", "PartitionConfig"),
}


@pytest.mark.parametrize("seen", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_connected_worker_proves_that_its_job_lives(running, seen):
    for _ in range(100):
        assert running.look(seen, {"gpu-7-1"}, after=60) == "running"
    assert running.job.restarts == 0


def test_a_job_whose_workers_are_there_runs_before_the_queue_lists_it(life):
    assert [life.look(None), life.look(None, {"gpu-7-0"}), life.look(None, BOTH)] == [
        "submitting",
        "booting",
        "running",
    ]
    assert life.look(row("PENDING"), BOTH, after=25) == "running"


def test_a_row_from_before_a_requeue_counts_for_nothing(running):
    running.look(row("RUNNING", "", 1), {"gpu-7.1-0", "gpu-7.1-1"})
    for old in (row("RUNNING"), row("COMPLETING"), row("CANCELLED"), row("PENDING", "JobHeldUser")):
        assert running.look(old, {"gpu-7.1-0"}, after=60) == "running"
    assert running.job.workers == ("gpu-7.1-0", "gpu-7.1-1")


def test_a_job_that_ends_while_its_workers_are_there_is_replaced_ahead_and_over_without_them(running):
    assert running.look(row("COMPLETING"), BOTH) == "running"
    assert running.job.site_job().ends_at == 1002.0 + 2
    assert running.look(row("COMPLETING"), BOTH, after=20) == "running"
    assert running.look(row("COMPLETING")) == JobEnd("COMPLETING", "COMPLETING")


def test_a_condition_that_passed_starts_anew(life):
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
def test_a_job_that_boots_for_long_is_not_given_up_for_an_instant_in_which_it_seems_to_end(life, blinks):
    life.look(row("RUNNING"))
    assert life.look(row("RUNNING"), after=300) == "booting"
    assert {life.look(seen) for seen in blinks} <= {"booting", "pending"}


def test_a_condition_has_its_own_patience_and_not_what_another_left(life):
    assert life.look(row("PENDING", "PartitionConfig")) == "pending"
    assert life.look(row("PENDING", "PartitionConfig"), after=29) == "pending"
    assert life.look(row("COMPLETING")) == "pending"
    assert life.look(row("COMPLETING")) == "pending"
    assert life.look(row("COMPLETING")) == JobEnd("COMPLETING", "COMPLETING")


def test_a_requeued_job_that_is_held_was_whole_before_and_is_not_its_pools_fault(running):
    held = row("PENDING", "job requeued in held state", 1)
    assert running.look(held, BOTH) == JobEnd("PENDING (job requeued in held state)", "PENDING", is_held=True)


def test_a_requeued_job_has_other_workers(running):
    assert running.look(row("PENDING", "BeginTime", 1), BOTH) == "pending"
    assert running.job.workers == ("gpu-7.1-0", "gpu-7.1-1")
    assert running.look(row("RUNNING", "", 1), BOTH) == "booting"  # those are the old ones
    assert running.look(row("RUNNING", "", 1), set(running.job.workers)) == "running"


def test_a_job_that_lost_both_workers_is_given_a_minute(running):
    assert running.look(row("RUNNING")) == "booting"
    assert running.look(row("RUNNING"), after=59) == "booting"
    assert running.look(row("RUNNING"), after=1) == JobEnd("none of its workers is connected for 60 s")


def test_half_a_job_counts_as_one_when_the_other_half_does_not_come(life):
    assert life.look(row("RUNNING"), {"gpu-7-0"}) == "booting"
    assert life.look(row("RUNNING"), {"gpu-7-0"}, after=601) == "running"
    assert life.look(row("RUNNING"), {"gpu-7-0"}, after=900) == "running"


def test_a_job_leaves_a_node_that_is_being_drained_and_stays_where_that_is_taken_back(running):
    running.look(row("RUNNING"), BOTH, draining={"c1"})
    first = running.job.site_job()
    running.look(row("RUNNING"), BOTH, draining={"c1"}, after=5)
    assert (first.ends_at, first.reason) == (1022.0, "its node is being drained")
    assert running.job.site_job().ends_at == 1022.0
    running.look(row("RUNNING"), BOTH, draining={"c2"})
    assert running.job.site_job().ends_at == 4550.0


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


# What is true of a job, second by second, and what SLURM's commands may say of it.
TRUTHS = [
    row("PENDING", "PartitionConfig"), row("PENDING", "JobHeldUser"), row("PENDING", "Priority"), row("CONFIGURING"),
    row("RUNNING"), row("COMPLETING"), row("PENDING", "BeginTime", 1),
    row("PENDING", "JobHeldUser", 1), row("RUNNING", "", 1), row("COMPLETING", "", 1),
    row("CANCELLED", "", 1),
]  # fmt: skip
# Which of them its workers may be connected in: they are let in while it runs.
RUNS = {index for index, truth in enumerate(TRUTHS) if truth.state == "RUNNING"}
ANSWER = st.sampled_from(["true", "empty", "old", "unheard"])


@given(
    st.lists(
        st.tuples(st.booleans(), ANSWER, st.integers(0, 9), st.booleans(), st.floats(0, 40)), max_size=60
    )
)
def test_whatever_squeue_says_a_job_whose_worker_is_connected_is_not_over(steps):
    """Answers are true, empty, from any time before, or none; the job goes on in the meantime."""
    life, at = Life(), 2
    for goes_on, answer, age, is_sure, after in steps:
        at = min(at + goes_on, len(TRUTHS) - 1)
        names = (
            {f"gpu-7.{TRUTHS[at].restarts}-0" if TRUTHS[at].restarts else "gpu-7-0"} if at in RUNS else set()
        )
        seen = {"true": TRUTHS[at], "empty": None, "old": TRUTHS[max(at - age, 0)], "unheard": None}[answer]
        if answer == "unheard":
            continue
        state = life.look(seen, names, after, is_sure=is_sure)
        connected = names & set(life.job.workers)
        if connected:
            assert state in ("booting", "running")
        elif not isinstance(state, str):
            return
