"""`dask ferro benchmark | inspect` as a process and by click's runner."""

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import dask
import numpy as np
import onnx
import onnxruntime as ort
import psutil
import pytest
from click.testing import CliRunner

from dask_ferro.cli import main
from dask_ferro.trace import Trace
from tests.graphs import written
from tests.waiting import ended, until

PROGRAM = Path(sys.executable).parent / "dask-ferro"


def call(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments], prog_name="dask ferro")


def saved(path, text, weights=None, **options):
    """Write the model of ONNX's text form to a file."""
    onnx.save(written(text, weights, **options), path)
    return path


@pytest.fixture
def scorer(tmp_path):
    """[batch, 4] to scores [batch, 3] and their classes [batch]."""
    text = (
        "(float[batch,4] x) => (float[batch,3] scores, int64[batch] classes) { [matmul] z = MatMul (x, w)"
        " [softmax] scores = Softmax (z) [argmax] classes = ArgMax <axis = 1, keepdims = 0> (z) }"
    )
    return saved(tmp_path / "scorer.onnx", text, {"w": np.arange(12, dtype=np.float32).reshape(4, 3) / 12})


@pytest.fixture
def picker(tmp_path):
    """Rows of a table of 3, by number: a number beyond it fails in the task."""
    text = "(int64[batch] i) => (float[batch,2] y) { [gather] y = Gather (table, i) }"
    return saved(tmp_path / "picker.onnx", text, {"table": np.zeros((3, 2), np.float32)})


def rows(path, array):
    np.save(path, array)
    return path


# ---- bad arguments ----------------------------------------------------------------------------------------


# THIS is replaced by a file that exists and is neither a model nor an array.
BAD = {
    "a command that is none": ("fly", "No such command 'fly'"),
    "nothing to run": ("benchmark", "either a MODEL or --workload"),
    "two things to run": ("benchmark THIS --workload wide", "either a MODEL or --workload"),
    "a model that is not there": ("benchmark absent.onnx", "does not exist"),
    "a graph that is none": ("benchmark --workload spiral", "choose one of transformer"),
    "a parameter that is none": ("benchmark --workload wide --param width=3", "'width'"),
    "a parameter without value": ("benchmark --workload wide --param length", "NAME=NUMBER"),
    "a parameter out of range": ("benchmark --workload wide --param length=0", "at least 1"),
    "rows of a graph": ("benchmark --workload wide --rows 3", "--rows goes with a MODEL"),
    "parameters of a model": ("benchmark THIS --param a=1", "--param goes with --workload"),
    "a granularity that is none": ("benchmark THIS --granularity fine", "'fine' is neither"),
    "a granularity below zero": ("benchmark THIS --granularity -1", "'-1' is neither"),
    "no workers": ("benchmark THIS --workers 0", "x>=1"),
    "workers that are no number": ("benchmark THIS --workers two", "'two'"),
    "an input that is not there": ("benchmark THIS --input x.csv", "does not exist"),
    "an input of another kind": ("benchmark THIS --input THIS", "neither .npy nor .npz"),
    "rows of an input": ("benchmark THIS --input HERE.npy --rows 2", "--rows is for synthetic"),
    "output to nowhere": ("benchmark THIS --output no/y.npz", "folder 'no' does not exist"),
    "two clusters": ("benchmark THIS --scheduler tcp://a:1 --workers 2", "--workers is for"),
    "nothing to import": ("inspect", "Missing argument 'MODEL'"),
    "an import that is not there": ("inspect absent.onnx", "does not exist"),
}


