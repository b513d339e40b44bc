"""What lies on a device: weights once per content, results that come and go, memory that is bounded."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from emulated.device import StandIn
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.engines.device import residency as residents
from dask_ferro.engines.device.residency import DeviceArray, Residency, content_of
from dask_ferro.engines.device_executable import compile_on_device
from tests.engines.device.late import Late
from tests.engines.device.test_device import model_of, node
from tests.waiting import ended

KB = 1024
BLOCK = np.arange(256, dtype=np.float32)  # 1 kB


@pytest.fixture(autouse=True)
def _no_device() -> Iterator[None]:
    yield
    residents.ProcessDevice.residency = None


def residency(total: int = 64 * KB, **bounds: Any) -> Residency:
    return Residency(StandIn(total), **bounds)


def result(on: Residency, fill: float = 0) -> DeviceArray:
    return on.run(lambda: on.device.namespace.asarray(BLOCK + np.float32(fill), copy=True), on.keep)


def same(value: Any) -> Any:
    return value


class TestWeights:
    def test_a_weight_goes_up_once_however_often_it_is_asked_for(self) -> None:
        on, tensor = residency(), ir.tensor(BLOCK)
        first = on.weight(tensor)
        assert all(on.weight(tensor) is first for _ in range(5))
        assert on.device.traffic.counts()["up_bytes"] == KB

    def test_equal_content_is_one_weight_whatever_its_name_and_model(self) -> None:
        on = residency()
        assert on.weight(ir.tensor(BLOCK, name="a")) is on.weight(ir.tensor(BLOCK.copy(), name="b"))
        assert on.device.traffic.ups == 1

    @pytest.mark.parametrize(
        "other",
        [BLOCK + 1, BLOCK.reshape(16, 16), BLOCK.view(np.int32)],
        ids=["other values", "another shape", "another dtype of the same bytes"],
    )
    def test_differing_content_is_another_weight(self, other: np.ndarray) -> None:
        assert content_of(ir.tensor(BLOCK)) != content_of(ir.tensor(other))

    def test_threads_that_ask_together_upload_once(self) -> None:
        on, tensor = residency(), ir.tensor(BLOCK)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: on.weight(tensor), range(16)))
        assert on.device.traffic.ups == 1

    def test_they_are_bounded_in_bytes_and_the_least_recently_used_leaves(self) -> None:
        on = residency(weights=2 * KB)
        a, b, c = (ir.tensor(BLOCK + i) for i in range(3))
        for tensor in (a, b, a, c, a):  # b leaves when c comes
            on.weight(tensor)
        assert on.device.traffic.ups == 3
        on.weight(b)
        assert on.device.traffic.ups == 4
        assert on.device.memory().live == 2 * KB


class TestResults:
    def test_it_tells_what_it_is_without_moving(self) -> None:
        on = residency()
        y = result(on)
        assert (y.shape, y.dtype, y.nbytes, y.ndim, len(y)) == ((256,), np.float32, KB, 1, 256)
        assert sys.getsizeof(y) >= KB
        assert on.device.traffic.downs == 0

    def test_numpy_brings_it_down_and_it_stays(self) -> None:
        y = result(residency())
        assert np.array_equal(np.asarray(y), BLOCK)
        assert y.is_resident

    def test_the_oldest_moves_to_the_host_when_there_are_too_many(self) -> None:
        on = residency(results=2 * KB)
        a, b, c = (result(on, i) for i in range(3))
        assert [y.is_resident for y in (a, b, c)] == [False, True, True]
        assert on.device.memory().live == 2 * KB
        assert np.array_equal(np.asarray(a), BLOCK)

    def test_one_that_moved_goes_up_again_once(self) -> None:
        on = residency()
        y = result(on, 7)
        y.leave()
        ups = on.device.traffic.ups
        assert on.on_device(y) is on.on_device(y)
        assert on.device.traffic.ups == ups + 1
        assert np.array_equal(np.asarray(y), BLOCK + 7)

    def test_a_forgotten_one_is_forgotten_everywhere(self) -> None:
        on = residency()
        y = result(on)
        del y
        gc.collect()
        assert on.nbytes == on.device.memory().live == 0

    def test_pickled_it_arrives_as_numpy_where_there_is_no_device(self) -> None:
        arrived = pickle.loads(pickle.dumps(result(residency(), 3)))
        assert type(arrived) is np.ndarray
        assert np.array_equal(arrived, BLOCK + 3)

    def test_pickled_it_arrives_on_its_way_to_the_device_where_there_is_one(self) -> None:
        there = residency()
        residents.ProcessDevice.residency = there
        arrived = pickle.loads(pickle.dumps(result(residency(), 3)))
        assert not arrived.is_resident
        assert there.device.traffic.ups == 0
        there.on_device(arrived)
        assert there.device.traffic.counts()["up_bytes"] == KB


class TestInputs:
    def test_one_that_many_tasks_read_goes_up_once(self) -> None:
        on = residency()
        assert on.on_device(BLOCK) is on.on_device(BLOCK)
        assert on.device.traffic.ups == 1

    def test_an_array_of_the_users_own_goes_up_each_time(self) -> None:
        on = residency(keeps_inputs=False)
        x = BLOCK.copy()
        first = on.device.to_host(on.on_device(x))
        x += 1
        assert np.array_equal(on.device.to_host(on.on_device(x)), first + 1)

    def test_the_copy_goes_with_the_array(self) -> None:
        on = residency()
        x = BLOCK.copy()
        on.on_device(x)
        del x
        gc.collect()
        assert on.nbytes == 0

    def test_what_came_down_is_known_again(self) -> None:
        on = residency()
        host = on.brought_down(on.device.to_device(BLOCK))
        on.on_device(host)
        assert on.device.traffic.ups == 1

    def test_arrays_may_die_in_the_middle_of_anything(self) -> None:
        """The collector runs where it likes; here, between two evictions."""
        on = residency()
        hosts = [BLOCK.copy() for _ in range(3)]

        for host, array in zip(hosts, (Dying(hosts), on.device.to_device(BLOCK)), strict=False):
            on.brought_down(array, host)
        del host
        on.limit = 0
        on.on_device(BLOCK)
        assert hosts == []
        assert on.nbytes == 0

    def test_an_array_in_a_dead_ones_place_is_not_taken_for_it(self) -> None:
        """Of two arrays that live one after the other, the second often has the first one's id."""
        on, ids = residency(), set()
        for i in range(20):
            x = BLOCK + np.float32(i)
            ids.add(id(x))
            assert np.array_equal(on.device.to_host(on.on_device(x)), x)
            del x
        assert len(ids) < 20

    def test_many_threads_come_and_go(self) -> None:
        on = residency(results=4 * KB)

        def work(seed: int) -> bool:
            kept = []
            for i in range(60):
                x = BLOCK + np.float32(seed * 100 + i)
                kept = [*kept[-2:], on.run(lambda x=x: on.on_device(x) + 0, on.keep, (x,))]
                assert np.array_equal(np.asarray(kept[0]), kept[0].host())
            return bool(np.asarray(kept[-1])[0] == seed * 100 + 59)

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(4)))
        gc.collect()
        assert on.nbytes == 0


