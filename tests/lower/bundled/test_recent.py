"""The choices of recent graphs: when one holds, and when bundles are chosen again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dask_ferro.graph.bundling.partition import Dag
from dask_ferro.graph.bundling.tasks import TaskDag
from dask_ferro.lower.bundled import recent
from dask_ferro.lower.bundled.recent import RecentChoices

WORK = TaskDag(Dag([1e-3] * 4, [(0, 1, 8.0), (1, 2, 8.0)]), [0] * 4, [0.1] * 4)
LIMITS = (2, 1e6)


def with_seconds(factor: float) -> TaskDag:
    return replace(WORK, dag=replace(WORK.dag, seconds=[factor * s for s in WORK.dag.seconds]))


@pytest.mark.parametrize(
    ("work", "limits", "is_chosen_again"),
    [
        pytest.param(WORK, LIMITS, False, id="the same graph"),
        pytest.param(with_seconds(1.2), LIMITS, False, id="tasks that take little longer"),
        pytest.param(with_seconds(1.5), LIMITS, True, id="tasks that take much longer"),
        pytest.param(with_seconds(0.5), LIMITS, True, id="tasks that take half as long"),
        pytest.param(replace(WORK, shares=[0.2] * 4), LIMITS, True, id="results twice as large"),
        pytest.param(replace(WORK, shares=[0.1, 0.1, 0.1, 0.6]), LIMITS, True, id="another wanted key"),
        pytest.param(replace(WORK, kinds=[0, 0, 0, 1]), LIMITS, True, id="other annotations"),
        pytest.param(replace(WORK, dag=Dag([1e-3] * 4, [(0, 1, 8.0)])), LIMITS, True, id="other edges"),
        pytest.param(WORK, (3, 1e6), True, id="another worker"),
    ],
)
def test_a_choice_holds_while_little_changes(
    work: TaskDag, limits: tuple[float, ...], is_chosen_again: bool
) -> None:
    choices = RecentChoices()
    first, second = ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))
    assert choices.bundles(WORK, LIMITS, lambda: first) == first
    assert choices.bundles(work, limits, lambda: second) == (second if is_chosen_again else first)


def test_old_graphs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "TASKS", 10)
    choices = RecentChoices()
    for workers in range(1, 4):
        choices.bundles(WORK, (workers, 1e6), lambda: ((0,),))
    # Two graphs of four tasks are left, the newest ones.
    assert choices.bundles(WORK, (3, 1e6), lambda: ()) == ((0,),)
    assert choices.bundles(WORK, (1, 1e6), lambda: ()) == ()
