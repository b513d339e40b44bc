"""What is learned of tasks: seconds of the newest, bytes of all."""

from __future__ import annotations

from math import nan

import pytest

from dask_ferro.flow.costs import GROUPS, Costs, MeasuredTasks, merge_tasks
from dask_ferro.flow.task_cost import TaskCost


def of_group(tasks: int, nbytes: float, *, seconds: float = 1.0, group: str = "x-1a2b3c4d") -> MeasuredTasks:
    return MeasuredTasks("x", group, tasks, tasks * seconds, nbytes)


def test_the_small_chunks_at_the_end_of_a_run_do_not_stand_for_all() -> None:
    costs = Costs([of_group(90, 1000.0), of_group(10, 0.0)])
    assert costs.of(("x-1a2b3c4d", 0)) == TaskCost(pytest.approx(1.0), pytest.approx(900.0))


def test_calls_of_one_function_of_other_sizes_are_forgotten_soon() -> None:
    costs = Costs(
        [MeasuredTasks("inc", "inc", 1000, 1.0, 1e3), *[MeasuredTasks("inc", "inc", 1, 1e-3, 1e7)] * 20]
    )
    assert costs.of("inc-1").nbytes > 5e6  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("measured", "seconds", "most"),
    [
        pytest.param([0.2], 0.2, 2.0, id="one other call: ten times as long is possible"),
        pytest.param([0.2, 0.3], 0.25, 1.0, id="two that are alike: as long as the longest, or 1 ms"),
        pytest.param([2.0, 4.0, 2.0], 2.0, 4.0, id="three: as long as the longest"),
        pytest.param([*[0.2] * 7, 5.0], 0.2, 5.0, id="a busy machine once"),
        pytest.param([9.0, *[0.2] * 8], 0.2, 1.0, id="the newest eight"),
        pytest.param([0.001], 0.001, 1.0, id="a trial on small data"),
    ],
)
def test_a_fresh_name_costs_the_median_of_its_prefix(
    measured: list[float], seconds: float, most: float
) -> None:
    costs = Costs(of_group(1, 8.0, seconds=s * 1e-3, group=f"x-{i:08x}") for i, s in enumerate(measured))
    assert costs.of(("x-00ffffff", 0)) == pytest.approx((seconds * 1e-3, 8.0, most * 1e-3))
    # What was measured is no guess.
    assert costs.of((f"x-{len(measured) - 1:08x}", 0)) == pytest.approx((measured[-1] * 1e-3, 8.0, 0.0))


def test_one_program_has_many_groups_of_a_prefix() -> None:
    costs = Costs(of_group(1, float(i), group=f"x-{i:08x}") for i in range(GROUPS))
    assert [costs.of((f"x-{i:08x}", 0)).nbytes for i in range(GROUPS)] == [*range(GROUPS)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("a", "b", "tasks", "nbytes"),
    [
        (30.0, 60.0, (1, 2), 50.0),
        (nan, 60.0, (1, 2), 60.0),
        (30.0, nan, (1, 2), 30.0),
        (nan, nan, (1, 2), nan),
    ],
)
def test_measurements_of_a_group_are_added_up(
    a: float, b: float, tasks: tuple[int, int], nbytes: float
) -> None:
    found = merge_tasks(of_group(tasks[0], a, seconds=2.0), of_group(tasks[1], b, seconds=1.0))
    assert (found.tasks, found.seconds) == (3, pytest.approx(4.0))
    assert found.nbytes == pytest.approx(nbytes, nan_ok=True)
