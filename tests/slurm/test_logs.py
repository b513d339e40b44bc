"""Where a batch job writes, by what SLURM and its script say, and the last lines of that."""

from __future__ import annotations

import asyncio
import os

import pytest

from dask_ferro.slurm import logs
from dask_ferro.slurm.job_lifecycle import BatchJob
from dask_ferro.slurm.logs import Log, last_output, patterns_of, tail
from tests.waiting import BOUND_S


def job(job_id: str, number: str = "") -> BatchJob:
    return BatchJob("default-0", "default", 0, 1, 0.0, job_id, number=number)


@pytest.mark.parametrize(
    ("one", "header", "paths"),
    [
        pytest.param(job("15_1", "18"), "-o /o-%J\n#SBATCH -e /e-%j", ("/e-18", "/o-18"), id="an element's own number"),
        pytest.param(job("14"), '-o "/my logs %4j-%N.err"', ("/my logs 0014-*.err",), id="widths, blanks, one file"),
        pytest.param(job("7"), "--output=/l/%x.out", ("/l/w.out",), id="errors go where the output goes"),
        pytest.param(job("7"), "--output /l/%%j", ("/l/%j",), id="a per cent sign, and a blank for an equals sign"),
        pytest.param(job("7"), "-o a\n#SBATCH -o b", ("/sub/b",), id="the last of two wins"),
        pytest.param(job("7"), "-D /x -o a", ("/x/a",), id="the script's own folder"),
        pytest.param(job("7"), "-o /a[1]", ("/a[[]1]",), id="brackets"),
        pytest.param(job("7"), "-p cpu", ("/sub/slurm-7.out",), id="SLURM's default"),
        pytest.param(job("7_2"), "-p cpu", ("/sub/slurm-7_2.out",), id="and for arrays"),
        pytest.param(job("7_2"), "-o %A-%3a-%j", ("/sub/7-002-*",), id="what nobody knows may be anything"),
    ],
)  # fmt: skip
def test_files(one, header, paths, monkeypatch):
    monkeypatch.setattr(os, "getcwd", lambda: "/sub")
    assert tuple(patterns_of(f"#!/bin/sh\n#SBATCH {header}\nx\n", "w", one)) == paths


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


def test_what_cannot_be_read_is_told_and_no_error(tmp_path):
    (tmp_path / "empty").touch()
    troubles = {path: tail(str(tmp_path / path)).trouble for path in ("empty", "none")}
    assert troubles == {"empty": "is empty", "none": "cannot be read: No such file or directory"}


def test_what_a_job_printed_stands_in_for_errors_that_it_did_not_print(tmp_path):
    (tmp_path / "e").touch()
    (tmp_path / "o").write_text("said\n")
    script = f"#SBATCH -e {tmp_path}/e\n#SBATCH -o {tmp_path}/o\n"

    log = asyncio.run(last_output(script, "w", job("7")))
    assert log == Log(f"{tmp_path}/o", ("said",))


def test_neither_a_pipe_nor_a_file_system_that_hangs_is_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    log = asyncio.run(last_output(f"#SBATCH -o {tmp_path}/pipe\n", "w", job("7")))
    assert log.brief() == f"its log {tmp_path}/pipe does not exist"
    monkeypatch.setattr(logs, "_READ_TIMEOUT", 0.05)

    async def test():
        never_set = asyncio.Event()

        async def to_thread(function, *arguments):
            await asyncio.wait_for(never_set.wait(), BOUND_S)

        monkeypatch.setattr(asyncio, "to_thread", to_thread)
        return await last_output(f"#SBATCH -o {tmp_path}/o\n", "w", job("7"))

    log = asyncio.run(asyncio.wait_for(test(), 10))
    assert log.brief() == f"its log {tmp_path}/o could not be read within 0.05 s"
