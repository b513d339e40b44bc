"""What workers with GPUs tell the scheduler, and what it makes of that: all figures, true room, kinds of memory."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import onnx_ir as ir
import pytest
from distributed import Worker
from emulated.declared import DeclaredDevice, compute
from emulated.device import StandIn

from dask_ferro.engines.device import residency
from dask_ferro.engines.device.residency import Residency
from dask_ferro.lower.worker.task import use_device
from dask_ferro.scheduler import calibration
from dask_ferro.scheduler.annotations import require_device
from dask_ferro.scheduler.device_memory import Devices
from dask_ferro.scheduler.worker_plugin import METRIC
from tests.fake_gpu import GB, FakeCupy
from tests.scheduler.test_devices import CPU, MB, Site, on_site, site
from tests.waiting import until_async


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture(autouse=True)
def _no_device() -> Iterator[None]:
    yield
    use_device(None)


def told(s: Site, worker: Worker) -> dict[str, Any]:
    found: dict[str, Any] = s.scheduler.workers[worker.address].metrics[METRIC]
    return found


# ---- measuring ---------------------------------------------------------------------------------------------


def test_what_was_measured_leaves_nothing_in_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeCupy().install(monkeypatch)
    found = calibration.figures("gpu")
    assert found.model == "A100"
    assert (gpu.own, gpu.kept) == (0, 0)


def test_a_gpu_that_cupy_sees_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with dask.config.set({"ferro.worker.device": "auto"}):
        FakeCupy().install(monkeypatch)
        assert calibration.detect_device() == "gpu"


async def test_a_heartbeat_in_the_middle_of_measuring_loses_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The speed is known, the name is not; Dask has said that there is a GPU."""
    gpu = FakeCupy(total=40 * GB).install(monkeypatch)
    gpu.may_tell_name.clear()

    with dask.config.set({"ferro.worker.device": "gpu"}):
        async with site(CPU) as s:
            worker = await Worker(s.scheduler.address, nthreads=1, name="late")
            s.workers.append(worker)
            await asyncio.to_thread(gpu.asked_for_name.wait, 20)
            await until_async(
                lambda: (s.stealing._beats.get(worker.address) or {}).get("beat", 0) > 0, "the first report"
            )
            assert "gpu" not in told(s, worker)
            gpu.may_tell_name.set()
            await until_async(lambda: "gpu" in told(s, worker), "what the GPU is")
            row = s.ledger.rows[worker.address]
            await until_async(lambda: row.most == 40 * GB, "its bytes in the book")
            assert told(s, worker)["gpu"]["model"] == "A100"


@on_site(CPU, DeclaredDevice("gpu", 20.0, total=4 * MB))
async def test_who_measures_still_is_what_dask_said_of_it(s: Site) -> None:
    address = s.workers[1].address
    row = {**told(s, s.workers[1]), "device": "cpu", "flops": None}
    del row["gpu"]
    s.stealing.devices.heard(s.scheduler.workers[address], row)
    assert (s.ledger.rows[address].device, s.ledger.rows[address].most) == ("gpu", 4 * MB)


async def test_one_cpu_is_measured_when_another_class_of_devices_joins() -> None:
    """A measurement takes time from tasks, and a cluster of one class compares nothing."""
    async with site() as s:
        beats = s.stealing._beats
        for name in ("first", "second"):
            s.workers.append(await Worker(s.scheduler.address, nthreads=1, name=name))
        await until_async(
            lambda: [(b or {}).get("beat", 0) > 1 for b in beats.values()] == [True] * 2, "beats"
        )
        assert {beat["flops"] for beat in beats.values()} == {None}
        device = DeclaredDevice("gpu", 20.0, total=4 * MB)
        s.workers.append(await Worker(s.scheduler.address, nthreads=1, plugins=(device,)))
        await until_async(lambda: s.ledger.durations.speeds.keys() == {"cpu", "gpu"}, "both speeds")
        assert [beats[worker.address]["flops"] is None for worker in s.workers].count(True) == 1


