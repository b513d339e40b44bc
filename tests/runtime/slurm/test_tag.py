"""The tag in a job's comment, by which the queue says whose job it is."""

from __future__ import annotations

import os
import subprocess

import pytest

from dask_ferro.runtime.slurm import orphan_guard
from dask_ferro.runtime.slurm.orphan_guard import is_orphan, new_tag


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
