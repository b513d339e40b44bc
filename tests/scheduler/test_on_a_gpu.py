"""What only a GPU can show, of streams, of an allocator at its end, and of workers on CuPy.

The same scenes run on the stand-in, where they say that the scenes are right; what the hardware does is the part
marked `gpu`.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import dask
import numpy as np
import onnx
import pytest
from distributed import Client, Nanny, Scheduler, Worker
from distributed.deploy.spec import SpecCluster
from emulated.device import CountedGpu, StandIn
from onnx import helper

import dask_ferro as ff
from dask_ferro.engines.device.device import Device, cupy_devices
from dask_ferro.engines.device.residency import Residency
from dask_ferro.lower.worker.task import use_device
from dask_ferro.scheduler.worker_plugin import METRIC
from tests.device_counts import counts as counts_here

gpu = [pytest.mark.gpu, pytest.mark.skipif(not cupy_devices(), reason="needs CuPy and a GPU that it sees")]
KINDS = ["stand-in", pytest.param("cupy", marks=gpu)]
SIDE = {"stand-in": 32, "cupy": 2048}
F = np.float32


def block_bytes(kind: str) -> int:
    return SIDE[kind] ** 2 * 4


@contextmanager
def of_blocks(kind: str, count: int) -> Iterator[Device]:
    """A device that gives out so many blocks and no more."""
    if kind == "stand-in":
        yield StandIn(count * block_bytes(kind))
        return
    import cupy

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + count * block_bytes(kind))
    try:
        yield CountedGpu()
    finally:
        pool.set_limit(size=0)
        pool.free_all_blocks()


@pytest.mark.parametrize("kind", KINDS)
def test_a_bundle_that_runs_out_of_memory_runs_again_and_nothing_is_lost(kind: str) -> None:
    """Nothing is moved out of the way before: the bound on results is far above what there is."""
    # Multiples of small integers are exact in float32.
    host = (np.arange(SIDE[kind] ** 2) % 4096).astype(F).reshape(SIDE[kind], -1)
    with of_blocks(kind, 6) as device:
        on = Residency(device, results=1 << 50)
        kept = [
            on.run(lambda n=n: device.namespace.add(device.to_device(host), device.to_device(host * n)), on.keep)
            for n in range(12)
        ]  # fmt: skip
        assert sum(not result.is_resident for result in kept) >= 6
        for n, result in enumerate(kept):
            np.testing.assert_array_equal(result.host(), host * (1 + n))
        # What fits no empty device is an error, and leaves it as good as before.
        with pytest.raises(MemoryError):
            on.run(lambda: [device.to_device(host) for _ in range(7)], lambda made: made)
        assert np.array_equal(on.run(lambda: device.to_device(host), device.to_host), host)
        del kept, result


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_on_streams_of_their_own_see_each_others_results(kind: str) -> None:
    """Each adds to what the other one made a round before, 50 times: a result handed over early would be wrong."""
    device: Device = StandIn() if kind == "stand-in" else CountedGpu()
    on, barrier = Residency(device), Barrier(2, timeout=60)
    host = np.ones((SIDE[kind], SIDE[kind]), F)
    made = [on.run(lambda: device.to_device(host), on.keep) for _ in range(2)]
    streams: list[set[int]] = [set(), set()]

    def work(me: int) -> None:
        for _ in range(50):
            other = made[1 - me]
            barrier.wait(60)  # both have read before either writes
            made[me] = on.run(lambda other=other: step(on.on_device(other), me), on.keep, [other])
            barrier.wait(60)

    def step(array: Any, me: int) -> Any:
        if kind == "cupy":
            import cupy

            streams[me].add(cupy.cuda.get_current_stream().ptr)
        for _ in range(20):
            array = device.namespace.add(array, array)
            array = device.namespace.multiply(array, device.namespace.asarray(0.5, dtype=array.dtype))
        return device.namespace.add(array, device.namespace.asarray(1.0, dtype=array.dtype))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    for result in made:
        np.testing.assert_array_equal(result.host(), host + 50)
    if kind == "cupy":
        assert [len(found) for found in streams] == [1, 1]
        assert streams[0].isdisjoint(streams[1])
        assert 0 not in streams[0] | streams[1]  # the default stream waits for all others


# ---- workers -----------------------------------------------------------------------------------------------


def chain(side: int) -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w"], ["y"]),
    ]
    w = np.random.default_rng(6).standard_normal((side, side)).astype(F) / F(side)
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", side])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(w, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def reference(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    w = onnx.numpy_helper.to_array(model.graph.initializer[0])
    found: np.ndarray = np.tanh(x @ w) @ w
    return found


@contextmanager
def workers(kind: str, *, threads: int = 1, blocks: int = 0) -> Iterator[Client]:
    """A worker with a device, of which so many blocks are free (0: as many as it has), and one without."""
    classes = {"device": "gpu" if kind == "cupy" else "cpu", "host": "cpu"}
    options = {"memory_limit": 0, "dashboard": False, "nthreads": threads}
    specs = {
        name: {"cls": Nanny, "options": {**options, "config": _configured(device)}}
        for name, device in classes.items()
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "dashboard_address": ":0"}}
    with SpecCluster(workers=specs, scheduler=scheduler) as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=60)
        client.run(_start, kind, blocks * block_bytes(kind), workers=[address(client, "device")])
        yield client


def _configured(device: str) -> Any:
    """A worker's configuration; sessions have weights of their own, which would be counted twice."""
    own = {"ferro": {"worker": {"device": device}, "device": {"onnxruntime": "never"}}}
    return dask.config.merge(dask.config.config, own)


