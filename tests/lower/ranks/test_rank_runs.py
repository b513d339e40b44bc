"""Training steps of a pipeline by a plan: Dask collections, whose parameters and state stay on their ranks."""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import cache, partial

import dask
import numpy as np
import pytest
from dask.base import tokenize
from distributed import futures_of, wait

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.graph.ir.regions import region as region
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.pipeline.schedules import NAMES, usual_chunks
from dask_ferro.graph.sharding.placements import Partial
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.optim import SGD, Adam
from dask_ferro.graph.tensor.tensor import asarray, input
from dask_ferro.lower.ranks.parallel import parallelize
from dask_ferro.lower.ranks.spmd import Ranks
from dask_ferro.lower.tensor import compute
from tests.each import every
from tests.graph.pipeline.nets import mlp
from tests.lower.ranks.runs import M, alike, flat, workers_of
from tests.waiting import WHOLE_S, until

LAYERS, STAGES = 4, [["layer0", "layer1"], ["layer2", "layer3"]]
PLAN = {
    "mesh": {"tensor": 2},
    **{f"layer{i}": {"shard": {"w*": 0} if i % 2 else {"w*": 1, "b*": 0}} for i in range(LAYERS)},
}


class Clipped:
    """Gradient descent with momentum; a step is as long as the rate at most."""

    def init(self, params):
        return SGD(0.1, momentum=0.9).init(params)

    def step(self, params, grads, state):
        norm = ft.sqrt(sum((g * g).sum() for g in pytree.leaves(grads)))
        return SGD(0.1, momentum=0.9).step(params, pytree.map_leaves(lambda g: g / norm, grads), state)


def training(optimizer=None, width=16, plan=PLAN):
    net = mlp(LAYERS, width=width)
    return net, parallelize(
        net.loss, params=net.params, stages=STAGES, micro_batches=M, plan=plan, optimizer=optimizer
    )


def steps(step, batches, **how):
    """Yield the result of each step, from which the next step begins."""
    now = {}
    for batch in batches:
        found = step(batch, **now).compute(**how)
        yield found
        now = {"params": found.params, "state": found.state}


# ---- a collection ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [None, Adam(0.01)], ids=["gradients", "optimizer"])
def test_a_run_is_a_collection(optimizer):
    net, step = training(optimizer)
    one, two = (step(net.batch(2 * M, seed)) for seed in (1, 2))
    wanted = [run.compute(scheduler="sync") for run in (one, two)]
    assert dask.is_dask_collection(one)
    found = dask.compute(one, {"two": two}, one.loss, scheduler="sync")
    alike(found[0], wanted[0])
    alike(found[1]["two"], wanted[1])
    assert found[2] == wanted[0][0]
    held = one.persist(scheduler="sync")
    assert type(held) is type(one)
    assert len(held.__dask_graph__()) < len(one.__dask_graph__()) / 4
    alike(held.compute(scheduler="sync"), wanted[0])
    alike(dask.delayed(tuple)(held).compute(scheduler="sync"), tuple(wanted[0]))


def test_tokens_and_keys_are_the_calls_own():
    """Keys of an equal call may be on their way out of the scheduler, which would then miss them in the new call."""
    net, step = training(Adam(0.01))
    batch = net.batch(2 * M)
    run, other = step(batch), step(batch)
    assert tokenize(run) == tokenize(run) == tokenize(run.persist(scheduler="sync")) != tokenize(other)
    assert set(run.__dask_graph__()).isdisjoint(other.__dask_graph__())


SPLIT = {
    "zb-h1",
    "zb-v",
    "dualpipe-v",
}  # schedules with I and W, for some micro-batches or all


@every("schedule", NAMES)
def test_an_action_of_one_rank_is_one_task(schedule):
    """It has nothing to exchange, so there is nothing for which a part of it could begin sooner."""
    step = scheduled(schedule, {"mesh": {"tensor": 1}})
    chunks = range(step.schedule.chunks)
    tasks = Counter(segment.site.action for segment in step.graphs(2).step.pieces.segments)
    backwards = {f"{c}{k}" for c in chunks for k in "IW"} - {"0I"}
    whole = {f"{c}B" for c in chunks}
    assert set(tasks) == {f"{c}F" for c in chunks} | (backwards if schedule in SPLIT else whole)
    assert set(tasks.values()) == {1}


