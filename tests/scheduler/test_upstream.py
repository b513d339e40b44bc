"""Names of Dask that the installed version lacks: stock Dask goes on, with one sentence."""

from __future__ import annotations

import logging
import warnings

import pytest
from distributed.stealing import WorkStealing

import dask_ferro as ff
from dask_ferro.scheduler import preload, upstream
from dask_ferro.scheduler.plugin import NAME
from tests.clusters import on_cluster


@pytest.fixture
def hide(monkeypatch):
    """Let the installed version lack a name."""
    needed = dict(upstream._PRIVATE_NAMES)

    def without(owner):
        monkeypatch.setattr(upstream, "_PRIVATE_NAMES", {**needed, owner: f"{needed[owner]} gone"})

    return without


def test_nothing_is_missing():
    assert upstream.missing() == []


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
    hide(WorkStealing)

    async def test(client, scheduler):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            await ff.install(client)
        assert len(told) == 1
        text = str(told[0].message)
        for words in ("WorkStealing.gone", "distributed 20", "stock Dask goes on", "Install "):
            assert words in text
        _is_stock(scheduler)
        await ff.uninstall(client)
        assert await client.submit(lambda: 7) == 7

    on_cluster()(test)()
    assert _warnings_of_ours(caplog) == []


def test_a_preload_leaves_stock_dask_and_warns_once_where_a_name_is_missing(hide, caplog):
    async def test(client, scheduler):
        hide(type(scheduler))
        await preload.dask_setup(scheduler)
        _is_stock(scheduler)
        assert await client.submit(lambda: 7) == 7

    on_cluster()(test)()
    (warning,) = _warnings_of_ours(caplog)
    assert "Scheduler.gone" in warning.getMessage()
