"""The ledger's state after each event: the tasks that run on each worker, those that wait, and data on their way."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.policy.estimates import GUESS, Links
from dask_ferro.policy.facts import Key
from dask_ferro.policy.idle_order import SCAN_LIMIT
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.waits import look
from tests.policy.facts import ledger


def assign(book: Ledger, address: str, *keys: Key, now: float = 0.0, prefix: str = "p") -> None:
    """Assign tasks whose priority is their order."""
    for order, key in enumerate(keys):
        book.assign(now, key, address, prefix, (0, order))


def queue(book: Ledger, address: str) -> list[Key]:
    """Keys of a worker's queue, the last to start first."""
    return [task.key for task in book.queue(address, 64, 0.0)]


def running(book: Ledger, address: str) -> set[Key]:
    return set(book.rows[address].running)


def starts_in(book: Ledger, address: str, now: float) -> float:
    return book.worker(address, now).starts_in


# -- running tasks -----------------------------------------------------------------------------------------


def test_a_worker_starts_as_many_tasks_as_it_has_threads() -> None:
    book = ledger({"a": 2})
    assign(book, "a", "k0", "k1", "k2", "k3")
    assert (running(book, "a"), queue(book, "a"), book.waiting) == ({"k0", "k1"}, ["k3", "k2"], 2)


def test_the_next_by_priority_starts_when_one_ends() -> None:
    book = ledger({"a": 1})
    for key, priority in [("first", 0), ("late", 9), ("soon", 1)]:
        book.assign(0.0, key, "a", "p", priority)
    book.finish(1.0, "first")
    assert (running(book, "a"), queue(book, "a")) == ({"soon"}, ["late"])


def test_tasks_of_equal_priority_start_in_the_order_in_which_they_came() -> None:
    book = ledger({"a": 1})
    for key in ["x", 3, ("x", 1), "b"]:  # keys of mixed types have no order of their own
        book.assign(0.0, key, "a", "p", 0)
    assert queue(book, "a") == ["b", ("x", 1), 3]


def test_every_free_thread_is_filled_when_one_ends() -> None:
    book = ledger({"a": 2, "b": 1})
    assign(book, "a", *range(6))
    book.request(0.0, 0, "b")  # believed to run, and not started in truth
    book.confirm(0.0, 0)
    book.finish(1.0, 1)
    assert (running(book, "a"), queue(book, "a")) == ({2, 3}, [5, 4])


def test_threads_that_a_worker_gains_are_filled() -> None:
    book = ledger({"a": 1})
    assign(book, "a", *range(5))
    book.add_worker("a", 3, "h")
    assert running(book, "a") == {0, 1, 2}


def test_a_worker_without_threads_divides_nothing_by_zero() -> None:
    book = ledger({"a": 0}, p=1.0)
    assign(book, "a", 0, 1)
    assert starts_in(book, "a", 0.0) == 2.0


def test_a_task_for_an_unknown_worker_leaves_nothing_behind() -> None:
    book = ledger({"a": 1})
    with pytest.raises(KeyError):
        assign(book, "gone", "k")
    assert book.entries == {}


def test_what_never_stood_in_the_book_ends_without_notice() -> None:
    assert ledger({"a": 1}).finish(0.0, "k") is None


def test_a_paused_worker_starts_nothing_until_it_runs_again() -> None:
    book = ledger({"a": 1}, p=1.0)
    assign(book, "a", *range(3))
    book.set_accepts("a", accepts=False)
    book.finish(1.0, 0)
    assert (running(book, "a"), queue(book, "a")) == (set(), [2, 1])
    book.set_accepts("a", accepts=True)
    assert (running(book, "a"), queue(book, "a"), starts_in(book, "a", 1.0)) == ({1}, [2], 2.0)


def test_a_task_that_reaches_a_worker_as_it_pauses_waits() -> None:
    book = ledger({"a": 2})
    book.set_accepts("a", accepts=False)
    assign(book, "a", 0)
    assert (running(book, "a"), queue(book, "a")) == (set(), [0])


