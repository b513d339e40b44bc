"""The example models: what `examples/make_models.py` builds, and the trained digits that are shipped."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

import dask_ferro as ff
from dask_ferro.graph.model.load import load

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """A script of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # NamedTuple and dataclass look their module up
    spec.loader.exec_module(module)
    return module


make = example("make_models")
digits = example("train_digits")


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: x})
    return y


def op_types(model: onnx.ModelProto) -> dict[str, int]:
    return dict(Counter(node.op_type for node in model.graph.node))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


# ---- made models -------------------------------------------------------------------------------------------

SMALL = {
    "encoder": (make.transformer_encoder(layers=1, d_model=32, heads=4, seq=16), (16, 32), (16, 32)),
    "resnet18": (make.resnet18(image=32, classes=7, width=8), (3, 32, 32), (7,)),
    "mlp": (make.mlp((20, 16, 5)), (20,), (5,)),
    "branching": (make.branching(modules=2, channels=8, image=12), (3, 12, 12), (10,)),
}


@pytest.mark.parametrize("name", SMALL)
def test_is_valid_and_takes_any_batch(name):
    model, x_shape, y_shape = SMALL[name]
    onnx.checker.check_model(model, full_check=True)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    for rows in (1, 3):
        assert run(model, normal(rows, *x_shape)).shape == (rows, *y_shape)


