"""The op of our own domain that waits."""

from __future__ import annotations

import ctypes
import sys
import threading
import time

import pytest

from dask_ferro.engines.array.custom_ops import sleep
from tests.waiting import ended


def timer_slack() -> int:
    """Nanoseconds by which Linux may wake this thread late."""
    return ctypes.CDLL(None).prctl(30, 0, 0, 0, 0)


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.02])
def test_it_waits_for_no_less(seconds):
    start = time.monotonic()
    sleep(seconds)
    assert time.monotonic() - start >= seconds


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="timer slack is Linux's")
def test_it_is_late_by_less_than_the_timer_slack_and_leaves_that_as_it_was(monkeypatch):
    seen = []
    monkeypatch.setattr("time.sleep", lambda seconds: seen.append(timer_slack()))
    before = timer_slack()
    assert before > 1
    sleep(0.001)
    assert seen == [1]
    assert timer_slack() == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="timer slack is Linux's")
def test_an_interrupted_sleep_leaves_the_timer_slack_as_it_was(monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupted)
    before = timer_slack()
    with pytest.raises(KeyboardInterrupt):
        sleep(0.001)
    assert timer_slack() == before


def test_threads_sleep_at_the_same_time():
    threads = [threading.Thread(target=sleep, args=(0.1,)) for _ in range(8)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        ended(thread)
    assert time.monotonic() - start < 0.8  # one after another