class TestMemory:
    @pytest.mark.parametrize(
        ("module", "name", "told"),
        [
            ("cupy_backends.cuda.libs.cublas", "CUBLASError", "CUBLAS_STATUS_NOT_INITIALIZED"),
            ("cupy_backends.cuda.libs.cublas", "CUBLASError", "CUBLAS_STATUS_ALLOC_FAILED"),
            ("cupy_backends.cuda.api.driver", "CUDADriverError", "CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
            ("cupy.cuda.memory", "OutOfMemoryError", "cudaErrorMemoryAllocation: out of memory"),
        ],
    )
    def test_what_libraries_call_it_makes_room_too(self, module: str, name: str, told: str) -> None:
        """Inside a bundle, where errors tell their node."""
        error = type(name, (RuntimeError,), {"__module__": module})
        on = residency()
        kept, calls = result(on), iter([error(told)])

        def exp(x: Any) -> Any:
            for once in calls:
                raise once
            return x + 1

        on.device.namespace.exp = exp
        model = model_of([node("Exp", "x", "y")], {"x": (256,)}, ["y"])
        (y,) = compile_on_device(model, ["x"], ["y"], on)(BLOCK)
        assert np.array_equal(np.asarray(y), BLOCK + 1)
        assert not kept.is_resident

    def test_what_a_slot_holds_counts_leaves_and_comes_back(self) -> None:
        on, built = residency(), []

        def build() -> np.ndarray:
            built.append(1)
            return BLOCK

        slot = on.slot()
        assert slot(build) is slot(build)
        assert (on.nbytes, len(built)) == (KB, 1)
        on.clear()
        assert on.nbytes == 0
        slot(build)
        assert (on.nbytes, len(built)) == (KB, 2)
        del slot
        assert on.nbytes == 0

    def test_a_part_of_a_large_array_that_stays_does_not_keep_the_rest(self) -> None:
        """The result of a Slice, and of one of several products that were one; both that stay and that come down."""
        on = residency(total=1 << 20)
        text = "e = Exp (x) y = Slice (e, zero, one)"
        model = model_of(text, {"x": (256, 64)}, ["y"], zero=np.array([0]), one=np.array([1]))
        x = np.zeros((256, 64), np.float32)
        (y,) = compile_on_device(model, ["x"], ["y"], on)(x)
        del x
        assert (on.nbytes, on.device.memory().live, y.nbytes) == (256, 256, 256)
        (z,) = compile_on_device(model, ["x"], ["y"], on, down=[0])(np.zeros((256, 64), np.float32))
        assert (on.nbytes, on.device.memory().live, z.nbytes) == (512, 512, 256)

    def test_a_part_is_copied_before_the_wait(self) -> None:
        device = Waiting(1 << 20)
        original = device.namespace.asarray
        device.namespace.asarray = lambda *a, **o: device.log.append("copied") or original(*a, **o)
        bounds = {"zero": np.array([0]), "one": np.array([1])}
        model = model_of("y = Slice (x, zero, one)", {"x": (256,)}, ["y"], **bounds)
        run = compile_on_device(model, ["x"], ["y"], Residency(device))
        device.log.clear()
        run(BLOCK)
        assert device.log == ["copied", "done", "copied", "done"]  # the input goes up, and the part is copied

    def test_a_bundle_that_runs_out_runs_again_alone(self) -> None:
        on = residency(total=4 * KB, results=4 * KB)
        kept = [result(on, i) for i in range(3)]

        def wants_three() -> float:
            xp = on.device.namespace
            return float(sum(float(xp.sum(a)) for a in [xp.ones(256, dtype=xp.float32) for _ in range(3)]))

        assert on.run(wants_three, same) == 768
        assert [np.array_equal(np.asarray(y), BLOCK + i) for i, y in enumerate(kept)] == [True] * 3

    def test_what_a_bundle_reads_is_not_moved_out_of_its_way(self) -> None:
        on = residency(total=4 * KB, results=2 * KB)
        y = result(on)
        up = on.device.to_device
        kept = on.run(lambda: [up(BLOCK) for _ in range(2)], lambda made: [*map(on.keep, made)], reads=[y])
        assert y.is_resident
        assert [one.is_resident for one in kept] == [False, True]

    @given(st.lists(st.tuples(st.sampled_from(["make", "read", "drop"]), st.integers(0, 7)), max_size=40))
    @settings(max_examples=60, deadline=None)
    def test_whatever_comes_and_goes_no_value_is_lost_and_the_bound_holds(self, steps: list[Any]) -> None:
        on = residency(total=16 * KB, results=3 * KB)
        alive: dict[int, DeviceArray] = {}
        for what, i in steps:
            if what == "make":
                alive[i] = result(on, i)
            elif what == "drop":
                alive.pop(i, None)
            elif i in alive:
                on.run(lambda i=i: on.on_device(alive[i]), same, [alive[i]])
            assert on.device.memory().live <= 4 * KB  # the bound, and one that is being read
        assert all(np.array_equal(np.asarray(y), BLOCK + i) for i, y in alive.items())


class Dying:
    """An array on the device during whose eviction other host arrays die."""

    def __init__(self, hosts: list[Any]) -> None:
        self._hosts = hosts

    @property
    def nbytes(self) -> int:
        if len(self._hosts) == 3 and sys._getframe(1).f_code.co_name in ("_make_room", "_leave_room"):
            self._hosts.clear()
        return KB


class Waiting(StandIn):
    """A stand-in that writes down when it was waited for."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.log: list[Any] = []

    def synchronize(self) -> None:
        self.log.append("done")


class TestOrder:
    """On a GPU, work is queued: what it reads may not go, and what it makes may not be seen, before it is done."""

    def test_results_are_handed_over_when_the_work_is_done(self) -> None:
        device = Waiting(64 * KB)
        Residency(device).run(lambda: device.log.append("queued"), lambda _: device.log.append("handed over"))
        assert device.log == ["queued", "done", "handed over"]

    def test_after_an_error_it_waits_too(self) -> None:
        device = Waiting(64 * KB)
        with pytest.raises(ZeroDivisionError):
            Residency(device).run(lambda: 1 / 0, same)
        assert device.log == ["done"]

    def test_what_many_threads_may_read_is_there_before_they_see_it(self) -> None:
        device = Waiting(64 * KB)
        on = Residency(device)
        on.weight(ir.tensor(BLOCK))
        on.on_device(BLOCK)
        assert device.log == ["done", "done"]

    def work(self, device: Late) -> list[Any]:
        """Chains of bundles by four threads, that share inputs, a weight and results, with memory for few of them."""
        on = Residency(device, results=3 * KB)
        nodes = [node("MatMul", "x w", "a"), node("Exp", "a", "b"), node("Slice", "b zero half", "y")]
        shape, half = (16, 16), np.array([16])
        weights = {"w": np.eye(16, dtype=np.float32), "zero": np.array([0]), "half": half}
        run = compile_on_device(model_of(nodes, {"x": shape}, ["y"], **weights), ["x"], ["y"], on)
        x = np.zeros(shape, np.float32)
        with ThreadPoolExecutor(4) as pool:
            first = list(pool.map(lambda _: run(x)[0], range(8)))
            return [np.asarray(y) for (y,) in pool.map(run, first)]

    def test_of_many_threads_nobody_reads_what_is_not_there_yet(self) -> None:
        device = Late(64 * KB)
        found = self.work(device)
        assert all(np.allclose(y, np.exp(1)) for y in found)
        assert device.early == []

    @pytest.mark.parametrize("waits", [True, False])
    def test_a_wait_that_is_missing_would_be_seen(self, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a weight that went up, and of a bundle's result: by the stand-in of the test above."""
        device = Late(64 * KB)
        on = Residency(device)
        if not waits:
            monkeypatch.setattr(device, "synchronize", lambda: None)
        weight, y = on.weight(ir.tensor(BLOCK)), on.run(lambda: device.to_device(BLOCK), on.keep)
        with ThreadPoolExecutor(1) as pool:
            for array in (weight, y.array()):
                error = pool.submit(lambda array=array: array + 0).exception()
                assert isinstance(error, AssertionError) == (not waits)

    def test_memory_that_is_let_go_too_early_would_be_seen(self) -> None:
        device = Late(64 * KB)
        arrays = [device.to_device(BLOCK)]
        device.synchronize()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: arrays[0] + 0).result(timeout=60)
            arrays.clear()
            assert len(device.early) == 1


class TestTurns:
    def test_who_runs_alone_runs_beside_nobody(self) -> None:
        on, inside, seen = residency(), [], []

        def beside_others() -> None:
            with on._turn():
                inside.append(1)
                inside.pop()

        def alone() -> None:
            with on._turn(alone=True):
                seen.append(len(inside))

        threads = [threading.Thread(target=f) for f in (beside_others, alone) * 20]
        for t in threads:
            t.start()
        for t in threads:
            ended(t)
        assert seen == [0] * 20

    def test_others_run_at_a_time(self) -> None:
        on, barrier = residency(), threading.Barrier(3, timeout=5)

        def run() -> int:
            with on._turn():
                return barrier.wait(60)

        with ThreadPoolExecutor(3) as pool:
            assert sorted(f.result(timeout=60) for f in [pool.submit(run) for _ in range(3)]) == [0, 1, 2]
