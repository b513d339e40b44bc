"""Names of Dask that the installed version lacks: the part that needs them stays off, with one sentence."""

from __future__ import annotations

import asyncio
import logging
import warnings
from types import SimpleNamespace

import pytest
from distributed import LocalCluster
from distributed.stealing import WorkStealing

import dask_ferro as ff
from dask_ferro.errors import ConfigError
from dask_ferro.runtime import preload, upstream_names
from dask_ferro.runtime.scheduler_plugin import NAME
from dask_ferro.runtime.upstream_names import CLUSTER, JOBQUEUE, SCHEDULER, WORKER, missing
from dask_ferro.runtime.worker.plugin import METRIC, FerroWorker
from tests.clusters import on_cluster


@pytest.fixture
def hide(monkeypatch):
    """Let a name be missing from the installed version, in a process that has checked nothing yet."""
    there = upstream_names._names_of

    def without(name):
        monkeypatch.setattr(upstream_names, "_names_of", lambda path: there(path) - {name})
        missing.cache_clear()

    missing.cache_clear()
    upstream_names.warn_once.cache_clear()
    yield without
    missing.cache_clear()
    upstream_names.warn_once.cache_clear()


def test_nothing_is_missing_that_is_checked_at_start_up():
    assert missing(SCHEDULER, WORKER, CLUSTER, JOBQUEUE) == ()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param("distributed.scheduler.Scheduler", "valid_workers", id="a method of a base class"),
        pytest.param("distributed.scheduler.Scheduler", "stream_comms", id="an annotation"),
        pytest.param("distributed.deploy.spec.SpecCluster", "new_spec", id="an attribute of its constructor"),
        pytest.param("distributed.stealing", "_WORKER_STATE_REJECT", id="a constant of a module"),
    ],
)
def test_a_name_is_seen(path, name):
    names = upstream_names._names_of(path)
    assert name in names
    assert f"{name}_of_old" not in names


def test_a_module_that_is_gone_has_no_names():
    assert upstream_names._names_of("distributed.gone.Owner") == set()


def _warnings_of_ours(caplog):
    return [
        record
        for record in caplog.records
        if record.levelno >= logging.WARNING and "ferro" in record.getMessage()
    ]


def _is_stock(scheduler):
    stock = scheduler.extensions["stealing"]
    assert type(stock) is WorkStealing
    assert scheduler.stream_handlers["steal-response"].__self__ is stock
    assert NAME not in scheduler.plugins
    assert {"is_rootish", "decide_worker_non_rootish"}.isdisjoint(vars(scheduler))


def test_ff_install_leaves_stock_dask_and_warns_once_where_a_name_is_missing(hide, caplog):
    hide("move_task_confirm")

    async def test(client, scheduler):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            await ff.install(client)
        assert len(told) == 1
        text = str(told[0].message)
        for words in ("WorkStealing.move_task_confirm", "distributed 20", "stock Dask goes on", "Install "):
            assert words in text
        _is_stock(scheduler)
        await ff.uninstall(client)
        assert await client.submit(lambda: 7) == 7

    on_cluster()(test)()
    assert _warnings_of_ours(caplog) == []


def test_a_preload_leaves_stock_dask_and_warns_once_where_a_name_is_missing(hide, caplog):
    hide("is_rootish")

    async def test(client, scheduler):
        await preload.dask_setup(scheduler)
        await preload.dask_setup(scheduler)
        _is_stock(scheduler)
        assert await client.submit(lambda: 7) == 7

    on_cluster()(test)()
    (warning,) = _warnings_of_ours(caplog)
    assert "Scheduler.is_rootish" in warning.getMessage()


def test_a_worker_measures_nothing_and_warns_once_where_a_name_is_missing(hide, caplog):
    hide("transfer_incoming_log")

    worker = SimpleNamespace(metrics={})
    plugin = FerroWorker(device="cpu", sends=0.001)
    asyncio.run(plugin.setup(worker))
    asyncio.run(plugin.setup(worker))
    plugin.teardown(worker)
    assert METRIC not in worker.metrics
    (warning,) = _warnings_of_ours(caplog)
    assert "Worker.transfer_incoming_log" in warning.getMessage()


def test_adapt_is_refused_where_a_name_is_missing(hide):
    hide("_correct_state")
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        pytest.raises(ConfigError, match=r"ff\.Elastic cannot be used.*SpecCluster\._correct_state.*Install"),
    ):
        cluster.adapt(Adaptive=ff.Elastic, minimum=0, maximum=1)


def test_a_cluster_of_jobs_is_refused_where_a_name_is_missing(hide):
    hide("_dummy_job")
    with pytest.raises(ConfigError, match=r"ff\.SLURMCluster cannot be used.*JobQueueCluster\._dummy_job"):
        ff.SLURMCluster(cores=1, memory="1GB")
