"""What tasks cost that were never measured: what they say of themselves, and what calls of one model share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dask.typing import Key
from onnx import helper

import dask_ferro as ff
from dask_ferro.flow.costs import Costs, MeasuredTasks, names_of
from dask_ferro.flow.task_cost import TaskCost, own_cost
from dask_ferro.lower.bundling.choice import choose
from dask_ferro.lower.bundling.rewrite import rewrite_graph
from dask_ferro.lower.portable import BundleTask
from dask_ferro.lower.upstream import Task, TaskRef
from tests import graphs
from tests.each import every
from tests.lower.bundling.graphs import facts

CHAINS, LENGTH = 4, 20


def made(kind: Callable[..., Task]) -> tuple[dict[Key, Task], list[Key]]:
    """Return a graph of chains, whose ends one task reads, and its key."""
    ends = [("step", c, LENGTH - 1) for c in range(CHAINS)]
    graph: dict[Key, Task] = {"end": kind("end", max, *map(TaskRef, ends))}
    for c in range(CHAINS):
        for s in range(LENGTH):
            reads = [TaskRef(("step", c, s - 1))] if s else []
            graph["step", c, s] = kind(("step", c, s), max, 0, 0, *reads)
    return graph, ["end"]


def tells(told: Callable[[int], object]) -> dict[str, dict[Key, Any]]:
    return {"ferro": {key: told(i) for i, key in enumerate(made(Task)[0])}}


@every(
    ("annotations", "measured", "has"),
    [
        pytest.param({}, None, (0, 0), id="nobody knows"),
        pytest.param(tells(lambda i: {"seconds": 1e-3 + i * 1e-6}), None, (81, 80), id="each its seconds"),
        pytest.param(tells(lambda i: {"seconds": 1e-3, "bytes": 100 + i}), None, (81, 80), id="and bytes"),
        pytest.param(tells(lambda i: {"seconds": 1e-3, "bytes": 9e12}), None, (0, 0), id="large results"),
        pytest.param(tells(lambda i: {"seconds": 20.0}), None, (0, 0), id="long"),
        pytest.param(tells(lambda i: {"seconds": 20.0}), TaskCost(1e-3, 28), (81, 80), id="but measured"),
        pytest.param(tells(lambda i: {"seconds": "1"}), None, (0, 0), id="no number"),
        pytest.param(tells(lambda i: {"seconds": -1.0}), None, (0, 0), id="no duration"),
        pytest.param(tells(lambda i: 7), None, (0, 0), id="no mapping"),
        pytest.param(
            tells(lambda i: {"seconds": 1e-3, "region": f"layer/{i}"}), None, (0, 0), id="another annotation"
        ),
    ],
)
def test_tasks_run_together_by_what_they_say(
    annotations: dict[str, dict[Key, Any]], measured: TaskCost | None, has: tuple[int, int]
) -> None:
    def known(members: int) -> Any:
        return replace(facts(members=members), cost=lambda key: measured)

    graph, wanted = made(Task)
    flows = choose(graph, wanted, annotations, known(2)).flows
    bundles = choose(graph, wanted, annotations, known(0)).bundles
    assert (sum(len(flow.tasks) for flow in flows), sum(len(b) for b in bundles if len(b) > 1)) == has
    common = {"ferro": next(iter(annotations["ferro"].values()))} if has[0] else {}
    assert bool(choose(graph, wanted, {}, known(2), common).flows) == bool(has[0])
    # What tasks say of themselves is not said of what they run in.
    for key, told in rewrite_graph(graph, wanted, annotations, known(2)).annotations.get("ferro", {}).items():
        assert not has[0] or told == {"seconds": pytest.approx(told["seconds"])}, key


def test_a_models_bundles_say_what_they_cost() -> None:
    graph, wanted = made(lambda *args: BundleTask(*args, cost=TaskCost(1e-3, 28.0, 1e-2)))
    unknown = replace(facts(members=2), cost=lambda key: None)
    (flow,) = choose(graph, wanted, {}, unknown).flows
    assert len(flow.tasks) == len(graph)
    renamed = {key: task.substitute({}, key=("other", key)) for key, task in graph.items()}
    assert all(task.cost == TaskCost(1e-3, 28.0, 1e-2) for task in renamed.values())


def test_what_is_told_may_be_wrong_by_ten_times() -> None:
    assert own_cost({"seconds": 0.2, "bytes": 8}) == TaskCost(0.2, 8, 2.0)
    assert own_cost({"seconds": 1e-6}) == TaskCost(1e-6, pytest.approx(1e3), 1e-3)


def _two_sizes() -> Any:
    """A model of four matrix products, of which two take as long as each other."""
    nodes = [helper.make_node("MatMul", [i, w], [o]) for i, w, o in ["xaa", "acb", "bcd", "dey"]]
    shapes = {"a": (4, 64), "c": (64, 64), "e": (64, 2)}
    weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    nodes[0].input[1], nodes[0].output[0] = "a", "h"
    nodes[1].input[0] = "h"
    return graphs.model(nodes, {"x": ["N", 4]}, {"y": ["N", 2]}, weights, name="sizes")


def test_calls_of_a_model_share_the_costs_of_bundles_that_are_alike() -> None:
    model = ff.from_onnx(_two_sizes(), granularity="op")

    def names(rows: int, value: float) -> list[tuple[str, str]]:
        keys = set(model(np.full((rows, 4), value, np.float32)).__dask_graph__())
        return [names_of(key) for key in sorted(keys, key=str)]

    first, again, longer = names(8, 1.0), names(8, 2.0), names(16, 1.0)
    assert {prefix for prefix, _ in first} == {"sizes-matmul"}
    assert len(first) == 4
    assert len(set(first)) == 3
    assert sorted(first) == sorted(again)
    assert set(first).isdisjoint(longer)
    costs = Costs(MeasuredTasks(*name, 1, 1.0 + i, 8.0) for i, name in enumerate(sorted(set(first))))
    key = next(iter(model(np.full((8, 4), 3.0, np.float32)).__dask_graph__()))
    assert costs.of(key) == (1.0 + sorted(set(first)).index(names_of(key)), 8.0, 0.0)
