"""A bundle's session as the client wrote it, in a process that has loaded no model."""

from __future__ import annotations

import json
import pickle
import sys

import dask
import numpy as np
import pytest

import dask_ferro as ff
from dask_ferro.engines.selection import route
from dask_ferro.errors import InputError
from dask_ferro.lower.model.collection import prepared_model_of
from dask_ferro.lower.worker import sessions
from dask_ferro.lower.worker.task import BundleRef, run_bundle
from tests.graphs import written
from tests.programs import ran

X = np.linspace(-1, 1, 5 * 64, dtype=np.float32).reshape(5, 64)
# The process of a worker: it loads what a task has, and runs it.
PROGRAM = """
import json, pickle, sys
from dask_ferro.lower.worker.task import run_bundle
result = run_bundle(*pickle.load(open(sys.argv[1], "rb")))
print(json.dumps([result.tolist(), sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def task(path) -> tuple[sessions.ModelRef, BundleRef]:
    """Return the arguments of a task on a whole model: a layer whose weight is in the file, and four more nodes."""
    text = "(float[N, 64] x) => (float[N, 64] y) { h = MatMul(x, w) t = Tanh(h) a = Abs(t) s = Sqrt(a) y = Add(s, w0) }"
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model = written(text, weights={"w": weight, "w0": weight[0]})
    path.write_bytes(model.SerializeToString())
    opened = prepared_model_of(ff.from_onnx(path))
    engines = route(opened.support, range(len(opened.support)))
    (session,) = opened.sessions(((("x",), ("y",), engines),))
    return opened.ref, BundleRef(("x",), ("y",), engines, ((0, -1),), session=session)


@pytest.fixture
def forget(monkeypatch):
    """Forget what this process has compiled, as a new process."""
    from dask_ferro.engines.cache import Cache
    from dask_ferro.lower.worker import task as module

    monkeypatch.setattr(sessions, "_contents", Cache(8, size=None))
    monkeypatch.setattr(module, "_bundles", lambda: Cache(1 << 30))


def test_a_worker_that_has_the_session_imports_neither_onnx_nor_its_friends(tmp_path):
    ref, bundle = task(tmp_path / "net.onnx")
    expected = run_bundle(ref, bundle._replace(session=None), X)
    (tmp_path / "task").write_bytes(pickle.dumps((ref, bundle, X)))
    result, modules = json.loads(ran([sys.executable, "-c", PROGRAM, str(tmp_path / "task")]).stdout)
    np.testing.assert_array_equal(np.array(result, np.float32), expected)
    assert not {"onnx", "onnx_ir", "sympy", "ml_dtypes", "pandas", "scipy", "array_api_compat"} & set(modules)


def test_the_session_has_no_weight_that_is_in_the_file(tmp_path):
    _, bundle = task(tmp_path / "net.onnx")
    assert [place.name for place in sessions.unpack(bundle.session).weights] == ["w"]
    assert len(bundle.session) < 4096


def test_a_file_that_changed_opens_no_session(tmp_path, forget):
    ref, bundle = task(tmp_path / "net.onnx")
    content = bytearray((tmp_path / "net.onnx").read_bytes())
    content[content.index(b"Tanh") : content.index(b"Tanh") + 4] = b"Sinh"
    (tmp_path / "net.onnx").write_bytes(content)
    for _ in range(20):
        assert sessions.open_session(ref, bundle.session, None, sessions.SessionSettings()) is None
    assert sessions._contents.nbytes == 0  # refusals take no places from contents


def test_a_file_that_this_process_maps_opens_no_session(tmp_path, forget):
    ref, bundle = task(tmp_path / "net.onnx")
    with dask.config.set({"ferro.limits.mapped-above": 100}):
        assert sessions.open_session(ref, bundle.session, None, sessions.SessionSettings()) is None


def test_a_process_that_does_not_see_the_file_reads_its_copy(tmp_path, forget):
    ref, bundle = task(tmp_path / "net.onnx")
    expected = run_bundle(ref, bundle, X)
    copy = np.fromfile(tmp_path / "net.onnx", np.uint8)
    blind = ref._replace(path=str(tmp_path / "elsewhere.onnx"))
    np.testing.assert_array_equal(run_bundle(blind, bundle, X, copy=copy), expected)
    with pytest.raises(InputError, match="this process cannot see it"):
        run_bundle(blind._replace(digest="0" * 40), bundle, X)
