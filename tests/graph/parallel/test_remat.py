"""Rematerialization by region: the same bits, fewer live bytes, and what is computed again."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import dask_ferro as ff
from dask_ferro.errors import InputError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.ir.nodes import value_bytes
from dask_ferro.graph.ir.regions import BACKWARD, REMAT_KEY, region, region_of
from dask_ferro.graph.model.load import load
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.parallel.config import read_plan
from dask_ferro.graph.pipeline.stages import cut_stages
from dask_ferro.graph.tensor import nn, pytree
from dask_ferro.graph.tensor.emit import BuiltModel, build, to_model
from dask_ferro.graph.tensor.tensor import Tensor, emit, input
from tests.each import every
from tests.graph.pipeline.chunks import pieces
from tests.graph.pipeline.nets import Net, mlp, transformer
from tests.graph.pipeline.test_stages import run_chunks
from tests.graph.sharding.shard_run import assert_same, evaluate, evaluate_sharded
from tests.graph.tensor.runs import computed

REMAT = {"remat": True}
NETS: dict[str, tuple[Net, dict[str, Any]]] = {
    "layers": (mlp(6), {"layer*": REMAT}),
    "two layers of six": (mlp(6), {"layer1": REMAT, "layer4": REMAT}),
    "blocks of a transformer": (transformer(3), {"block*": REMAT}),
}


def trained(net: Net) -> BuiltModel:
    leaves = pytree.leaves(net.params)
    gradients = {f"g{i}": g for i, g in enumerate(grad(net.loss, leaves))}
    return build({"loss": net.loss, **gradients}, leaves)


def repeated(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if REMAT_KEY in node.metadata_props]


@pytest.mark.parametrize("name", NETS)
def test_results_have_the_same_bits(name):
    net, plan = NETS[name]
    built = trained(net)
    applied = apply_plan(built, plan)
    assert repeated(applied.model)
    feeds = {**built.bound, **net.batch(8)}
    whole, again = computed(built.model, feeds), computed(applied.model, feeds)
    for key, wanted in whole.items():
        np.testing.assert_array_equal(again[key], wanted, err_msg=key)
    # Loaded again, as it is sent to workers, and on one session.
    graph = ff.from_onnx(ir.to_proto(applied.model), granularity="model")
    for key, wanted in (
        ff.from_onnx(ir.to_proto(built.model), granularity="model")(feeds).compute(scheduler="sync").items()
    ):
        np.testing.assert_array_equal(graph(feeds).compute(scheduler="sync")[key], wanted, err_msg=key)


@every("chunks", [1, 2, 3])
@every("name", NETS)
def test_a_pipelines_chunks_keep_less_and_give_the_same_bits(name, chunks):
    net, plan = NETS[name]
    found = cut_stages({"loss": net.loss}, net.params, chunks=chunks)
    feeds = found.bound | net.batch(6)
    kept, results = [], []
    for model in (found.model, apply_plan(found.model, plan).model):
        loaded = load(ir.to_proto(model)).model
        cuts = pieces(loaded, chunks)
        types = infer(loaded, dims={"N": 64})
        kept.append(sum(value_bytes(types[value]) for cut in cuts for value in cut.forward.kept))
        results.append(run_chunks(loaded, cuts, feeds))
    assert kept[1] < kept[0]
    for key in ("loss", *found.grads):
        np.testing.assert_array_equal(results[1][key], results[0][key])


def blocks(rows: int | str = 8) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two blocks with dropout, in a region each."""
    x = input("x", (rows, 6), np.float64)
    w = {
        f"{i}{n}": input(f"{i}{n}", s, np.float64)
        for i in "ab"
        for n, s in (("up", (6, 8)), ("down", (8, 6)))
    }
    h = x
    for i in "ab":
        with region(i):
            h = h + nn.dropout(nn.gelu(h @ w[f"{i}up"]), 0.3, seed=1, layer=i) @ w[f"{i}down"]
    loss = (h * h).sum()
    return {"loss": loss, **{f"d_{n}": g for n, g in grad(loss, w).items()}}, w


def test_on_ranks_with_dropout():
    outputs, w = blocks()
    model = to_model(outputs)
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((8, 6))} | {n: rng.standard_normal(t.shape) for n, t in w.items()}
    plan = {
        "mesh": {"data": 2, "tensor": 2},
        "inputs": {"x": {"data": 0}},
        **{i: {"shard": {f"{i}up": {"tensor": 1}, f"{i}down": {"tensor": 0}}, **REMAT} for i in "ab"},
    }
    assert_same(evaluate_sharded(apply_plan(model, plan).spmd(), feeds), evaluate(ir.to_proto(model), feeds))


def test_what_is_computed_again():
    outputs, _ = blocks()
    applied = apply_plan(to_model(outputs), {"a": REMAT})
    made = repeated(applied.model)
    assert {region_of(node) for node in made} == {("a", BACKWARD)}
    assert all(applied.regions[node.name].name == "a" for node in made)
    # The result of the block is the next one's input, so the last product and sum are not needed again.
    repeats = [node.op_type for node in made]
    assert repeats.count("MatMul") == 1
    assert "Gelu" in repeats
    # Of the block's values, only its result lives from the forward to the backward.
    made_in_forward = [value for n in applied.model.graph if region_of(n) == ("a", "") for value in n.outputs]
    crossing = [v for v in made_in_forward if any(region_of(u).phase == BACKWARD for u in v.consumers())]
    assert len(crossing) == 1
    assert {region_of(user).path for user in crossing[0].consumers()} == {"b"}


def test_nothing_is_computed_again_without_a_backward_or_where_remat_is_off():
    x = input("x", (4, 4))
    with region("a"):
        y = nn.gelu(x) * 2.0
    model = to_model(y)
    assert len(list(apply_plan(model, {"a": REMAT}).model.graph)) == len(list(model.graph))
    outputs, _ = blocks()
    assert not repeated(apply_plan(to_model(outputs), {"a": {"remat": False}}).model)
    assert not repeated(
        apply_plan(to_model(outputs), {"*": REMAT, "a": {"remat": False}, "b": {"remat": False}}).model
    )


def test_random_nodes_are_refused():
    x = input("x", (4, 4))
    with region("a"):
        noise = emit("RandomNormalLike", [x], x.shape)
        y = nn.gelu(x + nn.stop_gradient(noise))
    model = to_model({"y": y, "g": grad(y.sum(), x)})
    with pytest.raises(InputError, match=re.escape("a.remat: 'a/RandomNormalLike_0' draws random numbers")):
        apply_plan(model, {"a": REMAT})


def test_nodes_without_a_signal_are_refused():
    x = input("x", (4, 4))
    y = nn.sigmoid(x)
    model = to_model({"y": y, "g": grad(y.sum(), x)})
    with pytest.raises(
        InputError, match=re.escape("'Sigmoid_0' has no region, so its backward nodes are not known")
    ):
        apply_plan(model, {"Sigmoid_*": REMAT})


def test_a_flag_that_is_none_is_refused():
    with pytest.raises(InputError, match=re.escape("a.remat: got 1, wanted true or false")):
        read_plan({"a": {"remat": 1}})
