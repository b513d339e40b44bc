"""The choices of recent graphs: when one holds, and when bundles are chosen again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_ferro.graph.bundling.partition import Dag
from dask_ferro.graph.bundling.tasks import ALONE, TaskDag
from dask_ferro.lower.bundled import recent
from dask_ferro.lower.bundled.recent import RecentChoices
from tests.each import every

WORK = TaskDag(Dag([1e-3] * 4, [(0, 1, 8.0), (1, 2, 8.0)]), [0] * 4, [0.1] * 4)
LIMITS = (2, 1e6)


def with_seconds(factor: float) -> TaskDag:
    return replace(WORK, dag=replace(WORK.dag, seconds=[factor * s for s in WORK.dag.seconds]))


@every(
    ("work", "limits", "is_chosen_again"),
    [
        pytest.param(WORK, LIMITS, False, id="the same graph"),
        pytest.param(with_seconds(1.2), LIMITS, False, id="tasks that take little longer"),
        pytest.param(with_seconds(1.5), LIMITS, True, id="tasks that take much longer"),
        pytest.param(with_seconds(0.5), LIMITS, True, id="tasks that take half as long"),
        pytest.param(
            replace(WORK, most=[1e-2] * 4), LIMITS, True, id="tasks that may take ten times as long"
        ),
        pytest.param(replace(WORK, shares=[0.2] * 4), LIMITS, True, id="results twice as large"),
        pytest.param(replace(WORK, shares=[0.1, 0.1, 0.1, 0.6]), LIMITS, True, id="another wanted key"),
        pytest.param(replace(WORK, kinds=[0, 0, 0, 1]), LIMITS, True, id="other annotations"),
        pytest.param(replace(WORK, dag=Dag([1e-3] * 4, [(0, 1, 8.0)])), LIMITS, True, id="other edges"),
        pytest.param(WORK, (3, 1e6), True, id="another worker"),
        pytest.param(
            replace(WORK, dag=Dag([1e-3] * 4, [(0, 1, 800.0), (1, 2, 8.0)])), LIMITS, True, id="larger edges"
        ),
    ],
)
def test_a_choice_holds_while_little_changes(
    work: TaskDag, limits: tuple[float, ...], is_chosen_again: bool
) -> None:
    choices = RecentChoices()
    plans = choices.plans(WORK, LIMITS, lambda: ())
    plans.bundles = ((0, 1, 2, 3),)
    assert (choices.plans(work, limits, lambda: ()) is not plans) == is_chosen_again


def test_a_long_task_and_one_by_itself_hide_nothing() -> None:
    def work(short: float) -> TaskDag:
        return TaskDag(Dag([*[short] * 100, 10.0, 10.0], []), [*[0] * 101, ALONE], [0.0] * 102)

    choices = RecentChoices()
    plans = choices.plans(work(1e-3), LIMITS, lambda: ())
    assert choices.plans(work(3.5e-3), LIMITS, lambda: ()) is not plans


def test_old_graphs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    # A graph of four tasks and two edges counts as 15.
    monkeypatch.setattr(recent, "NUMBERS", 30)
    monkeypatch.setattr(recent, "GRAPH", 1)
    choices = RecentChoices()
    plans = [choices.plans(WORK, (workers, 1e6), lambda: ()) for workers in range(1, 4)]
    # Two graphs are left, the newest ones.
    assert choices.plans(WORK, (3, 1e6), lambda: ()) is plans[2]
    assert choices.plans(WORK, (1, 1e6), lambda: ()) is not plans[0]


def test_what_was_measured_counts_for_more_than_what_was_projected() -> None:
    plans = RecentChoices().plans(WORK, LIMITS, lambda: ())
    assert plans.seconds("flow", 1.0) == 1.0
    # The first run opens connections.
    plans.took("flow", 3.0)
    assert plans.seconds("flow", 1.0) == 1.0
    plans.took("flow", 2.0)
    assert plans.seconds("flow", 1.0) == 2.0
    # Other graphs ran beside this one.
    plans.took("flow", 20.0)
    assert plans.seconds("flow", 1.0) == 2.0
    # What was fast long ago is forgotten.
    for _ in range(4):
        plans.took("flow", 5.0)
    assert plans.seconds("flow", 1.0) == 5.0
    assert plans.seconds("bundles", 1.5) == 1.5


@every(("factor", "is_remembered"), [(1.1, True), (1.5, True), (0.6, True), (3.0, False), (0.3, False)])
def test_what_was_measured_is_remembered_while_tasks_take_about_as_long(
    factor: float, is_remembered: bool
) -> None:
    choices = RecentChoices()
    for _ in range(2):
        first = choices.plans(WORK, LIMITS, lambda: ())
        first.took("bundles", 7.0)
    plans = choices.plans(with_seconds(factor), LIMITS, lambda: ())
    assert plans.seconds("bundles", 1.0) == (7.0 if is_remembered else 1.0)
    assert (plans is first) == (factor == 1.1)


def test_a_graph_is_told_apart_by_what_is_wanted_of_it() -> None:
    choices = RecentChoices()
    plans = choices.plans(WORK, LIMITS, lambda: ())
    choices.choose(["a", "b"], plans, "bundles")
    assert choices.chosen(["a"]) is None
    assert choices.chosen(["b", "a"]) == (plans, "bundles")
    assert choices.chosen(["b", "a"]) is None
