"""Names of weights, told by graphs as PyTorch's exporters write them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from dask_ferro.graph.tensor.imported.parameters import is_counted, known_names
from tests.each import every

SCOPES = "pkg.torch.onnx.name_scopes"


def node(op, inputs, output="y", name="", scopes=None):
    made = helper.make_node(op, inputs, [output], name)
    if scopes is not None:
        made.metadata_props.add(key=SCOPES, value=str(scopes))
    return made


def names(weights, *nodes):
    """The names of a graph's weights, in order."""
    tensors = [numpy_helper.from_array(np.zeros((2, 2), np.float32), weight) for weight in weights]
    info = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", nodes[-1].output[0])
    ]
    graph = helper.make_graph(list(nodes), "g", info[:1], info[1:], tensors)
    return list(known_names(ir.from_proto(helper.make_model(graph)).graph, weights).values())


def product(weight, name="", scopes=None, output="y"):
    return node("MatMul", ["x", weight], output, name, scopes)


@every(
    ("weights", "nodes", "wanted"),
    [
        pytest.param(["onnx::MatMul_7", "fc1.bias"],
            [product("onnx::MatMul_7", "/other/MatMul", output="p"), node("Add", ["p", "fc1.bias"])],
            ["fc1.weight", "fc1.bias"], id="by the bias that is added to the product"),
        pytest.param(["val_7", "attn.in_proj_bias"],
            [product("val_7", output="p"), node("Add", ["attn.in_proj_bias", "p"])],
            ["attn.in_proj_weight", "attn.in_proj_bias"], id="by a bias in front, whose name has more words"),
        pytest.param(["val_7", "head.bias"], [node("Gemm", ["x", "val_7", "head.bias"])], ["head.weight", "head.bias"],
            id="by the bias of the same operator"),
        pytest.param(["onnx::MatMul_7", "onnx::Add_8"],
            [product("onnx::MatMul_7", "/fc/MatMul", output="p"), node("Add", ["p", "onnx::Add_8"], name="/fc/Add")],
            ["fc.weight", "onnx::Add_8"], id="by the scope where the bias has a count"),
        pytest.param(["onnx::MatMul_7", "fc.weight", "fc.bias"],
            [node("Gemm", ["x", "fc.weight", "fc.bias"], "h"), product("onnx::MatMul_7", output="p"),
                node("Add", ["p", "fc.bias"])],
            ["onnx::MatMul_7", "fc.weight", "fc.bias"], id="no name twice: one that the file has keeps its meaning"),
        pytest.param(["onnx::MatMul_7", "onnx::MatMul_8"],
            [product("onnx::MatMul_7", "/fc/MatMul", output="p"), product("onnx::MatMul_8", "/fc/MatMul_1")],
            ["fc.weight", "onnx::MatMul_8"], id="no name twice: the second of one module keeps its own"),
        pytest.param(["onnx::Conv_7", "onnx::Conv_8"],
            [node("Conv", ["x", "onnx::Conv_7", "onnx::Conv_8"], name="/layer1/layer1.0/layer1.0.1/Conv")],
            ["layer1.0.1.weight", "layer1.0.1.bias"], id="a Sequential in a Sequential"),
        pytest.param(["onnx::MatMul_7"], [product("onnx::MatMul_7", "/encoder/layers.0/attn/MatMul")],
            ["encoder.layers.0.attn.weight"], id="an entry of a ModuleList"),
        pytest.param(["onnx::MatMul_7"], [product("onnx::MatMul_7", "/MatMul")], ["onnx::MatMul_7"],
            id="a product of the network itself has no module"),
        pytest.param(["onnx::MatMul_7"], [product("onnx::MatMul_7", "MatMul_3")], ["onnx::MatMul_7"],
            id="a node without scopes"),
        pytest.param(["val_7"], [product("val_7", "n", ["", "encoder", "encoder.layers.0", "linear"])],
            ["encoder.layers.0.weight"], id="by the metadata of the newer exporter"),
        pytest.param(["val_7"], [product("val_7", "n", ["", "linear"])], ["val_7"], id="metadata without a module"),
        pytest.param(["c.weight", "c.weight_bias"], [node("Conv", ["x", "c.weight", "c.weight_bias"])],
            ["c.weight", "c.bias"], id="a bias that the newer exporter made"),
        pytest.param(["onnx::PRelu_1"], [node("PRelu", ["x", "onnx::PRelu_1"], name="/act/PRelu")], ["act.weight"],
            id="a slope of which the exporter changed the shape"),
        pytest.param(["val_1", "val_2"],
            [node("Mul", ["x", "val_1"], "p", "/norm/Mul"), node("Add", ["val_2", "p"], name="/norm/Add")],
            ["norm.weight", "norm.bias"], id="the product and the sum at the end of a normalization"),
        pytest.param(["val_1", "val_2"],
            [node("Mul", ["x", "val_1"], "p", "/norm/Mul"), node("Sub", ["p", "val_2"], name="/norm/Sub")],
            ["val_1", "val_2"], id="a product without a sum"),
        pytest.param(["onnx::LSTM_1", "onnx::LSTM_2", "onnx::LSTM_3"],
            [node("LSTM", ["x", "onnx::LSTM_1", "onnx::LSTM_2", "onnx::LSTM_3"], name="/rnn/LSTM_1")],
            ["rnn.LSTM_1.W", "rnn.LSTM_1.R", "rnn.LSTM_1.B"], id="gates in ONNX's order have ONNX's names"),
        pytest.param(["onnx::Mul_7"], [node("Mul", ["x", "onnx::Mul_7"], name="/scale/Mul")], ["onnx::Mul_7"],
            id="a constant of an elementwise operator"),
        pytest.param(["dense/kernel"], [product("dense/kernel", "/fc/MatMul")], ["dense/kernel"],
            id="another exporter's names are kept"),
        pytest.param(["val_7"], [helper.make_node("MatMul", ["x", "val_7"], ["y"], "/f/M", domain="own")], ["val_7"],
            id="an operator of another domain"),
    ],
)  # fmt: skip
def test_a_name_is_told(weights, nodes, wanted):
    assert names(weights, *nodes) == wanted


