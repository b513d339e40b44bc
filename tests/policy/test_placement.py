"""Where a ready task goes, as a table of claims."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dask_ferro.policy.facts import TaskFacts
from dask_ferro.policy.placement import NoWorker, PlacementParameters
from tests.policy.facts import MB, Stand, free_links, needs, stand, task, where

PLACEMENT = PlacementParameters(margin=0.002, light=MB)
HELD = (needs(MB, "a"),)  # 10 ms to move, 35 ms with the burden, 37 ms with the margin


def only(*addresses: str) -> frozenset[str]:
    return frozenset(addresses)


@pytest.mark.parametrize(
    ("ready", "stands", "wanted"),
    [
        pytest.param(task("t"), [], NoWorker(), id="nowhere in an empty cluster"),
        pytest.param(task("t"), [stand("a", accepts=False)], NoWorker(), id="not to a paused worker"),
        pytest.param(task("t"), [stand("a", running=0.1), stand("b")], "b", id="where it starts first"),
        pytest.param(task("t", 1.0), [stand("a", slowness=3.0), stand("b", running=0.5)], "b",
            id="where it ends first"),
        pytest.param(task("t"), [stand("b"), stand("a")], "a", id="to the first by address, all else equal"),
        pytest.param(task("t"), [stand("a", running=0.0), stand("b")], "b",
            id="to the worker with fewer busy threads, all else equal"),
        pytest.param(task("t", inputs=HELD), [stand("a", running=0.01), stand("b")], "a", id="to its inputs' holder"),
        pytest.param(task("t", inputs=HELD), [stand("a", running=0.0365), stand("b")], "a",
            id="to the holder, where leaving gains less than the margin"),
        pytest.param(task("t", inputs=HELD), [stand("a", running=0.0375), stand("b")], "b",
            id="away from the holder, where it gains more"),
        pytest.param(task("t", inputs=HELD), [stand("a", running=0.5), stand("b", running=0.01)], "b",
            id="where the transfer hides behind what runs"),
        pytest.param(task("t", allowed=only("a")), [stand("a", running=9.0), stand("b")], "a", id="where it must"),
        pytest.param(task("t", allowed=only("c")), [stand("a"), stand("b")], NoWorker(), id="nowhere, if it may not"),
        pytest.param(task("t", allowed=only()), [stand("a")], NoWorker(), id="nowhere, if nobody may"),
        pytest.param(task("t", allowed=only("a"), preferred=only("b")), [stand("a"), stand("b")], "a",
            id="a must before a wish"),
        pytest.param(task("t", preferred=only("a")), [stand("a", running=9.0), stand("b")], "a", id="where it likes"),
        pytest.param(task("t", preferred=only("a")), [stand("a", accepts=False), stand("b")], "b",
            id="elsewhere, where it likes is paused"),
        pytest.param(task("t", preferred=only("gone")), [stand("b")], "b", id="elsewhere, where it likes left"),
        pytest.param(task("t", 0.5, known=False), [stand("a", running=0.1), stand("b")], "b", id="a guess as well"),
        pytest.param(task("t", 0.5, known=False), [stand("a", running=0.1, slowness=0.5), stand("b")], "b",
            id="a guess beside an idle worker, however fast the others are"),
    ],
)  # fmt: skip
def test_a_ready_task_goes(ready: TaskFacts, stands: list[Stand], wanted: str | NoWorker) -> None:
    assert where(PLACEMENT.choose(ready, [s.worker for s in stands], free_links(), {})) == wanted


@pytest.mark.parametrize(
    ("stands", "wanted"),
    [
        pytest.param([stand("a", running=9.0), stand("b")], "a", id="stays with it, however long the queue"),
        pytest.param([stand("a", running=0.2), stand("c", running=0.1)], "c", id="goes to the freer of two holders"),
        pytest.param([stand("a", accepts=False), stand("b")], "b", id="leaves holders that are paused"),
    ],
)  # fmt: skip
def test_a_task_with_a_large_input(stands: list[Stand], wanted: str) -> None:
    large = task("t", inputs=(needs(2 * MB, "a", "c"), needs(10, "b")))
    assert where(PLACEMENT.choose(large, [s.worker for s in stands], free_links(), {})) == wanted


@pytest.mark.parametrize(
    ("seconds", "nbytes", "changes", "wanted"),
    [
        pytest.param(1e-5, 100, {}, 8, id="short ones several at a time"),
        pytest.param(0.0, 0, {}, 8, id="those that take no time and hold nothing too"),
        pytest.param(0.002, 100, {}, 2, id="those of some length fewer"),
        pytest.param(0.010, 100, {}, 0, id="long ones one by one"),
        pytest.param(1e-5, 300_000, {}, 3, id="as many as their results are small"),
        pytest.param(1e-5, 100, {"ahead_tasks": 3}, 3, id="as many as an option says"),
        pytest.param(1e-5, 10**9, {}, 0, id="one by one with large results"),
        pytest.param(1e-5, None, {}, 0, id="one by one while no result was seen"),
        pytest.param(None, 100, {}, 0, id="one by one while none was measured"),
        pytest.param(1e-5, 100, {"steals": False}, 0, id="one by one where nothing is stolen"),
        pytest.param(1e-5, 100, {"ahead": 0.0}, 0, id="one by one where that is switched off"),
    ],
)
def test_queued_tasks_are_sent(
    seconds: float | None, nbytes: int | None, changes: dict[str, Any], wanted: int
) -> None:
    rule = replace(PlacementParameters(), **changes)
    assert rule.tasks_ahead(seconds or 0.0, seconds is not None, nbytes) == wanted


def test_a_worker_that_is_weighed_twice_counts_once() -> None:
    workers = [stand("a", running=0.1).worker, stand("b").worker] * 2
    assert where(PLACEMENT.choose(task("t"), workers, free_links(), {})) == "b"


@pytest.mark.parametrize(
    ("seconds", "running", "other", "nbytes", "known", "settled"),
    [
        pytest.param(0.1, 0.001, 0.0, 10, True, True, id="settles where the holder is as good as free"),
        pytest.param(0.1, 9.0, 0.2, 10, True, True, id="settles where nobody else runs dry in time"),
        pytest.param(0.1, 9.0, 0.0, 2 * MB, True, True, id="settles with a large input"),
        pytest.param(0.1, 9.0, 0.0, 10, True, False, id="looks around where another worker is free"),
        pytest.param(0.1, 9.0, 0.01, 10, False, True, id="settles where its duration is a guess and nobody is idle"),
        pytest.param(0.1, 9.0, 0.0, 10, False, False, id="leaves by a guess for an idle worker"),
        pytest.param(0.0, 0.01, 0.0, 10, True, False, id="leaves for little, however short it is"),
    ],
)  # fmt: skip
def test_a_task_whose_inputs_one_worker_holds(
    seconds: float,
    running: float,
    other: float,
    nbytes: int,
    known: bool,
    settled: bool,
) -> None:
    """And where it settles, `choose` says the same of all workers."""
    ready = task("t", seconds, inputs=(needs(nbytes, "a"),), known=known)
    workers = [
        s.worker._replace(runs_dry_in=s.worker.starts_in)
        for s in (stand("a", running=running), stand("b", running=other) if other else stand("b"))
    ]
    first = min(w.starts_in for w in workers)
    assert PLACEMENT.settles(seconds, known, running, first, nbytes) is settled
    assert where(PLACEMENT.choose(ready, workers, free_links(), {})) == ("a" if settled else "b")
