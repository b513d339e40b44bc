"""ONNX Runtime on a device's own arrays: nothing crosses to the host, outputs lie in the allocator's memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from emulated.device import CountedGpu, StandIn
from onnx import TensorProto, helper

from dask_ferro.engines.device.device import cupy_devices
from dask_ferro.engines.device.oom import is_out_of_memory
from dask_ferro.engines.device.residency import Residency
from dask_ferro.engines.device_executable import compile_on_device, device_engines, device_route
from dask_ferro.engines.executable import Executable
from dask_ferro.engines.onnxruntime.device_session import (
    CUDA,
    DeviceSessionRun,
    ProviderPlace,
    place_of,
    provider_options,
    resolve_shape,
    sizes_of,
    works,
)
from dask_ferro.engines.onnxruntime.session import DEFAULTS
from dask_ferro.errors import InputError, ModelError
from dask_ferro.graph.model.load import load
from tests.each import every
from tests.graphs import mlp, mlp_reference, model, written

X = np.linspace(-1, 1, 24, dtype="f4").reshape(4, 6)


@pytest.fixture(params=["standin", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    if request.param == "standin":
        return StandIn(1 << 20)
    if not cupy_devices():
        pytest.skip("no GPU that CuPy sees")
    if not works(CUDA):
        pytest.skip("no ONNX Runtime with a CUDA provider that works (package onnxruntime-gpu)")
    return CountedGpu()


def session(device: Any, proto: onnx.ModelProto, **options: Any) -> DeviceSessionRun:
    loaded = ir.from_proto(proto)
    inputs, outputs = ([v.name or "" for v in side] for side in (loaded.graph.inputs, loaded.graph.outputs))
    opset = loaded.opset_imports[""]
    made = [loaded, list(loaded.graph), inputs, outputs, opset, DEFAULTS]
    return DeviceSessionRun(*made, device=device, held=Residency(device).slot(), **options)


def test_a_session_gives_the_devices_arrays(device: Any) -> None:
    run = session(device, mlp())
    with device.stream():
        (found,) = run(device.to_device(X))
        assert type(found) is device.array_type
        np.testing.assert_allclose(device.to_host(found), mlp_reference(X), rtol=1e-5)


def test_nothing_crosses_between_two_sessions(device: Any) -> None:
    """Ten runs in a row: one upload before, one download after."""
    square = model([helper.make_node("Relu", ["x"], ["y"])], {"x": ["N", 6]}, {"y": ["N", 6]})
    run = session(device, square)
    with device.stream():
        value = device.to_device(X)
        for _ in range(10):
            (value,) = run(value)
        np.testing.assert_array_equal(device.to_host(value), np.maximum(X, 0))
    crossed = device.traffic.counts()
    assert (crossed["ups"], crossed["downs"], crossed["reads"]) == (1, 1, 0)
    assert (crossed["up_bytes"], crossed["down_bytes"]) == (X.nbytes, X.nbytes)


def test_an_array_of_the_host_goes_up_once_and_is_counted() -> None:
    device = StandIn()
    (found,) = session(device, mlp())(X)
    np.testing.assert_allclose(device.to_host(found), mlp_reference(X), rtol=1e-5)
    assert device.traffic.counts()["ups"] == 1


def test_an_output_outlives_its_session(device: Any) -> None:
    run = session(device, mlp())
    with device.stream():
        found = [run(device.to_device(X))[0] for _ in range(3)]
        del run
        for one in found:
            np.testing.assert_allclose(device.to_host(one), mlp_reference(X), rtol=1e-5)


def test_results_of_two_runs_do_not_share_memory(device: Any) -> None:
    run = session(device, mlp())
    with device.stream():
        found = [run(device.to_device(X * scale))[0] for scale in (1, 2, 3)]
        for one, scale in zip(found, (1, 2, 3), strict=True):
            np.testing.assert_allclose(device.to_host(one), mlp_reference(X * np.float32(scale)), rtol=1e-4)


def test_a_shape_that_depends_on_the_values_is_left_to_onnxruntime(device: Any) -> None:
    run = session(device, written('(float[N,6] x) => (int64[2,found] "where") { "where" = NonZero (x) }'))
    with device.stream():
        for x in (X, np.zeros_like(X), np.eye(4, 6, dtype="f4")):
            np.testing.assert_array_equal(device.to_host(run(device.to_device(x))[0]), np.nonzero(x))


@every("dtype", ["bool", "int8", "uint8", "int32", "int64", "float32", "float64"])
def test_every_dtype_comes_back_as_it_went(device: Any, dtype: str) -> None:
    kind = int(ir.DataType.from_numpy(np.dtype(dtype)))
    proto = model([helper.make_node("Transpose", ["x"], ["y"])], {"x": ["N", 6]}, {"y": [6, "N"]}, dtype=kind)
    run, x = session(device, proto), (X > 0).astype(dtype)
    with device.stream():
        for _ in range(2):
            (found,) = run(device.to_device(x))
            back = device.to_host(found)
            assert back.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(back, x.T)


def test_an_input_that_is_not_in_c_order_is_read_right(device: Any) -> None:
    run, xp = session(device, mlp(features=4)), device.namespace
    with device.stream():
        (found,) = run(xp.permute_dims(device.to_device(X), (1, 0)))
        np.testing.assert_allclose(device.to_host(found), mlp_reference(X.T, features=4), rtol=1e-5)


def test_an_empty_batch_has_the_shape_of_its_outputs(device: Any) -> None:
    run = session(device, mlp())
    with device.stream():
        for _ in range(2):
            assert run(device.to_device(X[:0]))[0].shape == (0, 3)


def test_without_its_provider_a_session_is_refused_by_name() -> None:
    """Not run on the host in silence, which is what ONNX Runtime itself does."""
    if works(CUDA):
        pytest.skip("here the CUDA provider works")

    class Cuda(StandIn):
        def __init__(self) -> None:
            super().__init__()
            self.namespace = _OnCuda()

    class _OnCuda:
        __name__ = "elsewhere"

        def empty(self, shape: int) -> Any:
            return self

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    with pytest.raises(InputError, match="CUDAExecutionProvider does not work here"):
        session(Cuda(), mlp())


def test_a_session_waits_before_it_runs_and_after_what_it_copies() -> None:
    """A first run copies its outputs out of the session's memory, later ones write where they are to be."""

    class Waited(StandIn):
        waits = 0

        def synchronize(self) -> None:
            self.waits += 1

    device = Waited()
    run, each = session(device, mlp()), []
    for _ in range(3):
        before = device.waits
        run(device.to_device(X))
        each.append(device.waits - before)
    assert each == [2, 1, 1]