@pytest.mark.parametrize(("line", "said"), BAD.values(), ids=BAD)
def test_bad_arguments_exit_2_with_one_line(line, said, tmp_path):
    np.save(tmp_path / "here.npy", np.zeros(3))
    places = {"THIS": __file__, "HERE.npy": tmp_path / "here.npy"}
    done = call(*(places.get(word, word) for word in line.split()))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("array", "said"),
    [
        pytest.param(np.zeros((2, 4)), "float64, wanted float32", id="dtype"),
        pytest.param(np.zeros((2, 5), np.float32), "5 on axis 1, wanted 4", id="shape"),
        pytest.param(np.zeros(4, np.float32), "wanted 2 axes", id="rank"),
        pytest.param(np.array([{}]), "not a readable .npy file", id="Python objects"),
    ],
)
def test_inputs_that_do_not_fit_exit_2_before_a_cluster_starts(scorer, tmp_path, array, said):
    done = call("benchmark", scorer, "--input", rows(tmp_path / "x.npy", array))
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_names_that_do_not_fit_exit_2(scorer, tmp_path):
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 4), np.float32))
    done = call("benchmark", scorer, "--input", tmp_path / "x.npz")
    assert done.exit_code == 2
    assert "unknown input 'images', missing input 'x'" in done.stderr


def test_an_input_file_that_is_broken_exits_2(scorer, tmp_path):
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 and no more")
    done = call("benchmark", scorer, "--input", tmp_path / "x.npz")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)


def test_two_outputs_do_not_fit_into_one_array_file(scorer, tmp_path):
    done = call("benchmark", scorer, "--output", tmp_path / "y.npy")
    assert done.exit_code == 2
    assert "scores, classes" in done.stderr


def test_an_address_that_is_none_exits_2(scorer):
    done = call("benchmark", scorer, "--scheduler", "carrier-pigeon://home")
    assert done.exit_code == 2
    assert "carrier-pigeon" in done.stderr
    without_port = call("benchmark", scorer, "--scheduler", "foo")
    assert (without_port.exit_code, without_port.stdout) == (2, "")
    assert "scheduler 'foo': no port" in without_port.stderr


def test_an_output_that_cannot_be_written_is_told_before_it_runs(scorer, tmp_path):
    (tmp_path / "y.npz.part").mkdir()
    done = call("benchmark", scorer, "--rows", 2, "--output", tmp_path / "y.npz")
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"output '{tmp_path / 'y.npz'}' cannot be written" in done.stderr
    assert done.stderr.count("\n") == 1  # no cluster was started


def test_a_trace_of_several_runs_is_of_the_last(scorer, tmp_path):
    done = call("benchmark", scorer, "--workers", 1, "--repeat", 2, "--trace", tmp_path / "run.ferrotrace")
    assert done.exit_code == 0
    trace = Trace.load(tmp_path / "run.ferrotrace")
    assert trace.tasks
    assert len({task.key for task in trace.tasks}) == len(list(trace.of("compute")))


def test_both_commands_explain_themselves():
    for command in ("benchmark", "inspect"):
        done = call(command, "--help")
        assert done.exit_code == 0
        assert "--granularity auto|op|model|SECONDS" in done.stdout


# ---- import -----------------------------------------------------------------------------------------------


def test_import_prints_what_a_model_is(scorer):
    done = call("inspect", scorer)
    assert (done.exit_code, done.stderr) == (0, "")
    shapes = ("x: float32[batch, 4]", "scores: float32[batch, 3]")
    for text in (*shapes, "MatMul", "onnxruntime", "3 ops", "1 bundle"):
        assert text in done.stdout


def test_import_as_json_is_one_object(scorer):
    done = call("inspect", scorer, "--json", "--batch", 5, "--granularity", "op")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert found["inputs"] == [{"name": "x", "kind": "tensor", "dtype": "float32", "shape": ["batch", 4]}]
    assert {row["op"]: row["nodes"] for row in found["ops"]} == {"MatMul": 1, "Softmax": 1, "ArgMax": 1}
    assert {row["op"]: row["flops"] for row in found["ops"]}["MatMul"] == 2 * 5 * 4 * 3
    assert [bundle["nodes"] for bundle in found["bundles"]] == [1, 1, 1]
    assert found["rows"] == 5
    assert found["problems"] == []


