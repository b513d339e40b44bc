"""What SLURM prints, oddity by oddity."""

from __future__ import annotations

from datetime import datetime
from itertools import zip_longest
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.slurm import parsing
from dask_ferro.slurm.parsing import (
    ENDING,
    EXECUTING,
    HOLD,
    LIMIT,
    PENDING,
    PERMANENT,
    TERMINAL,
    TRANSIENT,
    UNKNOWN,
    QueueRow,
)

WIDTHS = [int(column.partition(":")[2]) for column in parsing.FORMAT.split(",")]


def printed(job_id: str, *cells: str, number: str = "", nodes: str = "", status: str = "") -> str:
    """A line of squeue's; last cells may be missing."""
    pairs = zip_longest((job_id, number, *cells[:5], nodes, status, *cells[5:]), WIDTHS, fillvalue="")
    return "".join(cell[:width].ljust(width) for cell, width in pairs)


@pytest.mark.parametrize(
    ("cells", "row"),
    [
        pytest.param(("12", "RUNNING", "0", "1795293373", "1795293374", "1795296974", "c1", "None"),
            QueueRow("12", "RUNNING", 0, 1795293373.0, 1795293374.0, 1795296974.0, "c1", ""), id="a job that runs"),
        pytest.param(("12_3", "PENDING", "0", "1795293373", "N/A", "N/A", "", "Priority"),
            QueueRow("12_3", "PENDING", 0, 1795293373.0, None, None, "", "Priority"),
            id="an element of an array that waits"),
        pytest.param(("12", "PENDING", "2", "1795293373", "1795293474", "N/A", "", "BeginTime"),
            QueueRow("12", "PENDING", 2, 1795293373.0, 1795293474.0, None, "", "BeginTime"),
            id="a job that was requeued twice"),
        pytest.param(("12", "RUNNING", "0", "Unknown", "INVALID", "NONE", "c1", ""),
            QueueRow("12", "RUNNING", 0, None, None, None, "c1", ""), id="times that are none"),
        pytest.param(("12", "RUNNING", "", "0", "0", "0", "c1", "None"),
            QueueRow("12", "RUNNING", 0, None, None, None, "c1", ""), id="times and counts that were never set"),
        pytest.param(("12", "PENDING", "0", "N/A", "N/A", "N/A", "",
            "Nodes required for job are DOWN, DRAINED or reserved"), QueueRow("12", "PENDING",
            reason="Nodes required for job are DOWN, DRAINED or reserved"), id="a reason of several words"),
        pytest.param(("12", "PENDING", "0", "N/A", "N/A", "N/A", "", "Priority", "quick please ferro-12ab"),
            QueueRow("12", "PENDING", reason="Priority", comment="quick please ferro-12ab"), id="a comment"),
        pytest.param(("12", "PENDING", "0", "N/A", "N/A", "N/A", "", "Priority", "(null)"),
            QueueRow("12", "PENDING", reason="Priority"), id="no comment"),
    ],
)  # fmt: skip
def test_a_line_is_a_row(cells, row):
    assert parsing.rows(printed(*cells)) == {row.job_id: row}


@pytest.mark.parametrize("status", ["3:0", "768"])
def test_a_line_has_the_number_of_an_element_its_nodes_and_its_exit(status):
    cells = ("12_3", "FAILED", "0", "1", "2", "3", "c[1-2]", "NonZeroExitCode")
    row = parsing.rows(printed(*cells, number="15", nodes="2", status=status))["12_3"]
    assert (row.number, row.nodes, row.node) == ("15", 2, "c[1-2]")
    assert row.description == "FAILED (NonZeroExitCode), exit code 3"


def test_lines_that_are_no_job_are_left_out():
    text = "\n".join(
        [
            "",
            "slurm_load_jobs error: Unable to contact slurm controller",
            printed("7", "RUNNING", *[""] * 6),
            "JOBID",
        ]
    )
    assert list(parsing.rows(text)) == ["7"]


@given(st.text())
def test_whatever_is_printed_is_read(text):
    for job_id, row in parsing.rows(text).items():
        assert row.job_id == job_id
        assert row.phase in (PENDING, EXECUTING, HOLD, ENDING, TERMINAL)


@pytest.mark.parametrize(
    ("state", "reason", "phase"),
    [
        ("PENDING", "Resources", PENDING),
        ("PENDING", "PartitionConfig", PENDING),
        ("PENDING", "JobHeldUser", HOLD),
        ("PENDING", "JobHeldAdmin", HOLD),
        ("PENDING", "job requeued in held state", HOLD),
        ("PENDING", "launch_failed_requeued_held", HOLD),
        ("PENDING", "JobHoldMaxRequeue", HOLD),
        ("PENDING", "user_env_retrieval_failed_requeued_held", HOLD),
        ("PENDING", "QOSUsageThreshold", PENDING),
        ("PENDING", "ReqNodeNotAvail, UnavailableNodes:threshold[1-2]", PENDING),
        ("SPECIAL_EXIT", "", HOLD),
        ("CONFIGURING", "", EXECUTING),
        ("SUSPENDED", "", EXECUTING),
        ("A_STATE_OF_TOMORROW", "", EXECUTING),
        ("COMPLETING", "", ENDING),
        ("NODE_FAIL", "", TERMINAL),
        ("TIMEOUT", "TimeLimit", TERMINAL),
        ("CANCELLED", "", TERMINAL),
    ],
)
def test_states_are_phases(state, reason, phase):
    assert QueueRow("1", state, reason=reason).phase == phase


