"""Where a batch job writes, by what SLURM and its script say, and the last lines of that."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dask_ferro.runtime.slurm import logs
from dask_ferro.runtime.slurm.logs import Log, files_of, last_output, tail
from tests.waiting import BOUND_S

# What SLURM 22.05 says of an element of an array and of a job by itself: some patterns are left as they were given.
ELEMENT = (
    "JobId=18 ArrayJobId=15 ArrayTaskId=1 JobName=wrap UserId=ann(1000) GroupId=ann(1000) JobState=FAILED "
    "NtasksPerN:B:S:C=0:0:*:* Command=(null) WorkDir=/home/ann StdErr=/tmp/e-%J.err StdIn=/dev/null "
    "StdOut=/tmp/o-18.out Power= \n"
)
ALONE = (
    "JobId=14 JobName=wrap UserId=ann(1000) BatchHost=c1 WorkDir=/home/ann StdErr=/home/ann/my logs %4j-%u-%N.err "
    "StdIn=/dev/null StdOut=/home/ann/my logs %4j-%u-%N.err Power= "
)


@pytest.mark.parametrize(
    ("told", "job_id", "header", "paths"),
    [
        pytest.param(ELEMENT, "15_1", "", ("/tmp/e-18.err", "/tmp/o-18.out"), id="%J is the element's own number"),
        pytest.param(ALONE, "14", "", ("/home/ann/my logs 0014-ann-c1.err",), id="widths, blanks, one file for both"),
        pytest.param("", "7", "-o o-%j\n#SBATCH -e e-%j", ("/sub/e-7", "/sub/o-7"), id="the script, from its folder"),
        pytest.param("", "7", "--output=/l/%x.out", ("/l/w.out",), id="errors go where the output goes"),
        pytest.param("", "7", "--output /l/%%j", ("/l/%j",), id="a per cent sign, and a blank for an equals sign"),
        pytest.param("", "7", "-o a\n#SBATCH -o b", ("/sub/b",), id="the last of two wins"),
        pytest.param("", "7", "-D /x -o a", ("/x/a",), id="the script's own folder"),
        pytest.param("", "7", '-o "a b"', ("/sub/a b",), id="quotes"),
        pytest.param("", "7", "-o a\\%j", ("/sub/a%j",), id="after a backslash nothing is replaced"),
        pytest.param("", "7", "-p cpu", ("/sub/slurm-7.out",), id="SLURM's default"),
        pytest.param("", "7_2", "-p cpu", ("/sub/slurm-7_2.out",), id="and for arrays"),
        pytest.param("", "7_2", "-o %A-%3a-%j", ("/sub/7-002-%j",), id="what nobody knows stays as it is"),
    ],
)  # fmt: skip
def test_files(told, job_id, header, paths):
    assert files_of(told, job_id, f"#!/bin/sh\n#SBATCH {header}\nx\n", "w", "/sub") == paths


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        pytest.param(b"a\nb\n", ("a", "b"), id="as it stands"),
        pytest.param(b"a\n\n  \nb", ("a", "b"), id="without empty lines"),
        pytest.param(b"".join(b"%d\n" % n for n in range(99)), tuple(map(str, range(79, 99))), id="the last 20"),
        pytest.param(b"x" * 20000 + b"\nend\n", ("end",), id="no part of a line, of a long one"),
        pytest.param(b"x" * 20000, ("x" * 16384,), id="but where there is one line alone"),
        pytest.param(b"\x1b[31mred\x1b[0m\x07 50 %\r100 %\r\nok\r\n", ("red 50 %", "100 %", "ok"), id="no controls"),
        pytest.param(b"\xff\xfe\n", ("\ufffd\ufffd",), id="bytes that are no text"),
    ],
)  # fmt: skip
def test_the_last_lines(tmp_path, content, lines):
    path = tmp_path / "log"
    path.write_bytes(content)
    assert tail(str(path)) == Log(str(path), lines)


def no_file(path: Path) -> None:
    """Leave it out."""


@pytest.mark.parametrize(
    ("make", "trouble"),
    [
        pytest.param(no_file, "cannot be read: No such file or directory", id="none"),
        pytest.param(Path.touch, "is empty", id="empty"),
        pytest.param(Path.mkdir, "is not a regular file", id="a folder"),
        pytest.param(os.mkfifo, "is not a regular file", id="a pipe, which would wait for a writer"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_told_and_no_error(tmp_path, make, trouble):
    path = tmp_path / "log"
    make(path)
    log = tail(str(path))
    assert (log.lines, log.trouble, log.brief()) == ((), trouble, f"its log {path} {trouble}")


def test_what_a_job_printed_stands_in_for_errors_that_it_did_not_print(tmp_path):
    (tmp_path / "e").touch()
    (tmp_path / "o").write_text("said\n")
    script = f"#SBATCH -e {tmp_path}/e\n#SBATCH -o {tmp_path}/o\n"

    async def forgotten(*command):
        raise OSError("slurm_load_jobs error: Invalid job id specified")

    log = asyncio.run(last_output(forgotten, "7", script, "w"))
    assert log == Log(f"{tmp_path}/o", ("said",))


def test_neither_a_command_nor_a_file_system_that_hangs_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_ASKED", 0.05)
    monkeypatch.setattr(logs, "_READ", 0.05)

    async def test():
        asked, never_set = asyncio.Event(), asyncio.Event()

        async def never(*command):
            await asyncio.wait_for(never_set.wait(), BOUND_S)

        async def to_thread(function, *arguments):
            asked.set()
            await asyncio.wait_for(never_set.wait(), BOUND_S)

        monkeypatch.setattr(asyncio, "to_thread", to_thread)
        log = await last_output(never, "7", f"#SBATCH -o {tmp_path}/o\n", "w")
        assert asked.is_set()
        return log

    log = asyncio.run(asyncio.wait_for(test(), 10))
    assert log.brief() == f"its log {tmp_path}/o could not be read within 0.05 s"
