"""The window: how many are in flight, what happens after a failure, what is tried again."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.stream.drive import ChunkFailed, Lost, drive


class Bench:
    """A pool whose chunks end when the test says so: before each look at the limit, the oldest ones do."""

    def __init__(self, limit=3, outcomes=None):
        self.most, self.outcomes = limit, outcomes or {}
        self.flying, self.submitted, self.peak = [], [], 0

    def limit(self):
        self._end_one_if_full()
        return self.most

    def submit(self, number, attempt):
        self.submitted.append((number, attempt))
        future = Future()
        future.job = number, attempt
        self.flying.append(future)
        self.peak = max(self.peak, len(self.flying))
        if len(self.submitted) > 100:
            raise AssertionError("it never stops")
        return future

    def _end_one_if_full(self):
        if len(self.flying) >= self.most:
            self.end()

    def end(self):
        self.flying.pop(0).set_result(None)

    def error(self, future):
        return self.outcomes.get(future.job)


def run(bench, numbers):
    """Drive to the end; chunks that are in flight when no more are submitted end one by one."""
    done = []
    flight = drive(Feeding(bench, numbers), bench)
    try:
        done.extend(flight)
    except ChunkFailed as failed:
        return done, failed
    return done, None


class Feeding:
    """Numbers; when they run out, what is in flight ends."""

    def __init__(self, bench, numbers):
        self.bench, self.numbers = bench, iter(numbers)

    def __iter__(self):
        return self

    def __next__(self):
        for number in self.numbers:
            return number
        while self.bench.flying:
            self.bench.end()
        raise StopIteration


@given(count=st.integers(0, 20), limit=st.integers(1, 7))
def test_all_are_done_once_and_no_more_than_the_limit_are_in_flight(count, limit):
    bench = Bench(limit)
    done, failed = run(bench, range(count))
    assert failed is None
    assert sorted(done) == list(range(count))
    assert bench.submitted == [(n, 0) for n in range(count)]
    assert bench.peak <= limit


def test_after_a_failure_nothing_is_submitted_and_those_in_flight_are_done():
    error = ValueError("no")
    bench = Bench(limit=1, outcomes={(2, 0): error})
    done, failed = run(bench, range(10))
    assert done == [0, 1]
    assert (failed.number, failed.error, failed.others, failed.__cause__) == (2, error, 0, error)
    assert len(bench.submitted) < 10


def test_what_was_lost_is_submitted_again():
    bench = Bench(limit=4, outcomes={(1, 0): Lost(), (1, 1): Lost()})
    done, failed = run(Ends(bench), range(3))
    assert failed is None
    assert sorted(done) == [0, 1, 2]
    assert [s for s in bench.submitted if s[0] == 1] == [(1, 0), (1, 1), (1, 2)]


def test_but_not_for_ever():
    bench = Bench(limit=4, outcomes={(1, attempt): Lost("gone") for attempt in range(9)})
    done, failed = run(Ends(bench), range(3))
    assert (sorted(done), failed.number, str(failed.error)) == ([0, 2], 1, "gone")
    assert [s for s in bench.submitted if s[0] == 1] == [(1, attempt) for attempt in range(4)]


class Ends:
    """A bench whose chunks end as soon as they are submitted."""

    def __init__(self, bench):
        self.bench = bench
        self.flying = []

    def limit(self):
        return self.bench.most

    def submit(self, number, attempt):
        future = self.bench.submit(number, attempt)
        self.bench.end()
        return future

    def error(self, future):
        return self.bench.error(future)


def test_a_limit_that_changes_is_followed():
    bench = Bench(limit=1)
    flight = drive(Feeding(bench, range(6)), Ends(bench))
    assert next(flight) == 0
    bench.most = 5
    assert list(flight) == [1, 2, 3, 4, 5]


def test_an_interrupt_leaves_the_loop_at_once():
    class Interrupted(Ends):
        def error(self, future):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(drive(range(3), Interrupted(Bench())))
