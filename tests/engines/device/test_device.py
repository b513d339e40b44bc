"""A device: what it counts, and that programs arranged for it compute what the table computes.

The stand-in runs everywhere; with CuPy and a GPU, the same tests run there too, marked `gpu`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from emulated.device import CountedGpu, OutOfMemory, StandIn
from onnx import helper, parser

from dask_ferro.engines import array
from dask_ferro.engines.device.device import Device, cupy_devices
from tests.each import each, every
from tests.engines.array.cases import BY_OP, CASES, Case, bound, expected, id_of
from tests.engines.array.test_ops import TOLERANCE
from tests.graphs import written

gpu = [pytest.mark.gpu, pytest.mark.skipif(not cupy_devices(), reason="needs CuPy and a GPU that it sees")]
F = np.float32
OPSET = 25


def made(kind: str) -> Device:
    return StandIn() if kind == "stand-in" else CountedGpu()


@pytest.fixture(params=["stand-in", pytest.param("cupy", marks=gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return made(request.param)


# An operator a namespace would be 170 skips more where there is no GPU.
KINDS = ["stand-in", *([pytest.param("cupy", marks=pytest.mark.gpu)] if cupy_devices() else [])]


def model_of(
    nodes: str | Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[Any]],
    outputs: Sequence[str],
    **weights: Any,
) -> ir.Model:
    """A model with its shapes inferred; inputs are float32, and nodes may be in ONNX's text form."""
    made = parser.parse_graph(f"g () => () {{ {nodes} }}").node if isinstance(nodes, str) else nodes
    graph = helper.make_graph(
        made,
        "g",
        [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in inputs.items()],
        [onnx.ValueInfoProto(name=n) for n in outputs],
        [onnx.numpy_helper.from_array(w, n) for n, w in weights.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def on_device(model: ir.Model, device: Device) -> array.Program:
    """A model as one program on a device."""
    return bound(model, device.namespace, device.to_device)


def run_there(program: array.Program, device: Device, inputs: Sequence[np.ndarray]) -> list[Any]:
    """What a program gives on a device, on the host again; its inputs go up but for those that the host reads."""
    up = [
        x if name in program.host_inputs else device.to_device(x)
        for name, x in zip(program.inputs, inputs, strict=True)
    ]
    return [y if isinstance(y, np.ndarray) else device.to_host(y) for y in program(*up)]


def both(model: ir.Model, device: Device, *inputs: np.ndarray) -> tuple[list[Any], list[Any]]:
    """The outputs on numpy, node by node, and on the device, arranged for it."""
    plain = bound(model, numpy_namespace)(*inputs)
    return list(plain), run_there(on_device(model, device), device, inputs)


def agree(pair: tuple[list[Any], list[Any]], rtol: float = 1e-5) -> None:
    for wanted, got in zip(*pair, strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=rtol)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), f"{op}_{outputs}", **attributes)


X = np.linspace(-2, 2, 12, dtype=F).reshape(3, 4)


class TestCounting:
    def test_bytes_up_and_down(self, device: Device) -> None:
        y = device.to_device(X)
        assert np.array_equal(device.to_host(y), X)
        counts = device.traffic.counts()
        assert [counts[n] for n in ("ups", "up_bytes", "downs", "down_bytes")] == [1, X.nbytes, 1, X.nbytes]

    def test_a_view_costs_nothing_and_keeps_what_it_views(self, device: Device) -> None:
        before = device.memory().own
        y = device.to_device(np.zeros(2**16, F))[: 2**10]
        assert device.memory().own - before == 2**18
        del y
        assert device.memory().own == before

    def test_numpy_cannot_take_an_array_unasked(self, device: Device) -> None:
        with pytest.raises(TypeError):
            np.asarray(device.to_device(X))
        with pytest.raises(TypeError):
            X + device.to_device(X)

    def test_memory_is_bounded(self) -> None:
        device = StandIn(total=100)
        kept = device.to_device(np.zeros(20, F))
        with pytest.raises(OutOfMemory, match="80 bytes wanted, 20 of 100 are free"):
            kept + 1
        assert device.memory() == (100, 80, 80, 0)

    def test_each_thread_has_a_stream_of_its_own(self, device: Device) -> None:
        from concurrent.futures import ThreadPoolExecutor
        from threading import Barrier

        barrier = Barrier(3, timeout=5)

        def stream_of(_: int) -> Any:
            with device.stream():
                barrier.wait(60)
                if isinstance(device, StandIn):
                    return None
                import cupy

                return cupy.cuda.get_current_stream().ptr

        with ThreadPoolExecutor(3) as pool:
            streams = list(pool.map(stream_of, range(3)))
        assert len(device.streams if isinstance(device, StandIn) else set(streams)) == 3
        assert 0 not in streams  # the default stream waits for all others


