"""Tuned models: the file of the model with other weights, wherever it keeps them."""

from __future__ import annotations

from pathlib import Path

import dask
import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.graph.tensor.tensor import constant_of
from tests.graphs import written

from .nets import EXPORTERS, NETS, batch, path

RNG = np.random.default_rng(0)
W = RNG.standard_normal((64, 64)).astype(np.float32)  # over what is kept inside: mapped
V = RNG.standard_normal((64, 64)).astype(np.float32)
X = RNG.standard_normal((4, 64)).astype(np.float32)
TEXT = "(float[N,64] x) => (float[N,64] y) { h = MatMul (x, w) r = Relu (h) y = MatMul (r, v) }"


def run(file, x=X):
    """What ONNX Runtime makes of a file, after ONNX's own checks."""
    onnx.checker.check_model(file, full_check=True)
    session = onnxruntime.InferenceSession(file)
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def by_numpy(w=W, v=V):
    return np.maximum(X @ w, 0) @ v


def without_data(file):
    """A file's messages without weights."""
    proto = onnx.load(file, load_external_data=False)
    for tensor in proto.graph.initializer:
        for field in ("raw_data", "float_data", "external_data", "data_location"):
            tensor.ClearField(field)
    return proto


@pytest.fixture(params=["in memory", "mapped"])
def kept(request):
    """Where a model's weights are while it is used."""
    with dask.config.set({"ferro.limits.mapped-above": "1kiB" if request.param == "mapped" else "1MiB"}):
        yield request.param


@pytest.fixture(params=["inside", "beside"])
def file(request, tmp_path):
    """A model with two weights in its file, or in another one beside it."""
    at = str(tmp_path / "m.onnx")
    ir.save(
        ir.from_proto(written(TEXT, {"w": W, "v": V})),
        at,
        external_data="m.onnx.data" if request.param == "beside" else None,
    )
    return at


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NETS)
def test_an_exported_network_keeps_its_graph_and_names(name, exporter, tmp_path):
    model, x = ff.load_trainable(path(name, exporter)), batch(name).numpy()
    tuned = {n: constant_of(p) * 0.5 + 0.1 for n, p in model.parameters().items()}
    saved = str(tmp_path / "tuned.onnx")
    model.save(saved, params=tuned)
    assert without_data(saved) == without_data(path(name, exporter))
    wanted = model(x, params=tuned).compute(scheduler="sync")
    np.testing.assert_allclose(run(saved, x), wanted, rtol=1e-4, atol=1e-5)
    again = ff.load_trainable(saved)
    assert again.weights == model.weights
    assert all(np.array_equal(constant_of(p), tuned[n]) for n, p in again.parameters().items())


def test_weights_stay_where_the_file_has_them(file, kept, tmp_path):
    saved = tmp_path / "out" / "tuned.onnx"
    saved.parent.mkdir()
    ff.load_trainable(file).save(saved, params={"v": W})
    stored = onnx.load(saved, load_external_data=False).graph.initializer
    places = {tensor.name: onnx.external_data_helper.uses_external_data(tensor) for tensor in stored}
    assert places == dict.fromkeys(["w", "v"], Path(f"{file}.data").exists())
    assert (
        sorted(p.name for p in saved.parent.iterdir())
        == ["tuned.onnx", "tuned.onnx.data"][: 1 + any(places.values())]
    )
    np.testing.assert_allclose(run(str(saved)), by_numpy(v=W), rtol=1e-3, atol=1e-3)


def test_frozen_weights_of_a_large_model_are_not_copied(file):
    with dask.config.set({"ferro.limits.mapped-above": "1kiB"}):
        model = ff.load_trainable(file)
        one, two = (constant_of(model.parameters("w")["w"]) for _ in range(2))
        assert np.shares_memory(one, two)
        assert not one.flags.writeable
        loss = model(X, params=model.parameters("v")).sum()
        weight = ft.to_model(loss).graph.initializers["w"].const_value
        assert np.shares_memory(weight.numpy(), one)


def test_the_file_that_was_loaded_may_be_written_over(file, kept):
    model = ff.load_trainable(file)
    model.save(file, params={"v": W})
    np.testing.assert_allclose(run(file), by_numpy(v=W), rtol=1e-3, atol=1e-3)
    if kept == "mapped":
        with pytest.raises(
            ff.InputError, match=r"file '.*' changed after the graph was built|changed while it was read"
        ):
            model.save(file, params={"v": V})
        return
    model.save(file, params={"w": V})
    np.testing.assert_allclose(run(file), by_numpy(w=V), rtol=1e-3, atol=1e-3)


