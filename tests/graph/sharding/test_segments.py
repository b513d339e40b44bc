"""Segments of a sharded graph: no cycle whatever nodes take, and short work with its readers."""

from __future__ import annotations

from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.graph.sharding.segments import cut_segments, is_collective
from dask_ferro.graph.sharding.spmd import lower
from dask_ferro.graph.tensor.emit import build

PLANS = {
    "data": {"mesh": {"data": 2}, "inputs": {"x": 0}},
    "tensor": {"mesh": {"tensor": 2}, "inputs": {"up": {"tensor": 1}, "down": {"tensor": 0}}},
    "both": {
        "mesh": {"data": 2, "tensor": 2},
        "inputs": {"x": {"data": 0}, "up": {"tensor": 1}, "down": {"tensor": 0}},
    },
    "gathered": {"mesh": {"data": 2}, "inputs": {"x": 0, "up": 0, "down": 1}},
}


@cache
def model(plan):
    """Return loss, gradients and a sum of three layers of products, sharded."""
    x = ft.input("x", (8, 6))
    weights = {"up": ft.input("up", (6, 12)), "down": ft.input("down", (12, 6))}
    h = x
    for _ in range(3):
        h = h + ft.nn.relu(h @ weights["up"]) @ weights["down"]
    loss = ft.mean(h * h)
    ends = {f"d {name}": g for name, g in ft.grad(loss, weights).items()}
    built = build({"loss": loss, "sum": ft.sum(ft.tanh(x), axis=1), **ends}, [x, *weights.values()])
    return lower(ff.apply_plan(built, PLANS[plan]).shard()).model


@pytest.mark.parametrize("plan", PLANS)
@given(data=st.data())
def test_every_node_is_in_one_piece_and_pieces_wait_for_each_other_in_no_cycle(plan, data):
    nodes = list(model(plan).graph)
    count = len(nodes)
    seconds = data.draw(
        st.none() | st.lists(st.sampled_from([0.0, 1e-3, 1.0]), min_size=count, max_size=count)
    )
    pieces = cut_segments(
        model(plan), bucket_bytes=data.draw(st.sampled_from([None, 0, 300, 10**7])), seconds=seconds
    )
    positions = sorted(chain.from_iterable(segment.nodes for segment in pieces.segments))
    assert positions == [i for i, node in enumerate(nodes) if not is_collective(node)]
    collectives = sum(len(bucket.attributes) * len(bucket.ranks) for bucket in pieces.buckets)
    assert collectives == sum(len(node.outputs) for node in nodes if is_collective(node))
    reads = [segment.inputs for segment in pieces.segments]
    reads += [tuple(chain.from_iterable(bucket.reads)) for bucket in pieces.buckets]
    makes = [segment.outputs for segment in pieces.segments]
    makes += [tuple(chain.from_iterable(bucket.makes)) for bucket in pieces.buckets]
    maker = {name: i for i, names in enumerate(makes) for name in names}
    before = {i: {maker[name] for name in names if name in maker} for i, names in enumerate(reads)}
    assert len(list(TopologicalSorter(before).static_order())) == len(reads)


def parts(plan, second):
    """Return the number of segments of each rank, where each node takes so many seconds."""
    found = model(plan)
    pieces = cut_segments(found, seconds=[second] * len(list(found.graph)))
    return Counter(segment.rank for segment in pieces.segments)


def test_short_work_that_a_later_collective_needs_is_in_the_segment_of_its_readers():
    """Five collectives, so six segments; masks and products of the backward are no tasks of their own."""
    kinds = Counter(node.op_type for node in model("tensor").graph if is_collective(node))
    assert kinds == {"AllReduce": 5}
    assert parts("tensor", 1e-6) == {0: 6, 1: 6}
    assert parts("tensor", 1.0)[0] > 6
