"""What `load` promises of every model that it lets through."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from dask_ferro.errors import InputError, ModelError
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.model.embedding import content
from dask_ferro.graph.model.load import Limits, LoadedModel, load, load_built
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.emit import to_model
from dask_ferro.graph.tensor.tensor import asarray, input
from tests.each import every
from tests.graphs import written

X = np.arange(12, dtype=np.float32).reshape(3, 4) - 5

# Every model counts as large: its weights stay in its files.
MAPPED = Limits(mapped_above=0)


def parsed(text: str, opsets: str = '"": 17', functions: str = "") -> onnx.ModelProto:
    return parser.parse_model(f"<ir_version: 9, opset_import: [{opsets}]> g {text} {functions}")


def ops(loaded: LoadedModel) -> list[str]:
    return [node.op_type for node in loaded.model.graph]


def evaluate(model: onnx.ModelProto | ir.Model, **inputs: np.ndarray) -> list[Any]:
    """What ONNX's reference computes; it wants weights that lie in files put into the message."""
    if isinstance(model, onnx.ModelProto):
        return ReferenceEvaluator(model).run(None, inputs)
    proto = ir.to_proto(model)
    for tensor in proto.graph.initializer:
        held = model.graph.initializers[tensor.name].const_value
        if isinstance(held, ir.ExternalTensor):
            tensor.CopyFrom(numpy_helper.from_array(held.numpy(), tensor.name))
    return ReferenceEvaluator(proto).run(None, inputs)


def assert_equal(got: list[Any], wanted: list[Any]) -> None:
    assert len(got) == len(wanted)
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(g, w)


# Where the weights are.


def with_weights(*sizes: int) -> onnx.ModelProto:
    """y = x + w0 + w1 ...; weights of so many bytes."""
    weights = {f"w{i}": np.random.default_rng(i).random(n // 4, np.float32) for i, n in enumerate(sizes)}
    nodes = " ".join(f"[add{i}] y{i} = Sum (x, w{i})" for i in range(len(sizes)))
    ends = ", ".join(f"y{i}" for i in range(len(sizes)))
    return written(f"(float[1] x) => ({ends}) {{ {nodes} }}", weights, opset=17)


def constant(name: str, values: np.ndarray) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(values))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    onnx.save(with_weights(40, 4096, 100_000), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_large_weights_of_a_file_point_into_it(saved: Path) -> None:
    loaded = load(saved, limits=MAPPED)
    weights = {name: value.const_value for name, value in loaded.model.graph.initializers.items()}
    content = saved.read_bytes()
    assert not isinstance(weights["w0"], ir.ExternalTensor)
    for name, original in zip(
        ("w1", "w2"), with_weights(40, 4096, 100_000).graph.initializer[1:], strict=True
    ):
        tensor = weights[name]
        assert isinstance(tensor, ir.ExternalTensor)
        assert tensor.path == str(saved)
        assert tensor.offset is not None
        assert tensor.length == len(original.raw_data)
        assert content[tensor.offset : tensor.offset + tensor.length] == original.raw_data
        np.testing.assert_array_equal(tensor.numpy(), numpy_helper.to_array(original))
    assert loaded.weight_bytes == 40 + 4096 + 100_000
    assert loaded.path == str(saved)


def test_large_constants_that_stay_keep_their_data(tmp_path: Path) -> None:
    """The graph gives this one as an output, so it stays a node."""
    values = np.arange(5000, dtype=np.float32)
    proto = parsed("() => (float[5000] y) {}")
    proto.graph.node.append(constant("y", values))
    onnx.save(proto, tmp_path / "m.onnx")
    loaded = load(tmp_path / "m.onnx")
    assert ops(loaded) == ["Constant"]
    assert_equal(evaluate(loaded.model), [values])


def test_weights_in_memory_are_views_of_the_bytes() -> None:
    data = with_weights(100_000).SerializeToString()
    array = load(data).model.graph.initializers["w0"].const_value.numpy()
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))
    assert not array.flags.writeable


