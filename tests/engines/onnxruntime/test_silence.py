"""What ONNX Runtime's own logger writes: an error of a session arrives once, in the error of dask_ferro."""

from __future__ import annotations

import sys
from pathlib import Path

import dask
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import dask_ferro as ff
from dask_ferro.engines.onnxruntime.session import DEFAULTS, session_options
from tests.programs import ran

# Its lines begin with a colour, the time, and a letter of the severity.
LINE = "onnxruntime:"
X = np.zeros((7, 1), np.float32)


def _saved(path: Path, nodes: list[onnx.NodeProto], shape: list[int | str]) -> Path:
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1])
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "g", [given], [made])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    """Return a model that fails when it runs: 7 numbers have no shape of two columns."""
    two = helper.make_node("Constant", [], ["two"], value_ints=[-1, 2])
    return _saved(tmp_path / "fails.onnx", [two, helper.make_node("Reshape", ["x", "two"], ["y"])], ["M", 2])


@pytest.mark.parametrize("call", ["compute", "predict"])
def test_an_error_of_a_session_is_raised_and_not_written(failing, call, capfd):
    model = ff.from_onnx(failing)
    with pytest.raises(ff.ModelError, match="cannot be reshaped"):
        model.predict(X) if call == "predict" else model(X).compute(scheduler="threads")
    assert capfd.readouterr() == ("", "")


def test_a_run_that_is_stopped_writes_nothing(failing, capfd):
    """Its runs have options of their own, and with them a severity."""
    model = ff.from_onnx(failing)
    stopped = dask.config.set({"ferro.limits.run": "60s"})
    with stopped, pytest.raises(ff.ModelError, match="cannot be reshaped"):
        model.predict(X)
    assert capfd.readouterr() == ("", "")


def test_the_options_of_all_sessions_are_silent():
    assert session_options(None, DEFAULTS).log_severity_level == 4


# The errors of a call, of ff.predict_files in this process, and of both on worker processes, as a terminal would show
# them.
EVERYWHERE = """
import sys
import numpy as np
from distributed import Client
import dask_ferro as ff

def told(call, *args, **options):
    try:
        call(*args, **options)
    except Exception as error:
        print(type(error).__name__, str(error).count("cannot be reshaped"))

if __name__ == "__main__":
    _, model, source, sink = sys.argv
    told(ff.predict_files, model, source, sink)
    with ff.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster:
        with Client(cluster) as client:
            told(ff.predict_files, model, source, sink, client=client)
            told(ff.from_onnx(model)(np.load(source)).compute)
"""


@pytest.mark.cluster
def test_errors_of_runs_and_of_worker_processes_are_told_once(failing, tmp_path):
    script, source = tmp_path / "everywhere.py", tmp_path / "x.npy"
    script.write_text(EVERYWHERE, encoding="utf-8")
    np.save(source, X)
    done = ran([sys.executable, script, failing, source, tmp_path / "y.npy"], seconds=120)
    assert done.stdout.splitlines() == ["RuntimeError 1", "RuntimeError 1", "ModelError 1"], done.stderr
    assert LINE not in done.stderr
