"""The worker plugin: on real workers, in this process and in others."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster, Worker

from dask_ferro.policy.estimates import SENDS, Links
from dask_ferro.scheduler import calibration as speeds
from dask_ferro.scheduler.worker_plugin import MEASURE, METRIC, NAME, FerroWorker, Report, transfers_of
from tests.clusters import running
from tests.waiting import until

STOCK_SENDS = 0.002


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two workers in this process."""
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client
        if NAME in cluster.scheduler.worker_plugins:
            client.unregister_worker_plugin(NAME)


def published(cluster: LocalCluster) -> list[dict[str, Any]]:
    """Request the speed of all workers, and return their metrics once the scheduler has them with it."""
    for address in cluster.scheduler.workers:
        cluster.scheduler.worker_send(address, {"op": MEASURE})

    def received() -> list[Any]:
        return [ws.metrics.get(METRIC) for ws in cluster.scheduler.workers.values()]

    def complete() -> list[Any] | None:
        # A heartbeat may leave before the thread that measures has ended.
        found = received()
        return found if all(row and row["flops"] is not None for row in found) else None

    return until(complete, "a heartbeat of each worker with its speed", seen=received)


def intervals(cluster: LocalCluster) -> set[float]:
    return {w.batched_stream.interval for w in cluster.workers.values()}


def test_figures_reach_the_scheduler(cluster: LocalCluster, client: Client) -> None:
    client.register_plugin(FerroWorker())
    for row in published(cluster):
        assert set(row) == {"address", "device", "flops", "bandwidth", "beat", "transfers", "received"}
        assert row["address"] in cluster.scheduler.workers
        assert row["device"] == speeds.detect_device()
        assert row["flops"] > 1e8
        assert row["bandwidth"] > 1e8


def test_teardown_takes_all_of_it_back(cluster: LocalCluster, client: Client) -> None:
    for _ in range(2):
        client.register_plugin(FerroWorker())
        assert intervals(cluster) == {SENDS}
    client.unregister_worker_plugin(NAME)
    assert intervals(cluster) == {STOCK_SENDS}
    assert all(METRIC not in w.metrics and NAME not in w.plugins for w in cluster.workers.values())


def test_one_plugin_may_serve_many_workers(cluster: LocalCluster) -> None:
    plugin = FerroWorker()
    workers = list(cluster.workers.values())
    for worker in workers:
        cluster.sync(plugin.setup, worker)
        cluster.sync(plugin.setup, worker)  # and twice
    assert intervals(cluster) == {SENDS}
    plugin.teardown(workers[0])
    assert [w.batched_stream.interval for w in workers] == [STOCK_SENDS, SENDS]
    plugin.teardown(workers[1])
    plugin.teardown(workers[1])
    assert intervals(cluster) == {STOCK_SENDS}


def test_a_transfer_is_told_once_with_its_size(cluster: LocalCluster) -> None:
    plugin = FerroWorker()
    source, target = cluster.workers.values()
    cluster.sync(plugin.setup, target)
    with Client(cluster) as client:
        report = target.metrics.pop(METRIC)  # a heartbeat would take what it has to tell
        report(target)
        data = client.submit(bytes, 100_000, key="data", workers=[source.address])
        client.submit(len, data, key="moved", workers=[target.address]).result(timeout=60)
        ((sender, nbytes, seconds),) = report(target)["transfers"]
        assert (sender, nbytes) == (source.address, 100_000)
        assert 0 < seconds < 60
        assert report(target)["transfers"] == []
        target.metrics[METRIC] = report
    plugin.teardown(target)


def test_one_beat_tells_the_newest_64(cluster: LocalCluster) -> None:
    plugin = FerroWorker()
    worker, *_ = cluster.workers.values()
    cluster.sync(plugin.setup, worker)
    log = [{"who": "tcp://a", "total": n, "start": 1.0, "stop": 1.5} for n in range(100)]
    before = list(worker.transfer_incoming_log)
    worker.transfer_incoming_log.extend(log)
    row = worker.metrics[METRIC](worker)
    worker.transfer_incoming_log.clear()
    worker.transfer_incoming_log.extend(before)
    assert row["transfers"] == [("tcp://a", n, 0.5) for n in range(36, 100)]
    assert sum(count for count, _, _ in row["received"].values()) == 100 + len(before)
    plugin.teardown(worker)