@pytest.mark.parametrize(
    "dtype", [TensorProto.INT4, TensorProto.UINT4, TensorProto.BFLOAT16, TensorProto.BOOL]
)
def test_dtypes_that_numpy_lacks_keep_their_values(dtype: int, tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2, 20_001)
    weight = helper.make_tensor("w", dtype, [20_001], values, raw=False)
    weight = numpy_helper.from_array(numpy_helper.to_array(weight), "w")
    proto = written("() => (y) { y = Identity (w) }")
    proto.graph.initializer.append(weight)
    onnx.save(proto, tmp_path / "m.onnx")
    for source in (proto, tmp_path / "m.onnx"):
        tensor = load(source).model.graph.initializers["w"].const_value
        assert tensor.dtype == dtype
        np.testing.assert_array_equal(tensor.numpy().astype(np.int64), values)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_the_users_own_path_may_be_a_link(link, saved, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "n.onnx"
    link(saved, other)
    loaded = load(other)
    assert loaded.path == str(saved if other.is_symlink() else other)
    assert loaded.digest == load(saved).digest
    x = np.ones(1, np.float32)
    assert_equal(evaluate(loaded.model, x=x), evaluate(onnx.load(saved), x=x))


# External data.


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """The same model with its weights in two files of their own, one in a folder."""
    proto = with_weights(40, 4096, 100_000)
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=1)
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    (tmp_path / "sub").mkdir()
    (tmp_path / "w.bin").rename(tmp_path / "sub" / "w.bin")
    for tensor in proto.graph.initializer:
        next(entry for entry in tensor.external_data if entry.key == "location").value = "./sub//w.bin"
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    return tmp_path / "m.onnx"


# Whether the model and its weights are links: symbolic ones into a folder of blobs, or hard ones.
LAYOUTS = {
    "Hugging Face": ("soft", "soft"),
    "weights elsewhere": ("plain", "soft"),
    "uv and conda": ("hard", "hard"),
}


@pytest.mark.parametrize("limits", [None, MAPPED])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_external_data_may_be_links_to_files_that_its_owner_alone_may_write(layout, limits, split, tmp_path):
    expected, x = load(split).digest, np.ones(1, np.float32)
    wanted = evaluate(onnx.load(split), x=x)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot" / "sub").mkdir(parents=True)
    for name, kind in zip(("m.onnx", "sub/w.bin"), LAYOUTS[layout], strict=True):
        blob, link = tmp_path / "blobs" / (name[-5:] * 8), tmp_path / "snapshot" / name
        if kind == "soft":
            (tmp_path / name).rename(blob)
            link.symlink_to(os.path.relpath(blob, link.parent))
        else:
            (os.link if kind == "hard" else os.rename)(tmp_path / name, link)
    loaded = load(tmp_path / "snapshot" / "m.onnx", limits=limits)
    # A worker opens it by its path.
    assert load(loaded.path, limits=limits).digest == loaded.digest == expected
    assert_equal(evaluate(loaded.model, x=x), wanted)


def test_a_size_of_minus_one_is_an_open_size():
    proto = written("(float[N,M] x) => (float[N,M] y) { y = Relu (x) }")
    for info in (*proto.graph.input, *proto.graph.output):
        for dim in info.type.tensor_type.shape.dim:
            dim.dim_value = -1
    x = load(proto).model.graph.inputs[0]
    assert not any(isinstance(dim, int) for dim in x.shape)


def test_external_weights_point_into_their_file(split: Path) -> None:
    loaded = load(split, limits=MAPPED)
    for i, original in enumerate(with_weights(40, 4096, 100_000).graph.initializer):
        tensor = loaded.model.graph.initializers[f"w{i}"].const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert tensor.path == str(split.parent / "sub" / "w.bin")
        np.testing.assert_array_equal(tensor.numpy(), numpy_helper.to_array(original))
    assert loaded.weight_bytes == 40 + 4096 + 100_000


