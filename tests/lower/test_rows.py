"""Models whose rows depend on each other, or have no name, when the rows are cut."""

from __future__ import annotations

import warnings

import dask
import dask.array as da
import numpy as np
import pytest
from onnx import TensorProto, helper

import dask_ferro as ff
from tests.graphs import mlp, mlp_reference, model

node = helper.make_node
X = np.random.default_rng(1).standard_normal((10, 6), dtype=np.float32)


def centered():
    nodes = [
        node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1, name="mean"),
        node("Sub", ["x", "m"], ["y"]),
    ]
    return model(nodes, {"x": ["N", 6]}, {"y": ["N", 6]}, opset=17, name="centered")


def unsure():
    """Positions of what is not zero: rows are numbered from 0 in each chunk."""
    nodes = [
        node("NonZero", ["x"], ["i"], name="where"),
        node("Transpose", ["i"], ["t"]),
        node("Cast", ["t"], ["y"], to=TensorProto.FLOAT),
    ]
    return model(nodes, {"x": ["N", 6]}, {"y": [None, 2]}, name="unsure")


def test_a_model_that_combines_rows_runs_on_all_of_them():
    with dask.config.set(scheduler="sync"):
        got = ff.from_onnx(centered())(X, batch=10).compute()
    np.testing.assert_allclose(got, X - X.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "given", [lambda m: m(X, batch=5), lambda m: m(da.from_array(X, chunks=(5, 6)))], ids=["batch", "dask"]
)
def test_a_model_that_combines_rows_is_not_cut(given):
    with pytest.raises(
        ff.ConfigError, match=r"node 'mean' \(ReduceMean\) combines them all; run it on all rows"
    ):
        given(ff.from_onnx(centered()))


def test_a_model_that_combines_rows_is_not_streamed_in_chunks(tmp_path):
    with pytest.raises(ff.ConfigError, match="'mean'"):
        ff.run(centered(), X, tmp_path / "y.npy", batch=4, progress=False)
    ff.run(centered(), X, tmp_path / "y.npy", batch=10, progress=False)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), X - X.mean(0), rtol=1e-5, atol=1e-6)


def test_a_model_that_may_combine_rows_is_warned_of_once():
    m = ff.from_onnx(unsure())
    with pytest.warns(UserWarning, match=r"'where' \(NonZero\) numbers the rows"):
        m(X, batch=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m(X, batch=2)


@pytest.mark.parametrize(
    "outputs", [[None, 3], ["unk__7", 3], ["M", 3]], ids=["nothing", "invented", "other"]
)
def test_a_batch_axis_without_a_name_is_cut(outputs):
    proto = mlp(rows=None)
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("scores", TensorProto.FLOAT, outputs))
    m = ff.from_onnx(proto)
    if outputs[0] == "M":  # its own name says that it is another number
        with pytest.raises(ff.ConfigError, match="without the batch axis"):
            m(X, batch=4)
        return
    assert "unk__" not in repr(m)
    with dask.config.set(scheduler="sync"):
        np.testing.assert_allclose(m(X, batch=4).compute(), mlp_reference(X), rtol=1e-5, atol=1e-6)
        cut = m(da.from_array(X, chunks=(5, 6)))
        np.testing.assert_allclose(cut.compute(), mlp_reference(X), rtol=1e-5, atol=1e-6)


def test_a_dask_array_is_not_told_to_leave_batch_out():
    nodes = [node("ReduceSum", ["x"], ["y"], keepdims=0)]
    m = ff.from_onnx(model(nodes, {"x": ["N", 6]}, {"y": []}))
    with pytest.raises(ff.ConfigError, match=r"an input is a dask array: pass it as one numpy array"):
        m(da.from_array(X, chunks=(5, 6)))


def test_more_rows_than_one_need_an_output_with_rows():
    nodes = [node("ReduceSum", ["x"], ["y"], keepdims=0)]
    m = ff.from_onnx(model(nodes, {"x": [1, 6]}, {"y": []}))
    assert m(X[:1]).compute(scheduler="sync") == pytest.approx(X[:1].sum(), rel=1e-5)
    with pytest.raises(ff.ConfigError, match="fixed at 1, and it was given more"):
        m(X)


def test_a_fixed_batch_is_not_cut_into_smaller_ones():
    m = ff.from_onnx(model([node("Relu", ["x"], ["y"])], {"x": [4, 6]}, {"y": [4, 6]}))
    with pytest.raises(ff.ConfigError, match="fixed at 4 rows"):
        m(X[:4], batch=2)


def test_batch_rechunks_a_dask_array():
    m = ff.from_onnx(mlp())
    cut = m(da.from_array(X, chunks=(5, 6)), batch=4)
    assert cut.chunks[0] == (4, 4, 2)
    np.testing.assert_allclose(cut.compute(scheduler="sync"), mlp_reference(X), rtol=1e-5, atol=1e-6)


def unknown():
    x = da.from_array(X, chunks=(5, 6))
    return x[da.from_array(X[:, 0] > -9, chunks=5)]


def test_batch_does_not_cut_chunks_of_unknown_sizes():
    with pytest.raises(ff.ConfigError, match="compute_chunk_sizes"):
        ff.from_onnx(mlp())(unknown(), batch=4)


def test_two_inputs_of_unknown_chunk_sizes_are_taken_chunk_by_chunk():
    nodes = [node("Add", ["a", "b"], ["y"])]
    m = ff.from_onnx(model(nodes, {"a": ["N", 6], "b": ["N", 6]}, {"y": ["N", 6]}))
    u = unknown()
    np.testing.assert_allclose(m(u, u).compute(scheduler="sync"), 2 * X, rtol=1e-6)
    with pytest.raises(ff.ConfigError, match="chunked differently"):
        m(u, da.from_array(X, chunks=(10, 6)))


def test_an_output_in_chunks_is_named_with_its_remedy():
    first = ff.from_onnx(mlp())(X, batch=5)
    second = ff.from_onnx(model([node("Relu", ["s"], ["y"])], {"s": ["N", 3]}, {"y": ["N", 3]}))
    with pytest.raises(
        ff.ConfigError, match=r"input 's' is taken whole and comes in 2 chunks; make it without"
    ):
        second(first.outputs["scores"]).compute(scheduler="sync")
