"""Optimizers as graphs: each step's numbers are PyTorch's, trees of parameters, and a loop that learns."""

from __future__ import annotations

import re
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.optim import SGD, Adam, AdamW
from dask_ferro.graph.tensor.tensor import Tensor, asarray, input
from tests.each import every

from .runs import by_reference, computed, values

W = np.array([1.0, -2.0, 3.0])
GRADIENTS = [np.array([0.5, 1.0, -1.0]), np.array([-0.25, 0.5, 2.0]), np.array([1.0, 0.0, 0.5])]


def steps(optimizer, count: int = 3) -> list[np.ndarray]:
    """The parameter after each step: one model, whose outputs are its next inputs."""
    w, g = asarray(W, name="w"), input("g", (3,), np.float64)
    state = optimizer.init(w)
    after, new_state = optimizer.step(w, g, state)
    before, behind = (
        [w, *pytree.leaves(list(state.values()))],
        [after, *pytree.leaves(list(new_state.values()))],
    )
    model, bound = build({f"out_{i}": t for i, t in enumerate(behind)}, before)
    names = [str(v.name) for v in model.graph.inputs]
    feeds, found = dict(bound), []
    for gradient in GRADIENTS[:count]:
        outputs = list(computed(model, feeds | {"g": gradient}).values())
        feeds = dict(zip(names, outputs, strict=False))
        found.append(outputs[0])
    return found


@every(
    "call",
    [
        "SGD(0.1)", "SGD(0.1, momentum=0.9)", "SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01)",
        "SGD(0.1, weight_decay=0.01)", "Adam()", "Adam(0.05, betas=(0.8, 0.99), eps=1e-3)",
        "Adam(0.1, weight_decay=0.1)",
        "AdamW()", "AdamW(0.1)", "AdamW(0.1, weight_decay=0.1)",
    ],
)  # fmt: skip
def test_steps_are_pytorchs(call):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    w, wanted = torch.tensor(W, requires_grad=True), []
    name, _, options = call.partition("(")
    theirs = eval(f"{name}([w], {options}", {"w": w, name: getattr(torch.optim, name)})
    for g in GRADIENTS:
        w.grad = torch.tensor(g)
        theirs.step()
        wanted.append(w.detach().numpy().copy())
    np.testing.assert_allclose(steps(eval(call)), wanted, rtol=1e-12)


def test_a_rate_may_be_a_tensor():
    rate, w, g = input("rate", ()), input("w", (3,), np.float64), input("g", (3,), np.float64)
    after, _ = SGD(rate).step(w, g, {})
    model = build(after).model
    found = computed(model, {"rate": np.float32(0.5), "w": W, "g": GRADIENTS[0]})
    assert np.array_equal(found["y"], W - 0.5 * GRADIENTS[0])


def test_parameters_are_trees_of_any_form():
    params = {"layers": [{"w": input("w", (2, 3)), "b": input("b", (3,))}], "scale": input("s", ())}
    optimizer = Adam(0.1)
    state = optimizer.init(params)
    after, state = optimizer.step(params, params, state)
    assert [t.shape for t in pytree.leaves(after)] == [(2, 3), (3,), ()]
    assert set(after) == {"layers", "scale"}
    assert set(state) == {"step", "mean", "square"}
    assert state["mean"]["layers"][0]["w"].shape == (2, 3)