def test_the_digest_follows_external_data_that_is_used(split: Path) -> None:
    before = load(split).digest
    data = split.parent / "sub" / "w.bin"
    content = data.read_bytes()
    data.write_bytes(content + b"not used")
    assert load(split).digest == before
    data.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert load(split).digest != before


def test_external_data_without_offset_and_length_is_the_start_of_the_file(tmp_path: Path) -> None:
    proto = with_weights(400)
    tensor = proto.graph.initializer[0]
    (tmp_path / "w.bin").write_bytes(tensor.raw_data + b"more")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    onnx.save(proto, tmp_path / "m.onnx")
    got = load(tmp_path / "m.onnx").model.graph.initializers["w0"].const_value.numpy()
    np.testing.assert_array_equal(got, numpy_helper.to_array(with_weights(400).graph.initializer[0]))


# The digest.


def test_the_digest_is_that_of_the_bytes_wherever_they_are(saved: Path) -> None:
    data = saved.read_bytes()
    digests = {load(source).digest for source in (saved, str(saved), data, bytearray(data), memoryview(data))}
    digests.add(load(onnx.load(saved)).digest)
    assert len(digests) == 1
    assert len(digests.pop()) == 40
    assert load(with_weights(44)).digest != load(with_weights(40)).digest


def test_a_file_that_changed_has_another_digest(saved: Path) -> None:
    before = load(saved).digest
    onnx.save(with_weights(40, 4096, 100_004), saved)
    assert load(saved).digest != before


# One form for all.


def function(name: str, body: str, default: float | None = None) -> onnx.FunctionProto:
    """A function of `t` and attribute `k` that gives `u`."""
    kept = "" if default is not None else "<k>"
    text = f'<domain: "my", opset_import: ["": 17, "my": 1]> {name} {kept}(t) => (u) {{ {body} }}'
    made = parser.parse_function(text)
    if default is not None:
        made.attribute_proto.append(helper.make_attribute("k", default))
    return made


def with_functions(calls: str, *functions: onnx.FunctionProto) -> onnx.ModelProto:
    proto = parsed(f"(float[N, 4] x) => (float[N, 4] y) {{ {calls} }}", '"": 17, "my": 1')
    proto.functions.extend(functions)
    return proto


LEAKY = "u = LeakyRelu<alpha: float = @k>(t)"
INNER = "u = my.inner<k: float = @k>(t)"


def leaky(x: np.ndarray, alpha: float) -> np.ndarray:
    return np.where(x < 0, x * np.float32(alpha), x)


@pytest.mark.parametrize(
    ("proto", "wanted"),
    [
        pytest.param(with_functions("y = my.f<k = 0.5>(x)", function("f", LEAKY)), leaky(X, 0.5),
            id="an attribute is passed"),
        pytest.param(with_functions("y = my.f(x)", function("f", LEAKY)), leaky(X, 0.01),
            id="without it the operator decides"),
        pytest.param(with_functions("y = my.f(x)", function("f", LEAKY, 0.25)), leaky(X, 0.25),
            id="a default is used"),
        pytest.param(with_functions("y = my.f<k = 0.5>(x)", function("f", LEAKY, 0.25)), leaky(X, 0.5),
            id="an attribute beats the default"),
        pytest.param(with_functions("y = my.f(x)", function("f", INNER), function("inner", LEAKY, 0.25)),
            leaky(X, 0.25), id="a default is used where the caller's caller gives nothing"),
        pytest.param(with_functions("y = my.f(x)", function("f", INNER, 0.75), function("inner", LEAKY, 0.25)),
            leaky(X, 0.75), id="the caller's default beats the callee's"),
        pytest.param(with_functions("a = my.inner(x)  b = my.f<k = 0.5>(a)  y = Add(a, b)",
            function("inner", LEAKY, 0.25), function("f", "v = my.inner(t)  " + INNER.replace("(t)", "(v)"))),
            leaky(X, 0.25) + leaky(leaky(leaky(X, 0.25), 0.25), 0.5),
            id="one function is called by the graph and by another"),
    ],
)  # fmt: skip
def test_functions_are_written_out(proto: onnx.ModelProto, wanted: np.ndarray) -> None:
    loaded = load(proto)
    assert not loaded.model.functions
    assert {node.domain for node in loaded.model.graph} == {""}
    assert_equal(evaluate(loaded.model, x=X), [wanted])


