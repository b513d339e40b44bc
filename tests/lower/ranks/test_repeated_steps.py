"""Training steps in stages and micro-batches that follow each other: one template, and the numbers of single steps."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import chain
from math import inf

import numpy as np
import pytest
from dask.base import collections_to_expr
from dask.core import flatten
from distributed.protocol.pickle import dumps

from dask_ferro.flow.member import share_of
from dask_ferro.graph.tensor.optim import Adam
from dask_ferro.graph.tensor.pytree import unflatten
from dask_ferro.lower.bundling import expression
from dask_ferro.lower.bundling.choice import CostFacts
from dask_ferro.lower.bundling.expression import BundledGraph
from dask_ferro.lower.ranks.calls import member_tuples
from dask_ferro.lower.ranks.parallel import parallelize
from dask_ferro.lower.ranks.rank_assignment import Homes, RankWorkers
from dask_ferro.lower.ranks.sharded_array import CallOutputs, gather
from dask_ferro.lower.repetition import RepeatedTasks
from tests.each import every
from tests.graph.pipeline.nets import mlp
from tests.lower.ranks.runs import M, flat

NET, COUNT = mlp(layers=4), 6
DATA = {"mesh": {"data": 2}, "inputs": {"x": 0, "t": 0}}
# A schedule, a plan, and the rows of a batch.
CASES = {
    "gpipe": ("gpipe", None, 2 * M),
    "1f1b": ("1f1b", None, 2 * M),
    "interleaved": ("interleaved", None, 2 * M),
    "zb-v": ("zb-v", None, 2 * M),
    "two ranks a stage": ("1f1b", DATA, 4 * M),
}


def pipeline(schedule, plan):
    return parallelize(
        NET.loss, plan, NET.params, optimizer=Adam(0.01), stages=2, micro_batches=M, schedule=schedule
    )


def batches(rows, count=COUNT):
    return [NET.batch(rows, seed) for seed in range(count)]


def results(run):
    return flat([run.loss, run.params, run.state])


def one_by_one(step, rows):
    """Loss, parameters and state after each step, which begins with the whole arrays of the one before."""
    now, found = {}, []
    for batch in batches(rows):
        result = step(batch, **now).compute(scheduler="sync")
        found += flat(list(result))
        now = {"params": result.params, "state": result.state}
    return found


def named(arrays):
    return {str(i): array for i, array in enumerate(arrays)}


def same(arrays, wanted):
    for one, other in zip(arrays, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@every(("schedule", "plan", "rows"), list(CASES.values()), ids=list(CASES))
def test_the_tasks_of_repeats_are_those_of_steps_by_themselves(schedule, plan, rows):
    step = pipeline(schedule, plan)
    runs = step.successive(batches(rows))
    assert RepeatedTasks in {type(layer.mapping) for layer in runs[-1].loss.graph.layers.values()}
    got = gather(named(chain.from_iterable(map(results, runs))), scheduler="sync").values()
    same(got, one_by_one(step, rows))


@pytest.mark.cluster
@every(("schedule", "plan", "rows"), list(CASES.values()), ids=list(CASES))
def test_flows_of_repeats_are_the_same_numbers(four, schedule, plan, rows):
    """In two groups, of which the second goes on from results on workers."""
    step, found, now = pipeline(schedule, plan), [], {}
    for group in (batches(rows)[:3], batches(rows)[3:]):
        runs = step.successive(group, **now)
        arrays = named(chain.from_iterable(map(results, runs)))
        held = four.persist(CallOutputs(member_tuples(arrays, [], step.workers))).arrays
        last = iter(list(held.values())[-len(results(runs[-1])) + 1 :])
        now = {name: unflatten(getattr(runs[-1], name), last) for name in ("params", "state")}
        found += gather(held).values()
        assert len(group) - 1 in four.run_on_scheduler(_times)
    same(found, one_by_one(step, rows))


def _times(*, dask_scheduler):
    """How often what repeats does, in each member that the scheduler has."""
    shares = filter(None, (share_of(ts.run_spec) for ts in dask_scheduler.tasks.values()))
    return [len(one.inputs) for share in shares for one in share.repeats]


def submitted(step, count, monkeypatch):
    """The shares of members that a scheduler writes for so many steps, and the bytes that a client sends."""
    homes = Homes(("a", "b"), {0: "a", 1: "b"}, (0, 1), 1, {"a": 1, "b": 1})
    monkeypatch.setattr(RankWorkers, "__call__", lambda self: homes)
    facts = CostFacts(lambda key: None, lambda key: None, lambda key: None, 2, inf, inf, members=2)
    monkeypatch.setattr(expression, "_facts_of", lambda scheduler: facts)
    runs = step.successive(batches(2 * M, count))
    collection = CallOutputs(member_tuples(named(chain.from_iterable(map(results, runs))), [], step.workers))
    graph = BundledGraph(
        collections_to_expr([collection]).optimize(), list(flatten(collection.__dask_keys__())), "s", False
    )
    sent = dumps(graph)
    shares = filter(None, map(share_of, pickle.loads(sent).__dask_graph__().values()))
    return sorted(shares, key=lambda share: share.member), len(sent)


def test_a_step_adds_its_batch_to_what_is_sent_and_nothing_else(monkeypatch):
    step = pipeline("1f1b", None)
    (few, little), (many, much) = (submitted(step, count, monkeypatch) for count in (4, 24))
    nbytes = sum(array.nbytes for array in NET.batch(2 * M).values())
    # Beside the rows, the header of an array and a key for each input of each micro-batch.
    assert (much - little) / 20 < nbytes + 2 * M * 200
    assert [len(share.tasks) for share in few] == [len(share.tasks) for share in many]
    assert Counter(share.total > other.total for share, other in zip(many, few, strict=True)) == {True: 2}
