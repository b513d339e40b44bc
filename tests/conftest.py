"""Fixtures and hooks of all tests: a shared cluster of worker processes, time limits, skips and memory."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import dask
import distributed
import pytest
from distributed.utils import get_mp_context
from hypothesis import HealthCheck, settings, strategies

import dask_ferro as ff
from dask_ferro.engines.onnxruntime.session import give_back
from tests import needs
from tests.second_try import pytest_collection_modifyitems  # noqa: F401 - a hook
from tests.waiting import WHOLE_S

# No deadlines: the time of an example, or of its generation, depends on how busy the machine is.
settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machines")


# A small cache for test processes and their workers: no test needs a larger one, and four processes run at once.
dask.config.set({"ferro.cache.bytes": "64MiB"})
# What tasks cost is not kept in the user's folder.
dask.config.set({"ferro.bundle.costs": None})
# Worker processes are forks of a process that has imported Dask and what our tasks need, in place of importing it in
# each.  They have the environment of the first fork; a test that sets another environment for them uses "spawn".
dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
IN_WORKERS = ["dask_ferro.flow.member", "dask_ferro.lower.worker.task", "dask_ferro.scheduler.worker_plugin"]
# Dask's collections bring pandas, xarray and scipy: half a second for each worker.
get_mp_context().set_forkserver_preload(["distributed", "dask.array", "dask.dataframe", *IN_WORKERS])

# pytest-xdist sets it for its processes; a table in a pipe would have that width.
os.environ.pop("COLUMNS", None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With three processes, run the tests that mostly wait in a process of their own."""
    from tests import lanes

    is_meant = (config.option.dist, config.option.numprocesses) == ("loadfile", lanes.PROCESSES)
    return lanes.Lanes(config, log) if is_meant else None


@pytest.hookimpl(trylast=True)
def pytest_sessionstart() -> None:
    """Have Hypothesis's tables of characters made while a process is small: in a fresh clone that takes 200 MB."""
    # After Hypothesis's own hook: before that, it takes this for slow code in a conftest.
    strategies.text().validate()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze the collected tests, so that the many later garbage collections of Bokeh and of tests skip them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose needs this machine lacks."""
    for mark in item.iter_markers("needs"):
        needs.require(*mark.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test in an event loop of its own, with a timeout."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(test, WHOLE_S))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Turn a skipped test into a failure where everything should be installed."""
    report: pytest.TestReport = yield
    if needs.forbids_skips() and item.get_closest_marker("gpu") is None:
        _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Turn a skipped module into a failure where everything should be installed."""
    report: pytest.CollectReport = yield
    if needs.forbids_skips():
        _refuse_skip(report)
    return report


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        told = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped (FERRO_SKIPS=none): {told}"


@pytest.fixture(autouse=True)
def _no_scheduler_is_left_behind() -> Iterator[None]:
    """Reset Dask's `scheduler` setting, which clients leave behind if they close in another order than they opened."""
    before = dask.config.get("scheduler", None)
    yield
    if dask.config.get("scheduler", None) != before:
        dask.config.set(scheduler=before)


@pytest.fixture(autouse=True)
def _logging_is_left_as_it_was() -> Iterator[None]:
    """Restore the root logger's level, which ONNX Runtime's quantization raises, so that later tests see warnings."""
    before = logging.root.level
    yield
    logging.root.setLevel(before)


@pytest.fixture(autouse=True, scope="module")
def _memory_is_tidied() -> Iterator[None]:
    """Return freed memory to the system after each module, as glibc would keep it, and freeze what stays.

    What outlives a module is imported or cached.  The collections of all later tests would go through it, 0.2 s each.
    """
    yield
    gc.collect()
    gc.freeze()
    give_back()


@pytest.fixture(scope="session")
def cluster() -> Iterator[distributed.LocalCluster]:
    """A cluster of two worker processes of one thread each."""
    with ff.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: distributed.LocalCluster) -> Iterator[distributed.Client]:
    """A client of the shared cluster; it is the default client while the test runs."""
    with distributed.Client(cluster) as client:
        yield client


@pytest.fixture
def pythons_own_handler() -> Iterator[None]:
    """Python's handler of SIGINT: importing dask_jobqueue, as some test before may have, puts another in its place."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