@every(
    ("name", "wanted"),
    [
        ("onnx::MatMul_12", True), ("val_3", True), ("12", True), ("/fc/Constant_output_0", True),
        ("fc.weight", False), ("val_mean", False), ("interval_3x", False), ("layer1", False),
    ],
)  # fmt: skip
def test_a_count_is_known_by_its_form(name, wanted):
    assert is_counted(name) is wanted


PARTS = st.sampled_from(["a", "a.0", "a.0.1", "b", "0"])
SOME = st.sampled_from(["val_1", "val_2", "onnx::MatMul_1", "a.weight", "a.0.weight", "b.bias"])
WEIGHTS = st.lists(SOME, unique=True, min_size=1)


@given(WEIGHTS, st.data())
def test_no_two_weights_share_a_name_and_no_name_changes_its_meaning(weights, data):
    nodes = []
    for i, weight in enumerate(weights):
        scopes = data.draw(st.none() | st.lists(PARTS, max_size=3), label="scopes")
        path = "/".join(["", *data.draw(st.lists(PARTS, max_size=3), label="path"), f"MatMul_{i}"])
        nodes.append(product(weight, path, scopes, f"p{i}"))
        if data.draw(st.booleans(), label="with a bias"):
            bias = data.draw(st.sampled_from(weights), label="bias")
            nodes.append(node("Add", [f"p{i}", bias], f"q{i}"))
    found = names(weights, *nodes)
    assert len(set(found)) == len(weights)
    assert [
        name for name, now in zip(weights, found, strict=True) if now != name and not is_counted(name)
    ] == []
    assert set(found).isdisjoint(
        set(weights) - {n for n, now in zip(weights, found, strict=True) if n == now}
    )


def test_a_hostile_scope_is_only_text():
    assert names(["val_1"], product("val_1", scopes="[" * 100_000)) == ["val_1"]
