"""Redistribution: which steps lead from one layout to another, what they cost, and that they lose nothing."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.sharding.parts import local_shape, part
from dask_ferro.graph.sharding.placements import Partial, Shard
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import Mesh, price, steps, text
from dask_ferro.graph.sharding.spmd import lower
from dask_ferro.policy.estimates import Link
from tests.each import every

from .shard_run import MESHES, Net, P, R, S, by_axis, evaluate_sharded, layouts


@every(
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


@every(
    ("source", "target", "kinds"),
    [
        pytest.param((P, P), (S(0), S(0)), ["ReduceScatter 0", "ReduceScatter 1"], id="the outer axis splits first"),
        pytest.param((P, P), (R, S(0)), ["ReduceScatter 1", "AllReduce 0"], id="fewer bytes are reduced last"),
        pytest.param((S(0), S(0)), (R, R), ["AllGather 0,1"], id="both are gathered at once"),
        pytest.param((P, P), (R, R), ["AllReduce 0,1"], id="and reduced at once"),
        pytest.param((S(0), P, S(0)), (R, R, R), ["AllReduce 1", "AllGather 0,2"], id="with an axis between them"),
        pytest.param((S(0), S(1)), (R, R), ["AllGather 0", "AllGather 1"], id="two dimensions are not"),
        pytest.param((P, Partial("mean")), (R, R), ["AllReduce 0", "AllReduce 1"], id="nor two reductions"),
        pytest.param((S(0), S(0)), (S(0), S(1)), ["AllToAll 1"], id="the inner axis is exchanged"),
        pytest.param((S(0), S(0)), (R, S(0)), ["AllGather 0,1", "Slice 1"], id="the outer one is removed"),
        pytest.param((R, S(0)), (S(0), S(0)), ["AllGather 1", "Slice 0", "Slice 1"], id="an outer one is added"),
        pytest.param((P, S(0)), (S(0), S(0)), ["AllGather 1", "ReduceScatter 0", "Slice 1"], id="also by a sum"),
        pytest.param((S(1), S(0)), (S(0), S(0)), ["AllGather 1", "AllToAll 0", "Slice 1"], id="or an exchange"),
    ],
)  # fmt: skip
def test_axes_that_split_one_dimension_are_a_stack(source, target, kinds):
    assert [f"{step.kind} {','.join(map(str, step.axes))}" for step in steps(source, target)] == kinds


def each_layout(*placements):
    return product(placements, repeat=3)


def test_steps_end_for_any_two_layouts_and_never_reach_into_a_stack():
    for source, target in product(each_layout(R, P, S(0), S(1)), each_layout(R, S(0), S(1))):
        now = source
        found = steps(source, target)
        for step in found:
            assert {now[axis] for axis in step.axes} == {step.source}
            moved = {p for p in (step.source, step.target) if isinstance(p, Shard)}
            later = [p for axis, p in enumerate(now) if axis > step.axes[0] and axis not in step.axes]
            assert moved.isdisjoint(later)
            now = step.after(now)
        assert now == target
        # Each axis is gathered once on the way, and has its target once.
        assert len(found) <= 2 * len(target)


@pytest.mark.parametrize("size", [6, 12, 18])
def test_two_axes_split_a_dimension_as_one_axis_of_all_their_ranks(size):
    two, one = Mesh({"a": 2, "b": 3}), Mesh({"x": 6})
    layouts = ((R, S(1), S(1)), Mesh({"none": 1, **two.axes})), ((S(1),), one)
    nested, flat = ([part((4, size), at, mesh, rank) for rank in range(6)] for at, mesh in layouts)
    assert nested == flat


@settings(deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_parts_are_those_of_split_of_the_parts_of_the_axes_before(each, sizes):
    mesh = Mesh({f"a{i}": n for i, n in enumerate(sizes)})
    size = each * mesh.ranks
    parts = [np.arange(size)]
    for n in sizes:
        parts = [half for whole in parts for half in np.split(whole, n)]
    for rank, wanted in enumerate(parts):
        layout = (S(0),) * len(sizes)
        (cut,) = part((size,), layout, mesh, rank)
        np.testing.assert_array_equal(np.arange(size)[cut], wanted)
        assert local_shape((size,), layout, mesh) == wanted.shape == (each,)


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
    shape = (24, 48, 24)
    model = Net({"x": shape})
    model.end(y=model.op("Identity", "x"))
    x = np.random.default_rng(0).standard_normal(shape)
    placed, outputs = by_axis(mesh, {"x": source}), by_axis(mesh, {"y": target})
    plan = propagate(model.model, infer(model.model), mesh, placed, outputs=outputs)
    got = evaluate_sharded(lower(plan), {"x": x})
    np.testing.assert_allclose(got["y"], x, rtol=1e-12)
    if all(size > 1 for size in mesh.sizes):
        assert text(lower(plan).outputs[0].layout) == text(target)


@pytest.mark.parametrize("axes", [{}, {"x": 0}, {"x": 2.5}, {"x": True}], ids=str)
def test_a_mesh_has_axes_of_one_rank_or_more(axes):
    with pytest.raises(InputError, match="axes of 1 rank or more"):
        Mesh(axes)
