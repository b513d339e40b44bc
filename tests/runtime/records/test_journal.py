"""A cluster's journal: its contents wherever it was cut or damaged, and the lock on it."""

from __future__ import annotations

import logging
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.errors import ConfigError
from dask_ferro.lines import sealed
from dask_ferro.runtime.records.journal import ClusterRun, JobJournal, Told, by_file, parsed, read
from dask_ferro.runtime.records.record import JobRecord

RUNS = JobRecord(
    "default-0", job_id="7", state="running", why="adapt: work", run="ferro-1", started=5.0, seen=9.0
)
RECORDS = [
    RUNS,
    JobRecord("gpu-1", "gpu", "8_0", ("gpu-1",), state="pending", run="ferro-1", order=1),
    replace(RUNS, state="ended", ending="NODE_FAIL", ended=11.0),
]


def begun(path: Path, run: str) -> JobJournal:
    """The journal of a folder, taken by a run."""
    kept = JobJournal(path / "jobs", run)
    kept.begin("mine", 1.0)
    return kept


def journal(path: Path) -> bytes:
    """The content of one with two runs, of which the second was killed."""
    for run, records in {"ferro-1": RECORDS, "ferro-2": []}.items():
        kept = begun(path, run)
        kept.add(records)
        kept.release()
    return (path / "jobs").read_bytes()


def test_it_tells_the_newest_of_each_job_and_which_runs_did_not_end(tmp_path: Path) -> None:
    told = parsed(journal(tmp_path))
    assert told.records == (RECORDS[2], RECORDS[1])
    assert told.open_runs == (ClusterRun("ferro-1", "mine", 1.0), ClusterRun("ferro-2", "mine", 1.0))
    assert told.following == 2
    assert not told.damaged
    assert not told.torn


def test_cut_anywhere_it_tells_what_stood_before(tmp_path: Path) -> None:
    text = journal(tmp_path)
    ends = [at for at in range(len(text) + 1) if text[:at].endswith(b"\n")]
    for cut in range(len(text) + 1):
        whole = max((at for at in ends if at <= cut), default=0)
        told = parsed(text[:cut])
        if cut + 1 in ends:  # the line's end alone is missing
            assert told == parsed(text[: cut + 1])
            continue
        assert told._replace(torn=False) == parsed(text[:whole])
        assert told.torn == (cut != whole)


@given(at=st.integers(min_value=0), byte=st.binary(min_size=1, max_size=1))
def test_a_byte_that_changed_costs_its_line_at_most(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: bytes
) -> None:
    text = TEXT.get("all") or TEXT.setdefault("all", journal(tmp_path_factory.mktemp("journal")))
    at %= len(text)
    changed = text[:at] + byte + text[at + 1 :]
    told = parsed(changed)
    if changed == text:
        assert told == parsed(text)
        return
    lost = len(told.damaged) + told.torn
    assert 1 <= lost <= 2 or byte == b"\n"
    whole = [line for line in text.split(b"\n") if line and line in changed.split(b"\n")]
    assert told._replace(damaged=(), torn=False) == parsed(b"\n".join(whole))


TEXT: dict[str, bytes] = {}


def test_a_damaged_line_is_told_by_its_number_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = journal(tmp_path).splitlines(keepends=True)
    lines[1] = lines[1].replace(b"default-0", b"default-9")
    (tmp_path / "jobs").write_bytes(b"".join(lines))
    with caplog.at_level(logging.WARNING):
        told = read(tmp_path / "jobs")
    assert [record.name for record in told.records] == ["gpu-1"]
    assert "skipped damaged lines: 2" in caplog.text


def checked(body: bytes) -> bytes:
    """A line of that content whose checksum holds."""
    return body + b', "check": "' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


