"""Bundles on a device: what goes up and what comes down, counted; weights once per device; memory that is short."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import distributed
import numpy as np
import onnx
import pytest
from dask.core import flatten
from dask.sizeof import sizeof
from emulated.device import CountedGpu, StandIn

import dask_ferro as ff
from dask_ferro.engines.device import residency as residents
from dask_ferro.engines.device.device import cupy_devices
from dask_ferro.engines.device.residency import DeviceArray, Residency
from dask_ferro.lower.worker import task
from tests.device_counts import counts as counts_here
from tests.graphs import written
from tests.waiting import BOUND_S

gpu = [pytest.mark.gpu, pytest.mark.skipif(not cupy_devices(), reason="needs CuPy and a GPU that it sees")]
F = np.float32
RNG = np.random.default_rng(6)
CHAIN = [
    *("MatMul", "Relu", "Add", "Tanh", "MatMul", "Sigmoid", "Mul", "Exp", "MatMul", "Neg"),
    *("Softmax", "Sqrt", "Add", "Relu", "MatMul", "Tanh", "Mul", "Abs", "Add", "Relu"),
]


def _of(inputs: str, nodes: str, outputs: str = "y", **weights: Any) -> onnx.ModelProto:
    return written(f"({inputs}) => ({outputs}) {{ {nodes} }}", weights)


@pytest.fixture(params=["stand-in", pytest.param("cupy", marks=gpu)])
def on(request: pytest.FixtureRequest) -> Iterator[Residency]:
    """This process computes on a device while the test runs, and takes inputs to stay as they are."""
    residency = task.use_device(StandIn(1 << 24) if request.param == "stand-in" else CountedGpu())
    assert residency is not None
    residency.keeps_inputs = True
    yield residency
    task.use_device(None)


@pytest.fixture
def bare() -> Iterator[Residency]:
    """This process, which is no worker, computes on a stand-in: the arrays are the user's, and may change."""
    residency = task.use_device(StandIn())
    assert residency is not None
    yield residency
    task.use_device(None)


def chain(side: int = 160) -> onnx.ModelProto:
    """Twenty ops in a row; four of them are products with one weight of 100 kB."""
    takes = {"MatMul": ["w"], "Add": ["b"], "Mul": ["b"]}
    names = ["x", *(f"v{i}" for i in range(19)), "y"]
    names = ["x", *(f"v{i}" for i in range(19)), "y"]
    nodes = " ".join(
        f"[{op}_{i}] {names[i + 1]} = {op} ({', '.join([names[i], *takes.get(op, [])])})"
        for i, op in enumerate(CHAIN)
    )
    w = (RNG.standard_normal((side, side)) / side).astype(F)
    return _of(f"float[n,{side}] x", nodes, w=w, b=np.linspace(0, 1, side, dtype=F))


def computed(model: Any, feeds: Any, **options: Any) -> Any:
    return ff.from_onnx(model, **options)(feeds).compute(scheduler="sync")


def on_the_host(model: Any, feeds: Any, **options: Any) -> Any:
    before = task.current_device()
    task.use_device(None)
    try:
        return computed(model, feeds, **options)
    finally:
        residents.ProcessDevice.residency = before


X = RNG.standard_normal((8, 160)).astype(F)


@pytest.mark.parametrize("granularity", ["model", "op"])
def test_a_chain_of_20_ops_moves_its_input_up_once_and_its_output_down_once(granularity, on):
    """And the weight and the bias once, whether the chain is one task or twenty."""
    model = chain()
    y = computed(model, X, granularity=granularity)
    counts = on.device.traffic.counts()
    weights = 160 * 160 * 4 + 160 * 4
    assert (counts["ups"], counts["up_bytes"]) == (3, X.nbytes + weights)
    assert (counts["downs"], counts["down_bytes"], counts["reads"]) == (1, y.nbytes, 0)
    assert type(y) is np.ndarray
    np.testing.assert_allclose(y, on_the_host(model, X), rtol=1e-4, atol=1e-5)


def test_weights_go_up_once_however_many_models_bundles_and_chunks_read_them(on: Residency) -> None:
    w = RNG.standard_normal((160, 160)).astype(F)
    models = [
        _of("float[n,160] x", f"a = MatMul (x, w) b = {op} (a) y = MatMul (b, w)", w=w)
        for op in ("Tanh", "Relu")
    ]
    for model in models:
        computed(model, X, granularity="op", batch_size=2)
    uploaded_inputs = 2 * X.nbytes
    assert on.device.traffic.counts()["up_bytes"] == uploaded_inputs + w.nbytes
    assert on.weights.nbytes == w.nbytes


def test_an_input_that_changed_is_uploaded_again(bare: Residency) -> None:
    assert not bare.keeps_inputs
    x = X.copy()
    model = ff.from_onnx(chain(), granularity="model")
    first = model(x).compute(scheduler="sync")
    x *= 2
    assert not np.array_equal(model(x).compute(scheduler="sync"), first)