def test_running_out_of_memory_is_seen(device: Any) -> None:
    """The caller then makes room and tries again, as for the array table."""
    run = session(device, written("(int64[1] size) => (float[n] y) { y = ConstantOfShape (size) }"))
    with device.stream(), pytest.raises(Exception) as caught:  # noqa: PT011 - ONNX Runtime's errors have no common class
        run(device.to_device(np.array([1 << 45])))
    assert is_out_of_memory(caught.value)


def managed(on: Residency, proto: onnx.ModelProto) -> Executable:
    """The whole model as one session on a device whose memory is managed."""
    loaded = load(proto).model
    inputs, outputs = ([v.name or "" for v in side] for side in (loaded.graph.inputs, loaded.graph.outputs))
    engines = [("onnxruntime-device", len(list(loaded.graph)))]
    return compile_on_device(loaded, inputs, outputs, on, engines=engines)


def test_a_session_counts_as_weights_and_leaves_when_room_is_wanted(device: Any) -> None:
    on = Residency(device)
    run = managed(on, mlp())
    weights = on.weights.nbytes
    assert weights > 0
    first = np.asarray(run(X)[0])
    on.clear()
    assert on.weights.nbytes == 0
    np.testing.assert_array_equal(np.asarray(run(X)[0]), first)
    assert on.weights.nbytes == weights
    del run
    on.on_device(X)
    assert on.weights.nbytes == 0