# -- when a task would start -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nthreads", "tasks", "now", "wanted"),
    [
        pytest.param(1, 0, 0.0, 0.0, id="an idle worker starts at once"),
        pytest.param(2, 1, 0.0, 0.0, id="a free thread starts at once"),
        pytest.param(1, 1, 0.0, 1.0, id="behind one running task"),
        pytest.param(1, 1, 0.4, 0.6, id="what has run already is not waited for"),
        pytest.param(1, 3, 0.0, 3.0, id="behind the queue too"),
        pytest.param(2, 4, 0.0, 2.0, id="a queue is shared by the threads"),
        pytest.param(1, 1, 1.5, 1.5, id="a task that is overdue is projected to run as long again"),
    ],
)
def test_a_task_starts(nthreads: int, tasks: int, now: float, wanted: float) -> None:
    book = ledger({"a": nthreads}, p=1.0)
    assign(book, "a", *range(tasks))
    book.listen(0.0)
    assert starts_in(book, "a", now) == pytest.approx(wanted)


def test_a_queue_fills_up_the_threads_that_end_first() -> None:
    book = ledger({"a": 2}, short=1.0, long=10.0)
    book.assign(0.0, "long", "a", "long", 0)
    book.assign(0.0, "short", "a", "short", 0)
    assign(book, "a", *range(3), prefix="short")
    assert starts_in(book, "a", 0.0) == pytest.approx(4.0)


def test_a_slow_worker_takes_longer_for_the_same_queue() -> None:
    book = ledger({"slow": 1, "fast": 1}, p=1.0)
    for turn in range(20):
        for address, seconds in [("slow", 9.0), ("fast", 1.0)]:
            assign(book, address, address, now=9.0 * turn)
            book.finish(9.0 * turn + seconds, address, seconds)
    assign(book, "slow", 0, 1, now=900.0)
    assign(book, "fast", 2, 3, now=900.0)
    assert book.rows["fast"].slowness < 0.5 < 1.0 <= book.rows["slow"].slowness
    assert starts_in(book, "slow", 900.0) / starts_in(book, "fast", 900.0) > 2.0


def test_a_worker_that_is_off_by_less_than_durations_spread_counts_as_any_other() -> None:
    book = ledger({"a": 1}, p=1.0)
    for turn in range(20):
        assign(book, "a", turn, now=turn)
        book.finish(turn + 1.0, turn, 1.3)
    assert book.rows["a"].slowness == 1.0


def test_tasks_of_no_length_say_little_about_a_worker() -> None:
    book = ledger({"a": 1})
    book.assign(0.0, "k", "a", "p", 0, annotated=0.0)
    book.finish(1.0, "k", 1e-5)
    assert book.rows["a"].slowness == pytest.approx(1.0, abs=0.02)


def test_a_moved_task_counts_at_the_thief_as_soon_as_it_is_asked_back() -> None:
    book = ledger({"a": 1, "b": 1}, p=1.0)
    assign(book, "a", *range(3))
    book.request(0.0, 2, "b")
    assert (starts_in(book, "a", 0.0), starts_in(book, "b", 0.0)) == (2.0, 1.0)
    assert (book.worker("b", 0.0).busy, book.worker("b", 0.0).waiting) == (1, 0)


# -- moves -------------------------------------------------------------------------------------------------


def test_a_confirmed_task_stands_at_the_thief_and_remembers_the_victim() -> None:
    book = ledger({"a": 1, "b": 1})
    assign(book, "a", 0, 1)
    book.request(0.0, 1, "b")
    assert (queue(book, "a"), running(book, "b"), book.waiting) == ([], set(), 0)
    book.confirm(0.1, 1)
    assert (running(book, "b"), book.entries[1].origins) == ({1}, ("a",))