@pytest.mark.parametrize("name", SMALL)
def test_agrees_with_the_reference(name):
    model, x_shape, _ = SMALL[name]
    x = normal(2, *x_shape)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(run(model, x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_rows_do_not_mix(name):
    model, x_shape, _ = SMALL[name]
    x = normal(3, *x_shape)
    np.testing.assert_allclose(run(model, x)[1:2], run(model, x[1:2]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("granularity", ["auto", "op", "model"])
@pytest.mark.parametrize("name", SMALL)
def test_agrees_with_onnxruntime_as_a_dask_graph(name, granularity):
    model, x_shape, _ = SMALL[name]
    x = normal(3, *x_shape)
    got = ff.from_onnx(model, x, batch=2, granularity=granularity).compute(scheduler="sync")
    np.testing.assert_allclose(got, run(model, x), rtol=1e-3, atol=1e-4)


WEIGHTS = {"encoder": 3_159_552, "resnet18": 11_684_712, "mlp": 669_706, "branching": 138_186}


@pytest.mark.parametrize("name", make.RECIPES)
def test_default_sizes(name):
    """ResNet-18 with folded batch norms has 11,684,712 weights; the batch norms of others' files add some."""
    model = make.RECIPES[name]()
    floats = [w for w in model.graph.initializer if w.data_type == onnx.TensorProto.FLOAT and w.dims]
    assert sum(int(np.prod(w.dims)) for w in floats) == WEIGHTS[name]
    x = normal(1, *(d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim[1:]))
    y = run(model, x)
    assert np.isfinite(y).all()
    assert 0.01 < y.std() < 50


def test_resnet18_is_shaped_like_one():
    once = dict.fromkeys(["MaxPool", "GlobalAveragePool", "Flatten", "Gemm"], 1)
    assert op_types(make.resnet18(image=32, width=4)) == {"Conv": 20, "Relu": 17, "Add": 8, **once}


def test_a_module_has_four_parallel_branches():
    model = make.branching(modules=3, channels=8, image=8)
    consumers = Counter(value for node in model.graph.node for value in node.input)
    assert [consumers[f"module_{i}/concat"] for i in range(2)] == [4, 4]
    assert op_types(model)["Concat"] == 3


def test_encoder_with_a_symbolic_sequence_takes_any_length():
    model = make.transformer_encoder(layers=1, d_model=8, heads=2, seq="seq")
    assert [run(model, normal(2, n, 8)).shape for n in (1, 9)] == [(2, 1, 8), (2, 9, 8)]


def test_weights_come_from_the_seed():
    def content(seed: int) -> bytes:
        return make.mlp((8, 4), seed=seed).SerializeToString()

    assert content(0) == content(0)
    assert content(0) != content(1)


@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [("transformer_encoder", {"d_model": 30, "heads": 4}), ("branching", {"channels": 6})],
)
def test_refuses_sizes_that_do_not_divide(recipe, arguments):
    with pytest.raises(ValueError, match=r"must (divide|be a multiple)"):
        getattr(make, recipe)(**arguments)


def test_command_line_writes_the_named_models(tmp_path, capsys):
    make.main(["mlp", "branching", "--out", str(tmp_path)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["branching.onnx", "mlp.onnx"]
    assert onnx.load(tmp_path / "mlp.onnx") == make.mlp()
    assert "mlp.onnx  2.7 MB" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["make_models.py", "train_digits.py"])
def test_command_line_refuses_an_unknown_model_in_one_line(script, tmp_path):
    command = [sys.executable, str(EXAMPLES / script), "nope", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert "nope; choose from" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


# ---- trained models ----------------------------------------------------------------------------------------

needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn: pip install dask-ferro[examples]"
)
SHIPPED = ("digits_mlp", "digits_conv")


def shipped(name: str) -> onnx.ModelProto:
    return onnx.load(EXAMPLES / "models" / f"{name}.onnx")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_model_is_small_valid_and_loads(name):
    path = EXAMPLES / "models" / f"{name}.onnx"
    assert path.stat().st_size < 300_000
    onnx.checker.check_model(str(path), full_check=True)
    assert load(path).opset == 21


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_model_gives_probabilities(name):
    model = shipped(name)
    x_shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim[1:]]
    scores = run(model, 16 * np.random.default_rng(0).random((5, *x_shape), dtype=np.float32))
    assert scores.shape == (5, 10)
    assert (scores >= 0).all()
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-5)


@needs_sklearn
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_model_is_as_accurate_as_it_says(name):
    model = shipped(name)
    metadata = {p.key: p.value for p in model.metadata_props}
    _, held_out = digits.split(int(metadata["seed"]))
    assert metadata["held_out_rows"] == str(len(held_out.labels)) == "450"
    right = digits.accuracy(model, held_out)
    assert right > 0.95
    # Two digits of 450: engines may round a close decision differently.
    assert right == pytest.approx(float(metadata["held_out_accuracy"]), abs=2 / 450)


@needs_sklearn
def test_held_out_digits_are_not_trained_on():
    training, held_out = digits.split()
    assert (training.images.shape, held_out.images.shape) == ((1347, 64), (450, 64))
    assert not {row.tobytes() for row in training.images} & {row.tobytes() for row in held_out.images}
    shares = np.bincount(held_out.labels) / np.bincount(np.concatenate([training.labels, held_out.labels]))
    np.testing.assert_allclose(shares, 0.25, atol=0.01)


@needs_sklearn
@pytest.mark.parametrize("name", SHIPPED)
def test_training_again_gives_the_same_bytes_and_the_shipped_accuracy(name):
    first, second = digits.train(name), digits.train(name)
    assert first.SerializeToString() == second.SerializeToString()
    metadata = [{p.key: p.value for p in model.metadata_props} for model in (shipped(name), first)]
    was, now = (said["held_out_accuracy"] for said in metadata)
    assert float(now) == pytest.approx(float(was), abs=5 / 450)  # another BLAS rounds otherwise


@needs_sklearn
def test_gradient_of_the_conv_net_is_that_of_its_loss():
    """Against central differences, in double precision."""
    rng = np.random.default_rng(0)
    net = digits.ConvNet(*(np.asarray(w, np.float64) for w in digits._initial(rng)))
    net = net._replace(kernel_bias=rng.random(digits.CHANNELS))
    patches = digits._patches(rng.random((4, 64)))
    labels = np.eye(10)[[1, 2, 3, 9]]

    def loss(net) -> float:
        hidden = np.maximum(patches @ net.kernel + net.kernel_bias, 0)
        pooled = hidden.reshape(4, 4, 2, 4, 2, -1).max(axis=(2, 4))
        flat = pooled.reshape(4, 16, -1).swapaxes(1, 2).reshape(4, -1)
        return float(-(np.log(digits._softmax(flat @ net.fc + net.fc_bias)) * labels).sum(axis=1).mean())

    gradient = digits._gradient(net, patches, labels)
    for role, weights, slope in zip(net._fields, net, gradient, strict=True):
        step = np.zeros(weights.size)
        step[rng.integers(weights.size)] = 1e-6
        step = step.reshape(weights.shape)
        rise = loss(net._replace(**{role: weights + step})) - loss(net._replace(**{role: weights - step}))
        assert rise / 2e-6 == pytest.approx((slope * step).sum() / 1e-6, rel=1e-4, abs=1e-7), role