@every("schedule", NAMES)
def test_a_mesh_of_one_rank_has_the_tasks_of_no_mesh(schedule):
    net = mlp(LAYERS)
    tasks = []
    for plan in ({"mesh": {"tensor": 1}}, None):
        run = scheduled(schedule, plan)(net.batch(2 * M))
        tasks.append(Counter(key[0].rpartition("-")[0] for key in run.__dask_graph__().to_dict()))
        # A plan may have another value that a backward reads.
        del tasks[-1]["spmd-value"]
    assert tasks[0] == tasks[1]


def scheduled(schedule, plan):
    net = mlp(LAYERS)
    chunks = STAGES if usual_chunks(schedule) == 1 else [[f"layer{i}"] for i in range(LAYERS)]
    return parallelize(
        net.loss, params=net.params, stages=chunks, micro_batches=M, schedule=schedule, plan=plan
    )


@every("schedule", [n for n in NAMES if n != "zb-v"])
@every("plan", [None, PLAN], ids=["no plan", "plan"])
def test_forwards_alone_give_the_outputs_of_the_model(schedule, plan):
    x = input("x", ("N", 6), np.float64)
    h = x
    for i in range(LAYERS):
        with region(f"layer{i}"):
            rng = np.random.default_rng(i)
            w, b = (
                asarray(rng.standard_normal(shape), name=f"{n}{i}")
                for n, shape in (("w", (6, 6)), ("b", (6,)))
            )
            h = ft.tanh(h @ w + b)
    chunks = STAGES if usual_chunks(schedule) == 1 else [[f"layer{i}"] for i in range(LAYERS)]
    step = parallelize({"h": h, "s": h.sum()}, stages=chunks, micro_batches=M, schedule=schedule, plan=plan)
    batch = np.random.default_rng(9).standard_normal((2 * M, 6))
    run = step(batch)
    found = run.compute(scheduler="sync")
    wanted = compute({"h": h}, {"x": batch}, scheduler="sync")["h"]
    np.testing.assert_allclose(found["h"], wanted, rtol=1e-12)
    np.testing.assert_allclose(found["s"], wanted.reshape(M, -1).sum(1), rtol=1e-12)
    kept = run.persist(scheduler="sync")
    assert tokenize(kept) == tokenize(run)
    alike(kept.compute(scheduler="sync"), found)
    alike(dask.compute(run, scheduler="sync")[0], found)


# ---- optimizers --------------------------------------------------------------------------------------------


def test_an_optimizer_that_wants_all_gradients_moves_none_of_them():
    """A norm is summed where each gradient is; other stages read only its terms, which are numbers."""
    net, step = training(Clipped())
    _, plain = training(Clipped(), plan=None)
    batches = [net.batch(2 * M, seed) for seed in range(2)]
    for found, wanted in zip(
        steps(step, batches, scheduler="sync"), steps(plain, batches, scheduler="sync"), strict=True
    ):
        for got, value in zip(flat(found), flat(wanted), strict=True):
            np.testing.assert_allclose(got, value, rtol=1e-10, atol=1e-12)
    update = step.graphs(2).end
    made = {name: s.site for s in update.pieces.segments for name in s.outputs}
    crossing = [
        name for s in update.pieces.segments for name in s.inputs if name in made and made[name] != s.site
    ]
    sizes = {v.name: v.shape for node in update.spmd.model.graph for v in node.outputs}
    assert crossing
    assert {tuple(sizes[name]) for name in crossing} == {()}


def test_state_lies_as_its_parameter_does():
    _, step = training(Adam(0.01))
    net = mlp(LAYERS, width=16)
    run = step(net.batch(2 * M))
    layouts = [array.port.layout for array in flat(run.params)]
    assert any(text != layouts[0] for text in layouts)
    for kind in ("mean", "square"):
        assert [array.port.layout for array in flat(run.state[kind])] == layouts
    # Gradients are read in terms of the ranks where they have no parts.
    read = {port.name: port.layout for port in step.graphs(2).end.spmd.inputs}
    for i, layout in enumerate(layouts):
        own = read[f"gradient_{i}"]
        assert all(p in (wanted, Partial()) for p, wanted in zip(own, layout, strict=True))


