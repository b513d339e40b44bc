"""Devices on a running scheduler: declared ones, in this process and in their own; affinity by annotation."""

from __future__ import annotations

import asyncio
import importlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, Future, Scheduler, Worker
from distributed.protocol import deserialize, serialize
from distributed.scheduler import NoValidWorkerError
from emulated import declared as declared_device
from emulated.declared import DeclaredDevice, MemoryBlock, OutOfMemory, compute
from hypothesis import given
from hypothesis import strategies as st

import dask_ferro as ff
from dask_ferro.errors import InputError
from dask_ferro.policy.estimates import Estimate
from dask_ferro.policy.ledger import Ledger
from dask_ferro.scheduler import calibration
from dask_ferro.scheduler.annotations import (
    NO_WISH,
    Wish,
    estimate_of,
    prefer_device,
    require_device,
    wish_of,
)
from dask_ferro.scheduler.stealing import Stealing
from dask_ferro.scheduler.worker_plugin import METRIC
from tests import clusters
from tests.waiting import until_async

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MB = 1_000_000
CPU, GPU = DeclaredDevice("cpu", 1.0), DeclaredDevice("gpu", 20.0)
PATIENCE_S = 20.0


# ---- affinity ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "wanted"),
    [
        pytest.param(None, NO_WISH, id="nothing"),
        pytest.param({"prefer": "gpu"}, Wish("", "gpu"), id="a preference"),
        pytest.param({"require": "cpu"}, Wish("cpu", ""), id="a requirement"),
        pytest.param({"device-bytes": 1e6}, Wish(nbytes=1_000_000), id="bytes"),
        pytest.param({"device-bytes": -1}, NO_WISH, id="no bytes below zero"),
        pytest.param({"device-bytes": float("inf")}, NO_WISH, id="nor without end"),
        pytest.param({"prefer": "tpu"}, NO_WISH, id="no device that there is none of"),
        pytest.param({"region": "encoder/1", "regions": (("encoder*", "require", "gpu"),)}, Wish("gpu"),
            id="its region's"),
        pytest.param({"region": "decoder", "regions": (("encoder*", "require", "gpu"),)}, NO_WISH,
            id="no other region's"),
        pytest.param({"region": "a", "regions": (("*", "prefer", "cpu"), ("a", "require", "gpu"))}, Wish("", "cpu"),
            id="the first rule's that matches"),
        pytest.param({"prefer": "cpu", "region": "a", "regions": (("a", "require", "gpu"),)}, Wish("", "cpu"),
            id="its own before its region's"),
    ],
)  # fmt: skip
def test_an_annotation_wishes_for(annotation: Any, wanted: Wish) -> None:
    assert wish_of(None if annotation is None else {"ferro": annotation}) == wanted


@pytest.mark.parametrize(
    ("annotation", "wanted"),
    [
        pytest.param({"seconds": 2}, 2.0, id="seconds"),
        pytest.param({"seconds": True}, None, id="no truth value"),
        pytest.param({"flops": 4e9}, Estimate(None, 4e9, 0.0), id="operations"),
        pytest.param({"seconds": 1.0, "bytes": 8}, Estimate(1.0, 0.0, 8.0), id="bytes and seconds"),
        pytest.param({"flops": -1.0}, Estimate(None, 0.0, 0.0), id="nothing below zero"),
        pytest.param("soon", None, id="nothing that is no mapping"),
    ],
)
def test_an_annotation_estimates(annotation: Any, wanted: Any) -> None:
    assert estimate_of({"ferro": annotation}) == wanted


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["prefer", "require", "region", "regions", "device-bytes", "flops"]), junk
    )
)
def test_whatever_a_user_annotates_says_something_or_nothing(annotation: dict[str, Any]) -> None:
    wish = wish_of({"ferro": annotation})
    assert {wish.must, wish.likes} <= {"", "cpu", "gpu"}
    assert wish.nbytes is None or wish.nbytes >= 0
    estimate_of({"ferro": annotation})