def test_a_function_of_another_opset_is_converted() -> None:
    """ReduceSum took its axes as an attribute up to opset 12."""
    made = function("f", "u = ReduceSum<axes = [1]>(t)")
    made.opset_import[0].version = 11
    loaded = load(with_functions("y = my.f(x)", made))
    assert_equal(evaluate(loaded.model, x=X), [X.sum(1, keepdims=True)])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        pytest.param("(float[N, 4] x) => (float[N, 4] y) { y = Tanh(h)  h = Relu(x) }", ["Relu", "Tanh"],
            id="nodes are sorted"),
        pytest.param("(float[N, 4] x) => (float[N, 4] y) { z = Neg(x)  y = Relu(x)  w = Tanh(z) }", ["Relu"],
            id="nodes that nobody needs are gone"),
        pytest.param("(float[N, 4] x) => (float[N, 4] y) { c = Constant<value_float = 2.0>()  y = Mul(x, c) }",
            ["Mul"], id="constants are initializers"),
        pytest.param("(float[N, 4] x) => (y, float c) { c = Constant<value_float = 2.0>()  y = Mul(x, c) }",
            ["Constant", "Mul"], id="a constant that is an output stays"),
        pytest.param('(float[N, 4] x) => (string s) { s0 = Constant<value_strings = ["a", "b"]>()  s = Identity(s0) }',
            ["Constant", "Identity"], id="strings stay"),
        pytest.param("""(float[N, 4] x, bool c) => (float[N, 4] y) {
                k = Constant<value_float = 2.0>()
                z = Neg(x)
                y = If (c) <
                    then_branch = a () => (t) { t = Mul(z, k) }, else_branch = b () => (e) { e = Relu(x) }
                >
            }""",
            ["Neg", "If"], id="what only bodies use is needed"),
        pytest.param("""(float[N, 4] x, bool c) => (float[N, 4] y) {
                y = If (c) <
                    then_branch = a () => (t) { t = Neg(z) }, else_branch = b () => (e) { e = Relu(x) }
                >
                z = Tanh(x)
            }""",
            ["Tanh", "If"], id="what a body captures comes before it"),
    ],
)  # fmt: skip
def test_form(text: str, wanted: list[str]) -> None:
    assert ops(load(parsed(text))) == wanted


def test_initializers_are_no_inputs() -> None:
    proto = parsed(
        "(float[N, 4] x, float[4] w) => (float[N, 4] y) <float[4] w = {1, 2, 3, 4}> { y = Add(x, w) }"
    )
    proto.ir_version = 3
    graph = load(proto).model.graph
    assert [value.name for value in graph.inputs] == ["x"]
    assert list(graph.initializers) == ["w"]


def test_every_node_has_a_name_of_its_own() -> None:
    proto = parsed(
        "(float[N, 4] x) => (float[N, 4] y) { a = Relu(x)  b = Relu(a)  c = Relu(b)  y = Relu(c) }"
    )
    for node, name in zip(proto.graph.node, ("", "same", "same", "Relu:a"), strict=True):
        node.name = name
    names = [node.name for node in load(proto).model.graph]
    assert names == ["Relu:a_2", "same", "same_2", "Relu:a"]


def test_values_have_types_and_shapes() -> None:
    graph = load(parsed("(float[N, 4] x) => (y) { h = Transpose(x)  y = MatMul(x, h) }")).model.graph
    shapes = {v.name: (v.dtype, str(v.shape)) for node in graph for v in node.outputs}
    assert shapes == {"h": (ir.DataType.FLOAT, "[4,N]"), "y": (ir.DataType.FLOAT, "[N,N]")}