@every("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@every("scale", [1.0, 1e-3], ids=["gradients of 1", "gradients whose squares are no float16"])
@every("optimizer", [Adam(0.1), AdamW(0.1, weight_decay=0.1)], ids=["Adam", "AdamW"])
def test_adam_of_half_precision_differs_by_the_last_rounding_alone(optimizer, scale, dtype):
    w, g = asarray(W.astype(dtype), name="w"), input("g", (3,), dtype)
    state = optimizer.init(w)
    after, new = optimizer.step(w, g, state)
    kinds = [t.dtype.name for t in (after, new["step"], new["mean"], new["square"])]
    assert kinds == [np.dtype(dtype).name, "float32", "float32", "float32"]
    names = ["w", "step", "mean", "square"]
    outputs = {f"new {name}": t for name, t in zip(names, [after, *new.values()], strict=True)}
    model, feeds = build(outputs, [w, *state.values()])
    half, m, v = W.astype(dtype), np.zeros(3), np.zeros(3)
    for t, gradient in enumerate(GRADIENTS, 1):
        given = (scale * gradient).astype(dtype)
        found = by_reference(model, feeds | {"g": given})
        feeds = dict(zip(feeds, found.values(), strict=True))
        wide = given.astype(float)
        m, v = 0.9 * m + 0.1 * wide, 0.999 * v + 0.001 * wide**2
        direction = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        moved = half.astype(float) * (1 - 0.1 * optimizer.weight_decay) - 0.1 * direction
        half = found["new w"]
        np.testing.assert_allclose(half.astype(float), moved, rtol=float(ml_dtypes.finfo(dtype).eps))
        np.testing.assert_allclose(found["new square"], v, rtol=1e-5)


class Layer(NamedTuple):
    w: Tensor
    b: Tensor


def test_trees_are_paired_by_key_and_keep_their_form():
    w, b = asarray(np.ones((3, 3))), asarray(np.ones(3))
    gw, gb = asarray(np.full((3, 3), 2.0)), asarray(np.full(3, 5.0))
    after, _ = SGD(1.0).step({"w": w, "b": b}, {"b": gb, "w": gw}, {})
    found = values(after)
    assert found["w"].tolist() == [[-1.0] * 3] * 3
    assert found["b"].tolist() == [-4.0] * 3
    optimizer = Adam(0.1)
    params = Layer(w, b), (w, [b])
    pair, state = optimizer.step(params, params, optimizer.init(params))
    assert [type(part) for part in (pair, pair[0], pair[1], pair[1][1])] == [tuple, Layer, tuple, list]
    assert state["mean"][0].b.shape == (3,)


@every(
    ("call", "said"),
    [
        pytest.param(lambda: SGD(-1), "lr: got -1, wanted a number of at least 0", id="a learning rate below 0"),
        pytest.param(lambda: SGD(0.1, momentum=1.0), "momentum: ", id="momentum that stays"),
        pytest.param(lambda: SGD(0.1, nesterov=True), "nesterov without momentum", id="nothing to look ahead by"),
        pytest.param(lambda: Adam(betas=(0.9, 1.0)), "betas: ", id="a beta of 1"),
        pytest.param(lambda: Adam(weight_decay=-0.1), "weight_decay: ", id="decay below 0"),
        pytest.param(lambda: Adam().init(input("w", ("N",))), "unknown size", id="a parameter of unknown size"),
        pytest.param(lambda: SGD(0.1).step([input("w", (2,))], [], {}),
            "1 and 0 tensors do not match: [0] is only in one of them", id="gradients that are missing"),
        pytest.param(lambda: SGD(0.1).step({"w": input("w", (2,))}, {"v": input("v", (2,))}, {}),
            "['w'], ['v'] is only in one of them", id="gradients of other names"),
        pytest.param(lambda: SGD(0.1).step({"w": input("w", (2, 3))}, {"w": input("g", (3,))}, {}),
            "grads ['w']: got (3,), wanted (2, 3)", id="a gradient that would broadcast"),
        pytest.param(lambda: Adam().step(input("w", (2,)), input("g", (2,)), Adam().init(input("v", (1,)))),
            "mean the only tensor: got (1,), wanted (2,)", id="the state of another parameter"),
        pytest.param(lambda: SGD(0.1, momentum=0.9).step(input("w", (2,)), input("g", (2,)), {}),
            "SGD: state: got [], without ['velocity']; begin with state = optimizer.init(params)",
            id="no velocity to begin with"),
        pytest.param(lambda: Adam().step(input("w", (2,)), input("g", (2,)), {"step": asarray(0.0)}),
            "Adam: state: got ['step'], without ['mean', 'square']", id="half a state"),
        pytest.param(lambda: Adam(eps=-1), "eps: got -1, wanted a number of at least 0", id="eps below 0"),
        pytest.param(lambda: Adam(betas=(0.9, 0.99, 0.999)), "betas: got (0.9, 0.99, 0.999), wanted two",
            id="three betas"),
    ],
)  # fmt: skip
def test_is_refused(call, said):
    with pytest.raises(InputError, match=re.escape(said)):
        call()
