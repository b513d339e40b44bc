"""What PBS prints, as values: each oddity is a row."""

from __future__ import annotations

import time
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.runtime.sites import pbs, qstat

AT = time.mktime((2024, 9, 14, 8, 37, 55, 0, 0, -1))
WHEN = "Sat Sep 14 08:37:55 2024"
# A name and a place that are long enough to be cut.
LONG = "Variable_List = PBS_O_HOME=/home/me,PBS_O_PATH=/usr/bin:/usr/local/sbin:/opt/p\n\tbs/bin"


def job(*facts: str, number: str = "12.pbs01") -> str:
    return f"Job Id: {number}\n" + "".join(f"    {fact}\n" for fact in facts) + "\n"


def only(*facts: str) -> qstat.QueueRow:
    (row,) = qstat.rows(job(*facts)).values()
    return row


@pytest.mark.parametrize(
    ("facts", "phase", "state", "reason"),
    [
        pytest.param(["job_state = Q"], "pending", "PENDING", "", id="queued"),
        pytest.param(["job_state = Q", "comment = Not Running: the queue is on hold"], "pending", "PENDING",
            "Not Running: the queue is on hold", id="a comment with the word hold holds no job"),
        pytest.param(["job_state = W"], "pending", "PENDING", "", id="waits for its time"),
        pytest.param(["job_state = T"], "pending", "PENDING", "", id="on its way to another queue"),
        pytest.param(["job_state = M"], "pending", "PENDING", "", id="moved to another server"),
        pytest.param(
            ["job_state = Q", "comment = held back by a reservation"],
            "pending",
            "PENDING",
            "held back by a reservation",
            id="not held, whatever the comment says",
        ),
        pytest.param(["job_state = H", "Hold_Types = us"], "held", "PENDING", "held (us)", id="held"),
        pytest.param(["job_state = H", "comment = job held, too many failed attempts to run"], "held", "PENDING",
            "held (?) job held, too many failed attempts to run", id="held by PBS"),
        pytest.param(["job_state = R", "comment = Job run at Sat Sep 14"], "started", "RUNNING", "",
            id="runs, without a reason"),
        pytest.param(["job_state = S"], "started", "SUSPENDED", "", id="suspended, and there"),
        pytest.param(["job_state = ?"], "started", "RUNNING", "", id="an unknown state is a job that is there"),
        pytest.param(["job_state = E"], "ending", "COMPLETING", "", id="exiting"),
        pytest.param(["job_state = F", "Exit_status = 0"], "over", "COMPLETED", "", id="finished"),
        pytest.param(["job_state = F", "Exit_status = 3"], "over", "FAILED", "exit status 3",
            id="finished with an error"),
        pytest.param(["job_state = F", "Exit_status = 271"], "over", "CANCELLED", "exit status 271",
            id="ended by SIGTERM"),
        pytest.param(["job_state = F", "Exit_status = 143"], "over", "CANCELLED", "exit status 143",
            id="and told by its shell"),
        pytest.param(["job_state = F", "Exit_status = -29"], "over", "TIMEOUT", "exit status -29",
            id="out of walltime"),
        pytest.param(["job_state = F", "Exit_status = -1"], "over", "FAILED", "exit status -1",
            id="could not be started"),
        pytest.param(["job_state = F"], "over", "CANCELLED", "", id="deleted before it ran"),
        pytest.param(["job_state = F", "Exit_status = x" * 99], "over", "CANCELLED", "", id="a status that is none"),
        pytest.param(["job_state = C", "exit_status = 0"], "over", "COMPLETED", "", id="complete, as Torque says"),
        pytest.param(["job_state = X"], "over", "CANCELLED", "", id="expired"),
    ],
)  # fmt: skip
def test_states(facts: list[str], phase: str, state: str, reason: str) -> None:
    row = only(*facts)
    assert (row.phase, row.state, row.reason) == (phase, state, reason)


@pytest.mark.parametrize(
    ("comment", "is_stuck"),
    [
        ("Can Never Run: Insufficient amount of resource: ncpus (R: 64 A: 4 T: 4)", True),
        ("Can Never Run: Insufficient amount of server resource: home_fs (True != False)", False),
        ("Not Running: Insufficient amount of resource: ncpus", False),
        ("", False),
    ],
)
def test_a_request_that_no_node_meets_is_stuck_and_a_file_system_that_is_away_is_not(
    comment: str, is_stuck: bool
) -> None:
    assert only("job_state = Q", f"comment = {comment}").is_stuck == is_stuck
    assert not only("job_state = R", f"comment = {comment}").is_stuck


def test_times_nodes_and_the_word_of_a_submission_are_read_over_cut_lines() -> None:
    row = only(
        "job_state = R", f"qtime = {WHEN}", f"stime = {WHEN}", "Resource_List.walltime = 01:00:00",
        "exec_host = n12/0*8+n13/0*8", f"{LONG},FERRO_SUBMISSION=ferro-\n\t12ab.0\n\t1,OTHER=2",
    )  # fmt: skip
    assert row == qstat.QueueRow(
        "12.pbs01",
        "RUNNING",
        submitted=AT,
        starts=AT,
        ends=AT + 3600,
        node="n12",
        comment="ferro-12ab.01",
        known="started",
    )


