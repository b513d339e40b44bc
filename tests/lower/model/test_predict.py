"""`model.predict`: a model as an eager function, in this process and in tasks, and how it travels."""

from __future__ import annotations

import pickle

import dask
import dask.array as da
import numpy as np
import onnx
import pytest

import dask_ferro as ff
from dask_ferro.lower.worker import models
from tests.each import every
from tests.graphs import close, diamond, mlp, mlp_reference
from tests.waiting import result

X = np.random.default_rng(1).standard_normal((10, 6), dtype=np.float32)


@pytest.fixture
def path(tmp_path):
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    return str(tmp_path / "mlp.onnx")


@every("source", ["path", "bytes", "proto"])
@every("granularity", ["auto", "op", "model"])
@every("batch", [None, 3])
@every("is_pickled", [False, True])
def test_the_same_as_the_graph(path, source, granularity, batch, is_pickled):
    given = {"path": path, "bytes": mlp().SerializeToString(), "proto": mlp()}[source]
    model = ff.from_onnx(given, granularity=granularity, batch_size=batch)
    model = pickle.loads(pickle.dumps(model)) if is_pickled else model
    got = model.predict(X)
    assert type(got) is np.ndarray
    close(got, mlp_reference(X))
    close(model(X).compute(scheduler="sync"), mlp_reference(X))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param(lambda: X[:, :3], "has 3 on axis 1, wanted 6", id="another shape"),
        pytest.param(lambda: X.astype(np.int64), "int64", id="another dtype"),
        pytest.param(lambda: da.from_array(X, chunks=5), "is lazy", id="a dask array"),
        pytest.param(lambda: dask.delayed(lambda: X)(), "is lazy", id="a delayed value"),
        pytest.param(lambda: {"other": X}, "other", id="another name"),
    ],
)
def test_what_does_not_fit_is_refused(given, words):
    with pytest.raises(ff.InputError, match=words):
        ff.from_onnx(mlp()).predict(given())


def test_inputs_by_position_and_by_name_are_refused():
    for call in ((model := ff.from_onnx(mlp())), model.predict):
        with pytest.raises(ff.InputError, match="by position or by name, not both"):
            call(X, x=X)
        with pytest.raises(
            ff.InputError, match=r"granularity is not an input; the options .* batch_size, batch_inputs, dims"
        ):
            call(X, batch_size=3, granularity="op")


def test_a_model_from_a_file_travels_as_its_path(path):
    model = ff.from_onnx(path)
    # Most of it is what tells a process without dask_ferro what is missing.
    assert len(pickle.dumps(model)) < 2_500
    assert len(pickle.dumps(model.predict)) < 2_500


def test_a_file_that_is_gone_or_another_one_is_told(path, tmp_path):
    sent = pickle.dumps(ff.from_onnx(path))
    models._models.trim(0)
    onnx.save(diamond(), path)
    with pytest.raises(ff.InputError, match="changed after it was opened"):
        pickle.loads(sent)
    (tmp_path / "mlp.onnx").write_bytes(b"no model")
    with pytest.raises(ff.InputError, match="changed after it was opened, and cannot be loaded any more"):
        pickle.loads(sent)
    (tmp_path / "mlp.onnx").unlink()
    with pytest.raises(ff.InputError, match="this process cannot see it"):
        pickle.loads(sent)


@pytest.mark.cluster
@pytest.mark.parametrize("source", ["path", "bytes"])
def test_in_tasks(client, path, source):
    model = ff.from_onnx(path if source == "path" else mlp().SerializeToString())
    close(result(client.submit(model.predict, X)), mlp_reference(X))
    close(np.concatenate(client.gather(client.map(model.predict, [X[:5], X[5:]]))), mlp_reference(X))
    close(result(client.compute(dask.delayed(model.predict)(X))), mlp_reference(X))
    chunks = da.from_array(X, chunks=(5, 6))
    scores = chunks.map_blocks(model.predict, dtype=np.float32, chunks=(5, mlp_reference(X).shape[1]))
    close(result(client.compute(scores)), mlp_reference(X))
