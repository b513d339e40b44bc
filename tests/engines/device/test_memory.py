"""A GPU's memory by CuPy's account, page-locked memory and streams; the GPU is a fake."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from dask_ferro.engines.device.device import CupyDevice, cupy_memory
from tests.fake_gpu import GB, FakeCupy

MIB = 1 << 20


def test_of_cupys_own_pool_what_it_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeCupy(total=10 * GB, others=GB).install(monkeypatch)
    held, dropped = gpu.malloc(2 * GB), gpu.malloc(3 * GB)
    del dropped
    found = cupy_memory(gpu)
    assert (found.used, found.own, found.kept, found.live, found.free) == (
        *(6 * GB, 2 * GB, 3 * GB),
        *(3 * GB, 7 * GB),
    )
    assert (found.unused, found.own) == (4 * GB, held.nbytes)
    assert CupyDevice().memory() == found


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


def test_page_locked_memory_counts_until_all_views_of_an_array_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeCupy().install(monkeypatch)
    device, shape = CupyDevice(), (300, MIB // 4)  # 300 MiB, of a buffer of 512
    assert device.page_locked((3,), np.float32) is None  # too small to gain
    held = [device.page_locked(shape, np.float32) for _ in range(4)]
    assert all(a is not None and (a.shape, a.dtype) == (shape, np.float32) for a in held)
    assert device.page_locked(shape, np.float32) is None
    views = [a[5:].reshape(-1) for a in held if a is not None]
    del held
    gc.collect()
    assert device.page_locked(shape, np.float32) is None
    views.pop()
    gc.collect()
    assert device.page_locked(shape, np.float32) is not None


def test_where_the_system_locks_no_more_pages_a_download_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("out of memory")

    FakeCupy().install(monkeypatch)
    device = CupyDevice()
    monkeypatch.setattr(sys.modules["cupyx"], "empty_pinned", fails)
    for _ in range(10):
        assert device.page_locked((512, MIB // 4), np.float32) is None
