"""Real models against ONNX Runtime whole-model: the nine light ones of the onnx package, and the examples."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

import dask_ferro as ff
from tests.suite.reference import apart, whole_model

ROOT = Path(__file__).parents[2]
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = sorted(p.stem for p in LIGHT.glob("light_*.onnx"))
GRANULARITIES = ["auto", "op", "model", 0.02]


@cache
def light_reference(name: str) -> list[np.ndarray]:
    """Return the outputs of a light model for `feeds_of` one row, computed once for all granularities."""
    path = LIGHT / f"{name}.onnx"
    return apart(str(path), feeds_of(path, 1))


def example(name: str) -> onnx.ModelProto:
    """Return one of the models that `examples/make_models.py` makes, small."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import make_models
    finally:
        sys.path.pop(0)
    if name == "encoder":
        return make_models.transformer_encoder(layers=2, d_model=32, heads=2, seq=16)
    return getattr(make_models, name)()


def check(path: Path, feeds: dict[str, np.ndarray], wanted: list[np.ndarray], granularity, scheduler) -> None:
    model = ff.from_onnx(path, granularity=granularity)
    got = model(feeds).compute(**({"scheduler": scheduler} if scheduler else {}))
    names = list(model.outputs)
    for name, reference in zip(names, wanted, strict=True):
        value = got if len(names) == 1 else got[name]
        assert value.dtype == reference.dtype
        np.testing.assert_allclose(value, reference, rtol=1e-3, atol=1e-5)


def feeds_of(path: Path, rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {}
    for name, spec in ff.from_onnx(path).inputs.items():
        shape = [rows if isinstance(d, str) or d is None else d for d in spec.shape]
        feeds[name] = rng.random(shape).astype(spec.dtype)
    return feeds


def in_turn(first):
    """Yield models with granularities: one of each model runs in the suite, all of them in `make soak`."""
    for i, name in enumerate(NAMES):
        for j, granularity in enumerate(GRANULARITIES):
            usual = j == (i + first) % len(GRANULARITIES)
            marks = [] if usual else [pytest.mark.soak]
            yield pytest.param(name, granularity, id=f"{name}-{granularity}", marks=marks)


@pytest.mark.suite
@pytest.mark.parametrize(("name", "granularity"), list(in_turn(2)))
def test_light_model_alone(name, granularity):
    path = LIGHT / f"{name}.onnx"
    check(path, feeds_of(path, 1), light_reference(name), granularity, "sync")


@pytest.mark.suite
@pytest.mark.cluster
@pytest.mark.parametrize(("name", "granularity"), list(in_turn(0)))
def test_light_model_on_a_cluster(client, name, granularity):
    path = LIGHT / f"{name}.onnx"
    check(path, feeds_of(path, 1), light_reference(name), granularity, None)


@pytest.mark.suite
@pytest.mark.parametrize("name", NAMES)
def test_light_model_gives_the_stored_output(name):
    """The stored outputs were made by another engine; old softmaxes are where engines are known to differ."""
    path = LIGHT / f"{name}.onnx"
    stored = onnx.TensorProto.FromString((LIGHT / f"{name}_output_0.pb").read_bytes())
    feeds = {}
    for given, spec in ff.from_onnx(path).inputs.items():
        count = int(np.prod(spec.shape))
        feeds[given] = (np.arange(count).reshape(spec.shape) / count).astype(np.float32)
    got = ff.from_onnx(path)(feeds).compute(scheduler="sync")
    np.testing.assert_allclose(got, onnx.numpy_helper.to_array(stored), rtol=2e-3, atol=1e-7)


@pytest.mark.cluster
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ["encoder", "resnet18", "branching", "mlp"])
def test_example(client, tmp_path, name, granularity):
    path = tmp_path / f"{name}.onnx"
    path.write_bytes(example(name).SerializeToString())
    feeds = feeds_of(path, 3)
    check(path, feeds, whole_model(str(path), feeds), granularity, None)
    model = ff.from_onnx(path, granularity=granularity)
    feeds = feeds_of(path, 8)
    whole = model(feeds).compute()
    chunked = model(feeds, batch_size=3).compute()
    for name_ in model.outputs:
        one, other = (whole, chunked) if isinstance(whole, np.ndarray) else (whole[name_], chunked[name_])
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
