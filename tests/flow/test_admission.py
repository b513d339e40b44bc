"""What becomes of a flow by the states of its members, and where they run: rows of a table."""

from __future__ import annotations

import pytest

from dask_ferro.flow.admission import Step, Threads, next_step, placed

HELD = "no-worker"


@pytest.mark.parametrize(
    ("states", "has_failed", "voids", "step"),
    [
        (["waiting", "waiting"], False, 0, "wait"),
        (["memory", "released"], False, 0, "wait"),
        ([HELD, HELD], False, 0, "admit"),
        ([HELD, HELD], False, 4, "admit"),
        ([HELD, HELD], False, 5, "unreachable"),
        ([HELD, "waiting"], False, 0, "again"),
        ([HELD, "memory"], False, 0, "again"),
        ([HELD, "processing"], False, 0, "again"),
        ([HELD, "waiting"], True, 0, "fail"),
        ([HELD, "erred"], True, 5, "fail"),
        ([HELD], False, 0, "fail"),
        (["erred", "erred"], True, 0, "wait"),
    ],
    ids=str,
)
def test_a_flow_is_admitted_run_again_or_failed_as_a_whole(
    states: list[str], has_failed: bool, voids: int, step: Step
) -> None:
    assert next_step(2, states, has_failed, voids) == step


@pytest.mark.parametrize(
    ("held", "workers", "chosen"),
    [
        pytest.param([{}, {}], [Threads("a", 1, 0, 0), Threads("b", 1, 0, 0)], ["a", "b"], id="one each"),
        pytest.param([{}, {}], [Threads("a", 1, 1, 1), Threads("b", 1, 0, 0)], None, id="another flow runs"),
        pytest.param(
            [{}, {}], [Threads("a", 2, 1, 1), Threads("b", 1, 0, 0)], ["b", "a"], id="a thread is left"
        ),
        pytest.param([{"b": 9}, {}], [Threads("a", 1, 0, 0), Threads("b", 1, 0, 0)], ["b", "a"], id="inputs"),
        pytest.param([{}], [Threads("a", 1, 0, 3), Threads("b", 1, 0, 0)], ["b"], id="less to do"),
        pytest.param(
            [{}, {}, {}], [Threads("a", 1, 0, 0), Threads("b", 1, 0, 0)], ["a", "a", "b"], id="turns"
        ),
        pytest.param([{}, {}], [], None, id="no worker"),
    ],
)
def test_members_have_a_thread_each(
    held: list[dict[str, int]], workers: list[Threads], chosen: list[str] | None
) -> None:
    assert placed(held, workers) == chosen
