"""The reason that is shown for a task that waits while workers are idle, as a table."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dask_ferro.policy.waits import REASONS, by_reason, wait_of
from tests.pages import ROOT
from tests.policy.facts import ledger, needs, stand, task


@pytest.mark.parametrize(
    ("facts", "idle", "options", "reason"),
    [
        pytest.param({}, {}, {}, "about_to_move", id="it is about to move"),
        pytest.param({"allowed": frozenset({"v"})}, {}, {}, "restricted", id="restrictions"),
        pytest.param({"allowed": frozenset()}, {}, {"needs": True}, "resources", id="resources"),
        pytest.param({"must": "gpu"}, {}, {}, "wrong_device", id="a device class that is not idle"),
        pytest.param({"nbytes": 100}, {"room": 10, "most": 1000}, {}, "device_memory_full", id="no room"),
        pytest.param({"seconds": 9.0}, {"ends_in": 1.0}, {}, "worker_ending", id="the worker ends before"),
        pytest.param({"inputs": (needs(10, "v"),)}, {}, {"transfer": 9.0}, "transfer_too_slow",
            id="a transfer that costs more"),
    ],
)  # fmt: skip
def test_why_a_task_waits(facts: dict[str, Any], idle: dict, options: dict, reason: str) -> None:
    waiting = task("t", **{"seconds": 0.1, "overdue": 2.0, **facts})
    found = wait_of(waiting, "v", [stand("w").worker._replace(**idle)], **options)
    assert (found.reason, found.worker, found.seconds, found.some) == (reason, "v", 2.0, ("w",))
    assert REASONS[reason][0] in found.sentence()
    assert by_reason([found])[reason] == sum(by_reason([found]).values()) == 1


def _behind(seconds: float, now: float) -> list:
    """What is overdue at some time, of a short task behind one of so many seconds."""
    book = ledger({"v": 1, "w": 1}, long=seconds, short=0.001)
    book.assign(0.0, "long", "v", "long", (0,))
    book.assign(0.0, "short", "v", "short", (1,))
    book.listen(0.0)
    return [entry.key for entry, _, _ in book.overdue(now, 0.5, 0)]


@pytest.mark.parametrize(
    ("seconds", "now", "overdue"),
    [
        pytest.param(0.1, 0.4, [], id="not before there was time to look"),
        pytest.param(0.1, 0.71, ["short"], id="longer than twice what was expected"),
        pytest.param(0.8, 0.7, [], id="not what is about to start, as was expected"),
        pytest.param(8.0, 0.6, ["short"], id="what is to wait for as long again"),
    ],
)
def test_what_is_overdue(seconds: float, now: float, overdue: list[str]) -> None:
    assert _behind(seconds, now) == overdue


def test_one_that_may_move_is_found_soon_among_thousands_that_may_not() -> None:
    """Eight of a queue are looked at whatever they are; 10,000 of them would take ten minutes of ticks."""
    book = ledger({"v": 1, "w": 1}, short=0.001)
    book.facts.unbound = lambda entries: [e for e in entries if e.key == 6_001]  # type: ignore[method-assign]
    for number in range(10_000):
        book.assign(0.0, number, "v", "short", (number,))
    looks = ([entry.key for entry, _, _ in book.overdue(50.0, 0.5, turn)] for turn in range(5))
    assert any(6_001 in keys for keys in looks)


def test_a_task_runs_from_when_its_message_has_left() -> None:
    """A scheduler that works for a second hears and sends nothing: nothing it gave away meanwhile is overdue."""
    book = ledger({"v": 1}, short=0.001)
    for i in range(10):
        book.assign(0.1 * i, i, "v", "short", (i,))
    assert book.rows["v"].starts_in(1.0) == pytest.approx(0.01)
    book.listen(1.0)
    assert book.rows["v"].starts_in(1.5) == pytest.approx(0.5 + 0.009)


def test_a_worker_is_believed_in_what_it_runs() -> None:
    """Starts are inferred; a task that was thought to run, and waits, may be moved again when its worker says so."""
    book = ledger({"v": 1}, short=0.001)
    for i in range(3):
        book.assign(0.0, i, "v", "short", (i,))
    book.listen(0.0)
    book.hear(1.0, "v", 1.0, {2})
    assert list(book.rows["v"].running) == [2]
    assert [entry.key for _, _, entry in book.rows["v"].queue] == [0, 1]


def test_a_queue_that_waits_for_resources_leaves_its_worker_a_thief() -> None:
    book = ledger({"v": 2})
    book.set_resources("v", {"GPU": 1.0})
    for i in range(2):
        book.assign(0.0, i, "v", "x", (i,), needs={"GPU": 1.0})
    book.listen(0.0)
    row = book.rows["v"]
    assert (row.is_blocked, row.may_take, row.starts_in(0.0)) == (True, True, 0.0)
    assert book.queue("v", 64, 3.0)[0].blocked == pytest.approx(3.0)


def test_a_moved_task_is_overdue_behind_one_that_has_overrun_for_as_long() -> None:
    """It was projected to wait for 8 s, and has waited for 24 s: as long as what runs before it has run."""
    book = ledger({"v": 1, "w": 1}, long=8.0, short=0.001)
    book.assign(0.0, "short", "w", "short", (1,))
    book.request(0.0, "short", "v")
    book.assign(0.0, "long", "v", "long", (0,))
    book.confirm(0.0, "short")
    book.listen(0.0)
    assert [entry.key for entry, _, _ in book.overdue(24.0, 0.5, 0)] == ["short"]


def test_the_page_of_metrics_explains_each_reason():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = page.partition("| `reason` | the task waits because |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(REASONS)
