"""The scanner: what it takes out can be put back, and text that is no message is reported with its place."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from dask_ferro.graph.model import wire


def restored(proto: onnx.ModelProto, data: bytes) -> onnx.ModelProto:
    """The skeleton `proto` with its references into `data` followed."""
    attributes = [attribute for node in proto.graph.node for attribute in node.attribute]
    held = [attribute.t for attribute in attributes if attribute.HasField("t")]
    for tensor in [*proto.graph.initializer, *held]:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries.get("location") == wire.EMBEDDED:
            offset, length = int(entries["offset"]), int(entries["length"])
            tensor.raw_data = data[offset : offset + length]
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
    return proto


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    """A model with tensors of many sizes, in initializers, Constant nodes and a body."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 15, 16, 17, 127, 128, 4095, 4096, 20_000]), max_size=6))
    tensors = [numpy_helper.from_array(np.full(size, i, np.uint8), f"t{i}") for i, size in enumerate(sizes)]
    split = draw(st.integers(0, len(tensors)))
    rest = enumerate(tensors[split:])
    constants = [helper.make_node("Constant", [], [f"c{i}"], value=t, name="n" * i) for i, t in rest]
    body = helper.make_graph(constants, "body", [], [], tensors[:split])
    numbers = draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40))
    forest = helper.make_node("Forest", [], ["f"], ints=[*numbers, 1], floats=[1.5, *map(float, numbers)])
    for attribute, tensor in zip(forest.attribute, tensors, strict=False):
        # Behind the numbers in the file: a walk that loses its place among them does not find it.
        attribute.t.CopyFrom(tensor)
    nodes = [forest, *constants, helper.make_node("If", ["b"], ["y"], then_branch=body, else_branch=body)]
    text = "d" * draw(st.integers(0, 5000))
    return helper.make_model(helper.make_graph(nodes, "g", [], [], tensors[:split], doc_string=text))


@given(models(), st.sampled_from([1, 16, 17, 4096]))
def test_a_skeleton_with_its_data_put_back_is_the_model(model: onnx.ModelProto, span_bytes: int) -> None:
    data = model.SerializeToString()
    skeleton = wire.skeleton(memoryview(data), span_bytes=span_bytes)
    assert restored(onnx.ModelProto.FromString(skeleton.proto), data) == model
    assert 0 <= skeleton.structure_bytes <= len(skeleton.proto)


def test_the_numbers_of_a_forest_are_one_field() -> None:
    numbers = [0, 1, 127, 128, -1, 2**63 - 1]
    forest = helper.make_node("Forest", [], ["y"], i=numbers * 400_000, f=[0.5] * 400_000)
    data = helper.make_model(helper.make_graph([forest], "g", [], [])).SerializeToString()
    assert sum(len(attribute.ints) for attribute in forest.attribute) > wire.MAX_FIELDS
    assert wire.skeleton(memoryview(data)).proto == data


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        pytest.param(b"\x40" + b"\x80" * 10 + b"\x01", "a number of more than 10 bytes", id="a long number"),
        pytest.param(b"\x3d\x00\x00", "wants 4 bytes and 2 are left", id="half a float"),
        pytest.param(b"\x40\x80", "the file ends within a number", id="half a number"),
    ],
)
def test_a_damaged_number_after_sound_ones_is_told(number: bytes, problem: str) -> None:
    attribute = (b"\x40\x01" + b"\x3d\x00\x00\x00\x00") * 1000 + number
    node = wire._message(5, attribute)
    data = wire._message(7, wire._message(1, node))
    with pytest.raises(wire.WireError, match=problem):
        wire.skeleton(memoryview(data))


def test_the_last_of_several_raw_data_wins_as_in_protobuf() -> None:
    tensor = TensorProto(name="w", raw_data=b"a" * 5000).SerializeToString()
    tensor += TensorProto(raw_data=b"b" * 6000).SerializeToString()
    graph = wire._message(5, tensor)
    data = wire._message(7, graph)
    proto = onnx.ModelProto.FromString(wire.skeleton(memoryview(data)).proto)
    assert restored(proto, data).graph.initializer[0].raw_data == b"b" * 6000


def test_a_tensor_that_is_external_is_left_as_it_is() -> None:
    tensor = TensorProto(name="w", raw_data=bytes(5000), data_location=TensorProto.EXTERNAL)
    data = helper.make_model(helper.make_graph([], "g", [], [], [tensor])).SerializeToString()
    assert wire.skeleton(memoryview(data)).proto == data


def test_typed_numbers_are_data_and_no_structure() -> None:
    tensor = helper.make_tensor("w", TensorProto.FLOAT, [10_000], np.zeros(10_000))
    data = helper.make_model(helper.make_graph([], "g", [], [], [tensor])).SerializeToString()
    assert wire.skeleton(memoryview(data)).structure_bytes < 100


@pytest.mark.parametrize(
    ("data", "offset", "words"),
    [
        pytest.param(b"\x3a\x05abc", 0, "wants 5 bytes and 3 are left", id="a length past the end"),
        pytest.param(b"\x08\x01\x3a", 3, "ends within a number", id="no length"),
        pytest.param(b"\x08" + b"\xff" * 10, 1, "more than 10 bytes", id="an endless number"),
        pytest.param(b"\x08\x01\x00\x01", 2, "field number 0", id="field 0"),
        pytest.param(b"\x0b", 0, "a group", id="a group"),
        pytest.param(b"\x0f", 0, "wire type 7", id="an unknown wire type"),
        pytest.param(b"\x09\x00\x00", 0, "wants 8 bytes and 2 are left", id="a fixed number cut off"),
    ],
)
def test_tells_where_the_bytes_are_no_message(data: bytes, offset: int, words: str) -> None:
    with pytest.raises(wire.WireError, match=words) as caught:
        wire.skeleton(memoryview(data))
    assert caught.value.offset == offset


@given(st.integers(0, 2**64 - 1))
def test_numbers_come_back(number: int) -> None:
    encoded = wire._encode_varint(number)
    assert wire.varint(memoryview(encoded), 0, len(encoded)) == (number, len(encoded))