RUN, JOB = {"ferro": "cluster-run", "run": "x"}, {"ferro": "cluster-job", "name": "a"}


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(sealed({**RUN, "began": []}), id="a time that is a list"),
        pytest.param(sealed({**RUN, "began": None}), id="a time that is none"),
        pytest.param(sealed({**RUN, "began": float("nan")}), id="a time that is no number"),
        pytest.param(sealed({**RUN, "job_name": 3}), id="a name that is a number"),
        pytest.param(sealed({**JOB, "run": "x", "job_name": ["a"]}), id="a job's name that is a list"),
        pytest.param(sealed({**JOB, "workers": 5}), id="workers that are a number"),
        pytest.param(sealed({**JOB, "workers": "abc"}), id="workers that are a text"),
        pytest.param(sealed({**JOB, "asked": float("nan")}), id="asked for at no time"),
        pytest.param(sealed({**JOB, "started": float("inf")}), id="starts never"),
        pytest.param(sealed({**JOB, "order": 10**400}), id="a number beyond all"),
        pytest.param(sealed({"ferro": ["x"]}), id="a kind that is a list"),
        pytest.param(checked(b'{"a": ' + b"[" * 100_000), id="deep nesting"),
        pytest.param(checked(b'{"a": ' + b"9" * 5000), id="a number of too many digits"),
        pytest.param(checked(b'{"a" 7'), id="no JSON"),
    ],
)
def test_a_line_whose_checksum_holds_and_that_makes_no_sense_is_left_out_like_a_damaged_one(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    text = journal(tmp_path)
    (tmp_path / "jobs").write_bytes(line + text)
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path / "jobs") == parsed(text)._replace(damaged=(1,))
    assert "skipped damaged lines: 1" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"hello\n", id="text"),
        pytest.param(b"hello", id="text without an end"),
        pytest.param(b'{"ferro": "cluster-run"}\nx\n', id="lines of a like kind"),
        pytest.param(sealed({"run": "a", "chunk": 3}), id="the log of a run"),
        pytest.param(os.urandom(4096), id="bytes"),
    ],
)
def test_another_file_is_refused_and_stays_as_it_is(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="it has no line of a journal; choose another file"):
        JobJournal(path, "ferro-1").begin("mine", 1.0)
    assert path.read_bytes() == text
    assert os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("text", [None, b"", b'{"fer', b'{"ferro": "cluster-run", "run": "fe'], ids=repr)
def test_none_and_one_whose_first_line_was_cut_short_are_begun(tmp_path: Path, text: bytes | None) -> None:
    path = tmp_path / "jobs"
    if text is not None:
        path.write_bytes(text)
    kept = JobJournal(path, "ferro-1")
    assert kept.begin("mine", 1.0).records == ()
    kept.add(RECORDS)
    kept.release()
    assert len(read(path).records) == 2


def test_what_is_appended_behind_a_line_that_was_cut_short_is_read(tmp_path: Path) -> None:
    kept = begun(tmp_path, "ferro-1")
    with (tmp_path / "jobs").open("ab") as file:
        file.write(b'{"ferro": "cluster-job", "na')
    kept.add(RECORDS)
    kept.release()
    assert read(tmp_path / "jobs").records == (RECORDS[2], RECORDS[1])


def test_a_run_that_ended_in_order_ends_those_before_it_too(tmp_path: Path) -> None:
    journal(tmp_path)
    kept = JobJournal(tmp_path / "jobs", "ferro-3")
    assert [run.tag for run in kept.begin("mine", 2.0).open_runs] == ["ferro-1", "ferro-2"]
    kept.announce("tcp://1.2.3.4:5")
    assert Path(kept.address_file).read_text() == "tcp://1.2.3.4:5 ferro-3\n"
    kept.end(3.0, jobs_left=False)
    assert read(tmp_path / "jobs").open_runs == ()
    assert os.listdir(tmp_path) == ["jobs"]


def test_runs_that_did_not_start_and_those_without_jobs_are_not_looked_for_again(tmp_path: Path) -> None:
    journal(tmp_path)
    for n in range(3, 6):
        kept = begun(tmp_path, f"ferro-{n}")
        kept.abandon(3.0)
    assert [run.tag for run in read(tmp_path / "jobs").open_runs] == ["ferro-1", "ferro-2"]
    kept = begun(tmp_path, "ferro-6")
    kept.drop(["ferro-2"], 5.0)
    kept.release()
    assert [run.tag for run in read(tmp_path / "jobs").open_runs] == ["ferro-1", "ferro-6"]
    assert os.listdir(tmp_path) == ["jobs"]


def test_of_a_run_that_ended_in_order_no_job_is_left_if_the_line_of_its_end_is_lost(tmp_path: Path) -> None:
    kept = begun(tmp_path, "ferro-1")
    kept.add(RECORDS[:1])
    kept.end(3.0, jobs_left=False)
    (record,) = read(tmp_path / "jobs").records
    assert (record.state, record.ended, record.ending) == ("ended", 9.0, "unknown: its cluster ended")


def test_of_runs_that_were_killed_before_they_asked_for_a_job_the_newest_are_looked_for(
    tmp_path: Path,
) -> None:
    for n in range(1, 130):
        kept = begun(tmp_path, f"ferro-{n}")
        kept.add(RECORDS[:1] if n == 1 else ())
        kept.release()
    tags = [run.tag for run in read(tmp_path / "jobs").open_runs]
    assert tags == ["ferro-1", *(f"ferro-{n}" for n in range(29, 130))]


def test_one_with_jobs_left_does_not(tmp_path: Path) -> None:
    kept = begun(tmp_path, "ferro-1")
    kept.end(3.0, jobs_left=True)
    assert [run.tag for run in read(tmp_path / "jobs").open_runs] == ["ferro-1"]


