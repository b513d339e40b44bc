"""`dask ferro inspect` by click's runner."""

import json

import dask
import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from dask_ferro.cli import main
from tests.graphs import written


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


# ---- bad arguments ----------------------------------------------------------------------------------------


BAD = {
    "a command that is none": ("fly", "No such command 'fly'"),
    "a granularity that is none": (f"inspect {__file__} --granularity fine", "'fine' is neither"),
    "a granularity below zero": (f"inspect {__file__} --granularity -1", "'-1' is neither"),
    "no workers": (f"inspect {__file__} --workers 0", "x>=1"),
    "workers that are no number": (f"inspect {__file__} --workers two", "'two'"),
    "no model": ("inspect", "Missing argument 'MODEL'"),
    "a model that is not there": ("inspect absent.onnx", "does not exist"),
}


@pytest.mark.parametrize(("line", "said"), BAD.values(), ids=BAD)
def test_bad_arguments_exit_2_with_one_line(line, said):
    done = call(*line.split())
    assert done.exit_code == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_command_explains_itself():
    done = call("inspect", "--help")
    assert done.exit_code == 0
    assert "--granularity auto|op|model|SECONDS" in done.stdout


# ---- inspect ----------------------------------------------------------------------------------------------


def test_inspect_prints_what_a_model_is(scorer):
    done = call("inspect", scorer)
    assert (done.exit_code, done.stderr) == (0, "")
    shapes = ("x: float32[batch, 4]", "scores: float32[batch, 3]")
    for text in (*shapes, "MatMul", "onnxruntime", "3 ops", "1 bundle"):
        assert text in done.stdout


def test_inspect_as_json_is_one_object(scorer):
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
def test_inspect_tells_where_the_weights_are(tmp_path, above, said):
    text = "(float[N,64] x) => (float[N,64] y) { [n] y = MatMul (x, w) }"
    path = saved(tmp_path / "big.onnx", text, {"w": np.ones((64, 64), np.float32)})
    with dask.config.set({"ferro.limits.mapped-above": above}):
        assert said in " ".join(call("inspect", path).stdout.split())
        mapped = json.loads(call("inspect", path, "--json").stdout)["mapped"]
    assert mapped == ([str(path)] if above == "0B" else [])


def test_inspect_of_a_fixed_batch_refuses_another(tmp_path):
    path = saved(tmp_path / "fixed.onnx", "(float[4,2] x) => (float[4,2] y) { [relu] y = Relu (x) }")
    assert json.loads(call("inspect", path, "--json").stdout)["rows"] == 4
    done = call("inspect", path, "--batch", 6)
    assert done.exit_code == 2
    assert "fixed at 4" in done.stderr


def test_inspect_of_what_is_no_model_exits_1_with_the_message():
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


def test_what_nobody_computes_is_named_all_at_once_and_exits_1(foreign):
    done = call("inspect", foreign)
    said = done.stdout + done.stderr
    assert done.exit_code == 1
    assert "'first'" in said
    assert "'second'" in said
    assert "Traceback" not in said