def test_between_bundles_a_result_stays_and_has_its_bytes(on: Residency) -> None:
    model = _of("float[8,160] x", "a = Exp (x) y = Neg (a)")
    y = ff.from_onnx(model, granularity="op")(X)
    graph = dict(y.__dask_graph__())
    inner = [key for key in graph if key not in flatten(y.__dask_keys__())]
    values = dask.get(graph, inner)
    (value,) = [v for v in values if isinstance(v, DeviceArray)]
    assert value.is_resident
    assert sizeof(value) >= value.nbytes == X.nbytes
    assert hasattr(value, "__cuda_array_interface__") == isinstance(on.device, CountedGpu)
    assert np.array_equal(pickle.loads(pickle.dumps(value)), np.asarray(value))


def test_what_the_device_lacks_runs_on_the_host_and_moves_what_it_must(bare: Residency) -> None:
    """float16 is no dtype of the stand-in: its ops are the host's, between two runs on the device."""
    nodes = "a = Exp (x) h = Cast <to = 10> (a) n = Neg (h) f = Cast <to = 1> (n) y = Tanh (f)"
    model = _of("float[8,160] x", nodes)
    got = computed(model, X, granularity="model")
    counts = bare.device.traffic.counts()
    assert (counts["ups"], counts["downs"]) == (2, 2)
    np.testing.assert_allclose(got, on_the_host(model, X), rtol=1e-5)


class Watched(StandIn):
    """A stand-in that notes how many bytes were alive whenever it was waited for."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.alive: list[int] = []

    def synchronize(self) -> None:
        self.alive.append(self.memory().live)


def test_a_weight_that_is_not_kept_lives_until_the_bundle_is_done() -> None:
    """On a GPU its memory would be another stream's next, while the product still reads it."""
    w = RNG.standard_normal((160, 160)).astype(F)
    model = _of("float[n,160] x", "y = MatMul (x, w)", w=w)
    device = Watched(1 << 24)
    try:
        with dask.config.set({"ferro.device.weights-bytes": 0}):
            task.use_device(device)
        np.testing.assert_allclose(computed(model, X), X @ w, rtol=1e-4, atol=1e-5)
        assert device.alive[-1] >= w.nbytes + 2 * X.nbytes
        assert device.memory().live < w.nbytes
    finally:
        task.use_device(None)


def test_threads_that_start_together_find_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a residency of its own would take the memory several times."""
    start = threading.Barrier(4, timeout=5)

    def found() -> StandIn:
        time.sleep(0.05)  # as CuPy's import takes
        return StandIn()

    def asks(_: int) -> Residency | None:
        start.wait(BOUND_S)
        return task.current_device()

    def slowly(device: StandIn) -> Residency:
        time.sleep(0.05)  # as the driver takes to tell its free memory at first
        return Residency(device)

    monkeypatch.setattr(task, "_detect_device", found)
    monkeypatch.setattr(task, "_residency_of", slowly)
    monkeypatch.setattr(task, "_is_chosen", False)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(asks, range(4)))) == 1
    finally:
        task.use_device(None)


@pytest.mark.parametrize(
    "wanted", ["auto", "cpu"], ids=["a process that is no worker", "a worker that says cpu"]
)
def test_uses_no_device(wanted: str) -> None:
    with dask.config.set({"ferro.worker.device": wanted}):
        assert task._detect_device() is None


def _start(total: int) -> None:
    """In a worker: compute on a stand-in from now on."""
    from emulated.device import StandIn

    from dask_ferro.lower.worker import task

    task.use_device(StandIn(total))


def _stop() -> None:
    from dask_ferro.lower.worker import task

    task.use_device(None)


@pytest.mark.cluster
def test_workers_with_and_without_a_device_work_on_one_model(client: distributed.Client) -> None:
    """One worker of two has a stand-in: its results reach the other as numpy arrays, and right."""
    first = next(iter(client.scheduler_info(n_workers=-1)["workers"]))
    client.run(_start, 1 << 26, workers=[first])
    try:
        model, x = chain(), RNG.standard_normal((64, 160)).astype(F)
        got = ff.from_onnx(model, granularity="op", batch_size=4)(x).compute()
        np.testing.assert_allclose(got, on_the_host(model, x), rtol=1e-4, atol=1e-5)
        counts = client.run(counts_here, workers=[first])[first]
        assert counts["ups"] > 0
        assert counts["live"] <= counts["total"]
    finally:
        client.run(_stop)


def test_a_model_of_one_row_computes_each_row_of_a_batch_there(on: Residency) -> None:
    """Between its tasks too, where rows are taken from results on the device."""
    model = _of("float[1,160] x", "a = MatMul (x, w) y = Softmax (a)", w=np.eye(160, dtype=F))
    for granularity in ("model", "op"):
        y = computed(model, X, granularity=granularity, batch_size=len(X))
        np.testing.assert_allclose(y, on_the_host(model, X), rtol=1e-5)
    assert on.device.traffic.ups >= len(X)