def test_a_refused_task_runs_at_the_victim() -> None:
    book = ledger({"a": 1, "b": 1})
    assign(book, "a", 0, 1)
    book.request(0.0, 1, "b")
    book.refuse(0.1, 1)
    assert (running(book, "a"), book.rows["b"].incoming, book.entries[1].origins) == ({0, 1}, 0, ())
    book.finish(0.2, 0)
    book.finish(0.3, 1)
    assert (running(book, "a"), book.entries) == (set(), {})


def test_a_task_cannot_be_asked_back_twice() -> None:
    book = ledger({"a": 1, "b": 1})
    assign(book, "a", *range(4))
    book.request(0.0, 2, "b")
    with pytest.raises(AssertionError, match="2 was asked back already"):
        book.request(0.0, 2, "b")
    assert queue(book, "a") == [3, 1]


def test_a_request_for_an_unknown_thief_leaves_the_queue_as_it_was() -> None:
    book = ledger({"a": 1})
    assign(book, "a", *range(4))
    with pytest.raises(KeyError):
        book.request(0.0, 2, "gone")
    assert queue(book, "a") == [3, 2, 1]


# -- workers that come and go ------------------------------------------------------------------------------


def test_a_worker_that_leaves_takes_its_tasks_along_in_flight_ones_too() -> None:
    book = ledger({"a": 1, "b": 1})
    assign(book, "a", *range(4))
    book.request(0.0, 3, "b")
    book.remove_worker("a")
    assert (book.entries, book.waiting, book.rows["b"].incoming, list(book.hosts)) == ({}, 0, 0, ["b"])
    assert book.snapshot(0.0, ["a", "b"]).hungry == ("b",)


# -- durations ---------------------------------------------------------------------------------------------


def test_the_first_measured_duration_corrects_all_guesses_of_its_prefix() -> None:
    book = ledger({"a": 1, "b": 1, "c": 1})
    assign(book, "a", *range(4))
    assign(book, "b", "x")
    book.request(0.0, 3, "c")
    assert book.rows["a"].waiting_seconds == pytest.approx(2 * GUESS)
    book.finish(0.1, "x", 0.1)
    assert book.rows["a"].waiting_seconds == pytest.approx(0.2)
    assert starts_in(book, "a", 0.1) == pytest.approx(0.1 + 0.2)  # overdue: as long again
    assert book.rows["c"].incoming_seconds == pytest.approx(0.1)


def test_a_duration_measured_by_a_clock_that_was_set_back_is_zero() -> None:
    book = ledger({"a": 1})
    assign(book, "a", "k")
    book.finish(0.0, "k", -3.0)
    assert book.durations.of("p", "cpu") == (0.0, True)


def test_sums_do_not_drift_over_a_hundred_thousand_events() -> None:
    book = ledger({"a": 1})
    for turn in range(50_000):
        book.assign(float(turn), turn, "a", "p", turn, annotated=0.1 + turn % 7)
        if turn >= 8:
            book.finish(float(turn), turn - 8)
    exact = math.fsum(entry.seconds for _, _, entry in book.rows["a"].queue)
    assert book.rows["a"].waiting_seconds == pytest.approx(exact, rel=1e-9)
    for turn in range(50_000 - 8, 50_000):
        book.finish(5e4, turn)
    assert (book.rows["a"].waiting_seconds, book.longest()) == (0.0, 0.0)


# -- reading -----------------------------------------------------------------------------------------------


def soonest(book: Ledger, now: float, count: int) -> list[str]:
    return [worker.address for worker in book.soonest(now, count)]


def test_the_longest_queues_come_first_by_seconds_a_thread() -> None:
    book = ledger({"a": 1, "b": 4, "c": 1, "idle": 1}, p=1.0)
    for address, tasks in [("a", 3), ("b", 9), ("c", 5)]:
        assign(book, address, *((address, n) for n in range(tasks)))
    assert book.snapshot(0.0, []).busiest == ("c", "a", "b")
    assert book.snapshot(0.0, [], victims=1).busiest == ("c",)


