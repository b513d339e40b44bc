"""Every op's gradient against PyTorch's, in float64: the rows of the table, and elements as small as they come."""

from __future__ import annotations

import numpy as np
import pytest

from dask_ferro.graph.autodiff.grad import EXPANSIONS, RULES, grad
from dask_ferro.graph.model.load import load
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.from_model import from_model
from dask_ferro.graph.tensor.tensor import asarray, emit, input
from tests.each import every
from tests.graph.tensor.runs import computed, values

from .against_torch import compare
from .gradient_cases import CASES, FLOAT, Case, normal
from .torch_ops import OPS, WITHOUT, by_torch

torch = pytest.importorskip("torch")

OF_THEIR_OWN = {
    "Cast": "test_a_cast_gives_what_pytorch_gives",
    "CastLike": "test_a_cast_gives_what_pytorch_gives",
    "Resize": "tests.graph.autodiff.test_resize",
    "SwiGLU": "tests.graph.autodiff.test_autodiff.test_swiglu_equals_its_parts",
}


def by_us(case: Case, weight: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    loaded = load(case.model())
    imported = from_model(loaded.model)
    y = imported.outputs["y0"]
    gradients = grad((y * asarray(weight, y.dtype)).sum(), imported.inputs)
    named = {f"d_{name}": g for name, g in gradients.items()}
    found = values(named, case.feeds(), list(imported.inputs.values()))
    slopes = {name.removeprefix("d_"): found[name] for name in named}
    return computed(loaded.model, case.feeds())["y0"], slopes


def agree(case: Case) -> None:
    shape = computed(load(case.model()).model, case.feeds())["y0"].shape
    weight = np.random.default_rng(3).standard_normal(shape)
    if case.declared == FLOAT:  # the weight is stored as the result is declared
        weight = weight.astype(np.float32).astype(np.float64)
    (y, got), (their_y, wanted) = by_us(case, weight), by_torch(torch, case, weight)
    np.testing.assert_allclose(y, their_y, rtol=1e-9, atol=1e-12 * np.abs(their_y).max())
    assert wanted.keys() == case.feeds().keys()
    for name, slopes in wanted.items():
        near = 1e-12 * np.abs(slopes).max()
        np.testing.assert_allclose(got[name], slopes, rtol=1e-6, atol=near, err_msg=name)


@every("name", [name for name in CASES if name not in WITHOUT])
def test_a_row_equals_pytorch(name):
    agree(CASES[name])


def test_every_op_with_a_gradient_is_compared():
    compared = {case.op for name, case in CASES.items() if name not in WITHOUT}
    assert compared | {"RotaryEmbedding"} | OF_THEIR_OWN.keys() == RULES.keys() | EXPANSIONS.keys()
    assert compared <= OPS.keys()


@pytest.mark.parametrize("op", ["Cast", "CastLike"])
def test_a_cast_gives_what_pytorch_gives(op):
    x, weight = normal(2, 3), normal(2, 3).astype(np.float32)
    t, like = input("x", (2, 3), np.float64), asarray(np.zeros(1, np.float32))
    if op == "Cast":
        y = emit("Cast", [t], t.shape, like.type.dtype, to=int(like.type.dtype))
    else:
        y = emit("CastLike", [t, like], t.shape, like.type.dtype)
    (got,) = values({"g": grad((y * weight).sum(), t)}, {"x": x}).values()
    theirs = torch.tensor(x, requires_grad=True)
    (theirs.float() * torch.tensor(weight)).sum().backward()
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, theirs.grad.numpy())


# ---- kinks -------------------------------------------------------------------------------------------------

INF = float("inf")
FAR = np.array([-1000.0, -30.0, 0.0, 30.0, 1000.0])

