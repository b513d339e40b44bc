"""Calls that follow each other: one template for all of them, and the numbers of calls by themselves."""

from __future__ import annotations

import pickle
from math import inf

import numpy as np
import pytest
from dask.base import collections_to_expr
from dask.core import flatten
from distributed.protocol.pickle import dumps

from dask_ferro.flow.member import share_of
from dask_ferro.flow.run import MEMBER
from dask_ferro.lower.bundling import expression
from dask_ferro.lower.bundling.choice import CostFacts
from dask_ferro.lower.bundling.expression import BundledGraph
from dask_ferro.lower.ranks.calls import member_tuples
from dask_ferro.lower.ranks.rank_assignment import Homes
from dask_ferro.lower.ranks.sharded_array import CallOutputs, gather
from tests.lower.ranks.test_call_outputs import DATA, FOLLOW, ranks_of, step, walk

__all__ = ["step"]

READS = {start: end for end, start in FOLLOW.items()}
PLANS = [(None, False), (DATA, False), (DATA, True)]


def calls(ranks, held, counts, rng):
    """Return what `successive` gives for so many calls, after those before."""
    each = [{"x": rng.standard_normal((4, 3), "f4")} for _ in range(counts)]
    return ranks.successive([{**each[0], **held}, *each[1:]], READS)


def named(outputs):
    return {f"{name} {i}": array for i, out in enumerate(outputs) for name, array in out.items()}


@pytest.mark.parametrize(("plan", "copied"), PLANS)
def test_the_tasks_of_repeats_are_those_of_calls_by_themselves(step, plan, copied):
    ranks = ranks_of(step, plan, copied)
    outputs = calls(ranks, step.bound, 6, np.random.default_rng(0))
    got = gather(named(outputs), scheduler="sync").values()
    for one, other in zip(got, walk(ranks, step, [6], None), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.cluster
@pytest.mark.parametrize(("plan", "copied"), PLANS)
def test_flows_and_bundles_of_repeats_are_the_same_numbers(client, step, plan, copied):
    ranks, rng, held, found = ranks_of(step, plan, copied), np.random.default_rng(0), dict(step.bound), []
    for count in (1, 5, 4):
        outputs = named(calls(ranks, held, count, rng))
        apart = [f"loss {i}" for i in range(count)]
        outputs = client.persist(CallOutputs(member_tuples(outputs, apart, ranks.workers))).arrays
        held = {start: outputs[f"{end} {count - 1}"] for end, start in FOLLOW.items()}
        found += gather(outputs).values()
        # Beside the first call, and the tuples of members.
        assert count - 1 in client.run_on_scheduler(_times)
    for one, other in zip(found, walk(ranks, step, [10], None), strict=True):
        np.testing.assert_array_equal(one, other)


def _times(*, dask_scheduler):
    """Return how often what repeats does, in each bundle or member that the scheduler has."""
    shares = filter(None, (share_of(ts.run_spec) for ts in dask_scheduler.tasks.values()))
    return [0, *(len(one.inputs) for share in shares for one in share.repeats)]


def submitted(ranks, step, count, monkeypatch, members):
    """Return the graph that a scheduler writes for so many calls, and the bytes that a client sends."""
    homes = Homes(("a", "b"), {0: "a", 1: "b"}, (0, 1), 2, {"a": 1, "b": 1})
    monkeypatch.setattr(type(ranks.workers), "__call__", lambda self: homes)
    facts = CostFacts(lambda key: None, lambda key: None, lambda key: None, 2, inf, inf, members=members)
    monkeypatch.setattr(expression, "_facts_of", lambda scheduler: facts)
    outputs = named(calls(ranks, step.bound, count, np.random.default_rng(0)))
    collection = CallOutputs(member_tuples(outputs, [], ranks.workers))
    expr = collections_to_expr([collection]).optimize()
    graph = BundledGraph(expr, list(flatten(collection.__dask_keys__())), "s", False)
    sent = dumps(graph)
    return pickle.loads(sent), len(sent)


def test_a_step_adds_its_inputs_to_what_is_sent_and_nothing_else(step, monkeypatch):
    ranks = ranks_of(step, DATA, copied=True)
    few, many = (submitted(ranks, step, count, monkeypatch, members=2) for count in (4, 24))
    # Two parts of 24 bytes, as two arrays of NumPy.
    assert (many[1] - few[1]) / 20 < 400
    shares = [[share_of(task) for task in one.__dask_graph__().values()] for one, _ in (few, many)]
    totals = [[(len(share.tasks), share.total) for share in of if share] for of in shares]
    assert [a[0] - b[0] for a, b in zip(*totals, strict=True)] == [0, 0]
    assert all((b[1] - a[1]) % 20 == 0 and b[1] > a[1] for a, b in zip(*totals, strict=True))


def test_without_flows_the_scheduler_has_all_tasks(step, monkeypatch):
    ranks = ranks_of(step, DATA, copied=True)
    made, _ = submitted(ranks, step, 6, monkeypatch, members=0)
    graph, annotations = made.__dask_graph__(), made.__dask_annotations__()
    segments = [key for key in graph if "segment" in key[0]]
    assert len(segments) == 6 * len(ranks.pieces.segments)
    assert {annotations[MEMBER][key].worker for key in segments} == {"a", "b"}
