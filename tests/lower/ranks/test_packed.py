"""Outputs that stay in one tuple of their rank: the same numbers, and fewer tasks."""

from __future__ import annotations

import dask
import numpy as np
import pytest

from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.parallel.apply import apply
from dask_ferro.graph.sharding.spmd import lower
from dask_ferro.graph.tensor.emit import Built, build
from dask_ferro.graph.tensor.optim import SGD
from dask_ferro.graph.tensor.tensor import argument, asarray
from dask_ferro.lower.ranks.call_outputs import CallOutputs
from dask_ferro.lower.ranks.sharded import gather
from dask_ferro.lower.ranks.spmd import Ranks

FOLLOW = {"next w": "w", "next b": "b"}


def step() -> Built:
    x, w, b = (
        argument("x", (4, 3)),
        asarray(np.ones((3, 2), "f4"), name="w"),
        asarray(np.ones(2, "f4"), name="b"),
    )
    loss = ((x @ w + b) ** 2).mean()
    params = {"w": w, "b": b}
    after, _ = SGD(0.1).step(params, grad(loss, params), {})
    return build({"loss": loss, **{f"next {name}": value for name, value in after.items()}}, [x, w, b])


def walk(ranks: Ranks, built: Built, steps: int, *, persists: bool) -> list[np.ndarray]:
    """Return the loss and the parameters of some steps."""
    rng, held, found = np.random.default_rng(0), dict(built.bound), []
    for _ in range(steps):
        out = ranks({"x": rng.standard_normal((4, 3), "f4"), **held})
        if persists:
            out = dict(zip(out, dask.persist(*out.values()), strict=True))
        found.append(out["loss"].compute())
        held = {start: out[end] for end, start in FOLLOW.items()}
    return [*found, held["w"].compute(), gather(held)["b"], *dask.compute(held["w"], held["b"])]


def both(**options) -> tuple[Ranks, Ranks, Built]:
    built = step()
    spmd = apply(built).spmd(follow=FOLLOW)
    return Ranks(spmd, packed=FOLLOW), Ranks(spmd), built


def same(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    for one, other in zip(a, b, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("persists", [True, False])
def test_packed_outputs_are_the_same_numbers(persists):
    packed, plain, built = both()
    same(walk(packed, built, 3, persists=persists), walk(plain, built, 3, persists=persists))


def test_they_have_no_tasks_of_their_own():
    packed, plain, built = both()
    x = {"x": np.ones((4, 3), "f4"), **built.bound}
    assert [len(dict(ranks(x)["loss"].graph)) for ranks in (packed, plain)] == [2, 4]


DATA = {"mesh": {"data": 2}, "inputs": {"x": 0}}


@pytest.mark.parametrize("copied", [(), {*FOLLOW, *FOLLOW.values()}], ids=["shared", "copied"])
def test_several_ranks_pack_the_parts_that_are_their_own(copied):
    built = step()
    spmd = lower(apply(built, DATA).shard(follow=FOLLOW), copied)
    packed, plain = Ranks(spmd, packed=FOLLOW), Ranks(spmd)
    same(walk(packed, built, 2, persists=True), walk(plain, built, 2, persists=True))
    # Two ranks update copies of their own, which stay where they are; the loss has a task.
    counts = [
        len(dict(ranks({"x": np.ones((4, 3), "f4"), **built.bound})["loss"].graph))
        for ranks in (packed, plain)
    ]
    assert counts == ([5, 9] if copied else [6, 6])


@pytest.mark.cluster
def test_the_outputs_of_a_call_are_persisted_together_and_read_one_by_one(client):
    built = step()
    ranks = Ranks(lower(apply(built, DATA).shard(follow=FOLLOW), {*FOLLOW, *FOLLOW.values()}), packed=FOLLOW)
    out = ranks({"x": np.ones((4, 3), "f4"), **built.bound})
    held = client.persist(CallOutputs(out)).arrays
    for name, wanted in gather(out, scheduler="sync").items():
        np.testing.assert_array_equal(gather({name: held[name]})[name], wanted)


@pytest.mark.cluster
@pytest.mark.parametrize("calls", [1, 2, None])
def test_their_lineage_is_cut(client, calls):
    packed, plain, built = both()
    with dask.config.set({"ferro.ranks.checkpoint-calls": calls}):
        same(walk(packed, built, 5, persists=True), walk(plain, built, 5, persists=True))
