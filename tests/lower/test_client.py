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
WIDE = ff.testing.build("wide", branches=16, length=1, slow_s=0.05, fast_s=0.05)
X = np.ones(256, "f4")


def bundles(**settings: Any) -> int:
    """Return the number of tasks that a call is cut into."""
    with dask.config.set({key.replace("__", "."): value for key, value in settings.items()}):
        return len(ff.from_onnx(WIDE).planned(X).bundles)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(lambda: {"num_workers": 8}, id="num_workers"),
        pytest.param(lambda: {"pool": ThreadPoolExecutor(8)}, id="pool"),
        pytest.param(lambda: {"pool": ThreadPool(8)}, id="a pool of multiprocessing"),
        pytest.param(lambda: {"ferro__bundle__workers": 8}, id="our own setting"),
    ],
)
def test_the_configuration_counts(settings: Any) -> None:
    few, many = bundles(num_workers=2), bundles(**settings())
    assert many > few
    assert 8 <= many <= 16 + 2


def test_our_own_setting_is_the_strongest() -> None:
    assert bundles(num_workers=8, ferro__bundle__workers=2) == bundles(num_workers=2)


def test_a_call_beside_a_cluster_is_cut_for_its_threads() -> None:
    with running(1, processes=False):
        assert slots() == 1
        few = bundles()
        assert len(ff.from_onnx(WIDE)(X).compute()) == 16
    assert few == bundles(num_workers=1)


def test_otherwise_the_machines_cores() -> None:
    assert slots() == CPU_COUNT
