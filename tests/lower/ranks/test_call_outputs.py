"""Outputs of calls that are submitted together: the same numbers, in one flow, with a tuple for each member."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from distributed import Client

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.sharding.spmd import lower
from dask_ferro.graph.tensor.emit import BuiltModel, build
from dask_ferro.graph.tensor.optim import SGD
from dask_ferro.graph.tensor.tensor import asarray, input
from dask_ferro.lower.ranks.calls import member_tuples
from dask_ferro.lower.ranks.sharded_array import CallOutputs, gather
from dask_ferro.lower.ranks.spmd import Ranks

FOLLOW = {"next w": "w", "next b": "b"}
DATA = {"mesh": {"data": 2}, "inputs": {"x": 0}}


@pytest.fixture(scope="module")
def step() -> BuiltModel:
    x, w, b = (
        input("x", (4, 3)),
        asarray(np.ones((3, 2), "f4"), name="w"),
        asarray(np.ones(2, "f4"), name="b"),
    )
    loss = ((x @ w + b) ** 2).mean()
    params = {"w": w, "b": b}
    after, _ = SGD(0.1).step(params, grad(loss, params), {})
    return build({"loss": loss, **{f"next {name}": value for name, value in after.items()}}, [x, w, b])


def ranks_of(step: BuiltModel, plan: object, copied: bool) -> Ranks:
    names = {*FOLLOW, *FOLLOW.values()} if copied else set()
    return Ranks(lower(apply_plan(step, plan).shard(follow=FOLLOW), names))


def walk(ranks: Ranks, step: BuiltModel, groups: list[int], client: Client | None) -> list[np.ndarray]:
    """Return losses and parameters of steps, which a client submits in groups."""
    rng, held, found = np.random.default_rng(0), dict(step.bound), []
    for count in groups:
        outputs = {}
        for number in range(count):
            out = ranks({"x": rng.standard_normal((4, 3), "f4"), **held})
            outputs |= {f"{name} {number}": array for name, array in out.items()}
            held = {start: out[end] for end, start in FOLLOW.items()}
        if client is not None:
            apart = [f"loss {number}" for number in range(count)]
            outputs = client.persist(CallOutputs(member_tuples(outputs, apart, ranks.workers))).arrays
            held = {start: outputs[f"{end} {count - 1}"] for end, start in FOLLOW.items()}
        found += gather(outputs, **({} if client is not None else {"scheduler": "sync"})).values()
    return found


@pytest.mark.cluster
@pytest.mark.parametrize(("plan", "copied"), [(None, False), (DATA, False), (DATA, True)])
@pytest.mark.parametrize("calls", [1, 2, None])
def test_steps_submitted_together_are_the_same_numbers(client, step, plan, copied, calls):
    """Also where the lineage of their parameters is cut before each group."""
    ranks = ranks_of(step, plan, copied)
    with dask.config.set({"ferro.ranks.checkpoint-calls": calls}):
        got = walk(ranks, step, [1, 3, 2], client)
    for one, other in zip(got, walk(ranks, step, [6], None), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.cluster
def test_a_group_of_steps_takes_dask_a_task_for_each_member_and_tuple(client, step):
    ranks = ranks_of(step, DATA, copied=True)
    held, outputs = dict(step.bound), {}
    for number in range(5):
        out = ranks({"x": np.full((4, 3), number, "f4"), **held})
        outputs |= {f"{name} {number}": array for name, array in out.items()}
        held = {start: out[end] for end, start in FOLLOW.items()}
    apart = [f"loss {number}" for number in range(5)]
    kept = client.persist(CallOutputs(member_tuples(outputs, apart, ranks.workers))).arrays
    gather(kept)
    names = client.run_on_scheduler(
        lambda dask_scheduler: [str(ts.prefix.name) for ts in dask_scheduler.tasks.values()]
    )
    # Two members, and a tuple of each, as all of these are small.
    assert sorted(name.partition(":")[0] for name in names) == ["flow"] * 2 + ["spmd-output"] * 2
