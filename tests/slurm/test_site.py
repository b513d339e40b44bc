"""SLURM's commands for the jobs of a cluster: what other commands say of jobs that `squeue` does not list."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from dask_ferro.slurm.commands import RefusedError, run
from dask_ferro.slurm.parsing import QueueRow, expand_elements, scontrol_rows
from dask_ferro.slurm.site import SlurmSite

# As `scontrol --oneliner show job` of SLURM 22.05 prints them, less what is not read.
FACTS = (
    "JobId={} {}JobName=tt-1 UserId=root(0) QOS=(null) JobState={} Reason={} Dependency=(null) Requeue=1 Restarts={} "
    "ExitCode=0:0 SubmitTime=1795402767 StartTime=1795406367 EndTime=1795409967 NodeList={} "
    "Comment=x JobState=LOST ferro-abc "
)
UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def row(
    job_id: str, state: str, restarts: int = 0, node: str = "", reason: str = "", number: str = "12"
) -> QueueRow:
    times = (1795402767.0, 1795406367.0, 1795409967.0)
    return QueueRow(job_id, state, restarts, *times, node, reason, number=number)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param(FACTS.format(12, "", "RUNNING", "None", 0, "c1"), [row("12", "RUNNING", 0, "c1")], id="a job"),
        pytest.param(FACTS.format(12, "ArrayJobId=12 ArrayTaskId=0,2-3%1 ", "PENDING", "Priority", 1, "(null)"),
            [row(f"12_{i}", "PENDING", 1, "", "Priority") for i in (0, 2, 3)], id="elements that wait are one line"),
        pytest.param(FACTS.format(15, "ArrayJobId=12 ArrayTaskId=1 ", "COMPLETING", "None", 0, "c1"),
            [row("12_1", "COMPLETING", 0, "c1", number="15")], id="an element that ran has an id of its own"),
        pytest.param("No jobs in the system", [], id="none"),
        pytest.param("", [], id="nothing"),
    ],
)  # fmt: skip
def test_scontrol_shows_jobs(text, found) -> None:
    assert scontrol_rows(text) == {one.job_id: one for one in found}


def test_elements_of_an_array() -> None:
    assert list(expand_elements("0-8:4,11,...")) == [0, 4, 8, 11]


JOB = f"echo '{FACTS.format(12, '', 'RUNNING', 'None', 0, 'c1')}'"


@pytest.mark.parametrize(
    ("scontrol", "said"),
    [
        pytest.param(JOB, {"12": "RUNNING"}, id="it is there"),
        pytest.param(UNKNOWN, {"12": None}, id="it is gone"),
        pytest.param(DOWN, {}, id="no answer"),
        pytest.param("exit 0", {}, id="an empty answer is none"),
    ],
)
def test_a_job_is_asked_for_elsewhere(command, scontrol, said) -> None:
    command("scontrol", scontrol)
    rows = asyncio.run(SlurmSite("test", "ferro-1234").unlisted(["12"]))
    assert {job_id: row and row.state for job_id, row in rows.items()} == said


async def test_scontrol_is_asked_once_an_array(command) -> None:
    calls, site = command("scontrol", UNKNOWN), SlurmSite("test", "ferro-1234")
    assert await site.unlisted(["12_0", "12_1", "13"]) == {"12_0": None, "12_1": None, "13": None}
    assert calls.read_text().splitlines() == ["--oneliner show job 12", "--oneliner show job 13"]
    assert len(await site.unlisted([str(i) for i in range(99)])) == 32


def test_an_element_that_its_array_is_shown_without_was_cancelled_while_it_waited(command) -> None:
    """SLURM keeps no record of it; only its absence among the others shows it."""
    line = FACTS.format(12, "ArrayJobId=12 ArrayTaskId=1,3 ", "PENDING", "None", 0, "(null)")
    # SLURM cuts the elements of a long array, unless all of them are asked for.
    command(
        "scontrol",
        f"[ \"$SLURM_BITSTR_LEN\" = 0 ] || exit 1; case $4 in 12) echo '{line}';; *) {UNKNOWN};; esac",
    )
    rows = asyncio.run(SlurmSite("test", "ferro-1234").unlisted(["12_0", "12_1", "13_0"]))
    assert rows["12_0"] == QueueRow(
        "12_0", "CANCELLED", restarts=sys.maxsize, reason="its array is there without it"
    )
    assert (rows["12_1"], rows["13_0"]) == (row("12_1", "PENDING"), None)


def test_a_submission_is_found_by_its_word(command) -> None:
    pending = FACTS.format(12, "ArrayJobId=12 ArrayTaskId=0-1 ", "PENDING", "None", 0, "(null)")
    over = FACTS.format(9, "", "CANCELLED", "None", 0, "(null)").replace("ferro-abc", "ferro-def")
    command("scontrol", f"echo '{over}'; echo '{pending}'")
    site, words = SlurmSite("test", "ferro-1234"), ("ferro-abc", "ferro-def", "ferro-ghi")
    assert [asyncio.run(site.find(word)) for word in words] == ["12", None, None]


async def test_nodes_that_sinfo_does_not_tell_in_time_are_those_of_before(command, monkeypatch) -> None:
    monkeypatch.setattr("dask_ferro.slurm.site._NODES", 0.5)
    calls, site = command("sinfo", "echo c1"), SlurmSite("test", "ferro-1234")
    assert await site.draining() == {"c1"}
    command("sinfo", "sleep 35")
    await asyncio.sleep(0.5)
    async with asyncio.timeout(5.0):  # sinfo itself may take 10 s
        assert await site.draining() == await site.draining() == {"c1"}
    assert len(calls.read_text().splitlines()) == 2


async def test_a_command_that_hangs_is_ended_with_what_it_started(command, monkeypatch) -> None:
    monkeypatch.setattr("dask_ferro.slurm.commands._LIMIT", 0.3)
    command("sinfo", "sleep 34; echo never")

    with pytest.raises(RefusedError, match=r"sinfo did not answer within 0\.3 s"):
        await run("sinfo")
    left = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert b"sleep\x0034\x00" not in left
