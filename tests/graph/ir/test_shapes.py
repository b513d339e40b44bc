"""Types and shapes: what is inferred, what binding and overriding change, and what is left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, parser, shape_inference
from onnx.reference import ReferenceEvaluator

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.inference import Inference, ValueType, infer
from dask_ferro.graph.model.load import Limits, load
from tests.graphs import written

FLOAT = ir.DataType.FLOAT


def loaded(text: str, opsets: str = '"": 17') -> ir.Model:
    proto = parser.parse_model(f"<ir_version: 9, opset_import: [{opsets}]> g {text}")
    return load(proto).model


MLP = """(float[N, 4] x) => (float[N, 3] y)
<float[4, 3] w = {1,2,3, 4,5,6, 7,8,9, 1,2,3}> { h = MatMul(x, w)  y = Relu(h) }"""

FLATTEN = """(float[N, C, 8] x) => (float[A, B] y) {
    s = Shape(x)
    zero = Constant<value: tensor = int64[1] {0}>()
    n = Gather(s, zero)
    rest = Constant<value: tensor = int64[1] {-1}>()
    shape = Concat<axis = 0>(n, rest)
    y = Reshape(x, shape) }"""


def test_symbols_stay() -> None:
    types = infer(loaded(MLP))
    assert types == {
        "x": ValueType("tensor", FLOAT, ("N", 4)),
        "w": ValueType("tensor", FLOAT, (4, 3)),
        "h": ValueType("tensor", FLOAT, ("N", 3)),
        "y": ValueType("tensor", FLOAT, ("N", 3)),
    }


def test_a_bound_dimension_is_bound_everywhere() -> None:
    types = infer(loaded(MLP), dims={"N": 5})
    assert [types[name].shape for name in "xhy"] == [(5, 4), (5, 3), (5, 3)]


def test_shapes_that_are_computed_follow_the_bound_ones() -> None:
    types = infer(loaded(FLATTEN), dims={"N": 5, "C": 2})
    assert types["y"].shape == (5, 16)
    assert types["shape"].shape == (2,)


def test_a_whole_shape_binds_the_symbols_that_it_meets() -> None:
    types = infer(loaded(MLP), shapes={"x": (7, 4)})
    assert types["y"].shape == (7, 3)


def test_a_shape_against_the_declared_one_wins_and_the_rest_is_inferred_anew() -> None:
    model = loaded("(float[1, 4] x) => (float[1, 4] y) { h = Relu(x)  y = Tanh(h) }")
    types = infer(model, shapes={"x": (8, 4)})
    assert [types[name].shape for name in "xhy"] == [(8, 4)] * 3


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        pytest.param({"dims": {"M": 1}}, "no dimension 'M'.*'N'", id="an unknown symbol"),
        pytest.param({"shapes": {"z": (1, 4)}}, "no input 'z'.*'x'", id="an unknown input"),
        pytest.param({"shapes": {"x": (1, 4, 1)}}, "2 dimensions", id="another rank"),
        pytest.param(
            {"dims": {"N": 2}, "shapes": {"x": (3, 4)}}, "'N' is 2 and.* 3", id="two sizes for one symbol"
        ),
    ],
)
def test_refuses_to_bind(asked: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        infer(loaded(MLP), **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "opsets", "name", "type_"),
    [
        pytest.param("(float[2] x) => (s) { s = SequenceConstruct(x, x) }", '"": 17', "s",
            ValueType("sequence", FLOAT, None), id="a sequence has the dtype of its elements"),
        pytest.param("(float[2] x) => (o) { o = Optional(x) }", '"": 17', "o", ValueType("optional", FLOAT, (2,)),
            id="an optional has the shape of its tensor"),
        pytest.param("(float[N, 2] x) => (m) { m = ai.onnx.ml.ZipMap<classlabels_int64s = [0, 1]>(x) }",
            '"": 17, "ai.onnx.ml": 3', "m", ValueType("tensor", FLOAT, ("N", 2)),
            id="a sequence of maps is the array of their values"),
        pytest.param("(float[N, 2] x) => (float[N, 2] y) { h = ai.dask_ferro.Sleep<seconds = 0.5>(x)  y = Relu(h) }",
            '"": 17, "ai.dask_ferro": 1', "h", ValueType("tensor", FLOAT, ("N", 2)), id="what sleeps keeps its type"),
        pytest.param("(float[N, 2] x) => (float[N, 5] y) { y = their.Op(x) }", '"": 17, "their": 1', "y",
            ValueType("tensor", FLOAT, ("N", 5)), id="a foreign operator gives what is declared"),
        pytest.param("(float[N, 2] x) => (y) { y = their.Op(x) }", '"": 17, "their": 1', "y",
            ValueType("unknown", None, None), id="a foreign operator without declaration is unknown"),
        pytest.param("(float x) => (float y) { y = Relu(x) }", '"": 17', "y", ValueType("tensor", FLOAT, ()),
            id="a scalar has no dimensions"),
    ],
)  # fmt: skip
def test_kinds(text: str, opsets: str, name: str, type_: ValueType) -> None:
    model = loaded(text, opsets)
    assert infer(model)[name] == type_


def test_a_map_as_input_is_known_although_the_graph_cannot_hold_it() -> None:
    x = onnx.ValueInfoProto(name="x")
    x.type.map_type.key_type = TensorProto.STRING
    x.type.map_type.value_type.tensor_type.elem_type = TensorProto.FLOAT
    node = helper.make_node("DictVectorizer", ["x"], ["y"], domain="ai.onnx.ml", string_vocabulary=["a", "b"])
    graph = helper.make_graph([node], "g", [x], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3)])
    assert infer(load(proto).model)["x"] == ValueType("map", FLOAT, None)


def test_weights_are_not_read(tmp_path: Path) -> None:
    """The file may even be gone: only a bound of symbols forces a second inference."""
    path = tmp_path / "m.onnx"
    weights = {"w": np.zeros((64, 64), np.float32)}
    onnx.save(written("(float[N,64] x) => (y) { y = MatMul (x, w) }", weights), path)
    model = load(path).model
    path.unlink()
    assert infer(model, dims={"N": 2})["y"].shape == (2, 64)


def test_the_model_is_not_changed() -> None:
    model = loaded(FLATTEN)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    infer(model, dims={"N": 3})
    infer(model, shapes={"x": (2, 2, 8)})
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_a_body_gives_its_type_to_its_node() -> None:
    model = loaded("""(bool c, float[N, 2] x) => (y) {
        y = If (c) <
            then_branch = a () => (float[K, 2] t) { t = Relu(x) },
            else_branch = b () => (float[K, 2] e) { e = Tanh(x) }
        > }""")
    assert infer(model, dims={"N": 4})["y"].shape in ((4, 2), ("K", 2))


UNARY = ("Relu", "Tanh", "Neg", "Identity", "Transpose", "Shape", "ReduceMax", "Flatten")
BINARY = ("Add", "Mul", "MatMul", "Concat")


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """Graphs of square matrices and what is made of them; every value is an output."""
    nodes, matrices = [], ["x"]
    for i in range(draw(st.integers(1, 8))):
        op = draw(st.sampled_from(UNARY + BINARY))
        inputs = [draw(st.sampled_from(matrices)) for _ in range(1 + (op in BINARY))]
        nodes.append(helper.make_node(op, inputs, [f"v{i}"], **({"axis": 0} if op == "Concat" else {})))
        if op not in ("Shape", "ReduceMax", "Concat"):
            matrices.append(f"v{i}")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", "N"])
    outputs = [onnx.ValueInfoProto(name=node.output[0]) for node in nodes]
    graph = helper.make_graph(nodes, "g", [x], outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@given(graphs(), st.integers(1, 4))
def test_inferred_shapes_are_the_computed_ones(proto: onnx.ModelProto, size: int) -> None:
    types = infer(load(proto).model, dims={"N": size})
    values = ReferenceEvaluator(proto).run(None, {"x": np.ones((size, size), np.float32)})
    for info, value in zip(proto.graph.output, values, strict=True):
        inferred = types[info.name]
        assert inferred.dtype == ir.DataType.from_numpy(value.dtype)
        assert inferred.shape is not None
        assert len(inferred.shape) == value.ndim
        assert all(
            not isinstance(got, int) or got == want
            for got, want in zip(inferred.shape, value.shape, strict=True)
        )


# One inference, many sizes.


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each run of ONNX's inference, and whether it propagated values."""
    found: list[bool] = []
    native = shape_inference.infer_shapes

    def counted(proto: onnx.ModelProto, **options: bool) -> onnx.ModelProto:
        found.append(options.get("data_prop", False))
        return native(proto, **options)

    monkeypatch.setattr(shape_inference, "infer_shapes", counted)
    return found


