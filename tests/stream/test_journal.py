"""The journal: what it believes, what it does not, and what it says of a run that is another."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dask_ferro as ff
from dask_ferro.stream.journal import Header, Journal, Output, differences, line, notes_in
from tests.each import every

HEADER = Header(
    "d1" * 20, {"x": "x.npy, 10 bytes"}, 100, 10, {"y": Output("npy", "y.npy", "<f4", (3,))}, run="r1"
)


def journal(tmp_path, header=HEADER):
    made = Journal(str(tmp_path / "y.npy.ferro-progress"))
    made.begin(header)
    return made


def done_in(log, run):
    return [note.chunk for note in notes_in(log, run)]


def logs(made):
    return sorted(n for n in os.listdir(made.folder) if n.endswith(".log"))


@every(
    ("log", "done"),
    [
        pytest.param(b"", [], id="nothing"),
        pytest.param(line("r1", 1, 10, 0.1) + line("r1", 2, 10, 0.1), [1, 2], id="whole lines"),
        pytest.param(line("r1", 1, 10, 0.1) + line("r1", 2, 10, 0.1)[:-5], [1], id="a torn last line"),
        pytest.param(line("r1", 1, 10, 0.1)[:7] + line("r1", 2, 10, 0.1), [], id="a line on top of a torn one"),
        pytest.param(line("r0", 1, 10, 0.1) + line("r1", 2, 10, 0.1), [2], id="a line of another run"),
        pytest.param(b"\0" * 80 + b"\n" + line("r1", 2, 10, 0.1), [2], id="zeros, as a crashed disk leaves them"),
        pytest.param(b"[1]\n3\nnull\n" + b'{"run": "r1", "chunk": "4"}\n', [], id="JSON that is no line of ours"),
        pytest.param(b"\xff\xfe\n" + line("r1", 2, 10, 0.1), [2], id="what is no text"),
    ],
)  # fmt: skip
def test_lines(log, done):
    assert done_in(log, "r1") == done


@given(st.lists(st.integers(0, 99), max_size=20), st.integers(0, 2000))
def test_a_log_that_is_cut_anywhere_never_has_a_chunk_too_many(numbers, cut):
    whole = b"".join(line("r1", n, 10, 0.5) for n in numbers)
    read = done_in(whole[:cut], "r1")
    assert read == numbers[: len(read)]
    assert len(read) >= whole[:cut].count(b"\n")


@given(st.binary(min_size=1, max_size=1), st.data())
def test_a_line_with_a_changed_byte_does_not_count(byte, data):
    whole = line("r1", 3, 10, 0.5, ["ab" * 16])
    at = data.draw(st.integers(0, len(whole) - 2))
    changed = whole[:at] + byte + whole[at + 1 :]
    assert done_in(changed, "r1") == ([3] if changed == whole else [])


@given(st.integers(0, 10**6), st.integers(0, 7))
def test_a_header_with_a_flipped_bit_is_none(place, bit):
    whole = bytearray(HEADER.to_json().rstrip("\n").encode())
    whole[place % len(whole)] ^= 1 << bit
    with pytest.raises(ValueError, match=r"damaged, or another program|can't decode"):
        Header.from_json(whole.decode())


def test_a_header_is_read_as_it_was_written(tmp_path):
    assert journal(tmp_path).header() == HEADER
    assert Journal(str(tmp_path / "none")).header() is None


def test_every_process_has_a_log_of_its_own_and_threads_share_it(tmp_path):
    made = journal(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: made.record(line("r1", n, 10, 0.1)), range(50)))
    code = (
        f"from dask_ferro.stream.journal import *; Journal({made.folder!r}).record(line('r1', 77, 10, 0.1))"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert len(logs(made)) == 3
    assert made.done("r1") == {*range(50), 77}
    assert made.done("r2") == set()


def test_a_line_behind_one_that_was_cut_short_counts(tmp_path):
    made = journal(tmp_path)
    for number in range(3):
        made.record(line("r1", number, 10, 0.1))
        (log,) = logs(made)
        path = os.path.join(made.folder, log)
        os.truncate(path, os.path.getsize(path) - 5)
    made.record(line("r1", 7, 10, 0.1))
    assert made.done("r1") == {7}


def test_a_finished_one_keeps_a_mark_in_place_of_the_logs(tmp_path):
    made = journal(tmp_path)
    made.record(line("r1", 1, 10, 0.1))
    assert not made.is_finished("r1")
    made.finish("r1")
    assert made.is_finished("r1")
    assert not made.is_finished("r2")
    assert logs(made) == []
    assert made.header() == HEADER
    assert made.done("r1") == {1}
    made.reopen()
    assert (made.is_finished("r1"), made.done("r1")) == (False, {1})


def test_a_new_run_in_its_place_drops_what_was_noted(tmp_path):
    made = journal(tmp_path)
    made.record(line("r1", 1, 10, 0.1))
    made.finish("r1")
    made.begin(replace(HEADER, run="r2"))
    made.record(line("r1", 2, 10, 0.1))  # a task of the old one that was still running
    assert not made.is_finished("r1")
    assert not made.is_finished("r2")
    assert made.done("r2") == set()
    assert made.is_current("r2")
    assert not made.is_current("r1")


@pytest.mark.parametrize("content", ["{", "[]", '{"model": "d", "outputs": {}}', '{"outputs": {"y": {}}}'])
def test_a_folder_that_is_no_journal_is_refused_and_kept(tmp_path, content):
    made = Journal(str(tmp_path / "y.ferro-progress"))
    os.mkdir(made.folder)
    (tmp_path / "y.ferro-progress" / "header.json").write_text(content)
    with pytest.raises(ff.ConfigError, match="is the path of this run's journal, but is not a journal"):
        made.header()
    assert not made.is_current("r1")


def test_a_folder_of_other_things_is_no_journal(tmp_path):
    made = Journal(str(tmp_path))
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ff.ConfigError, match="it has no header"):
        made.header()
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"run": "r2"}, [], id="the name of the run alone is no difference"),
        pytest.param({"model": "d2" * 20}, ["the model: was d1d1d1d1d1d1, is d2d2d2d2d2d2"], id="model"),
        pytest.param({"inputs": {"x": "x.npy, 11 bytes"}}, ["source of 'x': was x.npy, 10 bytes, is x.npy, 11 bytes"],
            id="source"),
        pytest.param({"rows": 90, "batch": 9}, ["rows: was 100, is 90", "batch: was 10, is 9"], id="all of them"),
        pytest.param({"batched": ("x", "b")}, ["batched: was (), is ('x', 'b')"],
            id="an input that went whole to each chunk"),
        pytest.param({"outputs": {"z": Output("npy", "y.npy", "", ())}},
            ["sink of 'y': was y.npy (npy), is None", "sink of 'z': was None, is y.npy (npy)"], id="another output"),
        pytest.param({"outputs": {"y": Output("npy", "y.npy", "", ())}}, [], id="a layout that is still open"),
    ],
)  # fmt: skip
def test_differences(change, said):
    assert differences(HEADER, replace(HEADER, **change)) == said