def test_a_name_that_a_body_takes_again_is_changed_there() -> None:
    text = """(float[N, 4] x, bool c) => (float[N, 4] y) {
        h = Neg(x)
        z = If (c) <
            then_branch = a () => (h) { h = Relu(x) },
            else_branch = b () => (e) { k = Mul(h, h)  e = Add(k, h) }
        >
        y = Add(z, h)
    }"""
    loaded = load(parsed(text))
    names = [v.name for graph in loaded.model.graphs() for node in graph for v in node.outputs]
    assert len(names) == len(set(names))
    for condition, wanted in ((True, np.maximum(X, 0) - X), (False, X * X - X - X)):
        assert_equal(evaluate(loaded.model, x=X, c=np.array(condition)), [wanted])


def test_a_name_of_a_body_that_the_graph_gives_later_is_changed_in_the_body() -> None:
    text = """(float[N, 4] x, bool c) => (float[N, 4] y) {
        z = If (c) <then_branch = a () => (t) { h = Relu(x)  t = Neg(h) }, else_branch = b () => (e) { e = Neg(x) }>
        h = Mul(z, z)
        y = Add(z, h)
    }"""
    z = -np.maximum(X, 0)
    assert_equal(evaluate(load(parsed(text)).model, x=X, c=np.array(True)), [z + z * z])


def test_a_body_in_a_body_reads_the_nearest_of_equal_names() -> None:
    text = """(float[N, 4] x, bool c) => (float[N, 4] y) {
        h = Neg(x)
        z = If (c) <
            then_branch = a () => (m) {
                h = Relu(x)
                k = If (c) <then_branch = b () => (h) { h = Mul(x, x) }, else_branch = d () => (e) { e = Neg(h) }>
                g = Add(h, k)
                m = If (c) <then_branch = f () => (r) { r = Add(h, g) }, else_branch = i () => (h) { h = Neg(x) }>
            },
            else_branch = e () => (q) { q = Sub(h, x) }
        >
        y = Add(z, h)
    }"""
    loaded = load(parsed(text))
    inner = np.maximum(X, 0)
    for condition, wanted in ((True, inner + (inner + X * X) - X), (False, -X - X - X)):
        assert_equal(evaluate(loaded.model, x=X, c=np.array(condition)), [wanted])