@pytest.mark.parametrize(("above", "said"), [("0B", "mapped from big.onnx"), ("1GiB", "read into memory")])
def test_import_tells_where_the_weights_are(tmp_path, above, said):
    text = "(float[N,64] x) => (float[N,64] y) { [n] y = MatMul (x, w) }"
    path = saved(tmp_path / "big.onnx", text, {"w": np.ones((64, 64), np.float32)})
    with dask.config.set({"ferro.limits.mapped-above": above}):
        assert said in " ".join(call("inspect", path).stdout.split())
        mapped = json.loads(call("inspect", path, "--json").stdout)["mapped"]
    assert mapped == ([str(path)] if above == "0B" else [])


def test_import_of_a_fixed_batch_refuses_another(tmp_path):
    path = saved(tmp_path / "fixed.onnx", "(float[4,2] x) => (float[4,2] y) { [relu] y = Relu (x) }")
    assert json.loads(call("inspect", path, "--json").stdout)["rows"] == 4
    done = call("inspect", path, "--batch", 6)
    assert done.exit_code == 2
    assert "fixed at 4" in done.stderr


def test_import_of_what_is_no_model_exits_1_with_the_message():
    done = call("inspect", __file__)
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "test_cli.py" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def foreign(tmp_path):
    """Two nodes of an unknown domain, and one of a known one."""
    nodes = "[relu] a = Relu (x) [first] b = com.example.Warp (a) [second] y = com.example.Warp (b)"
    text = f"(float[2] x) => (float[2] y) {{ {nodes} }}"
    return saved(tmp_path / "foreign.onnx", text, domains='"com.example": 1')


@pytest.mark.parametrize("command", ["inspect", "benchmark"])
def test_what_nobody_computes_is_named_all_at_once_and_exits_1(foreign, command):
    done = call(command, foreign)
    said = done.stdout + done.stderr
    assert done.exit_code == 1
    assert "'first'" in said
    assert "'second'" in said
    assert "Traceback" not in said


# ---- run --------------------------------------------------------------------------------------------------