@pytest.mark.parametrize(
    ("configured", "wanted"),
    [
        pytest.param("gpu", "gpu", id="the worker's configuration declares one"),
        pytest.param("auto", "cpu", id="without CuPy it is a cpu"),
    ],
)
def test_device_class(
    cluster: LocalCluster,
    configured: str,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speeds, "cupy_devices", lambda: 0)
    plugin = FerroWorker()
    worker, *_ = cluster.workers.values()
    with dask.config.set({"ferro.worker.device": configured}):
        cluster.sync(plugin.setup, worker)
        until(worker.metrics[METRIC]._measuring.done, "the device")
    row = worker.metrics[METRIC](worker)
    plugin.teardown(worker)
    assert row["device"] == wanted
    assert row["flops"] is None or wanted == "gpu"  # a CPU is measured at a request


def test_a_failed_measurement_is_a_warning_and_none(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(speeds, "_best", _no_memory)
    plugin = FerroWorker()
    worker, *_ = cluster.workers.values()
    with caplog.at_level(logging.WARNING, "dask_ferro"):
        cluster.sync(plugin.setup, worker)
        cluster.sync(_measure, worker.metrics[METRIC])
    row = worker.metrics[METRIC](worker)
    plugin.teardown(worker)
    assert (row["device"], row["flops"], row["bandwidth"]) == ("cpu", None, None)
    assert "not measured: MemoryError" in caplog.text


async def _measure(report: Report) -> None:
    report.measure()
    await report._measuring


def _no_memory(*args: object) -> float:
    raise MemoryError("no 32 MiB left")


# ---- links -------------------------------------------------------------------------------------------------

HOSTS = {"tcp://a:1": "a", "tcp://a:2": "a", "tcp://b:1": "b"}


@pytest.mark.parametrize(
    ("transfers", "wanted"),
    [
        pytest.param([], [], id="no transfer, no sample"),
        pytest.param([("tcp://a:2", 10, 0.5)], [("host", 10, 0.5)], id="a neighbour of the same host"),
        pytest.param(
            [["tcp://b:1", 10, 0.5]],
            [("hosts", 10, 0.5)],
            id="another host, and a list as it is sent",
        ),
        pytest.param([("tcp://c:1", 10, 0.5)], [], id="a sender that left is skipped"),
        pytest.param([("tcp://b:1", 10, 0.0)], [], id="a clock that stood still says nothing"),
        pytest.param([("tcp://b:1", 10, -0.1)], [], id="a clock that went back says nothing"),
    ],
)
def test_transfers_are_samples_of_their_link(transfers: list[Any], wanted: list[Any]) -> None:
    assert transfers_of({"address": "tcp://a:1", "transfers": transfers}, HOSTS) == wanted


def test_a_worker_that_left_has_no_samples() -> None:
    assert transfers_of({"address": "tcp://gone:1", "transfers": [("tcp://a:1", 10, 0.5)]}, HOSTS) == []


def test_links_learn_from_samples() -> None:
    links = Links()
    before = links.classes["hosts"].bandwidth
    row = {"address": "tcp://a:1", "transfers": [("tcp://b:1", 10**9, 0.103)] * 100}
    for sample in transfers_of(row, HOSTS):
        links.add(*sample)
    assert before == 0.3e9
    assert links.classes["hosts"].bandwidth == pytest.approx(1e10, rel=0.01)


def test_a_real_measurement_is_plausible() -> None:
    flops, bandwidth = speeds.measure_speed("cpu")
    assert 1e8 < flops < 1e14
    assert 1e8 < bandwidth < 1e13


# ---- processes ---------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_workers_behind_nannies_and_those_that_come_later() -> None:
    with running(1) as client:
        client.register_plugin(FerroWorker())
        client.cluster.scale(2)
        client.wait_for_workers(2, timeout=60)
        rows = published(client.cluster)
        assert {row["device"] for row in rows} == {speeds.detect_device()}
        assert set(client.run(_interval).values()) == {SENDS}
        client.unregister_worker_plugin(NAME)
        assert set(client.run(_interval).values()) == {STOCK_SENDS}


def _interval(dask_worker: Worker) -> float:
    return dask_worker.batched_stream.interval


@pytest.mark.cluster
def test_preload(tmp_path: Path) -> None:
    preload = Path(__file__).parents[2] / "plugins" / "ferro_worker.py"
    with running(0) as client:
        command = [sys.executable, "-m", "distributed.cli.dask_worker", client.cluster.scheduler_address]
        options = ["--preload", str(preload), "--nthreads", "1", "--no-dashboard", "--no-nanny"]
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen([*command, *options], stdout=log, stderr=log, cwd=tmp_path)
        try:
            client.wait_for_workers(1, timeout=60)
            (row,) = published(client.cluster)
            assert row["flops"] > 1e8
            assert set(client.run(_interval).values()) == {SENDS}
            assert client.submit(sum, [1, 2]).result(timeout=60) == 3
        finally:
            process.terminate()
            process.wait(30)
    assert "Traceback" not in (tmp_path / "log").read_text()