def address(client: Client, name: str) -> str:
    found = client.scheduler_info(n_workers=-1)["workers"]
    return str(next(where for where, worker in found.items() if worker["name"] == name))


def _start(kind: str, room: int, dask_worker: Worker) -> None:
    """In a worker: compute on a device from now on, with so much room; on a GPU, other memory is taken for good."""
    if kind == "stand-in":
        use_device(StandIn(room or 1 << 26))
        return
    import cupy

    if room:
        dask_worker.ballast = cupy.cuda.alloc(cupy.cuda.runtime.memGetInfo()[0] - room)  # type: ignore[attr-defined]
    use_device(CountedGpu())


@pytest.mark.cluster
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_computes_on_its_device_and_tells_of_it(kind: str) -> None:
    side = SIDE[kind]
    model, x = chain(side), np.random.default_rng(0).standard_normal((8 * side, side)).astype(F)
    with workers(kind, threads=2) as client:
        ff.install(client)
        here = address(client, "device")
        got = ff.from_onnx(model, granularity="op", batch_size=side)(x)
        with dask.annotate(workers=[here], allow_other_workers=False):
            result = client.compute(got, workers=[here], allow_other_workers=False).result(timeout=60)
        np.testing.assert_allclose(result, reference(model, x), rtol=2e-3, atol=1e-3)
        counts = client.run(counts_here, workers=[here])[here]
        assert (
            counts["up_bytes"] == x.nbytes + side * side * 4
        )  # the weight once, for all bundles and threads
        assert counts["down_bytes"] == result.nbytes
        if kind == "cupy":
            told = client.run_on_scheduler(_told, here)
            assert (told["device"], told["gpu"]["total"]) == ("gpu", counts["total"])
            assert told["gpu"]["evictable"] >= side * side * 4


async def _told(worker: str, dask_scheduler: Scheduler) -> Any:
    import asyncio

    for _ in range(500):
        found = dask_scheduler.workers[worker].metrics.get(METRIC, {})
        if (found.get("gpu") or {}).get("evictable"):
            return found
        await asyncio.sleep(0.02)
    raise TimeoutError("no heartbeat told of the GPU's caches")


@pytest.mark.cluster
@pytest.mark.parametrize("kind", KINDS)
def test_forty_blocks_that_lie_on_a_host_pass_through_a_device_of_a_few(kind: str) -> None:
    """https://github.com/rapidsai/dask-cuda/issues/44: a GPU steals until its memory is full, and tasks fail."""
    side = SIDE[kind]
    model = ff.from_onnx(chain(side), granularity="op")
    # cuBLAS takes some tens of MB for itself, beside any pool.
    with workers(kind, threads=2, blocks=8 if kind == "stand-in" else 12) as client:
        ff.install(client)
        inputs = [np.full((side, side), n / 40, F) for n in range(40)]
        results = dask.compute(*(model(x) for x in inputs), scheduler=client)
        for x, y in zip(inputs, results, strict=True):
            np.testing.assert_allclose(y, reference(chain(side), x), rtol=2e-3, atol=1e-3)
        here = address(client, "device")
        counts = client.run(counts_here, workers=[here])[here]
        assert counts["ups"] > 0
        assert counts["live"] <= counts["total"]