def test_what_does_not_fit_a_step_is_refused():
    net, step = training(SGD(0.1, momentum=0.9))
    batch, run = net.batch(2 * M), step(net.batch(2 * M))
    elsewhere = Ranks.of(apply_plan({"y": input("a", (16, 16), np.float64) + 0.0}, {"mesh": {"tensor": 2}}))
    [split] = elsewhere({"a": np.zeros((16, 16))}).values()
    wrong = {"velocity": [{**part, "w": split} for part in run.state["velocity"]]}
    with pytest.raises(ff.InputError, match=r"input 'optimizer\.0': wanted .* got"):
        step(batch, state=wrong)
    with pytest.raises(ff.InputError, match="state: got a list of 0, wanted a dict of velocity"):
        step(batch, state=[])
    with pytest.raises(ff.InputError, match="state: the pipeline has no optimizer"):
        training()[1](batch, state={})
    with pytest.raises(ff.InputError, match="submit: it has no optimizer"):
        training()[1](batch).submit()
    with pytest.raises(ff.InputError, match="submit: there is no distributed client"):
        run.submit()


# ---- on workers --------------------------------------------------------------------------------------------


@cache
def walk(optimizer, plan, count):
    """A training, its batches, and what its steps give in this process."""
    rule = {"Adam": Adam(0.01), "momentum": SGD(0.1, momentum=0.9)}[optimizer]
    net, step = training(rule, plan=PLAN if plan == "plan" else None)
    batches = [net.batch(2 * M, seed) for seed in range(count)]
    return step, batches, list(steps(step, batches, scheduler="sync"))


@pytest.mark.cluster
@pytest.mark.parametrize("embedded", [8 << 20, 0], ids=["inputs inside tasks", "inputs that are tasks"])
def test_parameters_and_state_stay_on_their_ranks(four, monkeypatch, embedded):
    step, batches, (first, *_, wanted) = walk("Adam", "plan", 3)
    monkeypatch.setattr("dask_ferro.lower.ranks.spmd_tasks.EMBED_BYTES", embedded)
    alike(four.compute(step(batches[0])).result(timeout=WHOLE_S), first)
    homes, now = workers_of(four), {}
    for batch in batches:
        found = step(batch, **now).submit()
        now = {"params": found.params, "state": found.state}
        wait(futures_of([found.loss, *flat(found.params), *flat(found.state)]), timeout=WHOLE_S)
        for tree in (found.params, found.state["mean"]):
            for layer, part in enumerate(tree):
                own = homes[2 * (layer // 2) : 2 * (layer // 2) + 2]
                for array in part.values():
                    there = [four.who_has([f])[f.key] for f in futures_of(array)]
                    assert {address for held in there for address in held} <= set(own)
    alike(dask.compute(*found), tuple(wanted))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("plan", "calls"),
    # tests/train/test_cluster.py has all four.
    [pytest.param("no plan", 20, id="lineage"), pytest.param("plan", 1, id="checkpoints")],
)
def test_a_worker_that_dies_between_two_steps_changes_nothing(four, calls, plan):
    step, batches, (*_, wanted) = walk("momentum", plan, 4)
    with dask.config.set({"ferro.ranks.checkpoint-calls": calls}):
        now = {}
        for number, batch in enumerate(batches):
            found = step(batch, **now).submit()
            now = {"params": found.params, "state": found.state}
            assert max(array.depth for array in flat(found.params)) <= min(calls, number) + 1
            if number == 2:
                wait(futures_of(flat(found.params)), timeout=WHOLE_S)
                victim = sorted(four.nthreads())[1]
                os.kill(four.run(os.getpid)[victim], signal.SIGKILL)
                until(partial(is_gone, four, victim), "the worker to be missed", every=0.01)
        alike(dask.compute(*found), tuple(wanted))


def is_gone(client, worker):
    return worker not in client.nthreads()