def test_a_snapshot_shows_the_end_of_a_queue() -> None:
    book = ledger({"a": 1})
    assign(book, "a", *range(100))
    assert [t.key for t in book.snapshot(0.0, []).queues["a"]] == list(range(99, 35, -1))


def test_a_snapshot_stays_as_it_was_whatever_happens_later() -> None:
    book, links = ledger({"a": 1, "idle": 1}), Links()
    assign(book, "a", *range(5))
    shown = book.snapshot(0.0, ["idle"], links)
    was = copy.deepcopy(shown)
    assert (shown.workers["a"].waiting, len(shown.queues["a"])) == (4, 4)
    assign(book, "a", *range(5, 9))
    book.request(0.0, 8, "idle")
    book.add_worker("new", 1, "elsewhere")
    book.remove_worker("idle")
    links.add("host", 10**6, 9.0)
    assert shown == was
    assert (shown.workers["a"].waiting, len(shown.queues["a"])) == (4, 4)


def test_a_snapshot_can_be_pickled_and_is_equal_where_the_facts_are() -> None:
    first, second = (ledger({"a": 1, "b": 1, "idle": 1}) for _ in range(2))
    for book in (first, second):
        for address in "ab":
            assign(book, address, *((address, n) for n in range(3)))
    asked = {"idle": ("b", "gone", "a")}
    for options in ({}, {"asked": asked}):
        shown = first.snapshot(1.0, ["idle"], Links(), **options)
        again = second.snapshot(1.0, ["idle"], Links(), **options)
        assert pickle.loads(pickle.dumps(shown)) == shown == again
        assert set(shown.workers) == {"a", "b", "idle"}
    assert (shown.asked, shown.busiest) == ({"idle": ("b", "a")}, ())
    second.finish(1.0, ("a", 2))
    assert first.snapshot(1.0, ["idle"]) != second.snapshot(1.0, ["idle"])


def test_what_is_overdue_is_shown_as_a_value() -> None:
    book = ledger({"v": 1, "w": 1}, long=9.0, short=0.001)
    book.assign(0.0, "long", "v", "long", (0,))
    book.assign(0.0, "short", "v", "short", (1,))
    found = look(book, 1.0, book.idle(1.0), 0.5, 0)
    assert found.thieves == ("w",)
    seen = book.snapshot(1.0, found.thieves, first=found.tasks, tasks=0)
    assert ([t.key for t in seen.queues["v"]], seen.queues["v"][0].overdue, seen.busiest) == (
        ["short"],
        1.0,
        ("v",),
    )
    was = pickle.dumps(seen)
    book.finish(1.0, "long")
    assert pickle.dumps(seen) == was


@pytest.mark.parametrize(
    ("tasks", "seen"),
    [
        pytest.param(640, {"c": 9, "b": 9, "a": 9}, id="all where there is room"),
        pytest.param(12, {"c": 9, "b": 3}, id="the longest queue first, and of the next one what there is room for"),
        pytest.param(9, {"c": 9}, id="no empty end of a queue"),
    ],
)  # fmt: skip
def test_a_snapshot_shows_so_many_tasks(tasks: int, seen: dict[str, int]) -> None:
    book = ledger(dict.fromkeys("abc", 1), p=1.0, q=2.0, r=3.0)
    for address, prefix in zip("abc", "pqr", strict=True):
        assign(book, address, *((address, n) for n in range(10)), prefix=prefix)
    shown = book.snapshot(0.0, [], tasks=tasks)
    assert {address: len(queue) for address, queue in shown.queues.items()} == seen
    assert shown.busiest == ("c", "b", "a")


def test_an_empty_cluster_has_no_soonest_and_an_empty_snapshot() -> None:
    book = ledger({})
    shown = book.snapshot(0.0, ["a"])
    assert (book.soonest(0.0, 4), shown.hungry, shown.busiest, dict(shown.workers)) == ([], (), (), {})


