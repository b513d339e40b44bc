"""A GPU's memory by CuPy's account and RMM's, as dask-cuda sets them up; the GPU is a fake."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from dask_ferro.engines.device import memory
from dask_ferro.engines.device.device import CupyDevice
from dask_ferro.engines.device.memory import account
from tests.fake_gpu import GB, FakeCupy, Pool, Tracking, rmm

CUPY_ELSEWHERE = "CuPy does not allocate there"
UNCOUNTED = "its allocations are not counted"


@pytest.fixture(autouse=True)
def _not_warned_yet() -> Iterator[None]:
    memory._warn.cache_clear()
    yield
    memory._warn.cache_clear()


def test_of_cupys_own_pool_what_it_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeCupy(total=10 * GB, others=GB).install(monkeypatch)
    held, dropped = gpu.malloc(2 * GB), gpu.malloc(3 * GB)
    del dropped
    found = account(gpu)
    assert (found.used, found.own, found.kept, found.live, found.free) == (
        *(6 * GB, 2 * GB, 3 * GB),
        *(3 * GB, 7 * GB),
    )
    assert CupyDevice().memory() == (10 * GB, 7 * GB, held.nbytes, 4 * GB)


@pytest.mark.parametrize(
    ("is_cupys", "is_tracked", "free", "live", "told"),
    [
        pytest.param(True, True, 8, 2, [], id="as documented: all but what is used is free"),
        pytest.param(False, True, 1, 2, [CUPY_ELSEWHERE], id="CuPy has what the pool left"),
        pytest.param(True, False, 1, 9, [UNCOUNTED], id="a pool that nobody counts is taken"),
        pytest.param(False, False, 1, 9, [CUPY_ELSEWHERE, UNCOUNTED], id="dask-cuda's defaults with a pool"),
    ],
)
def test_with_rmms_pool_of_nine_tenths(is_cupys, is_tracked, free, live, told, monkeypatch, caplog):
    """Of 10 GB, the pool has 9, of which 2 are used."""
    gpu = FakeCupy(total=10 * GB, others=9 * GB).install(monkeypatch)
    pool = Pool(9 * GB)
    allocator = rmm(monkeypatch, Tracking(pool, 2 * GB) if is_tracked else pool)
    if is_cupys:
        gpu.allocator = allocator
    with caplog.at_level(logging.WARNING, "dask_ferro"):
        found = [account(gpu) for _ in range(3)][-1]
        memory = CupyDevice().memory()
    assert (memory.free, found.live) == (free * GB, live * GB)
    assert memory.live == (2 * GB if is_tracked else 0)
    assert len(caplog.messages) == len(told)  # once each
    assert all(text in message for text, message in zip(told, caplog.messages, strict=True))


def test_each_thread_of_a_gpu_has_a_stream_of_its_own_that_waits_for_no_other(monkeypatch):
    gpu = FakeCupy().install(monkeypatch)
    device, barrier = CupyDevice(), Barrier(3, timeout=5)

    def streams(_: int) -> list[object]:
        barrier.wait(60)
        found = []
        for _ in range(2):
            with device.stream():
                found.append(gpu.cuda.get_current_stream())
        return found

    with ThreadPoolExecutor(3) as pool:
        rows = list(pool.map(streams, range(3)))
    assert all(first is second and first.non_blocking for first, second in rows)  # type: ignore[attr-defined]
    assert len({id(first) for first, _ in rows}) == 3
