"""What becomes of a flow by the states of its members, and where they run: rows of a table."""

from __future__ import annotations

import pytest

from dask_ferro.flow.admission import Claim, Step, Threads, admit, next_step, place

HELD = "no-worker"


@pytest.mark.parametrize(
    ("states", "has_failed", "voids", "step"),
    [
        (["waiting", "waiting"], False, 0, "wait"),
        (["waiting", "released"], False, 0, "again"),
        (["waiting", "processing"], False, 0, "wait"),
        (["waiting", "erred"], True, 0, "wait"),
        (["waiting"], False, 0, "wait"),
        (["memory", "released"], False, 0, "wait"),
        ([HELD, HELD], False, 0, "admit"),
        ([HELD, HELD], False, 4, "admit"),
        ([HELD, HELD], False, 5, "unreachable"),
        ([HELD, "waiting"], False, 0, "again"),
        ([HELD, "memory"], False, 0, "again"),
        ([HELD, "processing"], False, 0, "again"),
        ([HELD, "waiting"], True, 0, "fail"),
        ([HELD, "erred"], True, 5, "fail"),
        ([HELD], False, 0, "lose"),
        (["erred", "erred"], True, 0, "wait"),
    ],
    ids=str,
)
def test_a_flow_is_admitted_run_again_or_failed_as_a_whole(
    states: list[str], has_failed: bool, voids: int, step: Step
) -> None:
    assert next_step(2, states, has_failed, voids) == step


A, B = Threads("a", 1, 0, 0), Threads("b", 1, 0, 0)
ANY = Claim({})


@pytest.mark.parametrize(
    ("claims", "workers", "chosen"),
    [
        pytest.param([ANY, ANY], [A, B], ["a", "b"], id="one each"),
        pytest.param([ANY, ANY], [Threads("a", 1, 1, 1), B], None, id="another flow runs"),
        pytest.param([ANY, ANY], [Threads("a", 2, 1, 1), B], ["b", "a"], id="a thread is left"),
        pytest.param([Claim({"b": 9}), ANY], [A, B], ["b", "a"], id="inputs"),
        pytest.param([ANY], [Threads("a", 1, 0, 3), B], ["b"], id="less to do"),
        pytest.param([ANY, ANY, ANY], [A, B], ["a", "b", "a"], id="turns"),
        pytest.param([ANY, ANY], [], None, id="no worker"),
        pytest.param([Claim({"b": 9}), Claim({}, "b")], [A, B], ["a", "b"], id="a home before inputs"),
        pytest.param([Claim({}, "c"), Claim({}, "a")], [A, B], ["b", "a"], id="a home that is gone"),
        pytest.param([Claim({}, "a"), Claim({}, "a")], [A, B], ["a", "b"], id="a home that is full"),
        pytest.param([Claim({}, "a"), Claim({}, "", ["a"])], [A, B], ["b", "a"], id="few can"),
        pytest.param([Claim({}, "", ["a"])] * 2, [A, B], ["a", "a"], id="few can, and take turns"),
        pytest.param([Claim({}, "", [])], [A, B], None, id="none can"),
    ],
)
def test_members_have_a_thread_each(
    claims: list[Claim], workers: list[Threads], chosen: list[str] | None
) -> None:
    assert place(claims, workers) == chosen


ONE, TWO, NEVER = [ANY], [ANY, ANY], [ANY, Claim({}, "", [])]


@pytest.mark.parametrize(
    ("flows", "places"),
    [
        pytest.param([ONE, ONE], [["a"], ["b"]], id="a thread each"),
        pytest.param([ONE, TWO, ONE], [["a"], None, None], id="none overtakes one that waits for threads"),
        pytest.param([NEVER, TWO], [None, ["a", "b"]], id="one that no worker can run is not waited for"),
        pytest.param([TWO, ONE], [["a", "b"], None], id="no thread is left"),
        pytest.param([], [], id="no flow"),
    ],
)
def test_flows_are_admitted_in_their_order(flows: list[list[Claim]], places: list[list[str] | None]) -> None:
    assert admit(flows, [A, B]) == places
