"""Sequence parallel regions: collectives of a transformer, counted, and its numbers; and what a plan cannot ask for.

layers  x  ranks  x  {tensor, data x tensor}  x  {kept, computed again}
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import onnx_ir as ir
import pytest

from dask_ferro.errors import InputError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.tensor.emit import build
from tests.each import every
from tests.graph.parallel.transformer import (
    NORMS,
    REGIONS,
    SHAPES,
    WITHOUT,
    batch_of,
    transformer,
)
from tests.graph.sharding.shard_run import evaluate, evaluate_sharded

ROWS = 4
DATA = {"inputs": {"x": {"data": 0}, "t": {"data": 0}}}
REMAT = {name: {**region, "remat": name != "loss"} for name, region in REGIONS.items()}


@cache
def trained(layers, half=None):
    """The graph of loss and gradients, and its inputs."""
    dtype = np.float64 if half is None else np.float32
    net = transformer(layers, dtype, half=half)
    outputs = {"loss": net.loss, **{f"d_{n}": g for n, g in grad(net.loss, net.params).items()}}
    built = build(outputs, list(net.params.values()))
    feeds = {**batch_of(ROWS, dtype), **built.bound}
    return built.model, feeds


def follow(layers):
    return {f"d_{name}{i}": f"{name}{i}" for i in range(layers) for name in SHAPES}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_layer_has_two_reduce_scatters_and_two_all_gathers_forward(layers, ranks):
    """And no all-reduce; the result stays in shards."""
    plan = {"mesh": {"tensor": ranks}, **REGIONS}
    sharding = apply_plan({"loss": transformer(layers).loss}, plan).shard(dims={"N": ROWS})
    assert sharding.collectives == {"ReduceScatter": 2 * layers, "AllGather": 2 * layers, "AllReduce": 1}
    reduced = [move.value.name for move in sharding.moves if move.steps[0].kind == "AllReduce"]
    assert reduced == ["loss"]
    tensor = {name: region for name, region in plan.items() if name == "mesh"} | WITHOUT
    plain = apply_plan({"loss": transformer(layers).loss}, tensor).shard(dims={"N": ROWS})
    assert plain.collectives == {"AllReduce": 2 * layers}
    # As many bytes: a ring all-reduce is a reduce-scatter and an all-gather.
    assert sharding.bytes - plain.bytes == pytest.approx(loss_bytes(ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_without_it_has_two_all_reduces_forward_and_two_backward(ranks):
    """And gradients lie as their weights do, without being asked to."""
    model, feeds = trained(1)
    applied = apply_plan(model, {"mesh": {"tensor": ranks}, **WITHOUT})
    assert applied.shard(dims={"N": ROWS}).collectives == {"AllReduce": 4}
    spmd = applied.spmd(dims={"N": ROWS})
    lies = {port.name: port.layout for port in (*spmd.inputs, *spmd.outputs)}
    assert {name: lies[f"d_{name}0"] for name in SHAPES} == {name: lies[f"{name}0"] for name in SHAPES}
    found = evaluate_sharded(spmd, feeds)
    for name, value in evaluate(ir.to_proto(model), feeds).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-11, err_msg=name)


def loss_bytes(ranks):
    return 2 * 8 * (ranks - 1) / ranks


@every("regions", [REGIONS, REMAT], ids=["kept", "computed again"])
@every(
    ("mesh", "layers"),
    [({"tensor": 2}, 1), ({"tensor": 2}, 2), ({"tensor": 4}, 1), ({"data": 2, "tensor": 2}, 1)],
)
def test_backward_has_as_many_and_gives_the_gradients_of_one_process(mesh, layers, regions):
    model, feeds = trained(layers)
    plan = {"mesh": mesh, **(DATA if "data" in mesh else {}), **regions}
    applied = apply_plan(model, plan)
    sharding = applied.shard(follow=follow(layers), dims={"N": ROWS})
    assert sharding.collectives["AllGather"] == 4 * layers
    assert sharding.collectives["ReduceScatter"] == 4 * layers
    # The loss, and gradients: over the data all of them, and over the sequence those of the norms, at once.
    reduced = SHAPES if "data" in mesh else NORMS
    assert sharding.collectives["AllReduce"] == 1 + len(reduced) * layers
    found = evaluate_sharded(applied.spmd(follow=follow(layers), dims={"N": ROWS}), feeds)
    for name, value in evaluate(ir.to_proto(model), feeds).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-11, err_msg=name)


def test_gradients_of_norms_may_be_left_in_terms():
    model, _ = trained(1)
    sharding = apply_plan(model, {"mesh": {"tensor": 2}, **REGIONS}).shard(
        follow=follow(1), dims={"N": ROWS}, terms=["loss", *follow(1)]
    )
    assert sharding.collectives == {"AllGather": 4, "ReduceScatter": 4}


@pytest.mark.parametrize("half", [np.float16, "bfloat16"])
def test_half_precision_is_sent_in_halves(half):
    model, _ = trained(1, half)
    sharding = apply_plan(model, {"mesh": {"tensor": 2}, **REGIONS}).shard(follow=follow(1), dims={"N": ROWS})
    moved = Counter((step.kind, move.value.dtype.itemsize) for move in sharding.moves for step in move.steps)
    assert moved["AllGather", 2] == moved["ReduceScatter", 2] == 4
    assert moved["AllGather", 4] == moved["ReduceScatter", 4] == 0


MISFITS = [
    ("layer0: {sequence: {tensor: 3}}", "line 1: layer0.sequence: no float value .* a dimension 3"),
    ("layer0/norm1: {sequence: {tensor: 2}}", "no float value .* dimension 2 with features behind"),
    ("layer0:\n  sequence: {tensor: -2}", "line 2: layer0.sequence: got -2, wanted .* from the front"),
    ("layer0: {sequence: {model: 1}}", "no axis 'model'; the mesh has tensor"),
    ("layer0: {sequence: yes}", "layer0.sequence: got True, wanted a dimension"),
    (
        "layer0:\n  sequence: 1\nmesh: {tensor: 9}",
        "line 2: .* 8 in dimension 1, which the 9 ranks of 'tensor' do not divide; pad it",
    ),
    (
        "layer0:\n  sequence: {data: 1, tensor: 1}\nmesh: {data: 4, tensor: 3}",
        "line 2: .* 8 in dimension 1, which the 12 ranks of 'data' and 'tensor' do not divide",
    ),
    ("layer0/norm1: {sequences: 1}", "did you mean sequence"),
]


@pytest.mark.parametrize(("text", "says"), MISFITS)
def test_what_cannot_be_split_is_named_by_line_and_key(tmp_path, text, says):
    path = tmp_path / "plan.yaml"
    path.write_text(text if "mesh" in text else f"{text}\nmesh: {{tensor: 2}}\n")
    with pytest.raises(InputError, match=says) as error:
        apply_plan({"loss": transformer(1).loss}, path)
    assert "plan.yaml" in str(error.value)
