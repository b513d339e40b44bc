"""The window: how many are in flight, and what happens after a failure."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_ferro.stream.window import ChunkFailed, drive


class Bench:
    """A pool whose chunks end in order of submission, with the errors in `outcomes`."""

    def __init__(self, limit=3, outcomes=None):
        self.most, self.outcomes = limit, outcomes or {}
        self.submitted = []
        self.flying = self.peak = 0

    def limit(self):
        return self.most

    def submit(self, number, known):
        self.submitted.append((number, known))
        self.flying += 1
        self.peak = max(self.peak, self.flying)
        future = Future()
        future.number = number
        future.set_result(None)
        return future

    def error(self, future):
        self.flying -= 1
        return self.outcomes.get(future.number)


def chunks(count):
    return ((number, number) for number in range(count))


def failing(bench, count):
    """Return what was done, and the failure."""
    done = []
    try:
        for number in drive(chunks(count), bench):
            done.append(number)  # noqa: PERF402 - what came before the error is wanted
    except ChunkFailed as failed:
        return done, failed
    raise AssertionError("nothing failed")


@given(count=st.integers(0, 20), limit=st.integers(1, 7))
def test_all_are_done_once_and_no_more_than_the_limit_are_in_flight(count, limit):
    bench = Bench(limit)
    assert list(drive(chunks(count), bench)) == list(range(count))
    assert bench.submitted == list(chunks(count))
    assert bench.peak == min(count, limit)


def test_after_a_failure_nothing_is_submitted_and_those_in_flight_are_done():
    error = ValueError("no")
    bench = Bench(limit=3, outcomes={2: error})
    done, failed = failing(bench, 10)
    assert done == [0, 1, 3, 4]
    assert (failed.number, failed.error, failed.others, failed.__cause__) == (2, error, 0, error)
    assert bench.submitted == list(chunks(5))


def test_the_first_failure_is_told_and_the_others_are_counted():
    done, failed = failing(Bench(limit=4, outcomes={n: ValueError(str(n)) for n in (1, 2, 4)}), 10)
    assert done == [0, 3]
    assert (failed.number, str(failed.error), failed.others) == (1, "1", 2)


def test_a_limit_that_changes_is_followed():
    bench = Bench(limit=1)
    flight = drive(chunks(9), bench)
    assert next(flight) == 0
    bench.most = 5
    assert next(flight) == 1
    assert (bench.peak, len(bench.submitted)) == (5, 6)


def test_an_interrupt_leaves_the_loop_at_once():
    class Interrupted(Bench):
        def error(self, future):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(drive(chunks(3), Interrupted()))
