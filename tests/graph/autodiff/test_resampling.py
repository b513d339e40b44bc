"""Gradients of Resize and GridSample against PyTorch's, in float32, forward by ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dask_ferro.errors import UnsupportedOp
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.tensor.tensor import Tensor, argument, asarray, emit
from tests.each import every
from tests.graph.tensor.runs import by_onnxruntime

torch = pytest.importorskip("torch")
F = torch.nn.functional

RNG = np.random.default_rng(41)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


IMAGE = normal(2, 3, 5, 7)
# Off the borders, where a slope jumps; some places are outside the image.
GRID = RNG.uniform(-1.4, 1.4, (2, 4, 6, 2)).astype(np.float32)


def resized(x: Tensor, size: tuple[int, ...], scale: float | None = None, **attributes: Any) -> Tensor:
    """A Resize of the spatial dimensions, to a size or by a scale."""
    shape = (*x.shape[:2], *size)
    if scale is None:
        inputs = [x, None, None, asarray(np.array(size, np.int64))]
    else:
        inputs = [x, None, asarray(np.array([scale, scale], np.float32))]
    return emit("Resize", inputs, shape, axes=[2, 3], **attributes)


def sampled(x: Tensor, grid: Tensor, **attributes: Any) -> Tensor:
    return emit("GridSample", [x, grid], (*x.shape[:2], *grid.shape[1:3]), **attributes)


def compare(y: Tensor, theirs: Any, arrays: tuple[np.ndarray, ...], params: list[Tensor]) -> None:
    leaves = [torch.tensor(a, requires_grad=True) for a in arrays]
    wanted = theirs(*leaves)
    weight = np.random.default_rng(5).standard_normal(tuple(wanted.shape)).astype(np.float32)
    (wanted * torch.tensor(weight)).sum().backward()
    slopes = {f"d{i}": g for i, g in enumerate(grad((y * argument("weight", y.shape)).sum(), params))}
    found = by_onnxruntime(
        {"y": y, **slopes}, {f"x{i}": a for i, a in enumerate(arrays)} | {"weight": weight}
    )
    np.testing.assert_allclose(found["y"], wanted.detach().numpy(), rtol=1e-4, atol=1e-5)
    for i, leaf in enumerate(leaves):
        np.testing.assert_allclose(found[f"d{i}"], leaf.grad.numpy(), rtol=1e-4, atol=1e-4, err_msg=f"x{i}")


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
    "linear, to one pixel": ((1, 7), None, {"mode": "linear", "coordinate_transformation_mode": "pytorch_half_pixel"},
        lambda x: torch.cat([x[:, :, :1]], 2)),
    "cubic": ((8, 10), None, {"mode": "cubic", **CENTRES}, lambda x: F.interpolate(x, (8, 10), mode="bicubic")),
    "cubic, corners aligned": ((3, 12), None, {"mode": "cubic", **CORNERS},
        lambda x: F.interpolate(x, (3, 12), mode="bicubic", align_corners=True)),
}  # fmt: skip


@every("name", RESIZED)
def test_resize_equals_pytorch(name):
    size, scale, attributes, theirs = RESIZED[name]
    x = argument("x0", IMAGE.shape)
    compare(resized(x, size, scale, **attributes), theirs, (IMAGE,), [x])


@every("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@every("mode", ["half_pixel", "asymmetric", "align_corners", "half_pixel_symmetric"])
def test_the_gradient_of_a_nearest_resize_counts_the_reads(mode, rounding):
    """The weights of the gradient are those that ONNX Runtime reads the input with."""
    x = argument("x0", (1, 1, 5, 7))
    y = resized(x, (8, 5), mode="nearest", coordinate_transformation_mode=mode, nearest_mode=rounding)
    places = np.arange(35, dtype=np.float32).reshape(1, 1, 5, 7)
    found = by_onnxruntime({"y": y, "g": grad(y.sum(), x)}, {"x0": places})
    reads = np.bincount(found["y"].astype(int).ravel(), minlength=35)
    np.testing.assert_array_equal(found["g"].ravel(), reads)


def test_the_batch_may_be_open():
    x, grid = argument("x0", ("N", 3, 5, 7)), argument("x1", ("N", 4, 6, 2))
    y = sampled(resized(x, (8, 9), mode="linear"), grid, mode="linear", opset=22)
    compare(
        y,
        lambda a, b: F.grid_sample(F.interpolate(a, (8, 9), mode="bilinear"), b, align_corners=False),
        (IMAGE, GRID),
        [x, grid],
    )


@pytest.mark.parametrize(
    ("mode", "attributes"),
    [
        ("linear", {}),
        ("linear", {"antialias": 1}),
        ("cubic", {"cubic_coeff_a": -0.5}),
        ("cubic", {"cubic_coeff_a": -0.5, "exclude_outside": 1}),
        ("cubic", {"antialias": 1}),
    ],
)
def test_a_resize_is_its_own_derivative(mode, attributes):
    """It is linear: the product of the gradient and the input is the weighted result."""
    x = argument("x0", IMAGE.shape)
    y = resized(x, (12, 3), mode=mode, coordinate_transformation_mode="half_pixel", **attributes)
    weight = normal(2, 3, 12, 3)
    loss = (y * weight).sum()
    found = by_onnxruntime({"loss": loss, "g": grad(loss, x)}, {"x0": IMAGE})
    assert float((found["g"] * IMAGE).sum()) == pytest.approx(float(found["loss"]), rel=1e-4)


@every("corners", [0, 1])
@every("padding", ["zeros", "border", "reflection"])
@every("mode", ["linear", "nearest"])
def test_grid_sample_equals_pytorch(mode, padding, corners):
    x, grid = argument("x0", IMAGE.shape), argument("x1", GRID.shape)
    named = {"linear": "bilinear", "nearest": "nearest"}[mode]
    compare(
        sampled(x, grid, mode=mode, padding_mode=padding, align_corners=corners, opset=22),
        lambda a, b: F.grid_sample(a, b, named, padding, bool(corners)),
        (IMAGE, GRID),
        [x, grid],
    )


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda x: resized(x, (3, 3), mode="linear", keep_aspect_ratio_policy="not_larger"),
            id="an aspect ratio",
        ),
        pytest.param(
            lambda x: resized(argument("v", (2, 3, "H", 7)) * x[:, :, :1], (3, 3), mode="linear"),
            id="open sizes",
        ),
        pytest.param(lambda x: sampled(x, asarray(GRID), mode="cubic", opset=22), id="cubic samples"),
    ],
)
def test_is_refused(make):
    x = argument("x", IMAGE.shape)
    with pytest.raises(UnsupportedOp, match=r"no gradient of (Resize|GridSample)"):
        grad(make(x).sum(), x)