KINKS = {
    **{f"{op} far out": Case(op, (FAR,)) for op in ("Selu", "Softplus", "Mish", "Sigmoid", "Gelu", "Softsign")},
    **{f"{op} far out": Case(op, (FAR,)) for op in ("HardSwish", "Tanh")},
    "Elu far out": Case("Elu", (FAR,), {"alpha": 0.7}),
    "Celu far out": Case("Celu", (FAR,), {"alpha": 0.7}, declared=FLOAT),
    "Swish far out": Case("Swish", (FAR,), opset=24),
    "HardSigmoid at its ends and at infinity": Case("HardSigmoid", (np.array([-INF, -1.0, 0.0, 1.0, INF]),),
        {"alpha": 0.5, "beta": 0.5}),
    "ReduceL2 of zeros": Case("ReduceL2", (np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([1]))),
    "ReduceMax shared": Case("ReduceMax", (np.array([[1.0, 2.0, 2.0]]), np.array([1]))),
    "ReduceProd of zeros": Case("ReduceProd", (np.array([[0.0, 0.0, 2.0], [0.0, 3.0, 2.0]]), np.array([1]))),
    "CumProd of zeros": Case("CumProd", (np.array([0.0, 2.0, 0.0, 0.0, 3.0]), np.array(0)), opset=26),
    "Max shared by two": Case("Max", (np.array([1.0, 2.0]), np.array([1.0, 3.0]))),
    "Relu at 0": Case("Relu", (np.array([-0.0, 0.0]),)),
    "Clip on its bounds": Case("Clip", (np.array([-2.0, -1.0, 0.0, 1.0, 2.0]), np.array(-1.0), np.array(1.0))),
    "Clip by bounds that cross": Case("Clip", (np.array([-2.0, 0.0, 2.0]), np.array(1.0), np.array(-1.0))),
    "Clip by equal bounds": Case("Clip", (np.array([-2.0, 1.0, 2.0]), np.array(1.0), np.array(1.0))),
    "Pow of 0": Case("Pow", (np.array([0.0, 0.0, 2.0]), np.array([2.0, 0.0, 0.0]))),
    "Attention, a query that sees nothing": Case("Attention",
        (*(normal(1, 1, 3, 2) for _ in range(3)), np.array([[True, False, True], [False] * 3, [True] * 3]))),
}  # fmt: skip


@every("name", KINKS)
def test_a_kink_is_pytorchs(name):
    with np.errstate(all="ignore"):
        agree(KINKS[name])


ON_BOUNDS = np.array([-2.0, -1.0, 0.5, 1.0, 3.0])


@pytest.mark.parametrize(
    ("ours", "theirs", "arrays"),
    [
        pytest.param(lambda x: xp.clip(x, -1.0, 1.0), lambda x: torch.clamp(x, -1, 1), [ON_BOUNDS],
            id="clip on its bounds"),
        pytest.param(lambda x: xp.clip(x, max=1.0), lambda x: torch.clamp(x, max=1), [ON_BOUNDS],
            id="clip from above"),
        pytest.param(lambda x: xp.clip(x, -1.0), lambda x: torch.clamp(x, -1), [ON_BOUNDS], id="clip from below"),
        pytest.param(lambda x, a, b: xp.clip(x, a, b), lambda x, a, b: torch.clamp(x, a, b),
            [ON_BOUNDS, np.full(5, -1.0), np.array([1.0, 1.0, 1.0, 1.0, -3.0])],
            id="clip by tensors, which cross in one place"),
        pytest.param(lambda x: xp.std(x, axis=1), lambda x: torch.std(x, 1, correction=0),
            [np.array([[2.0, 2.0, 2.0], [1.0, 2.0, 4.0]])], id="a standard deviation of equal numbers"),
        pytest.param(lambda x: xp.where(x > 0, x, xp.exp(1000 * x)),
            lambda x: torch.where(x > 0, x, torch.exp(1000 * x)), [np.array([1.0, -0.001])],
            id="a branch not taken that overflows is NaN in both"),
    ],
)  # fmt: skip
def test_a_function_has_pytorchs_slopes(ours, theirs, arrays):
    compare(ours, theirs, tuple(arrays), rtol=1e-12)
