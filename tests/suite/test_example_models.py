"""The example models: what `examples/make_models.py` builds, and the trained digits that are shipped."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime
import pytest

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


def test_encoder_with_a_symbolic_sequence_takes_any_length():
    model = make.transformer_encoder(layers=1, d_model=8, heads=2, seq="seq")
    assert [run(model, normal(2, n, 8)).shape for n in (1, 9)] == [(2, 1, 8), (2, 9, 8)]


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
@pytest.mark.parametrize("name", SHIPPED)
def test_training_again_gives_the_same_bytes_and_the_shipped_accuracy(name):
    first, second = digits.train(name), digits.train(name)
    assert first.SerializeToString() == second.SerializeToString()
    metadata = [{p.key: p.value for p in model.metadata_props} for model in (shipped(name), first)]
    was, now = (said["held_out_accuracy"] for said in metadata)
    assert float(now) == pytest.approx(float(was), abs=5 / 450)  # another BLAS rounds otherwise
