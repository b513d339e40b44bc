"""The tag in a job's comment, by which the queue says whose job it is."""

from __future__ import annotations

import os
import subprocess

import pytest

from dask_ferro.slurm import orphan_guard, parsing
from dask_ferro.slurm.orphan_guard import is_orphan, new_tag
from dask_ferro.slurm.site import SlurmSite


def gone() -> int:
    """Return the number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait(30)
    return process.pid


def of(process: int, machine: str = "") -> str:
    """Return the comment of a job that a process has submitted."""
    _, here, _, cluster = new_tag().split("-")
    return f"ferro-{machine or here}-{process}-{cluster}.0123456789ab"


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        pytest.param(of(os.getpid()), False, id="this process lives"),
        pytest.param(of(1), False, id="another user's process lives"),
        pytest.param(of(gone()), True, id="the process is gone"),
        pytest.param(f"for the group {of(gone())}", True, id="after a user's own words"),
        pytest.param(f"{of(gone())} for the group", True, id="before a user's own words"),
        pytest.param(of(gone(), machine="0123abcd"), False, id="the process of another machine"),
        pytest.param(f"ferro-{'0' * 12}.0123456789ab", False, id="no process"),
        pytest.param("for the group", False, id="no tag"),
        pytest.param("", False, id="no comment"),
    ],
)
def test_a_job_is_an_orphan_if(comment: str, expected: bool) -> None:
    assert is_orphan(comment) == expected


def test_two_clusters_of_a_process_have_tags_of_their_own() -> None:
    assert new_tag() != new_tag()


def test_a_container_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers of processes say nothing of those outside."""
    comment = of(gone())
    orphan_guard._machine.cache_clear()
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[4026532000]")
    assert not is_orphan(comment)
    orphan_guard._machine.cache_clear()


def line(job_id: str, state: str, comment: str) -> str:
    """Return a line of squeue."""
    cells = {"JobArrayID": job_id, "State": state, "Comment": comment}
    return "".join(cells.get(name, "").ljust(int(width)) for name, width in COLUMNS)


COLUMNS = [column.split(":") for column in parsing.FORMAT.split(",")]


async def test_a_listing_has_the_jobs_of_this_cluster_and_orphans(command, tmp_path) -> None:
    own = new_tag()
    jobs = {"1": f"{own}.a", "2": of(gone()), "3": f"{new_tag()}.a", "4": "for the group"}
    (tmp_path / "queue").write_text(
        "\n".join(line(job_id, "PENDING", words) for job_id, words in jobs.items())
    )
    command("squeue", "cat queue")
    assert list(await SlurmSite("test", own).queue()) == ["1", "2"]


async def test_a_cluster_without_jobs_looks_until_no_orphan_is_left(command, tmp_path) -> None:
    site, orphan = SlurmSite("test", new_tag()), of(gone())
    command("squeue", "cat queue")
    for state, may_have_jobs in [("PENDING", True), ("COMPLETING", True), ("CANCELLED", False)]:
        (tmp_path / "queue").write_text(line("2", state, orphan))
        await site.queue()
        assert site.was_used == may_have_jobs