def test_a_book_that_nobody_reads_does_not_grow() -> None:
    book = ledger({f"w{i}": 1 for i in range(SCAN_LIMIT + 1)})
    for turn in range(2000):
        assign(book, "w0", turn)
        book.finish(0.0, turn, 0.1)
    assert SCAN_LIMIT < sum(map(len, book._order._heaps.values())) <= 4 * (SCAN_LIMIT + 1) + 64


@pytest.mark.parametrize(
    ("workers", "skip", "seen"),
    [
        pytest.param(3, 0, ["w2", "w1", "w0"], id="shows all of a few"),
        pytest.param(3, 2, ["w2", "w1", "w0"], id="never hides one of a few"),
        pytest.param(5, 0, ["w4", "w3", "w2", "w1"], id="shows the longest queues of many"),
        pytest.param(5, 4, ["w0"], id="shows the next ones where nothing may move in those"),
    ],
)
def test_a_snapshot(workers: int, skip: int, seen: list[str]) -> None:
    book = ledger({f"w{i}": 1 for i in range(workers)}, p=1.0)
    for index in range(workers):
        assign(book, f"w{index}", *((index, place) for place in range(index + 2)))
    assert list(book.snapshot(0.0, (), victims=4, skip=skip).busiest) == seen


# -- what is kept is what would be counted ---------------------------------------------------------------------


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["assign", "assign", "assign", "finish", "request", "refuse", "confirm", "pause", "run"]
        ),
        st.sampled_from("ab"),
        st.integers(0, 9),
        st.sampled_from("pq"),
        st.none() | st.floats(0.0, 4.0),
    ),
    max_size=40,
)


def happens(
    book: Ledger, now: float, what: str, worker: str, key: Key, prefix: str, seconds: float | None
) -> None:
    entry = book.entries.get(key)
    if what == "assign":
        book.assign(now, key, worker, prefix, (0, key))
    elif what in ("pause", "run"):
        book.set_accepts(worker, what == "run")
    elif what == "finish":
        book.finish(now, key, seconds)
    elif (
        what == "request"
        and entry is not None
        and key not in book.requests
        and entry.worker.address != worker
    ):
        book.request(now, key, worker)
    elif what in ("refuse", "confirm") and key in book.requests:
        (book.refuse if what == "refuse" else book.confirm)(now, key)


def free_in(book: Ledger, address: str, now: float) -> float:
    """When a thread of a worker is free and its queue worked off, by the levels of a general number of threads."""
    row = book.rows[address]
    free = row.nthreads - len(row.running) - row.incoming
    if free > 0 and free > (0 if row.is_blocked else len(row.queue)):
        return 0.0
    left = []
    for entry in row.running.values():
        elapsed, whole = max(now - entry.started, 0.0), entry.seconds * row.slowness
        left.append(whole - elapsed if elapsed < whole else elapsed)
    levels = ([0.0] * (row.nthreads - len(left)) + sorted(left))[: row.nthreads]
    work = (row.waiting_seconds + row.incoming_seconds) * row.slowness
    for index, level in enumerate(levels[1:], 1):
        room = (level - levels[index - 1]) * index
        if work <= room:
            return levels[index - 1] + work / index
        work -= room
    return levels[-1] + work / row.nthreads


@given(EVENTS, st.sampled_from([1, 1, 2]))
def test_what_is_kept_is_what_would_be_counted(events, nthreads: int) -> None:
    book = ledger({"a": 1, "b": nthreads})
    for now, event in enumerate(events):
        happens(book, float(now), *event)
        loads = []
        for address, row in book.rows.items():
            waiting = [entry for _, _, entry in row.queue]
            assert row.waiting_seconds == pytest.approx(sum(e.seconds for e in waiting))
            assert starts_in(book, address, now + 0.5) == pytest.approx(free_in(book, address, now + 0.5))
            if waiting:
                loads.append((row.waiting_seconds * row.slowness / row.nthreads, address))
            # Nothing that could start waits.
            assert not waiting or not row.accepts or len(row.running) >= row.nthreads
        assert book._loads == sorted(loads)
        assert book.waiting == sum(len(row.queue) for row in book.rows.values())
