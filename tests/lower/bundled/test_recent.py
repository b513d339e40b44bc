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
    first, second = ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))
    assert choices.bundles(WORK, LIMITS, lambda: first) == first
    assert choices.bundles(work, limits, lambda: second) == (second if is_chosen_again else first)


def test_a_long_task_and_one_by_itself_hide_nothing() -> None:
    def work(short: float) -> TaskDag:
        return TaskDag(Dag([*[short] * 100, 10.0, 10.0], []), [*[0] * 101, ALONE], [0.0] * 102)

    choices = RecentChoices()
    choices.bundles(work(1e-3), LIMITS, lambda: ((0,),))
    assert choices.bundles(work(3.5e-3), LIMITS, lambda: ((1,),)) == ((1,),)


def test_old_graphs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    # A graph of four tasks and two edges counts as 15.
    monkeypatch.setattr(recent, "NUMBERS", 30)
    monkeypatch.setattr(recent, "GRAPH", 1)
    choices = RecentChoices()
    for workers in range(1, 4):
        choices.bundles(WORK, (workers, 1e6), lambda: ((0,),))
    # Two graphs are left, the newest ones.
    assert choices.bundles(WORK, (3, 1e6), lambda: ()) == ((0,),)
    assert choices.bundles(WORK, (1, 1e6), lambda: ()) == ()
