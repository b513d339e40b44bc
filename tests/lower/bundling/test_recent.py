"""The choices of recent graphs: when one holds, and when bundles are chosen again."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.graph.bundling.partition import Dag
from dask_ferro.graph.bundling.tasks import SINGLETON, TaskDag
from dask_ferro.lower.bundling import recent
from dask_ferro.lower.bundling.recent import GraphPlans, RecentChoices, Way
from tests.each import every

WORK = TaskDag(Dag([1e-3] * 4, [(0, 1, 8.0), (1, 2, 8.0)]), [0] * 4, [0.1] * 4)
NAMES, LIMITS = (2, "inc"), (1e6,)


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
        pytest.param(WORK, (2e6,), True, id="other bytes"),
        pytest.param(
            replace(WORK, dag=Dag([1e-3] * 4, [(0, 1, 800.0), (1, 2, 8.0)])), LIMITS, True, id="larger edges"
        ),
    ],
)
def test_a_choice_holds_while_little_changes(
    work: TaskDag, limits: tuple[float, ...], is_chosen_again: bool
) -> None:
    choices = RecentChoices()
    plans = choices.plans(WORK, NAMES, LIMITS, lambda: ())
    plans.bundles = ((0, 1, 2, 3),)
    assert (choices.plans(work, NAMES, limits, lambda: ()) is not plans) == is_chosen_again


def test_a_long_task_and_one_by_itself_hide_nothing() -> None:
    def work(short: float) -> TaskDag:
        return TaskDag(Dag([*[short] * 100, 10.0, 10.0], []), [*[0] * 101, SINGLETON], [0.0] * 102)

    choices = RecentChoices()
    plans = choices.plans(work(1e-3), NAMES, LIMITS, lambda: ())
    assert choices.plans(work(3.5e-3), NAMES, LIMITS, lambda: ()) is not plans


def test_old_graphs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    # A graph of four tasks and two edges counts as 15.
    monkeypatch.setattr(recent, "NUMBERS", 30)
    monkeypatch.setattr(recent, "GRAPH", 1)
    choices = RecentChoices()
    plans = [choices.plans(WORK, (workers,), LIMITS, lambda: ()) for workers in range(1, 4)]
    # Two graphs are left, the newest ones.
    assert choices.plans(WORK, (3,), LIMITS, lambda: ()) is plans[2]
    assert choices.plans(WORK, (1,), LIMITS, lambda: ()) is not plans[0]


def planned(projected: dict[Way, float]) -> GraphPlans:
    plans = RecentChoices().plans(WORK, NAMES, LIMITS, lambda: ())
    plans.projected.update(projected)
    return plans


def test_what_was_measured_counts_for_more_than_what_was_projected() -> None:
    plans = planned({"flow": 1.0, "bundles": 1.5})
    assert plans.seconds("flow") == 1.0
    # The first run opens connections.
    plans.took("flow", 3.0)
    assert plans.seconds("flow") == 1.0
    plans.took("flow", 2.0)
    assert plans.seconds("flow") == 2.0
    # Other graphs ran beside this one.
    plans.took("flow", 20.0)
    assert plans.seconds("flow") == 2.0
    # What was fast long ago is forgotten.
    for _ in range(4):
        plans.took("flow", 5.0)
    assert plans.seconds("flow") == 5.0
    assert plans.seconds("bundles") == 1.5


def ways(plans: GraphPlans, takes: dict[Way, float], runs: int) -> list[Way]:
    """Run a graph that takes some seconds each way; return how it ran."""
    chosen = []
    for _ in range(runs):
        chosen.append(plans.way())
        plans.took(chosen[-1], takes[chosen[-1]])
    return chosen


@every(
    ("takes", "wanted"),
    [
        pytest.param({"tasks": 1.0, "bundles": 0.4}, ["bundles"] * 8, id="bundles that gain as projected"),
        pytest.param(
            {"tasks": 1.0, "bundles": 0.9}, ["bundles"] * 2 + ["tasks"] + ["bundles"] * 5, id="bundles that gain little"
        ),
        pytest.param({"tasks": 1.0, "bundles": 1.1}, ["bundles"] * 2 + ["tasks"] * 6, id="bundles that lose little"),
        pytest.param({"tasks": 1.0, "bundles": 9.0}, ["bundles"] * 2 + ["tasks"] * 6, id="bundles that lose"),
    ],
)  # fmt: skip
def test_a_graph_that_ran_faster_as_tasks_runs_as_tasks(takes: dict[Way, float], wanted: list[Way]) -> None:
    plans = planned({})
    # Nothing is known of the first run but what it took, which is more than later ones do.
    assert plans.way() == "tasks"
    plans.took("tasks", 1.5 * takes["tasks"])
    plans.projected.update({"tasks": 3.0, "bundles": 1.0})
    assert ways(plans, takes, 8) == wanted


@settings(max_examples=200)
@given(st.tuples(*[st.floats(0.01, 100.0)] * 3), st.tuples(*[st.floats(0.01, 100.0)] * 3), st.booleans())
def test_no_way_that_was_slower_than_another_is_chosen_again(
    takes: tuple[float, float, float], projected: tuple[float, float, float], is_first_known: bool
) -> None:
    of: tuple[Way, Way, Way] = ("tasks", "bundles", "flow")
    plans = planned({})
    if is_first_known:
        plans.took("tasks", takes[0])
    plans.projected.update(zip(of, projected, strict=True))
    seconds: dict[Way, float] = dict(zip(of, takes, strict=True))
    chosen = ways(plans, seconds, 12)
    # Each way runs twice at most before the fastest of those that ran does.
    assert len(set(chosen[6:])) == 1
    assert seconds[chosen[-1]] == min(seconds[way] for way in chosen)
    if is_first_known:
        assert seconds[chosen[-1]] <= seconds["tasks"]


@every(("factor", "is_remembered"), [(1.1, True), (1.5, True), (0.6, True), (3.0, False), (0.3, False)])
def test_what_was_measured_is_remembered_while_tasks_take_about_as_long(
    factor: float, is_remembered: bool
) -> None:
    choices = RecentChoices()
    for _ in range(2):
        first = choices.plans(WORK, NAMES, LIMITS, lambda: ())
        first.took("bundles", 7.0)
    plans = choices.plans(with_seconds(factor), NAMES, LIMITS, lambda: ())
    plans.projected["bundles"] = 1.0
    assert plans.seconds("bundles") == (7.0 if is_remembered else 1.0)
    assert (plans is first) == (factor == 1.1)


def test_a_run_with_unknown_costs_is_remembered() -> None:
    choices = RecentChoices()
    unknown = replace(WORK, kinds=[SINGLETON] * 4)
    choices.plans(unknown, NAMES, (0,), lambda: ()).took("tasks", 7.0)
    plans = choices.plans(WORK, NAMES, LIMITS, lambda: ())
    plans.took("tasks", 8.0)
    assert plans.seconds("tasks") == 7.0
    # Other functions on the same edges make another graph.
    assert choices.plans(WORK, (2, "dec"), LIMITS, lambda: ()).seconds("tasks") == inf


def test_a_graph_is_told_apart_by_what_is_wanted_of_it() -> None:
    choices = RecentChoices()
    plans = choices.plans(WORK, NAMES, LIMITS, lambda: ())
    choices.choose(["a", "b"], plans, "bundles")
    assert choices.chosen(["a"]) is None
    assert choices.chosen(["b", "a"]) == (plans, "bundles")
    assert choices.chosen(["b", "a"]) is None
