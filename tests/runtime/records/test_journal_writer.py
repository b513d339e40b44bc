"""A cluster's journal on a file system that is slow, or hangs."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path

import pytest

from dask_ferro.runtime.records import journal
from dask_ferro.runtime.records.journal import JobJournal, read
from dask_ferro.runtime.records.recording import Recording
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob
from tests.waiting import BOUND_S

JOBS = [BatchJob(f"a-{n}", "a", n, 1, 0.0) for n in range(300)]


class FileServer:
    """Accepts appended data when it is set to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, self.writes = threading.Event(), 0
        self._append = journal.append
        monkeypatch.setattr(journal, "append", self._slow)

    def _slow(self, path: str, text: bytes) -> None:
        self.writes += 1
        self.answers.wait(30.0)
        self._append(path, text)


def test_a_file_server_that_hangs_holds_neither_the_loop_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = FileServer(monkeypatch)

    async def play() -> float:
        recording = Recording("ferro-1", JobJournal(tmp_path / "jobs", "ferro-1"))
        await recording.begin("mine")
        if recording.journal is not None:
            recording.journal._last = 0.2
        began = time.monotonic()
        recording.asked(JOBS, "k")
        for job in JOBS:
            recording.given_back(job)
        await recording.end(jobs_left=False)
        return time.monotonic() - began

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(play()) < 5.0
    server.answers.set()
    assert "its file system does not answer; the end of this run may be missing" in caplog.text
    for _ in range(500):
        if not (tmp_path / "jobs.ferro-lock").exists():
            break
        time.sleep(0.01)
    told = read(tmp_path / "jobs")
    assert [record.name for record in told.records] == [job.name for job in JOBS]
    assert {record.state for record in told.records} == {"ended"}
    assert told.open_runs == ()
    assert server.writes <= 4, "what comes together goes into the file together"


async def test_the_end_waits_for_the_last_lines(tmp_path: Path) -> None:
    recording = Recording("ferro-1", JobJournal(tmp_path / "jobs", "ferro-1"))
    await recording.begin("mine")
    recording.asked(JOBS, "k")
    await recording.end(jobs_left=False)
    told = read(tmp_path / "jobs")
    assert {record.ending for record in told.records} == {"its cluster ended"}
    assert told.open_runs == ()


async def test_a_start_that_is_given_up_while_it_waits_for_the_lock_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread went on to take the lock, for good."""
    waits, over = threading.Event(), threading.Event()
    held = journal.held

    def slow(*args: object) -> object:
        waits.set()
        over.wait(10.0)
        return held(*args)

    monkeypatch.setattr(journal, "held", slow)
    recording = Recording(
        "ferro-1", JobJournal(tmp_path / "jobs", "ferro-1")
    )  # which would let go when it is freed

    start = asyncio.create_task(recording.begin("mine"))
    await asyncio.to_thread(waits.wait)
    start.cancel()
    await asyncio.wait({start}, timeout=BOUND_S)
    await recording.release()
    over.set()
    for _ in range(500):
        if (tmp_path / "jobs").exists() and not (tmp_path / "jobs.ferro-lock").exists():
            break
        time.sleep(0.01)
    assert not (tmp_path / "jobs.ferro-lock").exists()
    assert (tmp_path / "jobs").exists()