HOSTILE = {
    "nothing": "",
    "a greeting": "Welcome to the cluster!\n\n",
    "a table": "Job id            Name             User\n12.pbs01  STDIN  me  0 R workq\n",
    "XML": "<Data><Job><Job_Id>12.pbs01</Job_Id><job_state>R</job_state></Job></Data>",
    "half a line": "Job Id: 12.pb",
    "no state": job("Job_Name = x"),
    "an empty state": job("job_state = "),
    "facts of no job": "    job_state = R\n",
    "a continuation of nothing": "\tR\nJob Id:\n\tR\n",
    "binary": "\x00\xff\ufffdJob Id \x1b[0m",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_job_is_left_out(text: str) -> None:
    assert qstat.rows(text) == {}
    assert list(qstat.rows(text + "\n" + job("job_state = Q"))) == ["12.pbs01"]


def test_an_environment_cannot_say_what_a_job_is() -> None:
    """Bash functions are exported with their lines."""
    body = "BASH_FUNC_f%%=() {  \n    job_state = F\n    Exit_status = 0\n}"
    row = only("job_state = R", f"Variable_List = A=1,{body}")
    assert row.phase == "started"


@given(st.text())
def test_no_answer_breaks_the_parser(text: str) -> None:
    facts = f"Job Id: 1.a\n    job_state = {text}\n    stime = {text}\n    Exit_status = {text}\n{text}"
    for row in qstat.rows(facts).values():
        assert row.phase in ("pending", "started", "held", "ending", "over")
    for read in (qstat.unknown, qstat.submitted, qstat.kill_delay, qstat.walltime, qstat.refusal):
        read(text)


@pytest.mark.parametrize(
    ("printed", "job_id"),
    [
        ("12.pbs01.site.org\n", "12.pbs01.site.org"),
        ("12\n", "12"),
        ("*** down on Monday 12 ***\n  12.pbs01\n\n", "12.pbs01"),
        ("12[].pbs01\n", "12[].pbs01"),
        ("qsub: waiting for job 12.pbs01 to start\n", ""),
        ("", ""),
        ("; rm -rf 12.pbs01\n", ""),
        ("-Wforce\n", ""),
    ],
)
def test_the_id_that_qsub_prints(printed: str, job_id: str) -> None:
    assert qstat.submitted(printed) == job_id


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("qsub: Unknown queue", "permanent"),
        ("qsub: Job violates queue and/or server resource limits", "permanent"),
        ("qsub: Unauthorized Request", "permanent"),
        ("qsub: Illegal attribute or resource value for Resource_List.select", "permanent"),
        ("qsub: hook rejected request: no project given", "permanent"),
        ("qsub: would exceed queue workq's per-user limit", "limit"),
        ("qsub: would exceed queue workq's per-user limit of jobs in 'Q' state", "limit"),
        ("qsub: Maximum number of jobs already in queue workq", "limit"),
        ("qsub: cannot connect to server pbs01 (errno=111)", "transient"),
        ("Connection refused\nqsub: cannot connect to server pbs01", "transient"),
        ("qsub: Queue is not enabled", "transient"),
        ("qsub: End of File", "transient"),
        ("qsub: Server shutting down", "transient"),
        ("qsub: strange things happen", "unknown"),
        ("", "unknown"),
    ],
)
def test_why_qsub_refused(words: str, kind: str) -> None:
    assert qstat.refusal(words) == kind


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("#PBS -l walltime=01:30:00", 5400.0),
        ("#PBS -l select=1:ncpus=2,walltime=600", 600.0),
        ("#PBS -l walltime=10:00\n#PBS -N x -l walltime=20:00", 1200.0),
        ("#PBS -l select=1:ncpus=2", inf),
        ("#PBS -l walltime=x", inf),
        ("# PBS -l walltime=10", inf),
        ("", inf),
    ],
)
def test_the_walltime_of_a_script(header: str, seconds: float) -> None:
    assert qstat.walltime(header) == seconds


def test_where_a_job_writes_is_told_by_pbs_then_by_its_script_then_by_the_manual(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = job(f"Error_Path = login:{tmp_path}/logs/", "Output_Path = login:/out/x.o12", "job_state = R")
    script = "#PBS -e elsewhere/\n#PBS -o elsewhere/"
    assert pbs.outputs(told, "12.pbs01", script, "x") == (f"{tmp_path}/logs/12.pbs01.ER", "/out/x.o12")
    assert pbs.outputs("", "12.pbs01", script, "x")[0] == f"{tmp_path}/elsewhere/12.pbs01.ER"
    assert pbs.outputs("", "12.pbs01", "", "x") == (f"{tmp_path}/x.e12", f"{tmp_path}/x.o12")
