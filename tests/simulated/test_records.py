"""Recorded programs, replayed: what our policy and stock Dask's decide now is what was stored with the records.

A change of policy fails here, with the programs that it changes.  `python benchmarks/replay.py --decide` stores the new
decisions, and their difference is a part of the change.
"""

import json

import pytest
import replay
from simulated import records

STORED = json.loads(replay.DECISIONS.read_text())


def test_each_recorded_graph_has_a_stored_decision():
    assert sorted(STORED) == records.names()
    assert len(STORED) >= 12


@pytest.mark.parametrize("name", records.names())
def test_a_recorded_graph_is_decided_as_stored(name):
    assert replay.decide(name) == STORED[name], "store them by `python benchmarks/replay.py --decide`"


def test_a_graph_is_read_as_it_was_saved(tmp_path):
    content = records.read("svd")
    graph, order = records.graph_of(content)
    records.save(graph, order, content["source"], tmp_path)
    assert records.read("svd", tmp_path) == content


def test_copies_stand_side_by_side_in_one_group_each():
    content = records.read("svd")
    graph, order = records.graph_of(content, copies=3)
    one, _ = records.graph_of(content)
    assert len(graph.tasks) == 3 * len(one.tasks)
    assert {task.group for task in graph.tasks} == {task.group for task in one.tasks}
    assert graph.critical_path == one.critical_path
    assert [order[task.key] for task in graph.tasks] == list(range(len(graph.tasks)))


def test_seconds_vary_around_the_recorded_ones():
    content = records.read("tensordot")
    one, _ = records.graph_of(content)
    other, _ = records.graph_of(content, spread=0.1, seed=1)
    assert other.work == pytest.approx(one.work, rel=0.05)
    assert other != records.graph_of(content, spread=0.1, seed=2)[0]
