"""Redistribution: which steps lead from one layout to another, what they cost, and that they lose nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import Mesh, price, steps, text
from dask_ferro.graph.sharding.spmd import lower
from dask_ferro.policy.estimates import Link

from .shard_run import MESHES, Net, P, R, S, evaluate_sharded, layouts


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        pytest.param((P,), (R,), ["AllReduce"], id="terms are reduced"),
        pytest.param((P,), (S(0),), ["ReduceScatter"], id="terms are reduced where they go"),
        pytest.param((S(0),), (R,), ["AllGather"], id="shards are gathered"),
        pytest.param((S(0),), (S(1),), ["AllToAll"], id="shards are exchanged"),
        pytest.param((R,), (S(1),), ["Slice"], id="what is there is cut"),
        pytest.param((R,), (R,), [], id="what is there stays"),
        pytest.param((P, S(0)), (S(1), R), ["ReduceScatter", "AllGather"], id="smaller comes first"),
        pytest.param((R, S(0)), (S(0), R), ["AllGather", "Slice"], id="a dimension is freed, then taken"),
        pytest.param((S(0), S(1)), (S(1), S(0)), ["AllGather", "AllToAll", "Slice"], id="two that swap"),
    ],
)
def test_steps(source, target, kinds):
    assert [step.kind for step in steps(source, target)] == kinds


def test_no_step_takes_a_value_apart_into_terms():
    with pytest.raises(ConfigError, match="there is no step from R to P"):
        steps((R,), (P,))


@pytest.mark.parametrize(
    ("kind", "sent", "hops"),
    [
        ("AllReduce", 1500, 6),
        ("ReduceScatter", 750, 3),
        ("AllGather", 750, 3),
        ("AllToAll", 187.5, 3),
        ("Slice", 0, 0),
    ],
)
def test_a_step_of_1000_bytes_on_4_ranks_is_priced_as_a_ring(kind, sent, hops):
    link = Link(latency=0.5, bandwidth=100.0)
    assert price(kind, 1000.0, 4, link) == (sent, hops * 0.5 + sent / 100.0)
    assert price(kind, 1000.0, 1, link) == (0.0, 0.0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_layout_becomes_any_other(data):
    mesh = data.draw(st.sampled_from(MESHES))
    source = data.draw(layouts(mesh, 3, partial=True))
    target = data.draw(layouts(mesh, 3))
    model = Net({"x": (4, 4, 4)})
    model.end(y=model.op("Identity", "x"))
    x = np.random.default_rng(0).standard_normal((4, 4, 4))
    plan = propagate(model.model, infer(model.model), mesh, {"x": source}, outputs={"y": target})
    got = evaluate_sharded(lower(plan), {"x": x})
    np.testing.assert_allclose(got["y"], x, rtol=1e-12)
    if all(size > 1 for size in mesh.sizes):
        assert text(lower(plan).outputs[0].layout) == text(target)


@pytest.mark.parametrize("axes", [{}, {"x": 0}, {"x": 2.5}, {"x": True}], ids=str)
def test_a_mesh_has_axes_of_one_rank_or_more(axes):
    with pytest.raises(ConfigError, match="axes of 1 rank or more"):
        Mesh(axes)
