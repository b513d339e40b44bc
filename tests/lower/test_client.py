"""The number of threads that a model is cut for: what Dask was told counts, without a setting of ours."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import dask
import numpy as np
import pytest
from dask.system import CPU_COUNT

import dask_ferro as ff
from dask_ferro.lower.client import slots
from tests.clusters import running

# Branches that are each worth a task: one bundle for each thread, and one for the join.
WIDE = ff.workloads.build("wide", branches=16, length=1, slow_s=0.05, fast_s=0.05)
X = np.ones(256, "f4")


def bundles(model: Any, **kwargs: Any) -> int:
    """Return the number of tasks that a local scheduler runs."""
    from dask.callbacks import Callback

    ran: list[Any] = []
    with Callback(pretask=lambda key, *rest: ran.append(key)):
        model.compute(**kwargs)
    return len(ran)


@pytest.fixture
def wide() -> Any:
    return ff.from_onnx(WIDE)(X)


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(lambda: {"scheduler": "threads", "num_workers": 8}, id="num_workers"),
        pytest.param(lambda: {"num_workers": 8}, id="num_workers of the default scheduler"),
        pytest.param(lambda: {"scheduler": "threads", "pool": ThreadPoolExecutor(8)}, id="pool"),
        pytest.param(lambda: {"pool": ThreadPool(8)}, id="a pool of multiprocessing"),
        pytest.param(lambda: {"scheduler": ThreadPoolExecutor(8)}, id="an executor as scheduler"),
    ],
)
def test_arguments_of_compute(wide: Any, told: Any) -> None:
    few, many = bundles(wide, scheduler="threads", num_workers=2), bundles(wide, **told())
    assert many > few
    assert 8 <= many <= 16 + 2
    # And back again: the number of the call before does not stick.
    assert bundles(wide, scheduler="threads", num_workers=2) == few


@pytest.mark.parametrize("key", ["num_workers", "pool"])
def test_dasks_configuration(wide: Any, key: str) -> None:
    with dask.config.set({key: 8 if key == "num_workers" else ThreadPoolExecutor(8)}):
        assert slots() == 8
        assert 8 <= bundles(wide, scheduler="threads") <= 16 + 2


def test_an_argument_is_stronger_than_the_configuration(wide: Any) -> None:
    few = bundles(wide, scheduler="threads", num_workers=2)
    with dask.config.set(num_workers=8):
        assert bundles(wide, scheduler="threads", num_workers=2) == few


def test_our_own_setting_is_the_strongest(wide: Any) -> None:
    few = bundles(wide, scheduler="threads", num_workers=2)
    with dask.config.set({"ferro.bundle.workers": 2}):
        assert bundles(wide, scheduler="threads", num_workers=8) == few


def test_a_local_scheduler_beside_a_cluster_is_cut_for_its_own_threads(wide: Any) -> None:
    with running(1, processes=False):
        assert slots() == 1
        assert bundles(wide, scheduler="threads", num_workers=8) >= 8
        assert len(wide.compute()) == 16


def test_one_thread_computes_a_synchronous_run(wide: Any) -> None:
    assert bundles(wide, scheduler="sync") == bundles(wide, scheduler="threads", num_workers=1)


def test_otherwise_the_machines_cores() -> None:
    assert slots() == CPU_COUNT