@pytest.mark.parametrize(
    ("text", "wanted"), [(MLP, [False]), (FLATTEN, [False, True])], ids=["floats alone", "a computed shape"]
)
def test_values_are_propagated_where_a_node_gives_integers(text, wanted, runs):
    model = loaded(text)
    runs.clear()
    infer(model, dims={"N": 5})
    assert runs == wanted


DECLARED = {
    "nothing but dtypes": ("(float[N, 4] x) => (float[] y) { h = Relu(x)  y = Tanh(h) }", True),
    "the symbols and sizes that follow": (
        "(float[N, 4] x) => (float[N, 4] y) { h = Relu(x)  y = Tanh(h) }",
        True,
    ),
    "a size in place of a symbol": ("(float[N, 4] x) => (float[1, 4] y) { h = Relu(x)  y = Tanh(h) }", False),
    "another symbol": ("(float[N, 4] x) => (float[M, 4] y) { h = Relu(x)  y = Tanh(h) }", False),
    "a value of another size": (
        "(float[N, 4] x) => (float[N, 4] y) <float[N, 7] h> { h = Relu(x)  y = Tanh(h) }",
        False,
    ),
    "what is computed from a shape": (FLATTEN, False),
}


@pytest.mark.parametrize(("text", "once"), DECLARED.values(), ids=DECLARED)
def test_types_at_other_sizes_are_inferred_again_only_where_a_file_declares(text, once, runs):
    whole = load(parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g {text}'))
    assert whole.is_inferred == once
    kept, shapes = Inference(whole.model, is_inferred=whole.is_inferred), {}
    for value in whole.model.graph.inputs:
        shapes[value.name] = tuple(size if isinstance(size, int) else 6 for size in value.shape)
    for trusts in (True, False):
        runs.clear()
        found = kept.types(shapes=shapes, trusts_declared=trusts)
        assert bool(runs) != once
        assert found == infer(whole.model, shapes=shapes, trusts_declared=trusts)


def test_an_open_size_of_a_second_input_is_inferred_anew(runs):
    text = "(float[N, 4] x, float[M, 4] z) => (float[] y) { h = Relu(x)  y = Concat<axis = 0>(h, z) }"
    whole = load(parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g {text}'))
    assert whole.is_inferred
    kept = Inference(whole.model, is_inferred=True)
    runs.clear()
    assert kept.types(shapes={"x": (2, 4), "z": (3, 4)})["y"].shape == (5, 4)
    assert runs


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("""(float[N, 4] x) => (y) <float[1, 4] w = {1, 2, 3, 4}>
         { v = Einsum<equation = "...j,...j->...j">(w, x)  y = Relu(v) }""", (6, 4)),
        ("""(float[4, 3, N] x) => (y)
         { y = Attention<q_num_heads = 2, kv_num_heads = 2>(x, x, x) }""", (4, 3, 6)),
    ],
    ids=["Einsum of 1 and a symbol", "Attention over a symbol"],
)  # fmt: skip
def test_a_symbol_that_onnx_takes_for_a_number_is_inferred_at_its_size(text, size):
    opset = 24 if "Attention" in text else 17
    proto = parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> g {text}')
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    whole = load(proto, limits=Limits())
    (x,) = whole.model.graph.inputs
    shape = tuple(dim if isinstance(dim, int) else 6 for dim in x.shape)
    kept = Inference(whole.model, is_inferred=whole.is_inferred)
    assert kept.types(shapes={"x": shape}, trusts_declared=False)["y"].shape == size
