"""Gradients at the edges: shapes as declared, sizes of 0, norms of 0, derivatives of derivatives."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir import regions
from dask_ferro.graph.model.load import load
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.emit import reachable_nodes, to_model
from dask_ferro.graph.tensor.from_model import from_model
from dask_ferro.graph.tensor.tensor import Tensor, asarray, emit, input
from tests.each import each, every
from tests.graph.tensor.runs import computed, values

from .gradient_cases import CASES, Case, normal, whole


def _backward(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor that differentiation has written, by a name of its own."""
    nodes = [node for node in reachable_nodes(gradients.values()) if node.region.phase == regions.BACKWARD]
    return {
        f"t{node.number}_{i}": Tensor(node, i, type_)
        for node in nodes
        for i, type_ in enumerate(node.types)
        if type_ is not None
    }


def test_every_backward_node_has_the_shape_it_declares():
    each(CASES, _declares_its_shapes)


def _declares_its_shapes(name):
    imported = from_model(load(CASES[name].model()).model)
    loss = (imported.outputs["y0"] * asarray(1.5, imported.outputs["y0"].dtype)).sum()
    written = _backward(grad(loss, imported.inputs))
    found = values(written, CASES[name].feeds(), list(imported.inputs.values()))
    assert {label: found[label].shape for label in written} == {k: t.shape for k, t in written.items()}


@pytest.mark.parametrize(("shape", "repeats"), [((0, 3), (2, 2)), ((2, 3), (0, 2))])
def test_a_tile_of_nothing_has_slope_0(shape, repeats):
    imported = from_model(load(Case("Tile", (np.ones(shape), whole(*repeats))).model()).model)
    found = values({"g": grad(imported.outputs["y0"].sum(), imported.inputs["x0"])}, {"x0": np.ones(shape)})
    np.testing.assert_array_equal(found["g"], np.zeros(shape))


# ---- derivatives of derivatives ----------------------------------------------------------------------------

STEP = 1e-6  # of central differences: their error is about 1e-9 here


def differences(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Central differences of the output by every element of the inputs."""
    found = {}
    for name, x in feeds.items():
        found[name] = np.zeros_like(x)
        for at in np.ndindex(*x.shape):
            ends = []
            for step in (STEP, -STEP):
                moved = x.copy()
                moved[at] += step
                ends.append(float(computed(model, feeds | {name: moved})["y"]))
            found[name][at] = (ends[0] - ends[1]) / (2 * STEP)
    return found


TWICE = {
    "a convolution": Case("Conv", (normal(2, 2, 6), normal(3, 2, 2)), {"strides": [2], "dilations": [2]}),
    "a convolution in groups": Case("Conv", (normal(2, 4, 5), normal(4, 2, 2)), {"group": 2}),
    "a transposed convolution": Case("ConvTranspose", (normal(1, 2, 3), normal(2, 2, 2)),
        {"strides": [2], "output_padding": [1]}),
    "an average pool": Case("AveragePool", (normal(1, 2, 5),), {"kernel_shape": [2], "strides": [2]}),
    "a batch by a weight": Case("MatMul", (normal(2, 2, 3), normal(3, 2))),
    "a slice with steps": Case("Slice", (normal(5), whole(4), whole(-9), whole(0), whole(-2))),
    "an einsum": Case("Einsum", (normal(2, 3), normal(3, 2)), {"equation": "ij,jk->ik"}),
}  # fmt: skip


@pytest.mark.parametrize("name", TWICE)
def test_gradients_have_gradients(name):
    case = TWICE[name]
    imported = from_model(load(case.model()).model)
    inputs = imported.inputs
    first = grad((xp.tanh(imported.outputs["y0"]) ** 2).sum(), inputs)
    loss = sum(((g * g).sum() for g in first.values()), start=asarray(np.float64(0)))
    found = values({f"d_{k}": g for k, g in grad(loss, inputs).items()}, case.feeds(), list(inputs.values()))
    wanted = differences(to_model(loss, list(inputs.values())), case.feeds())
    for label, slopes in wanted.items():
        np.testing.assert_allclose(found[f"d_{label}"], slopes, rtol=1e-5, atol=1e-6 * np.abs(slopes).max())


# ---- sizes that are known when it runs ---------------------------------------------------------------------


NAMED = [
    "average pool, the last window over the end", "average pool", "convolution in groups",
    "convolution with strides and holes", "cumulative product", "einsum with an ellipsis", "group norm",
    "matmul of a batch by a weight", "pad by reflection, two axes", "transposed convolution, padded beyond its holes",
    "transposed convolution in groups",
]  # fmt: skip


@every("name", NAMED)
def test_a_batch_that_is_only_named_has_the_gradients_of_its_size(name):
    case, found = CASES[name], []
    for is_named in (False, True):
        model = case._replace(shape=None).model() if is_named else case.model()
        if is_named:
            model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
            if case.shape is not None:
                shape = ("N", *case.shape[1:])
                model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y0", case.declared, shape))
        imported = from_model(load(model).model)
        gradients = grad(xp.sin(imported.outputs["y0"]).sum(), imported.inputs)
        named = {f"d_{label}": g for label, g in gradients.items()}
        found.append(values(named, case.feeds(), list(imported.inputs.values())))
    assert imported.inputs["x0"].shape[0] == "N"
    for label, slopes in found[0].items():
        np.testing.assert_allclose(found[1][label], slopes, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        pytest.param("ij,ij->ij", [(1, 3), (2, 3)], id="a row that is repeated"),
        pytest.param("ij,jk->ik", [(2, 3), (3, 4)], id="a product"),
        pytest.param("bij,bjk->bik", [(1, 2, 3), (2, 3, 2)], id="a batch of one"),
        pytest.param("ij,j->j", [(2, 3), (3,)], id="a label summed alone"),
    ],
)
def test_an_einsum_of_unknown_sizes_has_the_gradients_of_its_sizes(equation, shapes):
    feeds = {f"x{i}": normal(*shape) for i, shape in enumerate(shapes)}
    result = np.einsum(equation, *feeds.values())
    found = []
    for known in (True, False):
        xs = [input(f"x{i}", s if known else (None,) * len(s), np.float64) for i, s in enumerate(shapes)]
        y = emit("Einsum", xs, result.shape if known else (None,) * result.ndim, equation=equation)
        found.append(values(dict(zip("ab", grad((xp.sin(y)).sum(), xs), strict=True)), feeds, xs))
    for label in "ab":
        np.testing.assert_allclose(found[1][label], found[0][label], rtol=1e-13)
