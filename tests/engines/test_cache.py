"""The bounded cache of built things."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from dask_ferro.engines.cache import Cache


@dataclass
class Thing:
    nbytes: int


def test_builds_once_and_hands_out_the_same():
    cache = Cache(100)
    first = cache.get("a", lambda: Thing(10))
    assert cache.get("a", lambda: Thing(99)) is first
    assert cache.nbytes == 10


def test_the_least_recently_used_leaves_first():
    cache = Cache(100)
    for key in "abc":
        cache.get(key, lambda: Thing(40) if key != "c" else Thing(30))  # noqa: B023 - called at once
        if key == "b":
            cache.get("a", lambda: Thing(0))
    assert "a" in cache._kept
    assert "b" not in cache._kept
    assert "c" in cache._kept
    assert cache.nbytes == 70


def test_what_exceeds_the_bound_is_handed_out_and_not_kept():
    cache = Cache(100)
    cache.get("small", lambda: Thing(60))
    assert cache.get("huge", lambda: Thing(101)).nbytes == 101
    assert "huge" not in cache._kept
    assert "small" in cache._kept


def test_a_failed_build_leaves_nothing_behind():
    cache = Cache(100)

    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.get("a", fail)
    assert cache.get("a", lambda: Thing(1)).nbytes == 1


def test_two_threads_build_one_thing():
    cache = Cache(100)
    started, go, built = threading.Event(), threading.Event(), []

    def slow():
        started.set()
        assert go.wait(10)
        built.append(1)
        return Thing(5)

    got = []
    threads = [threading.Thread(target=lambda: got.append(cache.get("a", slow))) for _ in range(3)]
    threads[0].start()
    assert started.wait(10)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert len(built) == 1
    assert len(got) == 3
    assert got[0] is got[1] is got[2]


def test_two_things_are_built_at_the_same_time():
    """Under one lock for all, the first would wait for the second without end."""
    cache, both = Cache(100), threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as pool:
        sizes = pool.map(lambda n: cache.get(n, lambda: (both.wait(), Thing(n))[1]).nbytes, (1, 2))
    assert list(sizes) == [1, 2]


def test_what_is_no_longer_current_is_built_again():
    cache = Cache(2, size=None)
    first = cache.get("a", lambda: Thing(1))
    assert cache.get("a", lambda: Thing(2), lambda kept: kept.nbytes == 1) is first
    assert cache.get("a", lambda: Thing(2), lambda kept: kept.nbytes == 2).nbytes == 2
    assert cache.nbytes == 1