def run_json(*arguments):
    done = call("benchmark", *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.cluster
def test_run_of_a_built_in_graph_compares_with_bound_and_projection():
    found = run_json("--workload", "wide", "--param", "branches=2", "--workers", 2, "--repeat", 3)
    assert sum(row["nodes"] for row in found["ops"]) == 10
    assert len(found["seconds"]) == 3
    assert len(found["cluster"]["workers"]) == 2
    assert min(found["seconds"]) >= found["bound_seconds"] == pytest.approx(0.025)
    assert found["projected_seconds"] >= found["bound_seconds"]
    assert found["ops_per_s"] == pytest.approx(10 / found["median_seconds"])
    assert found["rows"] is None
    assert sum(share["tasks"] for share in found["workers"]) >= found["bundles"]


@pytest.mark.cluster
def test_run_without_batch_makes_a_chunk_for_each_thread(scorer):
    found = run_json(scorer, "--rows", 9, "--workers", 2)
    assert (found["rows"], found["batch"], found["chunks"]) == (9, 5, 2)


@pytest.mark.cluster
def test_run_without_batch_keeps_rows_together_that_depend_on_each_other(tmp_path):
    path = saved(tmp_path / "m.onnx", "(float[N,4] x) => (float[N,4] y) { y = Softmax <axis = 0> (x) }")
    found = run_json(path, "--rows", 9, "--workers", 2)
    assert (found["rows"], found["batch"], found["chunks"]) == (9, None, 1)


@pytest.mark.cluster
def test_run_of_a_model_writes_what_onnxruntime_computes(scorer, tmp_path):
    x = np.random.default_rng(0).standard_normal((10, 4), dtype=np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    found = run_json(
        scorer, "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz", "--workers", 1, "--batch", 4
    )
    assert (found["rows"], found["batch"], found["chunks"]) == (10, 4, 3)
    assert found["rows_per_s"] == pytest.approx(10 / found["median_seconds"])
    assert found["outputs"]["scores"] == {"dtype": "float32", "shape": [10, 3]}
    scores, classes = ort.InferenceSession(scorer).run(None, {"x": x})
    with np.load(tmp_path / "y.npz") as written:
        assert sorted(written.files) == ["classes", "scores"]
        np.testing.assert_allclose(written["scores"], scores, rtol=1e-5)
        np.testing.assert_array_equal(written["classes"], classes)
    assert [p.name for p in tmp_path.glob("*.part")] == []


@pytest.mark.cluster
def test_run_prints_what_ran_where(picker, tmp_path):
    done = call("benchmark", picker, "--rows", 6, "--workers", 1, "--output", tmp_path / "y.npy")
    assert done.exit_code == 0, done.stderr
    words = ("picker", "synthetic", "Gather", "where it ran", "tcp://127.0.0.1")
    for text in (*words, "projected", "bound", "rows/s"):
        assert text in done.stdout
    assert "run 1 of 1" in done.stderr
    assert np.load(tmp_path / "y.npy").shape == (6, 2)


@pytest.mark.cluster
def test_the_error_of_a_task_exits_1_with_its_message(picker, tmp_path):
    numbers = rows(tmp_path / "i.npy", np.array([0, 7]))
    done = call("benchmark", picker, "--input", numbers, "--workers", 1, "--output", tmp_path / "y.npy")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "y.npy").exists()


@pytest.mark.cluster
def test_run_on_a_cluster_that_runs_leaves_it_running(picker, cluster):
    found = run_json(picker, "--rows", 3, "--scheduler", cluster.scheduler_address)
    assert found["cluster"]["scheduler"] == cluster.scheduler_address
    assert len(cluster.scheduler_info["workers"]) == 1


@pytest.fixture
def cluster():
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as running:
        yield running


@contextmanager
def started(*arguments, **options):
    """Start the program in a session of its own."""
    process = subprocess.Popen(
        [PROGRAM, *map(str, arguments)], start_new_session=True, stdout=subprocess.PIPE, **options
    )
    try:
        yield process
    finally:
        for left in session(process.pid):
            left.kill()
        ended(process)
        process.stdout.close()


def session(leader):
    """Return the live processes of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("when", "whole_group"),
    [
        pytest.param("starting", True, id="starting, by its terminal"),
        pytest.param("benchmarkning", False, id="running, itself alone"),
        pytest.param("starting", False, id="starting, itself alone", marks=pytest.mark.soak),
        pytest.param("benchmarkning", True, id="running, by its terminal", marks=pytest.mark.soak),
    ],
)
def test_interrupting_exits_130_and_leaves_no_process(whole_group, when, tmp_path):
    errors = tmp_path / "stderr"
    slow = ("benchmark", "--workload", "imbalanced", "--param", "long_s=60", "--workers", 2)
    with errors.open("w") as stderr, started(*slow, stderr=stderr) as process:
        if when == "starting":
            until(lambda: len(session(process.pid)) > 1, "a second process")
        else:
            until(lambda: "2 workers" in errors.read_text(), "2 workers", seen=errors.read_text)
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
        until(lambda: not session(process.pid), "the end of all processes", seen=lambda: session(process.pid))
    assert "interrupted" in errors.read_text()
    assert "Traceback" not in errors.read_text()


@pytest.mark.cluster
def test_progress_is_shown_on_a_terminal():
    terminal, side = pty.openpty()
    slow = (
        "benchmark",
        "--workload",
        "imbalanced",
        "--param",
        "long_s=1",
        "--param",
        "short=1",
        "--workers",
        1,
    )
    with started(*slow, "--json", stderr=side) as process:
        os.close(side)
        shown = everything(terminal)
        assert process.wait(timeout=60) == 0
        report = json.loads(process.stdout.read())
    assert b"bundles 1/1" in shown
    assert report["chunks"] == 1


def everything(terminal):
    """Return everything that is written to a terminal until its other side is closed."""
    shown = b""
    try:
        while part := os.read(terminal, 65536):
            shown += part
    except OSError:  # how Linux says that the other side is closed
        os.close(terminal)
    return shown