@pytest.mark.parametrize("linear", [True, False], ids=["linear indices", "indices by dimension"])
@pytest.mark.parametrize("where", ["initializer", "constant"])
def test_sparse_tensors_become_dense_when_the_graph_runs(where: str, linear: bool) -> None:
    proto = parsed("(float[3, 4] x) => (float[3, 4] y) { y = Add(x, w) }")
    values = numpy_helper.from_array(np.array([7.0, 9.0], np.float32), "w")
    indices = numpy_helper.from_array(np.array([1, 11] if linear else [[0, 1], [2, 3]]), "i")
    sparse = helper.make_sparse_tensor(values, indices, [3, 4])
    if where == "initializer":
        proto.graph.sparse_initializer.append(sparse)
    else:
        proto.graph.node.append(helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    loaded = load(proto)
    dense = np.zeros(12, np.float32)
    dense[[1, 11]] = 7, 9
    assert ops(loaded) == ["ConstantOfShape", "ScatterND", "Add"]
    assert_equal(evaluate(loaded.model, x=X), [X + dense.reshape(3, 4)])


def test_a_loop_keeps_its_body() -> None:
    text = """(float[3, 4] x, int64 n) => (float[3, 4] y) {
        t = Constant<value = bool {1}>()
        one = Constant<value_float = 1.0>()
        y = Loop (n, t, x) <body = b (int64 i, bool c, float[3, 4] s) => (bool d, float[3, 4] r) {
            d = Identity(c)
            r = Add(s, one)
        }>
    }"""
    loaded = load(parsed(text))
    assert ops(loaded) == ["Loop"]
    assert_equal(evaluate(loaded.model, x=X, n=np.array(5)), [X + 5])


# Old opsets.

BROADCASTS = [
    (op, opset, axis)
    for op in ("Add", "Sub", "Mul", "Div", "Pow", "Less", "And")
    for opset in (1, 6)
    for axis in (0, 1, 2, None)
]


@every(("op", "opset", "axis"), BROADCASTS)
def test_old_broadcasts_become_numpys(op: str, opset: int, axis: int | None) -> None:
    shape: list[int] = {0: [2, 3], 1: [3], 2: [4], None: [4]}[axis]
    dtype, kind = (np.bool_, "bool") if op == "And" else (np.float32, "float")
    result = "bool" if op in ("And", "Less") else "float"
    at = "" if axis is None else f", axis = {axis}"
    nodes = f"h = Identity (a) y = {op} <broadcast = 1{at}> (h, b)"
    old = parsed(f"({kind}[2,3,4] a, {kind}{shape} b) => ({result}[2,3,4] y) {{ {nodes} }}", f'"": {opset}')
    old.ir_version = 3
    loaded = load(old)
    assert loaded.opset == 7
    rng = np.random.default_rng(0)
    left, right = rng.random((2, 3, 4)).astype(dtype), (rng.random(shape) + 0.5).astype(dtype)
    spread = right.reshape(*shape, *[1] * (3 - len(shape) - (axis if axis is not None else 2)))
    numpys = {"Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power, "Less": np.less}
    wanted = {**numpys, "Add": np.add, "And": np.logical_and}[op](left, spread)
    (got,) = evaluate(loaded.model, a=left, b=right)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_an_old_model_keeps_its_weights_in_the_file(tmp_path: Path) -> None:
    nodes = "y = Add <broadcast = 1, consumed_inputs = [0, 0]> (x, w)"
    old = parsed(f"(float[2,4000] x, float[4000] w) => (float[2,4000] y) {{ {nodes} }}", '"": 1')
    old.ir_version = 3
    old.graph.initializer.append(numpy_helper.from_array(np.arange(4000, dtype=np.float32), "w"))
    onnx.save(old, tmp_path / "m.onnx")
    loaded = load(tmp_path / "m.onnx", limits=MAPPED)
    assert loaded.opset == 7
    assert isinstance(loaded.model.graph.initializers["w"].const_value, ir.ExternalTensor)
    ones = np.ones((2, 4000), np.float32)
    assert_equal(evaluate(loaded.model, x=ones), [ones + np.arange(4000, dtype=np.float32)])


# Models of this process.


def test_a_model_that_this_process_made_is_as_its_file() -> None:
    x = input("x", ("N", 4))
    made = to_model(xp.matmul(xp.exp(x), asarray(np.ones((4, 2), np.float32))))
    own, file = load_built(made), load(content(made))
    assert own.digest == file.digest
    assert [node.name for node in own.model.graph] == [node.name for node in file.model.graph]
    assert infer(own.model) == infer(file.model)


# What it takes.


def test_limits_can_be_raised() -> None:
    text = "(int64[1] n) => (float[M] y) <int64[1] s = {4000000000}> { y = ConstantOfShape(s) }"
    with pytest.raises(ModelError, match="value_bytes"):
        load(parsed(text))
    assert load(parsed(text), limits=Limits(value_bytes=1 << 40)).opset == 17


@pytest.mark.parametrize("source", [None, 3, object(), ir.Model(ir.Graph([], [], nodes=[]), ir_version=9)])
def test_a_source_of_another_kind_is_told_so(source: object) -> None:
    with pytest.raises(InputError, match="path, bytes or"):
        load(source)  # type: ignore[arg-type]


@pytest.mark.parametrize("node", ["Relu (x)", "Cast <to = 1> (x)"])
def test_an_output_declared_as_what_its_node_does_not_give_is_refused(node):
    proto = parsed(f"(float[N] x) => (int64[N] y) {{ [n] y = {node} }}")
    said = r"'n' .*float vs int64"
    with pytest.raises(ModelError, match=said):
        load(proto)
