"""A worker that an engine ended is reported so, with model, nodes and signal, and its task is not tried on others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import dask
import numpy as np
import pytest
from distributed import get_worker
from onnx import helper

import dask_ferro as ff
from dask_ferro.graph.model.own_models import made_here
from dask_ferro.lower.crash_notes import Notes, left_behind, noted
from tests.clusters import running
from tests.graphs import model
from tests.waiting import until

# What a worker does in the place of an engine that ends its process.
DEADLY = {"SIGFPE": signal.SIGFPE, "SIGABRT": signal.SIGABRT, "SIGSEGV": signal.SIGSEGV}


def ends_the_process(number):
    """A task that ends its worker's process while it runs a bundle."""
    with noted(get_worker(), "/models/deadly.onnx", lambda: "'ratio' (Div)"):
        signal.pthread_kill(threading.get_ident(), number)
        time.sleep(30)


@pytest.fixture(scope="module", autouse=True)
def _notes_of_their_own(tmp_path_factory):
    """The processes of a user share a folder of notes; other tests, and whatever else runs here, have theirs."""
    with pytest.MonkeyPatch.context() as patch:
        own = str(tmp_path_factory.mktemp("notes"))
        patch.setenv("TMPDIR", own)
        patch.setattr(tempfile, "tempdir", own)
        # A fork server has the environment that was there when it began.
        with dask.config.set({"distributed.worker.multiprocessing-method": "spawn"}):
            yield


@pytest.fixture(scope="module")
def client():
    with running(1) as client:
        yield client


@pytest.mark.parametrize("name", DEADLY)
def test_an_engine_that_ends_a_worker_is_told_by_model_and_node(client, name):
    future = client.submit(ends_the_process, DEADLY[name], pure=False)
    with pytest.raises(ff.UnsupportedOp, match=r"deadly.onnx.*'ratio'") as raised:
        future.result(timeout=60)
    assert future.key in str(raised.value)
    assert future.key not in {note.key for note in left_behind(_folder())}


def test_a_worker_that_was_killed_otherwise_runs_the_task_again(client, tmp_path):
    future = client.submit(_killed_once, str(tmp_path / "seen"), pure=False)
    assert future.result(timeout=60) == "done"


def _killed_once(path):
    with noted(get_worker(), "/models/fine.onnx", lambda: "'sum' (Add)"):
        if not os.path.exists(path):
            open(path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)
        return "done"


def _folder():
    from dask_ferro.lower.crash_notes import folder

    return folder()


def test_a_model_on_a_cluster_runs_with_its_notes(client):
    made = model([helper.make_node("Relu", ["x"], ["y"])], {"x": ["N"]}, {"y": ["N"]})
    x = np.array([-1, 2], np.float32)
    assert ff.from_onnx(made)(x).compute().tolist() == [0, 2]


def test_notes_of_a_process_that_ended_well_are_removed(tmp_path):
    code = (
        "import sys, pathlib; from dask_ferro.lower.crash_notes import Notes;"
        "n = Notes(pathlib.Path(sys.argv[1])); c = n.running('key', 'model', 'nodes'); c.__enter__()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert len(list(tmp_path.iterdir())) == 2
    assert list(left_behind(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_live_threads_never_share_a_note_and_slots_of_ended_threads_are_used_again(tmp_path):
    notes, most = Notes(tmp_path), 64
    for _ in range(2):  # the threads of the first round have ended
        begun, go = threading.Barrier(most + 3), threading.Barrier(most + 3)
        starts = []

        def task(begun=begun, go=go, starts=starts):
            with notes.running("key", "model", "nodes") as _:
                starts.append(notes._slots.get(threading.get_ident()))
                begun.wait(60)
                go.wait(60)

        threads = [threading.Thread(target=task) for _ in range(most + 2)]
        for thread in threads:
            thread.start()
        begun.wait(60)
        found = [start for start in starts if start is not None]
        assert len(found) == len(set(found)) == most
        assert sum(notes._memory[start] != 0 for start in found) == most
        go.wait(60)
        for thread in threads:
            thread.join(60)
        assert not any(notes._memory[start] for start in found)


@pytest.mark.timeout(180)  # on a busy machine, once in hundreds of runs, no worker came back
def test_a_model_whose_worker_an_engine_ends_says_so_at_the_client():
    """The worker gets from outside, while the bundle runs, the signal that an engine's abort is."""
    with running(1) as client:
        _told_at_the_client(client)


def _told_at_the_client(client):
    node = helper.make_node("Sleep", ["x"], ["y"], domain="ai.dask_ferro", seconds=60.0, name="long")
    call = ff.from_onnx(made_here(model([node], {"x": ["N"]}, {"y": ["N"]})))
    (pid,) = client.run(os.getpid).values()
    aborting = threading.Thread(target=_abort_once_noted, args=(pid, b"long"))
    aborting.start()
    try:
        with pytest.raises(
            ff.UnsupportedOp, match=r"engine ended the worker process \(Aborted\).*long"
        ) as raised:
            call(np.ones(2, np.float32)).compute()
        assert str(raised.value).count("model '") == 1
    finally:
        aborting.join(timeout=60)


def _abort_once_noted(pid, node):
    until(lambda: any(node in path.read_bytes() for path in _folder().glob("*.notes")), f"a note of {node!r}")
    os.kill(pid, signal.SIGABRT)