def test_weights_that_share_a_place_part_when_one_is_trained(tmp_path):
    at = str(tmp_path / "m.onnx")
    ir.save(ir.from_proto(written(TEXT, {"w": W, "v": V})), at, external_data="m.data")
    proto = onnx.load(at, load_external_data=False)
    for key, tensor in enumerate(proto.graph.initializer):
        proto.graph.initializer[key].CopyFrom(proto.graph.initializer[0])
        tensor.name = "wv"[key]
    Path(at).write_bytes(proto.SerializeToString())
    model = ff.load_trainable(at)
    model.save(tmp_path / "same.onnx")
    assert (tmp_path / "same.onnx.data").stat().st_size == W.nbytes
    model.save(tmp_path / "tuned.onnx", params={"v": V})
    np.testing.assert_allclose(run(str(tmp_path / "tuned.onnx")), by_numpy(w=W), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float64, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name
)
def test_every_dtype_and_every_field_of_values_is_written(dtype, tmp_path):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    info = [helper.make_tensor_value_info(name, kind, [2]) for name in "xy"]
    typed = helper.make_tensor("w", kind, [2], [1.0, 2.0])  # in a field of its dtype, not as bytes
    graph = helper.make_graph([helper.make_node("Mul", ["x", "w"], ["y"])], "g", info[:1], info[1:], [typed])
    at = tmp_path / "tuned.onnx"
    ff.load_trainable(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    ).save(at, params={"w": np.array([3, 4], dtype)})
    onnx.checker.check_model(at)
    (tensor,) = onnx.load(at).graph.initializer
    assert numpy_helper.to_array(tensor).astype(float).tolist() == [3.0, 4.0]


def test_functions_constants_and_old_opsets_stay(tmp_path):
    text = """(float[N,64] x) => (float[N,64] y) {
        two = Constant <value = float {2}> () h = MatMul (x, w) y = Mul (h, two)
    }"""
    old = written(text, {"w": W}, opset=9)
    ff.load_trainable(old).save(tmp_path / "old.onnx", params={"w": V})
    saved = onnx.load(tmp_path / "old.onnx")
    assert (saved.opset_import, [n.op_type for n in saved.graph.node]) == (
        old.opset_import,
        ["Constant", "MatMul", "Mul"],
    )
    np.testing.assert_allclose(run(str(tmp_path / "old.onnx")), 2 * X @ V, rtol=1e-3, atol=1e-3)
    body = [helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Neg", ["b"], ["c"])]
    called = written(
        "(float[N,64] x) => (float[N,64] y) { h = MatMul (x, w) y = Neg (h) }", {"w": W}, domains='"own": 1'
    )
    called.functions.append(
        helper.make_function("own", "F", ["a"], ["c"], body, [helper.make_opsetid("", 21)])
    )
    called.graph.node[1].op_type, called.graph.node[1].domain = "F", "own"
    model = ff.load_trainable(called)
    model.save(tmp_path / "called.onnx", params={"w": V})
    assert [f.name for f in onnx.load(tmp_path / "called.onnx").functions] == ["F"]
    np.testing.assert_allclose(
        run(str(tmp_path / "called.onnx")), -np.maximum(X @ V, 0), rtol=1e-3, atol=1e-3
    )
    inner = next(name for name in model.values if name not in ("h", "y"))
    with pytest.raises(
        ff.InputError,
        match=r"is not a value of the file's graph, but of a function .*dask_ferro.tensor.save_onnx",
    ):
        model.until(inner).save(tmp_path / "inner.onnx")


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_cut_model_is_written_without_what_is_behind_it(exporter, tmp_path):
    model, x = ff.load_trainable(path("convolutional", exporter)), batch("convolutional").numpy()
    value = list(model.values)[len(model.values) // 2]
    body, saved = model.until(value), str(tmp_path / "body.onnx")
    tuned = {name: constant_of(p) + 1 for name, p in body.parameters().items()}
    body.save(saved, params=tuned)
    np.testing.assert_allclose(
        run(saved, x), body(x, params=tuned).compute(scheduler="sync"), rtol=1e-4, atol=1e-5
    )
    proto = onnx.load(saved)
    assert [info.name for info in proto.graph.output] == [value]
    assert {tensor.name for tensor in proto.graph.initializer} == set(body.weights) < set(model.weights)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"ww": W}, r"'ww' is not a weight; nearest: 'w'"),
        (
            {"w": W[:2], "v": V.astype(float)},
            r"'w': got float32\(2, 64\), wanted float32\(64, 64\); 'v': got float64",
        ),
        (
            {"w": ft.input("w", (64, 64))},
            r"'w': got <Tensor w: float32\(64, 64\)>, which has no value yet",
        ),
    ],
)
def test_wrong_weights_are_refused_all_at_once_and_nothing_is_written(params, said, tmp_path):
    with pytest.raises(ff.InputError, match=said):
        ff.load_trainable(written(TEXT, {"w": W, "v": V})).save(tmp_path / "tuned.onnx", params=params)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_and_a_file_that_changed_are_named(file, tmp_path):
    with dask.config.set({"ferro.limits.mapped-above": "1kiB"}):
        model = ff.load_trainable(file)
    with pytest.raises(ff.InputError, match=r"folder '.*none' does not exist; create it first"):
        model.save(tmp_path / "none" / "tuned.onnx")
    data = next((p for p in [Path(f"{file}.data")] if p.exists()), Path(file))
    data.write_bytes(data.read_bytes() + b"\0")
    with pytest.raises(ff.InputError, match=r"changed (after the graph was built|while it was read)"):
        model.save(tmp_path / "tuned.onnx", params={"w": V})
    assert not (tmp_path / "tuned.onnx").exists()
