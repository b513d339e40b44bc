"""Pipelines whose stages are groups of ranks: the bits of no pipeline, activations that stay, and what is refused."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import example, given, settings

import dask_ferro as ff
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.schedules import NAMES, usual_chunks
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.optim import SGD
from dask_ferro.graph.tensor.tensor import input
from dask_ferro.lower.ranks.parallel import parallelize
from dask_ferro.lower.ranks.sharded_array import join_parts
from dask_ferro.lower.ranks.spmd import Ranks
from tests.each import every
from tests.graph.pipeline.nets import mlp, tied
from tests.graph.pipeline.schedules import feasible
from tests.lower.ranks.runs import M, actions_of, check_activations, inner_tasks, killed_in_a_flow, same
from tests.pairs import all_pairs

LAYERS = 4
COLUMNS, ROWS = {"w*": 1, "b*": 0}, {"w*": 0}
BY_COLUMNS_AND_ROWS = {
    "mesh": {"tensor": 2},
    **{f"layer{i}": {"shard": ROWS if i % 2 else COLUMNS} for i in range(LAYERS)},
}
BY_BATCH = {"mesh": {"data": 2}, "inputs": {"x": 0, "t": 0}}
NETS = {"tensor": (mlp(LAYERS), BY_COLUMNS_AND_ROWS), "data": (tied(8), BY_BATCH)}


def in_stages(plan, stages):
    """A plan that says which layers are of which stage."""
    each = LAYERS // stages
    return {
        name: region if name in ("mesh", "inputs") else region | {"stage": int(name[-1]) // each}
        for name, region in plan.items()
    }


def without_stages(net, plan, batch, m=M):
    """Loss and gradients of the sharded graph: the mean over micro-batches on each rank, then joined."""
    leaves = pytree.leaves(net.params)
    gradients = {f"g{i}": g for i, g in enumerate(grad(net.loss, leaves))}
    model, bound = build({"loss": net.loss, **gradients}, leaves)
    rows = len(batch["x"]) // m
    follow = dict(zip(gradients, bound, strict=True))
    ranks = Ranks(apply_plan(model, plan).spmd(follow=follow, dims={"N": rows}))
    total = {}
    for i in range(m):
        own = {name: array[i * rows : (i + 1) * rows] for name, array in batch.items()}
        found = {name: parts_of(array) for name, array in ranks({**own, **bound}).items()}
        for name, parts in found.items():
            total[name] = [a + b for a, b in zip(total[name], parts, strict=True)] if i else parts
    ports = {port.name: port.layout for port in ranks.spmd.outputs}
    mean = {
        name: join_parts([part / m for part in parts], ports[name], ranks.spmd.mesh.sizes)
        for name, parts in total.items()
    }
    return mean["loss"], [mean[f"g{i}"] for i in range(len(leaves))]


def parts_of(array):
    return dask.get(dict(array.__dask_graph__()), list(array.keys))


@pytest.fixture(scope="module")
def reference():
    batches = {name: net.batch(4 * M) for name, (net, _) in NETS.items()}
    return {
        name: (net, plan, batches[name], without_stages(net, plan, batches[name]))
        for name, (net, plan) in NETS.items()
    }


# ---- the same numbers --------------------------------------------------------------------------------------


@every(("schedule", "name"), [*product(NAMES, ["tensor"]), *product(["interleaved", "zb-h1"], ["data"])])
def test_every_schedule_gives_the_bits_of_no_pipeline(reference, name, schedule):
    net, plan, batch, wanted = reference[name]
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=M, schedule=schedule, plan=plan)
    same(step(batch).compute(scheduler="sync"), wanted)


@settings(max_examples=3, deadline=None)
@given(feasible())
@example(Schedule.of([["0F0", "1F0", "1B0", "0B0"], ["2F0", "2B0"]]))  # a loss over what two chunks back made
def test_any_list_that_can_run_gives_the_bits_of_no_pipeline(schedule):
    net, plan = NETS["data"]
    batch = net.batch(2 * schedule.micro_batches)
    wanted = without_stages(net, plan, batch, schedule.micro_batches)
    step = parallelize(net.loss, params=net.params, schedule=schedule, plan=plan)
    same(step(batch).compute(scheduler="sync"), wanted)


def test_the_stages_of_a_plan_are_the_chunks(reference):
    net, plan, batch, wanted = reference["tensor"]
    step = parallelize(net.loss, params=net.params, micro_batches=M, plan=in_stages(plan, 2))
    assert step.schedule.chunks == 2
    run = step(batch)
    same(run.compute(scheduler="threads"), wanted)
    regions = {
        (about[2], about[0].split()[0][:6]) for about in annotations(run) if about[0].startswith("layer")
    }
    assert regions == {(0, "layer0"), (0, "layer1"), (1, "layer2"), (1, "layer3")}


def layer_of(run):
    graph, top, _ = run.loss.tasks.written()
    return graph.layers[top]


def annotations(run):
    about = layer_of(run).annotations["ferro_about"]
    return [found for key in actions_of(run) if (found := about(key)) is not None]


def test_losses_are_summed_if_asked_and_dask_arrays_are_cut(reference):
    net, plan, batch, (loss, grads) = reference["tensor"]
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=M, plan=plan, reduction="sum")
    lazy = {name: da.from_array(array, chunks=5) for name, array in batch.items()}
    same(
        step(lazy).compute(scheduler="sync"), (M * loss, [M * g for g in grads])
    )  # exact: M is a power of two


def flat(gradients):
    return [layer[kind] for layer in gradients for kind in "wb"]


# ---- order and memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "stages", "ranks"), all_pairs(NAMES, [2, 3], [1, 2]))
def test_activations_live_as_long_as_the_table_says(schedule, stages, ranks):
    count, m = 2 * stages, 2 * stages
    net = mlp(count)
    plan = BY_COLUMNS_AND_ROWS if ranks == 2 else {"mesh": {"tensor": 1}}
    plan = plan | {f"layer{i}": plan[f"layer{i % 2}"] for i in range(count) if ranks == 2}
    chunks = count if usual_chunks(schedule) == 2 else stages
    each = count // chunks
    regions = [[f"layer{each * c + i}" for i in range(each)] for c in range(chunks)]
    step = parallelize(
        net.loss, params=net.params, stages=regions, micro_batches=m, schedule=schedule, plan=plan
    )
    check_activations(step(net.batch(2 * m)), step.schedule, ranks)


@pytest.mark.parametrize("mib", [1 / 32, 8])
def test_a_large_parameter_is_in_the_graph_once(mib):
    """Without a client, too: one that is made later computes the graph."""
    net = mlp(2, width=int((mib * 2**20 / 8 / 2) ** 0.5))
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=M, plan={"mesh": {"tensor": 1}})
    layer = layer_of(step(net.batch(M)))
    sent = sum(len(pickle.dumps(task)) for task in layer.mapping.values())
    assert (sent > 2 * mib * 2**20) == (mib < 2)


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"stages": None, "plan": {"layer0": {"stage": 1}}},
            r"its regions have stages \[1\], wanted 0, 1, ...", id="stages that do not begin with 0"),
        pytest.param({"net": "data", "stages": None, "plan": {"*": {"stage": 0}}},
            "line 1: .*its node .* has no region, and a pipeline is cut by regions", id="a stage without a region"),
        pytest.param({"optimizer": SGD(input("t", (), np.float64))}, r"argument \['t'\], which carries the batch",
            id="an optimizer that reads what comes in micro-batches"),
        pytest.param({"plan": {"layer9": {"stage": 0}}}, "the graph has no such region", id="no such region"),
        pytest.param({"stages": None,
            "plan": in_stages(BY_COLUMNS_AND_ROWS, 2) | {"layer0": {"stage": 0, "workers": [0, 1]}}},
            r"workers of stages \[0\], wanted all 2 of them", id="workers of one stage"),
    ],
)  # fmt: skip
def test_plans_that_a_pipeline_cannot_have(options, said):
    net, plan = NETS[options.get("net", "tensor")]
    options = {name: option for name, option in options.items() if name != "net"}
    with pytest.raises(ff.InputError, match=said):
        parallelize(
            net.loss, **{"params": net.params, "stages": 2, "micro_batches": M, "plan": plan, **options}
        )(net.batch(M))


def test_a_batch_in_shards_is_refused(reference):
    net, plan, batch, _ = reference["tensor"]
    step = parallelize(net.loss, params=net.params, stages=2, micro_batches=M, plan=plan)
    ranks = Ranks.of(apply_plan({"t": input("a", (16, 6), np.float64) + 0.0}, {"mesh": {"tensor": 2}}))
    with pytest.raises(ff.InputError, match="input 't' carries the batch and has no rows to cut"):
        step({**batch, "t": ranks({"a": batch["t"]})["t"]})


# ---- on workers --------------------------------------------------------------------------------------------


def on(plan, *workers):
    """A plan in stages that numbers the workers of each."""
    return {
        name: region if name == "mesh" else region | {"workers": workers[region["stage"]]}
        for name, region in in_stages(plan, len(workers)).items()
    }


@pytest.mark.cluster
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_ranks_of_stages_run_on_their_workers(four, reference, schedule):
    net, plan, batch, wanted = reference["tensor"]
    groups = [0, 1], [3, 2]
    step = parallelize(
        net.loss, params=net.params, micro_batches=M, schedule=schedule, plan=on(plan, *groups)
    )
    run = step(batch)
    ran, value = inner_tasks(four, run.compute)
    actions = actions_of(run)
    same(value, wanted)
    known = four.scheduler_info(n_workers=-1)["workers"]
    for address, keys in ran.items():
        assert keys
        for action, rank in map(actions.__getitem__, keys):
            assert known[address]["name"] == groups[step.schedule.stage_of[action.chunk]][rank]


@pytest.mark.cluster
def test_a_worker_that_is_killed_in_the_middle_of_a_step_changes_nothing(four):
    net, m = mlp(LAYERS, width=64), 24
    step = parallelize(net.loss, params=net.params, micro_batches=m, plan=in_stages(BY_COLUMNS_AND_ROWS, 2))
    run = step(net.batch(4 * m, seed=7))
    wanted = run.compute(scheduler="sync")
    with ThreadPoolExecutor(1) as pool:
        result = killed_in_a_flow(four, lambda: pool.submit(run.compute, scheduler=four))
        loss, grads = result.result(timeout=60)
    np.testing.assert_array_equal(loss, wanted[0])
    for got, value in zip(flat(grads), flat(wanted[1]), strict=True):
        np.testing.assert_array_equal(got, value)
