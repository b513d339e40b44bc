"""Gradients of Resize against PyTorch's, in float32, by ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_ferro.errors import UnsupportedOpError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.model.load import load
from dask_ferro.graph.tensor.from_model import from_model
from dask_ferro.graph.tensor.tensor import Tensor, asarray, emit, input
from tests.each import every
from tests.graph.tensor.runs import by_onnxruntime
from tests.graphs import written

torch = pytest.importorskip("torch")
F = torch.nn.functional

IMAGE = np.random.default_rng(41).standard_normal((2, 3, 5, 7)).astype(np.float32)


def resized(x: Tensor, size: tuple[int, ...], scale: float | None = None, **attributes: Any) -> Tensor:
    """A Resize of the spatial dimensions, to a size or by a scale."""
    shape = (*x.shape[:2], *size)
    if scale is None:
        inputs = [x, None, None, asarray(np.array(size, np.int64))]
    else:
        inputs = [x, None, asarray(np.array([scale, scale], np.float32))]
    return emit("Resize", inputs, shape, axes=[2, 3], **attributes)


CENTRES = {"coordinate_transformation_mode": "half_pixel"}
CORNERS = {"coordinate_transformation_mode": "align_corners"}
FLOORED = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
# name -> (size, scale, attributes, PyTorch's function)
RESIZED: dict[str, tuple[Any, Any, dict[str, Any], Any]] = {
    "nearest, larger": ((10, 14), None, FLOORED, lambda x: F.interpolate(x, (10, 14), mode="nearest")),
    "nearest, smaller": ((3, 4), None, FLOORED, lambda x: F.interpolate(x, (3, 4), mode="nearest")),
    "nearest of pixel centres": ((8, 11), None, {"mode": "nearest", "nearest_mode": "round_prefer_ceil", **CENTRES},
        lambda x: F.interpolate(x, (8, 11), mode="nearest-exact")),
    "linear, larger": ((9, 13), None, {"mode": "linear", **CENTRES},
        lambda x: F.interpolate(x, (9, 13), mode="bilinear")),
    "linear, smaller": ((2, 3), None, {"mode": "linear", **CENTRES},
        lambda x: F.interpolate(x, (2, 3), mode="bilinear")),
    "linear, by a scale": ((7, 10), 1.5, {"mode": "linear", **CENTRES},
        lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear", recompute_scale_factor=False)),
    "linear, corners aligned": ((9, 4), None, {"mode": "linear", **CORNERS},
        lambda x: F.interpolate(x, (9, 4), mode="bilinear", align_corners=True)),
    "cubic": ((8, 10), None, {"mode": "cubic", **CENTRES}, lambda x: F.interpolate(x, (8, 10), mode="bicubic")),
}  # fmt: skip


@every("batch", [2, "N"])
@every("name", RESIZED)
def test_resize_equals_pytorch(name, batch):
    size, scale, attributes, theirs = RESIZED[name]
    x, leaf = input("x", (batch, *IMAGE.shape[1:])), torch.tensor(IMAGE, requires_grad=True)
    y, wanted = resized(x, size, scale, **attributes), theirs(leaf)
    weight = np.random.default_rng(5).standard_normal(wanted.shape[1:]).astype(np.float32)
    (wanted * torch.tensor(weight)).sum().backward()
    found = by_onnxruntime({"y": y, "g": grad((y * weight).sum(), x)}, {"x": IMAGE})
    np.testing.assert_allclose(found["y"], wanted.detach().numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["g"], leaf.grad.numpy(), rtol=1e-4, atol=1e-4)


def test_an_exported_resize_whose_sizes_are_computed_has_a_gradient():
    text = """(float[N,3,5,7] x) => (float[N,3,10,7] y) {
        rows = Shape <end = 2> (x) all = Concat <axis = 0> (rows, sizes)
        y = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric"> (x, , , all)
    }"""
    model = from_model(load(written(text, {"sizes": np.array([10, 7])})).model)
    found = by_onnxruntime({"g": grad(model.outputs["y"].sum(), model.inputs["x"])}, {"x": IMAGE})["g"]
    assert float(found.sum()) == 2 * IMAGE.size


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda x: resized(x, (3, 3), mode="linear", keep_aspect_ratio_policy="not_larger"),
            id="an aspect ratio",
        ),
        pytest.param(
            lambda x: resized(input("v", (2, 3, "H", 7)) * x[:, :, :1], (3, 3), mode="linear"),
            id="open sizes",
        ),
    ],
)
def test_is_refused(make):
    x = input("x", IMAGE.shape)
    with pytest.raises(UnsupportedOpError, match="no gradient of Resize"):
        grad(make(x).sum(), x)