@pytest.mark.parametrize(
    ("beats", "wanted"),
    [
        pytest.param("a1 b1 a2 b2", "a", id="one is enough"),
        pytest.param("a1 b1 a2 a6 b6 a7 b7", "ab", id="it failed: the next one"),
        pytest.param("a1 A2 b2 b3", "ab", id="it was about to find its GPU"),
        pytest.param("a1 -a b2 b3", "ab", id="it left"),
        pytest.param("a1 a6 a7 a20", "a", id="nobody twice"),
    ],
)
def test_speeds_are_requested_of_one_worker_after_another(beats: str, wanted: str) -> None:
    """A beat is a worker (upper case: with its GPU) and its number; `-a`: it left."""
    asked: list[str] = []
    rows = {name: SimpleNamespace(device="cpu", most=None) for name in "ab"}
    known = SimpleNamespace(rows=rows, durations=SimpleNamespace(speeds={"gpu": None}))
    devices = Devices(
        SimpleNamespace(worker_send=lambda address, _: asked.append(address)),  # type: ignore[arg-type]
        lambda event: setattr(rows[event.worker], "device", event.device),  # type: ignore[union-attr]
    )
    devices.ledger = known  # type: ignore[assignment]
    for beat in beats.split():
        if beat[0] == "-":
            del rows[beat[1]]
            continue
        row = {"device": "gpu" if beat[0].isupper() else "cpu", "beat": int(beat[1:]), "flops": None}
        devices.heard(SimpleNamespace(address=beat[0].lower()), row)  # type: ignore[arg-type]
    assert "".join(asked) == wanted


# ---- room --------------------------------------------------------------------------------------------------


def test_caches_on_the_device_are_told_as_evictable(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCupy().install(monkeypatch)
    on = Residency(StandIn())
    weight, x = np.zeros(1000, np.uint8), np.zeros(500, np.uint8)
    residency.ProcessDevice.residency = on
    on.weight(ir.tensor(weight))
    on.on_device(x)
    kept = on.keep(on.device.to_device(np.zeros(300, np.uint8)))
    assert on.evictable == 1500
    assert on.nbytes == 1500 + kept.nbytes
    found = calibration.memory()
    assert found is not None
    assert found["evictable"] == 1500
    on.run(lambda: found.update(evictable=on.evictable), lambda made: made, [x])
    assert found["evictable"] == 1000  # an input that a bundle reads stays


async def test_a_warm_device_has_room_where_its_caches_are() -> None:
    total = 10 * MB
    async with site(CPU, DeclaredDevice("gpu", 20.0, total=total, cached=8 * MB)) as s:
        gpu = s.workers[1]
        with require_device("gpu"):
            kept = s.client.submit(compute, 0.0, MB, key="kept")
            await s.gather([kept])
        await gpu.heartbeat()
        await until_async(lambda: told(s, gpu)["gpu"]["live"] == 9 * MB, "the bytes that are taken")
        await until_async(lambda: s.ledger.worker(gpu.address, 0.0).room == total - MB, "its room")


# ---- models ------------------------------------------------------------------------------------------------


async def test_two_models_of_gpus_are_two_classes_of_one_kind() -> None:
    fast, slow = DeclaredDevice("gpu", 20.0), DeclaredDevice("gpu", 5.0)
    async with site(CPU, fast) as s:
        s.workers.append(await Worker(s.scheduler.address, nthreads=1, name="slow", plugins=(slow,)))
        row = s.ledger.rows[s.workers[2].address]
        other = "gpu: stand-in, 5 times a core"
        await until_async(lambda: row.device == other, "the other class")
        assert s.ledger.rows[s.workers[1].address].device == "gpu"
        speeds = s.ledger.durations.speeds
        assert speeds["gpu"].flops / speeds[other].flops == 4.0
        with require_device("gpu"):
            futures = s.client.map(compute, [0.4] * 30, [8] * 30, pure=False)
        await s.gather(futures)
        assert {"gpu-1", "slow"} == s.ran()
