"""A device: what it counts, and that programs arranged for it compute what the table computes.

The stand-in runs everywhere; with CuPy and a GPU, the same tests run there too, marked `gpu`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import array_api_compat.numpy as numpy_namespace
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, parser

from dask_ferro.engines import array
from dask_ferro.engines.array.passes import fuse
from dask_ferro.engines.array.passes.formulas import FORMULAS, PREAMBLE, number
from dask_ferro.engines.array.passes.unit import units_of
from dask_ferro.engines.device.device import CupyDevice, Device, cupy_devices
from dask_ferro.testing.emulated_device import OutOfMemory, StandIn
from tests.each import each, every
from tests.engines.array.cases import BY_OP, CASES, Case, compiled, expected, id_of
from tests.engines.array.test_ops import TOLERANCE
from tests.graphs import written

gpu = [pytest.mark.gpu, pytest.mark.skipif(not cupy_devices(), reason="needs CuPy and a GPU that it sees")]
F = np.float32
OPSET = 25


def made(kind: str) -> Device:
    return StandIn() if kind == "stand-in" else CupyDevice()


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


def run_there(program: array.Program, device: Device, inputs: Sequence[np.ndarray]) -> list[Any]:
    """What a program gives on a device, on the host again; its inputs go up but for those that the host reads."""
    up = [
        x if name in program.host_inputs else device.to_device(x)
        for name, x in zip(program.inputs, inputs, strict=True)
    ]
    found = program.bind(device.namespace, device.to_device)(*up)
    return [y if isinstance(y, np.ndarray) else device.to_host(y) for y in found]


def both(model: ir.Model, device: Device, *inputs: np.ndarray) -> tuple[list[Any], list[Any]]:
    """The outputs on numpy, node by node, and on the device, arranged for it."""
    plain = compiled(model).bind(numpy_namespace)(*inputs)
    return list(plain), run_there(compiled(model, on_device=True), device, inputs)


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
        before = device.memory().live
        y = device.to_device(np.zeros(2**16, F))[: 2**10]
        assert device.memory().live - before == 2**18
        del y
        assert device.memory().live == before

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
        assert device.memory() == (100, 20, 80, 20)

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
    program = compiled(ir.from_proto(case.model(case.weights)), on_device=True)
    for y, z in zip(run_there(program, device, case.feeds(case.weights)), wanted, strict=True):
        assert (y.dtype, y.shape) == (z.dtype, z.shape)
        close = TOLERANCE.get(y.dtype.name, 0)
        np.testing.assert_allclose(y, z, rtol=close, atol=close)


CHAIN = [
    *("Mul", "Add", "Tanh", "Sigmoid", "Exp", "Neg", "Relu", "Sqrt", "Abs", "Gelu"),
    *("Mul", "Softplus", "Elu", "Swish", "Add", "Log", "Mish", "Selu", "Erf", "Softsign"),
]


def chain_of_20() -> ir.Model:
    """Twenty elementwise ops, one after the other; some take a weight."""
    names = ["x", *(f"v{i}" for i in range(19)), "y"]
    takes = {"Mul": " half", "Add": " w"}
    nodes = [node(op, f"{names[i]}{takes.get(op, '')}", names[i + 1]) for i, op in enumerate(CHAIN)]
    return model_of(nodes, {"x": (3, 4)}, ["y"], half=np.array(0.5, F), w=np.full((3, 4), 3, F))


def steps_of(model: ir.Model) -> list[str]:
    """What each call of a program for a device is: an op, or the number of nodes in one."""
    steps = compiled(model, on_device=True)._steps
    return [step.unit.node.op_type + ("+" if step.unit.several else "") for step in steps]


class TestFusion:
    def test_a_chain_of_20_is_one_call_and_means_the_same(self, device: Device) -> None:
        assert steps_of(chain_of_20()) == ["Softsign+"]
        agree(both(chain_of_20(), device, X))

    @pytest.mark.parametrize(
        ("nodes", "outputs", "calls"),
        [
            pytest.param("a = Exp (x) b = Neg (x) c = Add (a, b) y = Tanh (c)", "y", ["Tanh+"], id="a tree"),
            pytest.param("a = Exp (x) b = MatMul (a, w) c = Tanh (b) y = Neg (c)", "y", ["Exp", "MatMul", "Neg+"],
                id="not across a product"),
            pytest.param("a = Exp (x) b = Neg (a) c = Tanh (a) y = Add (b, c)", "y", ["Exp", "Add+"],
                id="not a value that two read"),
            pytest.param("a = Exp (x) y = Neg (a)", "a y", ["Exp", "Neg"], id="not a value that leaves"),
            pytest.param("a = Exp (x) y = Mul (a, a)", "y", ["Mul+"], id="one that reads a value twice"),
            pytest.param("a = Exp (r) y = Add (a, x)", "y", ["Exp", "Add"], id="not one that stretches"),
        ],
    )  # fmt: skip
    def test_fuses(self, nodes: str, outputs: str, calls: list[str], device: Device) -> None:
        inputs = {"x": (4, 4)} | ({"r": (4,)} if "(r)" in nodes else {})
        weights = {"w": np.eye(4, dtype=F)} if "w)" in nodes else {}
        model = model_of(nodes, inputs, outputs.split(), **weights)
        assert steps_of(model) == calls
        square = np.linspace(-1, 1, 16, dtype=F).reshape(4, 4)
        agree(both(model, device, square, *([square[0]] if "r" in inputs else [])))


@pytest.mark.parametrize(
    ("value", "literal"),
    [
        (0.1, "Real(0.1)"),
        (np.inf, "(Real(1.0) / Real(0))"),
        (-np.inf, "(Real(-1.0) / Real(0))"),
        (np.nan, "(Real(0) / Real(0))"),
    ],
)
def test_a_literal_says(value: float, literal: str) -> None:
    assert number(value) == literal


@pytest.mark.needs("c++")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_formula_means_what_the_table_computes(dtype: str, tmp_path: Path) -> None:
    """All formulas in one library, on numbers, signed zeros, infinities and NaN, against the kernels on numpy."""
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -1e-30, 88.0, -88.0]
    x = np.array([*np.linspace(-4, 4, 41), *special], dtype)
    y = np.array([*np.linspace(3, -3, 41), *special[::-1]], dtype)
    real = fuse.computed_in(dtype)
    functions, wanted = [], {}
    for op in FORMULAS:
        count = 2 if op in ("Add", "Sub", "Mul", "Div", "Sum", "Max", "Min") else 3 if op == "Clip" else 1
        reads = ["x", "y", "y"][:count] if op != "Clip" else ["x", "low", "high"]
        model = model_of([node(op, " ".join(reads), "z")], dict.fromkeys(reads, (50,)), ["z"])
        limits = {"low": np.array(-1, dtype), "high": np.array(2, dtype)}
        given = {"x": x, "y": y} | limits
        arrays = (given[n] for n in dict.fromkeys(reads))
        (wanted[op],) = compiled(model).bind(numpy_namespace)(*arrays)
        text = fuse.body(units_of(list(model.graph), OPSET), list(dict.fromkeys(reads)), {}, OPSET)
        first, second = ("a[i]", "b[i]") if op != "Clip" else ("a[i]", "Real(-1)")
        functions.append(
            f'extern "C" void f_{op}(const Real* a, const Real* b, Real* out, int n) {{ for (int i = 0; i < n; i++) {{'
            f" const Real x0 = {first}; const Real x1 = {second}; const Real x2 = Real(2); Real y = 0;"
            f" (void)x1; (void)x2; {text} out[i] = y; }} }}"
        )
    source = tmp_path / "formulas.cpp"
    source.write_text(
        f"#include <cmath>\nusing namespace std;\ntypedef {real} Real;\n{PREAMBLE}\n" + "\n".join(functions)
    )
    library = tmp_path / "formulas.so"
    subprocess.run(
        ["c++", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=300
    )
    loaded = np.ctypeslib.load_library(str(library), ".")
    pointer = np.ctypeslib.ndpointer(dtype, flags="C")
    close = {"float32": 2e-5, "float64": 1e-12}[dtype]
    for op, expected_values in wanted.items():
        function = getattr(loaded, f"f_{op}")
        function.argtypes = [pointer, pointer, pointer, np.ctypeslib.ctypes.c_int]
        got = np.empty_like(x)
        function(x, y, got, len(x))
        np.testing.assert_allclose(got, expected_values, rtol=close, atol=close, err_msg=op)


class TestBatching:
    def products(self, count: int, shape: tuple[int, int], shared: bool) -> ir.Model:
        nodes = [node("MatMul", f"x{i} {'w' if shared else f'w{i}'}", f"y{i}") for i in range(count)]
        rng = np.random.default_rng(0)
        names = ["w"] if shared else [f"w{i}" for i in range(count)]
        weights = {n: rng.standard_normal((shape[1], 3)).astype(F) for n in names}
        return model_of(
            nodes, {f"x{i}": shape for i in range(count)}, [f"y{i}" for i in range(count)], **weights
        )

    @pytest.mark.parametrize("shared", [False, True], ids=["of their own factors", "of a common factor"])
    def test_independent_products_of_equal_shapes_are_one_call(self, shared: bool, device: Device) -> None:
        model = self.products(5, (4, 6), shared)
        assert steps_of(model) == ["MatMul+"]
        inputs = [np.full((4, 6), i, F) for i in range(5)]
        agree(both(model, device, *inputs))

    def test_chains_beside_each_other_go_level_by_level(self, device: Device) -> None:
        nodes = [
            node("MatMul", f"{'x' if not k else f'v{c}{k - 1}'}{c if not k else ''} w", f"v{c}{k}")
            for c in range(3)
            for k in range(4)
        ]
        model = model_of(
            nodes, {f"x{c}": (4, 4) for c in range(3)}, [f"v{c}3" for c in range(3)], w=np.eye(4, dtype=F) * 2
        )
        assert steps_of(model) == ["MatMul+"] * 4
        agree(both(model, device, *(np.full((4, 4), c, F) for c in range(3))))

    @pytest.mark.parametrize(
        "nodes",
        [
            pytest.param("a = MatMul (x, w) y = MatMul (a, w)", id="one that waits for the other"),
            pytest.param("a = MatMul (x, w) y = MatMul (r, w)", id="other shapes"),
        ],
    )
    def test_leaves_alone(self, nodes: str) -> None:
        model = model_of(nodes, {"x": (4, 4), "r": (2, 4)}, ["y", "a"], w=np.eye(4, dtype=F))
        assert steps_of(model) == ["MatMul", "MatMul"]


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
        on_host = {s.unit.node.op_type for s in compiled(model, on_device=True)._steps if s.unit.on_host}
        assert on_host == {"Shape", "Gather", "Range"}
        agree(both(model, device, np.ones((4, 4), F)))

    def test_an_input_that_only_says_a_shape_stays_on_the_host(self) -> None:
        made = written("(float[3,4] x, int64[2] shape) => (y) { y = Reshape (x, shape) }")
        model = ir.from_proto(made)
        assert compiled(model, on_device=True).host_inputs == {"shape"}
        device = StandIn()
        agree(both(model, device, X, np.array([4, 3])))
        assert (device.traffic.ups, device.traffic.reads) == (1, 0)

    def test_integers_that_a_kernel_reads_are_read_on_the_host(self) -> None:
        """`Kernel.reads` is complete: a row whose weights come late reads nothing off the device."""
        data_dependent = ("NonZero", "Compress", "Range", "ScatterND", "ScatterElements")
        rows = [case for case in CASES if case.late and case.weights]

        def reads_nothing(case: Case) -> None:
            device = StandIn()
            if _on(device, case):
                run_there(compiled(ir.from_proto(case.model(())), on_device=True), device, case.feeds(()))
                assert case.op in data_dependent or device.traffic.reads == 0

        each(rows, reads_nothing, lambda case: case.id)
