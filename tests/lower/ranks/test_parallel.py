"""`parallelize`: each pair of optimizer, plan, stages and micro-batches gives the numbers of one process."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.optim import SGD
from tests.graph.pipeline.nets import mlp
from tests.graphs import mlp as onnx_mlp
from tests.graphs import mlp_reference
from tests.lower.ranks.runs import M, leaves, trained
from tests.pairs import all_pairs

LAYERS = 4
SHARDS = {
    "mesh": {"tensor": 2},
    **{f"layer{i}": {"shard": {"w*": 0} if i % 2 else {"w*": 1, "b*": 0}} for i in range(LAYERS)},
}
STAGES = {n: p if n == "mesh" else {**p, "stage": int(n[-1]) // 2} for n, p in SHARDS.items()}
PLANS = {
    "no plan": None,
    "shards": SHARDS,
    "stages": {n: {"stage": p["stage"]} for n, p in STAGES.items() if n != "mesh"},
    "both": STAGES,
    "off": SHARDS | {"enabled": False},
}


@pytest.fixture(scope="module")
def reference():
    """A network, a batch, and the loss and parameters after a step of gradient descent in one process."""
    net = mlp(LAYERS, width=16)
    batch = net.batch(2 * M)
    [(loss, after, _)] = trained(net, SGD(0.1), [batch])
    return net, batch, loss, after


@pytest.mark.parametrize(
    ("plan", "micro_batches", "optimizer"), all_pairs(list(PLANS), [None, 1, M], [None, SGD(0.1)])
)
def test_a_step(reference, plan, micro_batches, optimizer):
    net, batch, loss, after = reference
    step = ff.parallelize(net.loss, PLANS[plan], net.params, optimizer=optimizer, micro_batches=micro_batches)
    found, then, *_ = step(batch).compute(scheduler="sync")
    np.testing.assert_allclose(found, loss, rtol=1e-10)
    before = build({"loss": net.loss}, ff_leaves(net.params)).bound.values()
    for [got], start, wanted in zip(leaves(then), before, after, strict=True):
        np.testing.assert_allclose(got if optimizer else start - 0.1 * got, wanted, rtol=1e-8, atol=1e-11)


def ff_leaves(tree):
    return [leaf for part in tree for leaf in part.values()]


def test_a_model_of_a_file(tmp_path):
    ir.save(ir.from_proto(onnx_mlp()), tmp_path / "mlp.onnx")
    x = np.random.default_rng(0).standard_normal((8, 6), dtype=np.float32)
    found = ff.parallelize(tmp_path / "mlp.onnx")(x)
    np.testing.assert_allclose(found.compute(scheduler="sync"), mlp_reference(x), rtol=1e-5)


def test_gradients_without_parameters_are_refused():
    w = ft.asarray(np.ones((6, 1), np.float32), name="w")
    lost = (ft.input("x", ("N", 6)) @ w).sum()
    with pytest.raises(ff.InputError, match="has only forwards, and an output is a gradient; pass the loss"):
        ff.parallelize({"g": ft.grad(lost, w)})(np.ones((4, 6), np.float32)).compute()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param({"plan": {"layer9": {"stage": 0}}}, "no such region", id="a region that is not there"),
        pytest.param({"optimizer": SGD(0.1)}, "there are no parameters", id="an optimizer of nothing"),
        pytest.param({"schedule": "2f2b"}, "wanted one of gpipe", id="no such schedule"),
        pytest.param({"plan": "missing.yaml"}, "missing.yaml", id="a plan that is not there"),
    ],
)
def test_what_does_not_go_together_is_refused(how, said):
    net = mlp(LAYERS)
    with pytest.raises(ff.InputError, match=said):
        ff.parallelize({"y": net.loss}, **how)
