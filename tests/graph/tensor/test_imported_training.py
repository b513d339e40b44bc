"""Imported models trained on: weights that stay in their file, and what PyTorch's older exporter writes."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper
from torch import nn as torch_nn

import dask_ferro as ff
from dask_ferro.errors import InputError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.onnx_inference import fold_constants
from dask_ferro.graph.model.embedding import content
from dask_ferro.graph.model.load import load
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.tensor.emit import build, save_onnx
from dask_ferro.graph.tensor.from_model import from_model
from dask_ferro.graph.tensor.tensor import asarray, constant_of, input
from dask_ferro.lower.ranks.parallel import parallelize
from dask_ferro.lower.ranks.sharded_array import gather
from dask_ferro.lower.ranks.spmd import Ranks
from dask_ferro.lower.tensor import compute
from tests.graphs import written

X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)  # over what is kept inside: mapped


@pytest.fixture(params=["inside", "beside"])
def path(request, tmp_path):
    """A model of one product, whose weight lies in its file or beside it."""
    model = build(input("x", ("N", 64)) @ asarray(W, name="w")).model
    at = str(tmp_path / "m.onnx")
    ir.save(model, at, external_data="m.data" if request.param == "beside" else None)
    return at


class TestMappedWeights:
    def test_are_computed_with_and_differentiated(self, path):
        model = from_model(load(path).model)
        y = model.outputs["y"]
        np.testing.assert_allclose(y.compute({"x": X}), X @ W, rtol=1e-4, atol=1e-4)
        found = compute(grad((y * y).sum(), model.weights), {"x": X})
        np.testing.assert_allclose(found["w"], 2 * X.T @ (X @ W), rtol=1e-3, atol=1e-2)

    def test_run_in_ranks_and_in_a_pipeline(self, path):
        model = from_model(load(path).model)
        y = model.outputs["y"]
        found = gather(Ranks.of(apply_plan({"y": y}))({"x": X}), scheduler="sync")["y"]
        np.testing.assert_allclose(found, X @ W, rtol=1e-4, atol=1e-4)
        step = parallelize((y * y).mean(), params=model.weights, stages=1, micro_batches=2)(X)
        loss, _ = step.compute(scheduler="sync")
        np.testing.assert_allclose(loss, ((X @ W) ** 2).mean(), rtol=1e-4)

    def test_are_written_with_the_model_wherever_it_goes(self, path, tmp_path):
        (tmp_path / "other").mkdir()
        saved = str(tmp_path / "other" / "part.onnx")
        save_onnx(from_model(load(path).model).outputs["y"] * 2.0, saved)
        np.testing.assert_allclose(ff.from_onnx(saved)(X).compute(), 2 * X @ W, rtol=1e-4, atol=1e-4)
        assert [file.name for file in (tmp_path / "other").iterdir()] == ["part.onnx"]

    def test_may_be_written_over_the_file_that_they_are_read_from(self, path):
        y = from_model(load(path).model).outputs["y"]
        save_onnx(y * 2.0, path)
        np.testing.assert_allclose(y.compute({"x": X}), X @ W, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(ff.from_onnx(path)(X).compute(), 2 * X @ W, rtol=1e-4, atol=1e-4)


def test_more_weights_than_a_message_holds_are_refused_with_the_remedy(tmp_path):
    hole = tmp_path / "w.data"
    with hole.open("wb") as file:
        file.truncate(2**31)  # a hole: no byte of it is written
    tensor = ir.ExternalTensor(
        "w.data", 0, 2**31, ir.DataType.FLOAT, name="w", shape=ir.Shape([2**29]), base_dir=tmp_path
    )
    value = ir.Value(name="w", type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    end = ir.Value(name="y", type=ir.TensorType(tensor.dtype), shape=tensor.shape)
    graph = ir.Graph([], [end], nodes=[ir.Node("", "Identity", [value], outputs=[end])], initializers=[value],
                     opset_imports={"": 21})  # fmt: skip
    with pytest.raises(InputError, match=r"weights are 2147483648 bytes.*dask_ferro.tensor.save_onnx"):
        content(ir.Model(graph, ir_version=10))


@pytest.mark.parametrize("scalar", [np.float32(2), np.asarray(2, np.float32)], ids=["a scalar", "an array"])
def test_values_without_dimensions_come_late_as_scalars_of_numpys(scalar):
    import dask

    y = input("x", (3,)) * input("s", ())
    model = ff.from_onnx(content(build(y).model))
    late = dask.delayed(lambda: scalar)()
    found = model({"x": np.ones(3, np.float32), "s": late}).compute(scheduler="sync")
    assert found.tolist() == [2.0] * 3


# ---- the older exporter ------------------------------------------------------------------------------------


def exported(module, x, **options):
    """What `torch.onnx.export(..., dynamo=False)` writes."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), x, file, dynamo=False, input_names=["x"], **options)
    return file.getvalue()