def test_a_second_cluster_is_refused_by_name(tmp_path: Path) -> None:
    first = begun(tmp_path, "ferro-1")
    with pytest.raises(
        ConfigError, match=rf"is being kept by another cluster: process {os.getpid()} on host"
    ):
        JobJournal(tmp_path / "jobs", "ferro-2").begin("mine", 1.0)
    first.release()
    begun(tmp_path, "ferro-2").release()


def test_what_a_full_disk_does_not_take_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = begun(tmp_path, "ferro-1")
    path, kept.path = kept.path, str(tmp_path / "no" / "jobs")
    kept.add(RECORDS[:2])
    kept.path = path
    kept.add(RECORDS[2:])
    kept.release()
    assert read(path).records == (RECORDS[2], RECORDS[1])


def test_one_whose_lock_was_removed_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = begun(tmp_path, "ferro-1")
    (tmp_path / "jobs.ferro-lock").unlink()
    kept.add(RECORDS)
    assert read(tmp_path / "jobs").records == ()
    assert "was removed or replaced" in caplog.text
    kept.end(2.0, jobs_left=False)
    assert [run.ended for run in read(tmp_path / "jobs").runs] == [False]


def test_at_its_end_a_run_touches_nothing_of_the_one_that_took_over(tmp_path: Path) -> None:
    kept = begun(tmp_path, "ferro-1")
    kept.announce("tcp://old:1")
    (tmp_path / "jobs.ferro-lock").unlink()
    (tmp_path / "jobs.scheduler").write_text("tcp://new:1 ferro-2\n")
    kept.end(2.0, jobs_left=False)
    assert (tmp_path / "jobs.scheduler").read_text() == "tcp://new:1 ferro-2\n"
    assert [run.ended for run in read(tmp_path / "jobs").runs] == [False]


def test_an_address_that_is_not_this_runs_stays(tmp_path: Path) -> None:
    kept = begun(tmp_path, "ferro-1")
    (tmp_path / "jobs.scheduler").write_text("tcp://new:1 ferro-2\n")
    kept.end(2.0, jobs_left=False)
    assert (tmp_path / "jobs.scheduler").exists()


def test_who_may_read_it_stays_as_it_was(tmp_path: Path) -> None:
    for n in range(2):
        begun(tmp_path, f"ferro-{n}").release()
        (tmp_path / "jobs").chmod(0o600 if n == 0 else (tmp_path / "jobs").stat().st_mode)
    assert (tmp_path / "jobs").stat().st_mode & 0o777 == 0o600


def test_a_link_that_somebody_put_in_its_way_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / ".jobs.part").symlink_to(precious)
    begun(tmp_path, "ferro-1").release()
    assert precious.read_text() == "mine"
    assert not (tmp_path / "jobs").is_symlink()
    (tmp_path / "jobs.ferro-lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="cannot be written: Too many levels of symbolic links"):
        JobJournal(tmp_path / "jobs", "ferro-2").begin("mine", 2.0)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("does", ["release", "end"])
def test_a_forked_process_leaves_its_parents_journal_alone(tmp_path: Path, does: str) -> None:
    kept = begun(tmp_path, "ferro-1")
    kept.announce("tcp://a:1")
    child = os.fork()
    if not child:
        status = 1
        try:
            kept.release() if does == "release" else kept.end(2.0, jobs_left=False)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kept.add(RECORDS)
    kept.release()
    told = read(tmp_path / "jobs")
    assert len(told.records) == 2
    assert [run.tag for run in told.open_runs] == ["ferro-1"]
    assert (tmp_path / "jobs.scheduler").exists()


def test_nothing_is_told_of_one_that_is_not_there(tmp_path: Path) -> None:
    assert read(tmp_path / "jobs") == Told()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        pytest.param("tcp://new:1 ferro-2\n", "tcp://new:1", id="a cluster that was started again"),
        pytest.param("", "tcp://old:1", id="a file that is empty"),
        pytest.param(None, "tcp://old:1", id="no file: not shared, or the cluster is gone"),
    ],
)
def test_a_job_looks_for_its_scheduler_when_it_starts(
    tmp_path: Path, content: str | None, found: str
) -> None:
    file = tmp_path / "it's here.scheduler"
    if content is not None:
        file.write_text(content)
    script = 'set -eu\nFERRO_WORKER="a-1"\necho tcp://<address>:1 $FERRO_WORKER'
    given = by_file(script, "tcp://<address>:1", "tcp://old:1", str(file))
    done = subprocess.run(["bash", "-c", given], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.split() == [found, "a-1"]