def test_affinities_nest_and_keep_what_stands_around() -> None:
    with dask.annotate(ferro={"seconds": 0.1}), prefer_device("gpu"):
        assert dask.get_annotations()["ferro"] == {"seconds": 0.1, "prefer": "gpu"}
        with require_device("cpu"):
            assert wish_of(dask.get_annotations()) == Wish("cpu")
        with require_device("cpu", region="in*"), prefer_device("gpu", region="input"):
            assert dask.get_annotations()["ferro"]["regions"] == (
                ("input", "prefer", "gpu"),
                ("in*", "require", "cpu"),
            )
        assert wish_of(dask.get_annotations()) == Wish("", "gpu")
    assert "ferro" not in dask.get_annotations()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        pytest.param(
            lambda: prefer_device("tpu"),
            "prefer_device: got 'tpu', wanted one of cpu, gpu",
            id="another device",
        ),
        pytest.param(
            lambda: require_device("gpu", region=""), "wanted a pattern of regions", id="no pattern"
        ),
    ],
)
def test_an_affinity_is_refused_for(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        make()


def test_an_affinity_inside_of_a_function_says_why_not() -> None:
    with (
        dask.annotate(ferro={"x": {"seconds": 1.0}}.get),
        pytest.raises(InputError, match="which is not a mapping; use a mapping there"),
    ):
        assert prefer_device("gpu").annotations


# ---- a scheduler with declared devices ---------------------------------------------------------------------


class Site:
    """A scheduler with our plugin and workers in this process."""

    def __init__(self, scheduler: Scheduler, client: Client) -> None:
        self.scheduler, self.client = scheduler, client
        self.workers: list[Worker] = []

    async def join(self, *devices: DeclaredDevice) -> None:
        """Start a worker for each device, and wait until the scheduler knows what it is."""
        for device in devices:
            name = f"{device.device}-{len(self.workers)}"
            self.workers.append(
                await Worker(self.scheduler.address, nthreads=1, name=name, plugins=(device,))
            )
        rows = self.ledger.rows
        await until_async(
            lambda: len(rows) == len(self.workers) and all(self._is_told(w) for w in self.workers),
            "what every worker is",
        )

    def _is_told(self, worker: Worker) -> bool:
        device = declared_device.of(worker)
        assert device is not None
        row = self.ledger.rows[worker.address]
        told = METRIC in self.scheduler.workers[worker.address].metrics
        told = told and device.device in self.ledger.durations.speeds
        return told and (row.device, row.most is None) == (device.device, device.device == "cpu")

    @property
    def stealing(self) -> Stealing:
        found = self.scheduler.extensions["stealing"]
        assert isinstance(found, Stealing)
        return found

    @property
    def ledger(self) -> Ledger:
        return self.stealing.ledger

    def ran(self) -> set[str]:
        """Names of the workers that hold results."""
        return {str(ws.name) for ws in self.scheduler.workers.values() if ws.has_what}

    async def gather(self, futures: Sequence[Future]) -> list[Any]:
        async with asyncio.timeout(PATIENCE_S):
            return list(await self.client.gather(list(futures)))


APART = {f"distributed.worker.memory.{name}": False for name in ("target", "spill", "pause", "terminate")}


@asynccontextmanager
async def site(*devices: DeclaredDevice, **options: Any) -> AsyncIterator[Site]:
    # Nor with workers' checks: they hold up the loop, by which workers tell of the bytes that are taken.
    slow = {"distributed.worker.validate": False, "distributed.worker.profile.enabled": False}
    config = {**APART, **clusters.UNCHECKED, **slow}
    tuned = {"tick": 0.02, **options}
    async with clusters.opened(0, installed=True, parameters=tuned, config=config) as given:
        made = Site(given["scheduler"], given["client"])
        try:
            await made.join(*devices)
            yield made
        finally:
            await ff.uninstall(made.client)
            await asyncio.gather(*(worker.close(nanny=False) for worker in made.workers))


@asynccontextmanager
async def _scene(*devices: DeclaredDevice, **options: Any) -> AsyncIterator[dict[str, Site]]:
    async with site(*devices, **options) as made:
        yield {"s": made}


on_site = clusters.plays(_scene, "s")


@on_site(CPU, DeclaredDevice("gpu", 20.0, total=400 * MB))
async def test_what_workers_say_of_their_devices_reaches_the_ledger(s: Site) -> None:
    rows = {str(ws.name): s.ledger.rows[ws.address] for ws in s.scheduler.workers.values()}
    assert {name: (row.device, row.most) for name, row in rows.items()} == {
        "cpu-0": ("cpu", None),
        "gpu-1": ("gpu", 400 * MB),
    }
    speeds = s.ledger.durations.speeds
    assert speeds["gpu"].flops / speeds["cpu"].flops == 20.0
    told = s.scheduler.workers[s.workers[1].address].metrics[METRIC]["gpu"]
    assert told["model"] == "stand-in, 20 times a core"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@on_site(CPU, CPU, GPU)
async def test_required_tasks_run_on_their_class_alone(s: Site, device: str) -> None:
    with require_device(device):
        futures = s.client.map(compute, [0.001] * 60, [8] * 60, pure=False)
    await s.gather(futures)
    assert {name.partition("-")[0] for name in s.ran()} == {device}


@on_site(CPU)
async def test_a_required_class_that_is_not_there_is_waited_for(s: Site) -> None:
    with require_device("gpu"):
        futures = s.client.map(compute, [0.001] * 5, [8] * 5, pure=False)
    await until_async(lambda: len(s.scheduler.unrunnable) == 5, "five tasks without a worker")
    await s.gather([s.client.submit(compute, 0.001, 8, pure=False)])  # others pass
    assert len(s.scheduler.unrunnable) == 5
    await s.join(GPU)
    await s.gather(futures)
    assert all(type(result) is MemoryBlock for result in await s.gather(futures))


@on_site(CPU)
async def test_who_requires_a_class_that_is_not_there_fails_after_dasks_timeout_where_one_is_set(
    s: Site,
) -> None:
    with require_device("gpu"):
        future = s.client.submit(compute, 0.001, 8, pure=False)
    await until_async(lambda: len(s.scheduler.unrunnable) == 1, "one task without a worker")
    s.scheduler.no_workers_timeout = 0.2  # ten ticks of ours
    with pytest.raises(NoValidWorkerError):
        await s.gather([future])


@on_site(CPU, DeclaredDevice("gpu", 0.5))
async def test_a_preference_holds_where_both_are_free(s: Site) -> None:
    rules = prefer_device("gpu", region="encoder*").annotations["ferro"]
    with dask.annotate(ferro={**rules, "region": "encoder/1", "seconds": 0.01}):
        await s.gather([s.client.submit(compute, 0.01, 8, pure=False)])
    assert s.ran() == {"gpu-1"}


@on_site(CPU, DeclaredDevice("gpu", 20.0, total=4 * MB + 1000))
async def test_forty_blocks_pass_through_a_device_of_four(s: Site) -> None:
    """Nothing is known of them before, and nothing of them is queued; a kernel that does not fit is an error."""
    start = s.client.submit(compute, 0.0, 8, key="start-0")
    task = dask.delayed(compute, pure=False)
    with require_device("gpu"):
        loaded = [task(0.02, MB, start, dask_key_name=f"load-{n}") for n in range(40)]
        worked = [task(0.02, MB, one, dask_key_name=f"work-{n}") for n, one in enumerate(loaded)]
        summed = [task(0.02, 8, one, dask_key_name=f"sum-{n}") for n, one in enumerate(worked)]
    # One graph: of several, the scheduler may have the blocks loaded before it knows who reads them.
    futures = s.client.compute(summed, optimize_graph=False)
    await s.gather(futures)
    held = [s.scheduler.tasks[future.key].who_has or () for future in futures]
    assert {ws.name for some in held for ws in some} == {"gpu-1"}


@on_site(DeclaredDevice("gpu", 20.0, total=4 * MB, spills=True))
async def test_results_that_stay_do_not_stop_the_rest(s: Site) -> None:
    """A device spills them: an idle one gets the next task, full or not."""
    start = s.client.submit(compute, 0.0, 8, key="start-0")
    kept = [s.client.submit(compute, 0.001, MB, start, key=f"keep-{n}") for n in range(12)]
    await s.gather(kept)
    (ws,) = s.scheduler.workers.values()
    assert len(ws.has_what) == 13
    assert s.ledger.worker(ws.address, 0.0).room < MB


# ---- the stand-in itself -----------------------------------------------------------------------------------


class _Holder:
    """As much of a worker as its memory takes."""

    address = "here"

    def __init__(self, *values: Any) -> None:
        self.data = dict(enumerate(values))


def test_a_declared_device_refuses_what_does_not_fit() -> None:
    device, holder = DeclaredDevice("gpu", total=3 * MB), _Holder(MemoryBlock(MB), b"on the host")
    device.take(holder, MB, [MemoryBlock(MB)])  # type: ignore[arg-type]
    device.take(holder, 2 * MB, [holder.data[0]])  # type: ignore[arg-type]
    with pytest.raises(OutOfMemory, match="2000001 bytes do not fit: 1000000 of 3000000 are taken"):
        device.take(holder, 2 * MB + 1)  # type: ignore[arg-type]
    assert device.memory(holder)["live"] == MB  # type: ignore[arg-type]


def test_a_block_travels_with_its_size() -> None:
    arrived = deserialize(*serialize(MemoryBlock(MB)))
    assert (type(arrived), arrived.nbytes) == (MemoryBlock, MB)


# ---- in processes of their own -----------------------------------------------------------------------------


@pytest.fixture
def heterogeneous(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("heterogeneous")


@pytest.mark.cluster
def test_one_gpu_and_four_cpus_share_the_work(heterogeneous: Any) -> None:
    """How soon they are done: in the simulator (tests/simulate/test_devices.py) and in the benchmark."""
    graph = heterogeneous.matmul_parallel()
    with heterogeneous.cluster() as client:
        heterogeneous.take_over(client, "ferro")
        heterogeneous.workload_kernels.run(client, graph, kernel="declared")  # learns what tasks take
        with ff.profile(client) as traced:
            heterogeneous.workload_kernels.run(client, graph, kernel="declared")
        names = {worker: told["name"] for worker, told in client.scheduler_info()["workers"].items()}
    ran = Counter(names[span.worker] for span in traced.trace.spans if span.kind == "compute")
    assert (ran.total(), len(traced.trace.tasks)) == (len(graph.tasks), len(graph.tasks))
    assert ran["gpu-0"] > sum(ran.values()) / len(names), ran  # more than its share of the tasks


def test_stock_dask_takes_half_as_long_again(heterogeneous: Any) -> None:
    """In the simulator: on a cluster, stock takes 2.5 s or 7.5 to 9, as it happens (`benchmarks/heterogeneous.py`)."""
    seconds = heterogeneous.simulated()["seconds"]
    assert seconds["stock"] >= 1.5 * seconds["informed"]


# ---- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(
    find_spec("cupy") is None or calibration.detect_device() != "gpu",
    reason="needs CuPy and a GPU that it sees",
)
def test_a_gpu_says_what_it_is() -> None:
    cupy = importlib.import_module("cupy")
    before = calibration.memory()
    block = cupy.ones(64 * MB, dtype=cupy.uint8)
    after = calibration.memory()
    assert before is not None
    assert after is not None
    assert 0 < before["live"] <= before["used"] <= before["total"]
    assert after["live"] - before["live"] >= block.nbytes
    del block
    kept = calibration.memory()
    assert kept is not None
    assert kept["live"] < after["live"]  # what the pool keeps for reuse is free
    assert calibration.model()