def _parameter_gradients(model, x):
    """The first output, and gradients of the sum of its squares by the imported weights' names."""
    imported = from_model(load(model).model)
    y = next(iter(imported.outputs.values()))
    # The initial states of recurrent networks are zeros that PyTorch does not learn.
    held = {n: w for n, w in imported.weights.items() if w.is_floating and w.ndim and constant_of(w).any()}
    return compute({"y": y, **grad((y * y).sum(), held)}, {"x": x.numpy()})


CELLS = {
    "RNN": lambda: torch_nn.RNN(3, 4, batch_first=True),
    "RNN of two layers and directions, relu": lambda: torch_nn.RNN(3, 4, 2, "relu", bidirectional=True),
    "GRU": lambda: torch_nn.GRU(3, 4),
    "LSTM": lambda: torch_nn.LSTM(3, 4, bidirectional=True),
}


@pytest.mark.parametrize("name", CELLS)
def test_recurrent_networks_have_torchs_gradients(name):
    torch.manual_seed(0)
    module, x = CELLS[name](), torch.randn(5, 2, 3)
    found = _parameter_gradients(exported(module, x, opset_version=17), x)
    wanted, _ = module(x)
    (wanted**2).sum().backward()
    np.testing.assert_allclose(found["y"].reshape(wanted.shape), wanted.detach().numpy(), atol=1e-5)
    ours = sorted(float((g.astype(float) ** 2).sum()) for n, g in found.items() if n != "y")
    # Exported weights are those of all gates and directions of a layer, in ONNX's order: their squares add up.
    theirs = sum(float((p.grad.double() ** 2).sum()) for p in module.parameters())
    np.testing.assert_allclose(sum(ours), theirs, rtol=1e-4)


@pytest.mark.parametrize("opset", [14, 17])
@pytest.mark.parametrize(
    "axes", [None, {"x": {0: "N"}}, {"x": {0: "N", 1: "S"}}], ids=["fixed", "rows", "all"]
)
def test_an_encoder_has_ranks_and_torchs_gradients(axes, opset):
    torch.manual_seed(0)
    layer = torch_nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module, x = torch_nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 8)
    with torch.no_grad():  # layers begin alike, and the exporter writes equal weights once
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    found = _parameter_gradients(exported(module, x, opset_version=opset, dynamic_axes=axes), x)
    wanted = module.train()(x)
    (wanted**2).sum().backward()
    np.testing.assert_allclose(found["y"], wanted.detach().numpy(), atol=1e-5)
    linear = {n: p.grad.numpy() for n, p in module.named_parameters() if n.endswith("linear1.bias")}
    for name, slope in linear.items():
        np.testing.assert_allclose(found[name], slope, rtol=1e-3, atol=1e-5)


class TestFolding:
    def model(self, op, inputs="", **constants):
        values = {name: np.asarray(value, np.int64) for name, value in constants.items()}
        return written(f"({inputs}) => (int64[] y) {{ y = {op} (a, b) }}", values)

    @pytest.mark.parametrize(
        ("op", "a", "b", "wanted"),
        [
            ("Mod", [2 + 3], [3], [2]),
            ("Mod", [-7], [3], [2]),
            ("Div", [-7], [2], [-3]),
            ("Add", [1, 2], [3], [4, 5]),
            ("Reshape", [[1, 2]], [-1], [1, 2]),
            ("Reshape", [[1, 2]], [0, -1], [[1, 2]]),
        ],
    )
    def test_gives_what_onnx_says(self, op, a, b, wanted):
        proto = self.model(op, a=a, b=b)
        found = fold_constants(proto).graph.node[0]
        assert found.op_type == "Constant"
        assert numpy_helper.to_array(found.attribute[0].t).tolist() == wanted
        assert ff.from_onnx(proto).compute(scheduler="sync").tolist() == wanted

    @pytest.mark.parametrize(
        ("op", "a", "b"),
        [("Mod", [1], [0]), ("Div", [1], [0]), ("Reshape", [1, 2], [3]), ("Add", [[0]] * 9, [0] * 9)],
    )
    def test_leaves_what_has_no_value_or_too_many(self, op, a, b):
        proto = self.model(op, a=a, b=b)
        assert fold_constants(proto) is proto

    def test_a_default_of_an_input_is_no_constant(self):
        proto = self.model("Add", "int64[1] a", a=[1], b=[2])
        assert fold_constants(proto) is proto
