"""Clusters that the tests share: real ones, with worker processes."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest
from hypothesis import HealthCheck, settings

import dask_ferro as ff
from dask_ferro.engines.onnxruntime.host_memory import give_back
from tests import needs, peak, quick
from tests.second_try import pytest_collection_modifyitems  # noqa: F401 - a hook
from tests.waiting import WHOLE_S

# How long an example takes, or its making, says how busy the machine is: no test asserts a wall-clock time.
settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machines")


# Sessions that a test process, or a worker of one, keeps: no test needs more of them, and four processes run at once.
dask.config.set({"ferro.cache.bytes": "64MiB"})
# Worker processes are forks of a process that has imported Dask: a fifth less CPU than to import it in each.
dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--quick`: what `make quick` runs."""
    parser.addoption(
        "--quick", action="store_true", help="only tests without clusters, processes or browsers"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, unread, the files that are not quick."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.getoption("--quick") and is_test and not quick.is_quick(collection_path):
        return True
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give what waits a process of its own, where there are three."""
    from tests import lanes

    is_meant = (config.option.dist, config.option.numprocesses) == ("loadfile", lanes.PROCESSES)
    return lanes.Lanes(config, log) if is_meant else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what was collected, which stays to the end, out of each later collection: Bokeh and tests ask for many."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell `tests/peak.py` what runs, and skip what this machine cannot run, by name."""
    if folder := os.environ.get(peak.FOLDER):
        Path(folder, str(os.getpid())).write_text(item.nodeid)
    for mark in item.iter_markers("needs"):
        needs.require(*mark.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test in a loop of its own, within a bound."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(test, WHOLE_S))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Where all is installed, a skipped test has failed."""
    report: pytest.TestReport = yield
    if needs.forbids_skips() and item.get_closest_marker("gpu") is None:
        _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Where all is installed, a skipped module has failed."""
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
    """Clients that close in another order than they were opened in leave Dask's `scheduler` setting behind."""
    before = dask.config.get("scheduler", None)
    yield
    if dask.config.get("scheduler", None) != before:
        dask.config.set(scheduler=before)


@pytest.fixture(autouse=True)
def _logging_is_left_as_it_was() -> Iterator[None]:
    """ONNX Runtime's quantization raises the root logger's level, and later tests would hear no warning."""
    before = logging.root.level
    yield
    logging.root.setLevel(before)


@pytest.fixture(autouse=True, scope="module")
def _freed_memory_goes_back() -> Iterator[None]:
    """A test process runs half of all modules, and glibc keeps what each of them freed."""
    yield
    give_back()


@pytest.fixture(scope="session")
def cluster() -> Iterator[distributed.LocalCluster]:
    """Two worker processes of one thread each."""
    with ff.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: distributed.LocalCluster) -> Iterator[distributed.Client]:
    """A client of the shared cluster, the default one while the test runs."""
    with distributed.Client(cluster) as client:
        yield client