@pytest.mark.parametrize(
    "told",
    [
        "BFCArena: Failed to allocate memory for requested buffer of size 8",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDA failure 2: out of memory",
    ],
)
def test_a_session_that_finds_no_memory_is_built_alone(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told by text, and by ONNX Runtime's own way out: a session on the host, or with other settings."""
    on, original, failures = Residency(StandIn(1 << 20)), ort.InferenceSession, [RuntimeError(told)]
    kept = on.run(lambda: on.device.to_device(X), on.keep)
    assert works(CPU_PROVIDER)  # tried once a process, by a session
    asked: list[Any] = []

    def built(*arguments: Any, **options: Any) -> Any:
        asked.append(options["enable_fallback"])
        if failures:
            raise failures.pop()
        return original(*arguments, **options)

    monkeypatch.setattr(ort, "InferenceSession", built)
    run = managed(on, mlp())
    assert not kept.is_resident
    assert asked == [0, 0]
    np.testing.assert_allclose(np.asarray(run(X)[0]), mlp_reference(X), rtol=1e-5)


def test_any_other_failure_of_a_session_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("This is an invalid model")

    assert works(CPU_PROVIDER)
    monkeypatch.setattr(ort, "InferenceSession", fails)
    with pytest.raises(ModelError, match=r"(?s)cannot load node.*invalid model"):
        managed(Residency(StandIn(1 << 20)), mlp())


def test_a_run_gives_its_arena_back(device: Any) -> None:
    """Nobody counts what lies in it."""
    arena = "gpu:0" if isinstance(device, CountedGpu) else "cpu:0"
    assert (
        session(device, mlp())._shrinking.get_run_config_entry("memory.enable_memory_arena_shrinkage")
        == arena
    )


def test_the_provider_is_that_of_the_arrays_memory(device: Any) -> None:
    wanted = (CUDA, "cuda") if isinstance(device, CountedGpu) else ("CPUExecutionProvider", "cpu")
    assert place_of(device)[:2] == wanted


def test_tf32_is_off_unless_it_is_asked_for() -> None:
    place = ProviderPlace(CUDA, "cuda", 1)
    assert provider_options(place, 1 << 30, tf32=False)["use_tf32"] == "0"
    assert provider_options(place, 1 << 30, tf32=True) == {
        "device_id": "1",
        "use_tf32": "1",
        "arena_extend_strategy": "kSameAsRequested",
        "cudnn_conv_algo_search": "HEURISTIC",
        "gpu_mem_limit": "1073741824",
    }


@pytest.mark.parametrize(
    ("declared", "shapes", "dims", "shape"),
    [
        pytest.param([("n", 3)], [(2, 3)], ("n", 3), (2, 3), id="a symbol has the size that an input gives it"),
        pytest.param([("n", 3)], [(2, 3)], (4, 5), (4, 5), id="a fixed shape needs no input"),
        pytest.param([("n",), ("n",)], [(2,), (3,)], ("n",), None, id="a symbol of two sizes is not known"),
        pytest.param([("n",)], [(2,)], ("k",), None, id="a symbol that no input has is not known"),
        pytest.param([(None,)], [(2,)], (None,), None, id="a dimension without a name is not known"),
        pytest.param([None], [(2,)], None, None, id="a value without a rank has no shape"),
        pytest.param([None], [(2,)], (), (), id="a scalar has one"),
    ],
)  # fmt: skip
def test_output_shapes(declared: Any, shapes: Any, dims: Any, shape: Any) -> None:
    assert resolve_shape(dims, sizes_of(declared, shapes)) == shape


ENDS = [("array", 2), ("onnxruntime-device", 2)]


@pytest.mark.parametrize("engines", [ENDS, ENDS[::-1]], ids=["array then session", "session then array"])
def test_a_bundle_of_two_engines_stays_on_the_device(device: Any, engines: Any) -> None:
    (found,) = compile_on_device(load(mlp()).model, ["x"], ["scores"], Residency(device), engines=engines)(X)
    assert device.traffic.counts()["downs"] == 0
    np.testing.assert_allclose(np.asarray(found), mlp_reference(X), rtol=1e-5)


# Which engine.


def node(op: str, dtype: int = TensorProto.FLOAT, domain: str = "") -> ir.Node:
    made = helper.make_node(op, ["x"], ["y"], domain=domain)
    return next(iter(ir.from_proto(model([made], {"x": [2, 3]}, {"y": [2, 3]}, dtype=dtype)).graph))


CPU_PROVIDER = "CPUExecutionProvider"
HELD = StandIn(1).dtypes


@pytest.mark.parametrize(
    ("made", "provider", "engines"),
    [
        pytest.param(node("Relu"), CPU_PROVIDER, ("array", "onnxruntime-device"),
            id="what the device computes stays there"),
        pytest.param(node("Relu"), None, ("array",), id="a provider that does not work is none"),
        pytest.param(node("Relu"), "NoSuchProvider", ("array",), id="a provider without a kernel is none"),
        pytest.param(node("Relu", TensorProto.BFLOAT16), CPU_PROVIDER, ("reference",),
            id="bfloat16 is the reference's"),
        pytest.param(node("Transpose", TensorProto.FLOAT16), CPU_PROVIDER, ("onnxruntime", "reference"),
            id="a dtype that the device has not is the host's"),
    ],
)  # fmt: skip
def test_engines_of_a_node_on_a_device(made: ir.Node, provider: str | None, engines: Any) -> None:
    assert device_engines(made, {"": 21}, provider, HELD) == engines


TABLE, SESSION = "array", "onnxruntime-device"


def many(step: str) -> str:
    """A step fifty times, from x to y."""
    names = ["x", *(f"v{i}" for i in range(49)), "y"]
    return " ".join(f"{after} = {step.format(before)}" for before, after in pairwise(names))


@every(
    ("nodes", "runs"),
    [
        pytest.param("a = MatMul (x, w) y = Relu (a)", ((TABLE, 2),), id="a few calls are no session"),
        pytest.param("a = MatMul (x, w) y = Softmax (a)", ((SESSION, 2),), id="a kernel for many calls is one"),
        pytest.param(many("MatMul ({}, w)"), ((TABLE, 50),), id="many products are none"),
        pytest.param(many("Tanh ({})"), ((SESSION, 50),), id="many elementwise nodes are one"),
        pytest.param("a = Softmax (x) b = Cast <to = 10> (a) c = Cast <to = 1> (b) y = Relu (c)",
            ((SESSION, 1), ("onnxruntime", 2), (TABLE, 1)), id="a dtype of the host alone splits them"),
    ],
)  # fmt: skip
def test_route_on_a_device(nodes: str, runs: Any) -> None:
    proto = written(f"(float[N,4] x) => (float[N,4] y) {{ {nodes} }}", {"w": np.eye(4, dtype="f4")})
    assert device_route(list(load(proto).model.graph), {"": 21}, CPU_PROVIDER, HELD) == runs
