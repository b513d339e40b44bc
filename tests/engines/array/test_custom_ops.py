"""The op of our own domain that waits."""

from __future__ import annotations

import threading
import time

import pytest

from dask_ferro.engines.array.custom_ops import sleep
from tests.waiting import ended


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.02])
def test_it_waits_for_no_less(seconds):
    start = time.monotonic()
    sleep(seconds)
    assert time.monotonic() - start >= seconds


def test_threads_sleep_at_the_same_time():
    threads = [threading.Thread(target=sleep, args=(0.1,)) for _ in range(8)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        ended(thread)
    assert time.monotonic() - start < 0.8  # one after another