def _on(device: Device, case: Case) -> bool:
    """Whether the device has the dtypes of a row."""
    kinds = {x.dtype.name for x in case.inputs if x is not None}
    return kinds <= device.dtypes and (case.attributes.get("to") != 10 or "float16" in device.dtypes)


@every("kind", KINDS)
@every("op", BY_OP)
def test_every_row_of_the_table_computes_there(op: str, kind: str) -> None:
    each(BY_OP[op], lambda position: _computes(position, made(kind)), id_of)


def _computes(position: int, device: Device) -> None:
    case = CASES[position]
    if not _on(device, case):
        return  # a dtype that the device lacks is the host's
    wanted = expected(position)
    program = on_device(ir.from_proto(case.model(case.weights)), device)
    for y, z in zip(run_there(program, device, case.feeds(case.weights)), wanted, strict=True):
        assert (y.dtype, y.shape) == (z.dtype, z.shape)
        close = TOLERANCE.get(y.dtype.name, 0)
        np.testing.assert_allclose(y, z, rtol=close, atol=close)


class TestShapesOnTheHost:
    def flattening(self) -> ir.Model:
        """As exporters write ``x.reshape(x.shape[0], -1)``."""
        nodes = (
            "shape = Shape (x) first = Gather (shape, zero) rows = Unsqueeze (first, zero1)"
            " wanted = Concat <axis = 0> (rows, minus) e = Exp (x) y = Reshape (e, wanted)"
        )
        weights = {"zero": np.array(0), "zero1": np.array([0]), "minus": np.array([-1])}
        return model_of(nodes, {"x": (3, 2, 2)}, ["y"], **weights)

    def test_no_value_is_read_and_nothing_but_the_input_goes_up(self) -> None:
        device = StandIn()
        x = np.linspace(0, 1, 12, dtype=F).reshape(3, 2, 2)
        agree(both(self.flattening(), device, x))
        counts = device.traffic.counts()
        assert (counts["ups"], counts["downs"], counts["reads"]) == (1, 1, 0)

    def test_a_mask_of_positions_is_the_devices(self, device: Device) -> None:
        nodes = (
            "s = Shape (x) n = Gather (s, zero) row = Range (zero, n, one) column = Unsqueeze (row, last)"
            " mask = Less (row, column) y = Where (mask, x, nought)"
        )
        weights = {"zero": np.array(0), "one": np.array(1), "last": np.array([1]), "nought": np.zeros((), F)}
        model = model_of(nodes, {"x": (4, 4)}, ["y"], **weights)
        on_host = {c.unit.node.op_type for c in on_device(model, device)._calls if c.unit.on_host}
        assert on_host == {"Shape", "Gather", "Range"}
        agree(both(model, device, np.ones((4, 4), F)))

    def test_an_input_that_only_says_a_shape_stays_on_the_host(self) -> None:
        made = written("(float[3,4] x, int64[2] shape) => (y) { y = Reshape (x, shape) }")
        model = ir.from_proto(made)
        device = StandIn()
        assert on_device(model, device).host_inputs == {"shape"}
        agree(both(model, device, X, np.array([4, 3])))
        assert (device.traffic.ups, device.traffic.reads) == (1, 0)

    def test_integers_that_a_kernel_reads_are_read_on_the_host(self) -> None:
        """`Kernel.reads` is complete: a row whose weights come late reads nothing off the device."""
        data_dependent = ("NonZero", "Compress", "Range", "ScatterND", "ScatterElements")
        rows = [case for case in CASES if case.late and case.weights]

        def reads_nothing(case: Case) -> None:
            device = StandIn()
            if _on(device, case):
                run_there(on_device(ir.from_proto(case.model(())), device), device, case.feeds(()))
                assert case.op in data_dependent or device.traffic.reads == 0

        each(rows, reads_nothing, lambda case: case.id)