@pytest.mark.parametrize(
    ("reason", "is_stuck"),
    [
        ("PartitionConfig", True),
        ("PartitionTimeLimit", True),
        ("BadConstraints", True),
        ("QOSMaxCpuPerJobLimit", True),
        ("AssocMaxWallDurationPerJobLimit", True),
        ("DependencyNeverSatisfied", True),
        ("PartitionDown", False),
        ("PartitionInactive", False),
        ("Resources", False),
        ("Priority", False),
        ("QOSMaxJobsPerUserLimit", False),
        ("AssocGrpCpuLimit", False),
        ("ReqNodeNotAvail, May be reserved for other job", False),
    ],
)
def test_a_job_is_stuck_where_time_alone_does_not_help(reason, is_stuck):
    assert QueueRow("1", "PENDING", reason=reason).is_stuck is is_stuck
    assert not QueueRow("1", "RUNNING", reason=reason).is_stuck


def test_partitions_grant_seconds_to_preempted_jobs():
    text = "\n".join(
        [
            "PartitionName=cpu AllowGroups=ALL Default=YES GraceTime=0 Hidden=NO",
            "PartitionName=low AllowGroups=ALL Default=NO GraceTime=120 TRES=cpu=24,mem=24000M",
            "slurm_load_partitions error: what is no partition",
        ]
    )
    assert parsing.preemption(text)[1] == {"low": 120.0}
    assert parsing.preemption(text.replace("GraceTime=0", "GraceTime=7"))[1] == {
        "cpu": 7.0,
        "": 7.0,
        "low": 120.0,
    }


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        pytest.param("PriorityTier=1 PreemptMode=CANCEL GraceTime=0", {"low"}, id="cancelled"),
        pytest.param("PriorityTier=1 PreemptMode=REQUEUE GraceTime=5", {"low"}, id="requeued after some seconds"),
        pytest.param("PriorityTier=1 PreemptMode=REQUEUE", {"low"}, id="nothing is said of a grace"),
        pytest.param("PriorityTier=1 PreemptMode=CANCEL Default=YES", {"low", ""}, id="the default partition"),
        pytest.param("PriorityTier=1 PreemptMode=CANCEL GraceTime=60", set(), id="a minute is enough to move"),
        pytest.param("PriorityTier=1 PreemptMode=OFF", set(), id="not preempted"),
        pytest.param("PriorityTier=1 PreemptMode=GANG", set(), id="takes turns"),
        pytest.param("PriorityTier=2 PreemptMode=CANCEL", set(), id="nobody comes before it"),
    ],
)  # fmt: skip
def test_partitions_whose_jobs_give_way_at_once(facts, found):
    text = f"PartitionName=cpu PriorityTier=2 PreemptMode=OFF\nPartitionName=low {facts}\n"
    assert parsing.preemption(text)[0] == found
    assert parsing.preemption("") == parsing.preemption("slurm is not here") == (frozenset(), {})


def test_local_time_is_read_too():
    assert parsing.parse_time("2026-11-21T21:36:14") == datetime(2026, 11, 21, 21, 36, 14).timestamp()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1", 60.0),
        ("1:30", 90.0),
        ("00:30:00", 1800.0),
        ("2-0", 172800.0),
        ("1-12:30", 131400.0),
        ("1-00:00:01", 86401.0),
        ("UNLIMITED", inf),
        ("0", inf),
        ("1:2:3:4", inf),
        ("", inf),
    ],
)
def test_time_limits(text, seconds):
    assert parsing.duration(text) == seconds


@given(st.sets(st.integers(0, 1000), min_size=1))
def test_indices_name_each_element_once(numbers):
    named: list[int] = []
    for run in parsing.indices(sorted(numbers)).split(","):
        first, _, last = run.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("invalid partition specified: x\nBatch job submission failed: Invalid partition name specified", PERMANENT),
        ("Batch job submission failed: Invalid account or account/partition combination specified", PERMANENT),
        ("Batch job submission failed: Invalid qos specification", PERMANENT),
        ("Batch job submission failed: Requested node configuration is not available", PERMANENT),
        ("Batch job submission failed: User's group not permitted to use this partition", PERMANENT),
        ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", PERMANENT),
        ("Unable to open file job.sh", PERMANENT),
        ("Could not establish a configuration source", PERMANENT),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", TRANSIENT),
        ("Batch job submission failed: Socket timed out on send/recv operation", TRANSIENT),
        ("Batch job submission failed: Resource temporarily unavailable", TRANSIENT),
        ("Slurm temporarily unable to accept job, sleeping and retrying", TRANSIENT),
        ("Batch job submission failed: Zero Bytes were transmitted or received", TRANSIENT),
        ("Batch job submission failed: Required partition not available (inactive or drain)", TRANSIENT),
        ("Batch job submission failed: Required node not available (down, drained or reserved)", TRANSIENT),
        ("Batch job submission failed: Unable to create job record, try again", TRANSIENT),
        ("QOSMaxSubmitJobPerUserLimit\nBatch job submission failed: Job violates accounting/QOS policy", LIMIT),
        ("Batch job submission failed: Invalid job array specification", LIMIT),
        ("AssocGrpSubmitJobsLimit\nBatch job submission failed: Job violates accounting/QOS policy", LIMIT),
        ("QOSMaxCpuPerJobLimit\nBatch job submission failed: Job violates accounting/QOS policy", PERMANENT),
        ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit, ...)", UNKNOWN),
        ("", UNKNOWN),
    ],
)  # fmt: skip
def test_refusals(text, kind):
    assert parsing.refusal("\n".join(f"sbatch: error: {line}" for line in text.split("\n"))) == kind
