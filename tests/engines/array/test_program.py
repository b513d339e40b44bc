"""A program: what it refuses, what it keeps, what it releases, what it costs, and how it fails."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from dask_ferro.engines import array
from dask_ferro.errors import UnsupportedOpError
from tests.waiting import ended

FLOAT, LONG = ir.DataType.FLOAT, ir.DataType.INT64


def nodes_of(*rows: tuple[str, str, str], **attributes: Any) -> list[ir.Node]:
    """Nodes from (op, "inputs", "outputs"); a dot in the names stands for one left out."""
    protos = [
        helper.make_node(
            op, _names(inputs), _names(outputs), f"{op}_{i}", **(attributes if i == len(rows) - 1 else {})
        )
        for i, (op, inputs, outputs) in enumerate(rows)
    ]
    graph = helper.make_graph(protos, "g", [], [])
    return list(ir.from_proto(helper.make_model(graph, ir_version=10)).graph)


def typed(row: tuple[str, str, str], dtypes: Sequence[Any], attributes: Mapping[str, Any]) -> ir.Node:
    """A node whose inputs have dtypes; None for one that is left out or not known."""
    (node,) = nodes_of(row, **attributes)
    for value, dtype in zip(node.inputs, dtypes, strict=True):
        if value is not None and dtype is not None:
            value.dtype = dtype
    return node


def _names(text: str) -> list[str]:
    return ["" if name == "." else name for name in text.split()]


def compiled(
    nodes: Sequence[ir.Node],
    inputs: str,
    outputs: str,
    weights: Mapping[str, Any] | None = None,
    **options: Any,
) -> array.Program:
    tensors = {name: ir.tensor(value, name=name) for name, value in (weights or {}).items()}
    return array.Program(nodes, inputs.split(), outputs.split(), opset=21, weights=tensors, **options)


def chain(length: int) -> list[ir.Node]:
    rows = [("Add", f"v{i} w", f"v{i + 1}") for i in range(length)]
    return nodes_of(*rows)


X = np.arange(6, dtype=np.float32).reshape(2, 3)


class TestCompile:
    def test_names_a_node_that_it_lacks(self) -> None:
        nodes = nodes_of(("Add", "x x", "b"), ("Loop", ". . x", "c"))
        with pytest.raises(UnsupportedOpError, match="node 'Loop_1': no Loop of opset 21"):
            compiled(nodes, "x", "c")

    def test_a_models_text_never_becomes_code(self) -> None:
        odd = "x'); raise SystemExit #"
        nodes = nodes_of(("Relu", "x", "y"))
        nodes[0].inputs[0].name = odd  # type: ignore[union-attr]
        program = array.Program(nodes, [odd], ["y"], opset=21, weights={})
        assert np.array_equal(program(X)[0], X)

    def test_accounts_for_its_weights(self) -> None:
        weights = {"w": np.zeros((1000, 100), np.float32)}
        program = compiled(nodes_of(("Add", "x w", "y")), "x", "y", weights)
        assert 400_000 < program.nbytes < 410_000


class TestCall:
    def test_outputs_come_in_the_order_asked_for(self) -> None:
        nodes = nodes_of(("Relu", "x", "a"), ("Neg", "x", "b"))
        b, x, a, w, again = compiled(nodes, "x", "b x a w b", {"w": X})(X)
        assert np.array_equal(b, -X)
        assert x is X
        assert np.array_equal(a, X)
        assert np.array_equal(w, X)
        assert np.array_equal(again, b)

    def test_gives_arrays_where_numpy_gives_scalars(self) -> None:
        (y,) = compiled(nodes_of(("Add", "x x", "y")), "x", "y")(np.array(2, np.float32))
        assert isinstance(y, np.ndarray)
        assert y == 4

    def test_inputs_that_are_left_out_are_passed_over(self) -> None:
        program = compiled(nodes_of(("Clip", "x . high", "y")), "x high", "y")
        (y,) = program(X, np.array(2, np.float32))
        assert np.array_equal(y, np.minimum(X, 2))

    def test_is_safe_in_many_threads(self) -> None:
        bound = compiled(chain(50), "v0", "v50", {"w": np.ones(3, np.float32)})
        results: dict[int, Any] = {}

        def work(i: int) -> None:
            for _ in range(20):
                results[i] = bound(X + i)[0]

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            ended(t)
        assert all(np.array_equal(results[i], X + i + 50) for i in range(4))


class TestFailure:
    def test_names_the_node_and_what_it_was_given(self) -> None:
        nodes = nodes_of(("Relu", "x", "a"), ("MatMul", "a w", "b"), ("Clip", "b . w", "c"))
        bound = compiled(nodes, "x", "c", {"w": np.zeros((2, 2), np.float32)})
        with pytest.raises(RuntimeError) as caught:
            bound(X)
        message = str(caught.value)
        assert message.startswith("node 'MatMul_1' (MatMul, opset 21) failed: ValueError: ")
        assert message.endswith("inputs: a: float32[2, 3], w: float32[2, 2]")
        assert isinstance(caught.value.__cause__, ValueError)

    def test_running_out_of_memory_stays_a_memory_error(self) -> None:
        nodes = nodes_of(("ConstantOfShape", "shape", "y"))
        with pytest.raises(MemoryError, match="node 'ConstantOfShape_0'"):
            compiled(nodes, "shape", "y")(np.array([2**45, 2**10]))


class TestCost:
    def test_a_value_is_released_after_its_last_use(self) -> None:
        Tracked.living = Tracked.peak = 0
        bound = compiled(chain(100), "v0", "v100", {"w": np.ones(1, np.float32)}, xp=Tracking)
        bound(Tracked())
        assert Tracked.peak <= 5  # the input, the weight, two of the chain and one for `type`


class Tracked:
    """An array that counts how many there are."""

    living = peak = 0

    def __init__(self) -> None:
        Tracked.living += 1
        Tracked.peak = max(Tracked.peak, Tracked.living)

    def __del__(self) -> None:
        Tracked.living -= 1


class Tracking:
    """As much of a namespace as a chain of additions needs."""

    @staticmethod
    def empty(shape: Any) -> Tracked:
        return Tracked()

    @staticmethod
    def asarray(x: Any) -> Tracked:
        return Tracked()

    @staticmethod
    def add(a: Any, b: Any) -> Tracked:
        return Tracked()


class TestWeights:
    @pytest.fixture
    def tensors(self, tmp_path: Path) -> dict[str, ir.ExternalTensor]:
        values = np.arange(2048, dtype=np.float32)
        (tmp_path / "weights").write_bytes(values.tobytes() + b"\0" + values.tobytes())
        return {
            name: ir.ExternalTensor(
                "weights", offset, values.nbytes, FLOAT, shape=ir.Shape([2048]), name=name, base_dir=tmp_path
            )
            for name, offset in (("aligned", 0), ("odd", values.nbytes + 1))
        }

    def test_aligned_weights_stay_in_the_mapped_file(self, tensors: dict[str, ir.ExternalTensor]) -> None:
        nodes = nodes_of(("Identity", "aligned", "y"))
        made = (array.Program(nodes, [], ["y"], opset=21, weights=tensors) for _ in range(2))
        (first,), (second,) = (program() for program in made)
        assert np.shares_memory(first, second)
        assert not first.flags.writeable

    def test_odd_weights_are_copied_once_into_place(self, tensors: dict[str, ir.ExternalTensor]) -> None:
        nodes = nodes_of(("Identity", "odd", "y"))
        bound = array.Program(nodes, [], ["y"], opset=21, weights=tensors)
        assert bound()[0].flags.aligned
        assert np.shares_memory(bound()[0], bound()[0])
        assert np.array_equal(bound()[0], np.arange(2048))


class TestSupports:
    """What is declared, by op and reason."""

    @pytest.mark.parametrize(
        ("claim", "row", "attributes", "dtypes", "opset", "supported"),
        [
            ("float addition", ("Add", "x y", "z"), {}, [FLOAT, FLOAT], 21, True),
            ("no opset before 7", ("Add", "x y", "z"), {}, [FLOAT, FLOAT], 6, False),
            ("no opset unheard of", ("Add", "x y", "z"), {}, [FLOAT, FLOAT], 99, False),
            ("no bfloat16", ("Add", "x y", "z"), {}, [ir.DataType.BFLOAT16] * 2, 21, False),
            ("no float8", ("Identity", "x", "z"), {}, [ir.DataType.FLOAT8E4M3FN], 21, False),
            ("no strings", ("Equal", "x y", "z"), {}, [ir.DataType.STRING] * 2, 21, False),
            ("no unknown dtype", ("Add", "x y", "z"), {}, [FLOAT, None], 21, False),
            ("an input left out needs no dtype", ("Clip", "x . h", "z"), {}, [FLOAT, None, FLOAT], 21, True),
            ("no op unheard of", ("Frobnicate", "x", "z"), {}, [FLOAT], 21, False),
            ("casts to a common dtype", ("Cast", "x", "z"), {"to": 7}, [FLOAT], 21, True),
            ("no cast to bfloat16", ("Cast", "x", "z"), {"to": 16}, [FLOAT], 21, False),
            ("products and sums", ("Einsum", "x y", "z"), {"equation": "ij,jk"}, [FLOAT] * 2, 21, True),
            ("diagonals", ("Einsum", "x", "z"), {"equation": "ii->i"}, [FLOAT], 21, True),
            ("no scatter by products", ("ScatterND", "x i u", "z"), {"reduction": "mul"}, [FLOAT, LONG, FLOAT], 21,
                False),
            ("no random dropout", ("Dropout", "x r t", "z"), {}, [FLOAT, FLOAT, ir.DataType.BOOL], 21, False),
            ("training statistics", ("BatchNormalization", "x s b m v", "z"), {"training_mode": 1}, [FLOAT] * 5, 21,
                True),
            ("no stash in float64", ("LayerNormalization", "x s", "z"), {"stash_type": 11}, [FLOAT] * 2, 21, False),
            ("no cubic padding", ("Pad", "x p", "z"), {"mode": "cubic"}, [FLOAT, LONG], 21, False),
            ("no other activations", ("LSTM", "x w r", "z"), {"activations": ["Relu"] * 3}, [FLOAT] * 3, 21, False),
            ("default activations by name", ("GRU", "x w r", "z"), {"activations": ["Sigmoid", "Tanh"]}, [FLOAT] * 3,
                21, True),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )  # fmt: skip
    def test_declares(self, claim, row, attributes, dtypes, opset, supported):
        assert array.supports(typed(row, dtypes, attributes), opset) is supported

    def test_the_tables_know_the_newest_opset(self) -> None:
        newest = max(s.since_version for s in onnx.defs.get_all_schemas() if s.domain == "")
        assert array.supports(typed(("Add", "x y", "z"), [FLOAT, FLOAT], {}), newest)
