"""Files that are broken or made to hurt: each gets one clear error, reads nothing outside, and costs little
memory.

A row is a claim (its id), a function that writes the file, the error, and words that the message must hold:
what is wrong and where.  `outside` beside the model's folder is watched by the kernel (inotify), so that
reads by ONNX's own libraries would show too.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dask_ferro.errors import InputError, ModelError, UnsupportedOpError
from dask_ferro.graph.model.load import Limits, load
from tests.programs import ran

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
Writer = Callable[[Path], object]

SECRET = b"nobody may read this" * 4


def info(name: str, dtype: int = FLOAT, shape: list[int | str] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def node(op: str, inputs: str, outputs: str, **attributes: object) -> onnx.NodeProto:
    """`inputs` and `outputs` are names with spaces between them; "-" is one that is left out."""
    split = [["" if name == "-" else name for name in text.split()] for text in (inputs, outputs)]
    return helper.make_node(op, *split, name=f"the_{op.lower()}", **attributes)


def array(name: str, values: object, dtype: type = np.float32) -> TensorProto:
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def graph(*nodes: onnx.NodeProto, weights: tuple[TensorProto, ...] = (), out: str = "y") -> onnx.GraphProto:
    return helper.make_graph(
        list(nodes), "g", [info("x", shape=["N", 4])], [info(name) for name in out.split()], list(weights)
    )


def model(*nodes: onnx.NodeProto, opset: int = 17, **parts: object) -> onnx.ModelProto:
    made = helper.make_model(graph(*nodes, **parts), opset_imports=[helper.make_opsetid("", opset)])  # type: ignore[arg-type]
    made.ir_version = 9
    return made


def write(make: Callable[[], onnx.ModelProto]) -> Writer:
    def writer(folder: Path) -> Path:
        path = folder / "model.onnx"
        path.write_bytes(make().SerializeToString())
        return path

    return writer


def has(*nodes: onnx.NodeProto, **parts: Any) -> Writer:
    """A model of these nodes."""
    return write(lambda: model(*nodes, **parts))


def overriding(domain: str) -> onnx.ModelProto:
    """A model whose own Relu is a Neg."""
    made = model(node("Relu", "x", "y"))
    opsets = [helper.make_opsetid("", 17)]
    made.functions.append(helper.make_function(domain, "Relu", ["a"], ["b"], [node("Neg", "a", "b")], opsets))
    return made


def changed(change: Callable[[onnx.ModelProto], object]) -> Writer:
    """A sound model (y = relu(x) + w), after `change`."""

    def make() -> onnx.ModelProto:
        made = model(node("Relu", "x", "r"), node("Add", "r w", "y"), weights=(array("w", [1, 2, 3, 4]),))
        change(made)
        return made

    return write(make)


def weight(change: Callable[[TensorProto], object]) -> Writer:
    return changed(lambda made: change(made.graph.initializer[0]))


def content(data: bytes | Callable[[bytes], bytes]) -> Writer:
    def writer(folder: Path) -> Path:
        path = folder / "model.onnx"
        sound = model(node("Relu", "x", "y")).SerializeToString()
        path.write_bytes(data if isinstance(data, bytes) else data(sound))
        return path

    return writer


# External data.


def refer(tensor: TensorProto, **entries: object) -> None:
    """Make `tensor` external: 16 bytes at `location`, unless `entries` say otherwise."""
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))


def external(
    location: str, prepare: Callable[[Path], object] = lambda folder: None, **entries: object
) -> Writer:
    def writer(folder: Path) -> Path:
        prepare(folder)
        return weight(lambda tensor: refer(tensor, location=location, **entries))(folder)

    return writer


def outside(folder: Path) -> Path:
    return folder.parent / "outside" / "secret.bin"


def beside(folder: Path, size: int = 16) -> None:
    (folder / "weights.bin").write_bytes(bytes(size))


def linked_folder(folder: Path) -> None:
    outside(folder).parent.chmod(0o777)
    (folder / "sub").symlink_to(outside(folder).parent)


def writable(folder: Path) -> Path:
    outside(folder).chmod(0o666)
    return outside(folder)


def external_in_attribute() -> onnx.ModelProto:
    held = array("c", [1, 2, 3, 4])
    refer(held, location="weights.bin")
    return model(node("Constant", "", "c", value=held), node("Add", "x c", "y"))


def external_in_body() -> onnx.ModelProto:
    held = array("w2", [1, 2, 3, 4])
    refer(held, location="../outside/secret.bin")
    return model(if_node(body(node("Identity", "w2", "b"), held)))


# Bodies and functions.


def body(one: onnx.NodeProto, *weights: TensorProto) -> onnx.GraphProto:
    return helper.make_graph([one], "b", [], [info(one.output[0])], list(weights))


def if_node(then: onnx.GraphProto) -> onnx.NodeProto:
    return node("If", "c", "y", then_branch=then, else_branch=body(node("Identity", "x", "other")))


def with_condition(then: onnx.GraphProto) -> onnx.ModelProto:
    return model(if_node(then), weights=(array("c", True, np.bool_),))


def within(one: onnx.NodeProto, *weights: TensorProto) -> Writer:
    """A model with a body of this node."""
    return write(lambda: with_condition(body(one, *weights)))


def nested(depth: int) -> onnx.ModelProto:
    outer = body(node("Identity", "x", "b"))
    for i in range(depth):
        inner = if_node(outer)
        inner.output[0] = f"y{i}"
        outer = body(inner)
    return with_condition(outer)


def too_deep(content: bytes) -> bytes:
    """60 bodies in one another, which ONNX's libraries cannot write: 180 nested messages."""
    for _ in range(60):
        for number in (6, 5, 1):
            content = message(number, content)
    return message(7, content)


def message(number: int, content: bytes) -> bytes:
    length, encoded = len(content), b""
    while length > 127:
        encoded += bytes([length & 127 | 128])
        length >>= 7
    return bytes([number << 3 | 2]) + encoded + bytes([length]) + content


def calling(calls: dict[str, list[str]], main: str = "f0", copies: int = 1) -> onnx.ModelProto:
    """A model of local functions, each a chain of calls."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    functions = []
    for name, callees in calls.items():
        body = [
            helper.make_node(c, [f"t{i}"], [f"t{i + 1}"], domain="" if c == "Relu" else "my")
            for i, c in enumerate(callees)
        ]
        functions.append(helper.make_function("my", name, ["t0"], [f"t{len(callees)}"], body, opsets))
    made = model(helper.make_node(main, ["x"], ["y"], name="call", domain="my"))
    made.opset_import.add(domain="my", version=1)
    for _ in range(copies):
        made.functions.extend(functions)
    return made


def bomb(levels: int) -> onnx.ModelProto:
    calls = {f"f{i}": [f"f{i + 1}"] * 2 for i in range(levels)}
    return calling({**calls, f"f{levels}": ["Relu", "Relu"]})


def wrong_call() -> onnx.ModelProto:
    made = calling({"f0": ["Relu"]})
    made.graph.node[0].input.append("x")
    return made


# Sizes.


def sized(op: str, inputs: str, *weights: TensorProto, **attributes: object) -> Writer:
    return has(node(op, inputs, "y", **attributes), weights=weights)


HUGE = 1 << 40


def doubled(times: int) -> onnx.ModelProto:
    nodes = [node("Concat", f"s{i} s{i}", f"s{i + 1}", axis=0) for i in range(times)]
    return model(*nodes, node("Expand", f"x s{times}", "y"), weights=(array("s0", [1, 1], np.int64),))


def ranks(op: str, times: int) -> onnx.ModelProto:
    """A chain whose values get more dimensions from node to node."""
    second = "x{}" if op == "Gather" else "axes"
    nodes = [node(op, f"x{i} {second.format(i)}", f"x{i + 1}") for i in range(times)]
    stored = (array("x0", [[0]], np.int64), array("axes", range(90), np.int64))
    return model(*nodes, weights=stored, out=f"x{times}")


def tall_body() -> onnx.ModelProto:
    body = ranks("Gather", 60).graph
    body.ClearField("input")
    return with_condition(body)


def branches(count: int) -> onnx.ModelProto:
    """As many Ifs in a row, each of which sees the results of all before it."""
    taken = body(node("Identity", "x", "b"))
    nodes = [
        helper.make_node("If", ["c"], [f"o{i}"], then_branch=taken, else_branch=taken) for i in range(count)
    ]
    last = helper.make_node("Sum", [f"o{i}" for i in range(count)], ["y"])
    return model(*nodes, last, weights=(array("c", True, np.bool_),))


def sparse(dims: list[int], index: int) -> onnx.ModelProto:
    values = array("w", [1.0])
    held = helper.make_sparse_tensor(values, array("i", [index], np.int64), dims)
    made = model(node("Add", "x w", "y"))
    made.graph.sparse_initializer.append(held)
    return made


def overlong(data: bytes) -> bytes:
    return data + b"\x3a" + b"\xff" * 11


# Where no error stands it is a ModelError.
_ROWS: list[tuple[Any, ...]] = [
    # the file itself
    ("refuses an empty file", content(b""), ["empty"]),
    ("refuses a text file", content(b"Dear reader,\nthis is no model.\n"), ["not an ONNX model"]),
    ("refuses a picture", content(b"\x89PNG\r\n\x1a\n" + bytes(64)), ["not an ONNX model"]),
    ("refuses zeros", content(bytes(4096)), ["not an ONNX model"]),
    ("refuses a file that is cut off", content(lambda data: data[:-9]), ["cut off"]),
    ("refuses a number that never ends", content(overlong), ["cut off, damaged"]),
    ("refuses a length past the end", content(b"\x3a\xff\xff\xff\xff\x07"), ["cut off, damaged"]),
    ("refuses messages in messages without end", content(b"\x3a" * 3000), ["cut off"]),
    ("refuses a folder", lambda folder: folder, ["folder", ".onnx"], InputError),
    ("refuses a file that is not there", lambda folder: folder / "no.onnx", ["No such file"], InputError),
    ("refuses a pipe", lambda folder: os.mkfifo(folder / "p") or folder / "p", ["not a regular file"], InputError),
    ("refuses a path with NUL", lambda folder: f"{folder}/\0", ["null"], InputError),
    # the model
    ("refuses a file without a graph", content(b"\x08\x09\x42\x02\x10\x11"), ["no graph"]),
    ("refuses a format from the future", changed(lambda m: setattr(m, "ir_version", 99)), ["IR version is 99"]),
    ("refuses a model without a format", changed(lambda m: m.ClearField("ir_version")), ["IR version is missing"]),
    ("refuses a model without opset", changed(lambda m: m.ClearField("opset_import")), ["no opset"]),
    ("refuses an opset from the future", changed(lambda m: setattr(m.opset_import[0], "version", 999)),
        ["opset 999", "export"]),
    ("refuses opset 0", changed(lambda m: setattr(m.opset_import[0], "version", 0)), ["opset 0"]),
    ("refuses two opsets of one domain", changed(lambda m: m.opset_import.add(domain="ai.onnx", version=11)),
        ["17 and 11"]),
    ("refuses a graph without outputs", changed(lambda m: m.graph.ClearField("output")), ["no outputs"]),
    # names
    ("refuses an output that nothing computes", changed(lambda m: setattr(m.graph.output[0], "name", "z")),
        ["'z'", "not an output of any node"]),
    ("refuses an undefined input", has(node("Relu", "ghost", "y")), ["the_relu", "'ghost'"]),
    ("refuses a circle of nodes", has(node("Add", "x b", "a"), node("Relu", "a", "b"), out="b"),
        ["circle", "the_add", "the_relu"]),
    ("refuses a node that eats itself", has(node("Add", "x y", "y")), ["circle", "the_add"]),
    ("refuses a circle through a body", within(node("Identity", "y", "b")), ["circle", "the_if"]),
    ("refuses a value computed twice", has(node("Relu", "x", "y"), node("Tanh", "x", "y")),
        ["'y'", "the_tanh", "redeclared"]),
    ("refuses a node that overwrites an input", has(node("Relu", "x", "x"), out="x"),
        ["'x'", "the_relu", "redeclared"]),
    ("refuses one input twice", changed(lambda m: m.graph.input.append(info("x"))), ["'x'", "2 times"]),
    ("refuses one weight twice", changed(lambda m: m.graph.initializer.append(array("w", [1]))),
        ["initializer 'w'", "2 times"]),
    ("refuses one output twice", changed(lambda m: m.graph.output.append(info("y"))), ["output 'y'"]),
    ("refuses an undefined name in a body", within(node("Relu", "ghost", "b")), ["'ghost'", "the_if"]),
    ("refuses a name that is not UTF-8", content(lambda data: data.replace(b"\x01x", b"\x01\xff")), ["not UTF-8"]),
    # nodes
    ("has no unknown operator", has(node("Relux", "x", "y")), ["the_relux", "mean Relu"], UnsupportedOpError),
    ("refuses an operator younger than the opset", has(node("Gelu", "x", "y"), opset=13),
        ["the_gelu", "domain_version of 13", "opset"]),
    ("refuses an operator that was withdrawn", has(node("Upsample", "x s", "y"), weights=(array("s", [1, 1]),)),
        ["the_upsample", "deprecated", "17"]),
    ("refuses a foreign attribute", has(node("Relu", "x", "y", alpha=1.0)), ["the_relu", "attribute: alpha"]),
    ("refuses a mistyped attribute", has(node("Softmax", "x", "y", axes=1)), ["the_softmax", "attribute: axes"]),
    ("refuses an attribute of the wrong kind", has(node("Softmax", "x", "y", axis="one")),
        ["axis'", "'STRING'", "Expected: 'INT'"]),
    ("refuses an attribute that lies about its kind",
        changed(lambda m: m.graph.node[0].attribute.add(name="a", type=1, i=3)),
        ["the_relu", "attribute: a"]),
    ("refuses an attribute of an unknown kind", changed(lambda m: m.graph.node[0].attribute.add(name="a")),
        ["kind 0"]),
    ("refuses a lacking attribute", has(node("Concat", "x x", "y")), ["the_concat", "'axis' is missing"]),
    ("refuses too many inputs", has(node("Relu", "x x", "y")), ["the_relu", "input size 2", "max=1"]),
    ("refuses a needed input left out", has(node("Add", "x -", "y")), ["the_add", "input 1"]),
    ("refuses a needed output left out", has(node("TopK", "x k", "- y"), weights=(array("k", [1], np.int64),)),
        ["the_topk"]),
    ("refuses a number of outputs between those that an operator has",
        has(node("BatchNormalization", "x w w w w", "y m"), weights=(array("w", [1]),)),
        ["the_batchnormalization", "2", "output sizes"]),
    ("refuses a domain that is not imported", has(helper.make_node("Op", ["x"], ["y"], name="n", domain="other")),
        ["'n'", "'other'", "opset import"]),
    ("refuses a parameter outside of a function",
        changed(lambda m: m.graph.node[0].attribute.add(name="a", type=1, ref_attr_name="p")), ["'p'", "function"]),
    ("refuses dtypes that do not agree", has(node("Add", "x w", "y"), weights=(array("w", [1, 2, 3, 4], np.int64),)),
        ["the_add", "inconsistent type tensor(int64)", "Cast"]),
    ("refuses a dtype that the operator does not take", has(node("Not", "x", "y")),
        ["the_not", "tensor(float)", "Cast"]),
    # tensors
    ("refuses negative dimensions", weight(lambda t: t.dims.__setitem__(0, -4)), ["'w'", "negative"]),
    ("refuses dimensions that overflow", weight(lambda t: t.dims.extend([1 << 40] * 3)), ["'w'", "elements"]),
    ("refuses dimensions that no float holds", weight(lambda t: t.dims.extend([1 << 62] * 40)), ["'w'", "elements"]),
    ("refuses thousands of dimensions", weight(lambda t: t.dims.extend([1 << 62] * 9000)), ["'w'", "9001 dimensions"]),
    ("refuses too little raw data", weight(lambda t: t.dims.append(2)), ["'w'", "has 16", "32"]),
    ("refuses too much raw data", weight(lambda t: setattr(t, "raw_data", bytes(20))), ["'w'", "has 20", "16"]),
    ("refuses too little raw data in a large tensor",
        weight(lambda t: t.CopyFrom(TensorProto(name="w", data_type=1, dims=[1 << 20], raw_data=bytes(8192)))),
        ["'w'", "8192", "4194304"]),
    ("refuses too few typed numbers",
        weight(lambda t: t.CopyFrom(TensorProto(name="w", data_type=1, dims=[1 << 40], float_data=[1.0]))),
        ["'w'", "reshape array of size 1"]),
    ("refuses numbers in the wrong field",
        weight(lambda t: t.CopyFrom(TensorProto(name="w", data_type=1, dims=[1], int64_data=[1]))),
        ["reshape array of size 0"]),
    ("refuses data twice", weight(lambda t: t.float_data.extend([1] * 4)), ["several fields"]),
    ("refuses an unknown dtype", weight(lambda t: setattr(t, "data_type", 77)), ["'w'", "number 77"]),
    ("refuses a tensor in segments", weight(lambda t: t.segment.SetInParent()), ["segments"]),
    ("refuses strings that are not UTF-8",
        weight(lambda t: t.CopyFrom(TensorProto(name="w", data_type=8, dims=[1], string_data=[b"\xff\xfe"]))),
        ["'w'", "utf-8"]),
    ("refuses an input of unknown dtype",
        changed(lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 77)), ["input 'x'", "77"]),
    ("refuses an input of negative size",
        changed(lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_value", -2)),
        ["input 'x'", "-2", "dim_param"]),
    ("refuses an input without a type", changed(lambda m: m.graph.input[0].ClearField("type")), ["no type"]),
    ("refuses a sparse index outside", write(lambda: sparse([2, 4], 8)), ["'w'", "out of range"]),
    # external data
    ("refuses external data above the folder", external("../outside/secret.bin"), ["'w", "is not in the model"]),
    ("refuses a way out and back", external("sub/../../outside/secret.bin"), ["'w", "is not in the model"]),
    ("refuses external data at an absolute path", lambda folder: external(str(outside(folder)))(folder),
        ["'w", "is not in the model"]),
    ("refuses a home folder", external("~/secret.bin"), ["is not in the model"]),
    ("refuses a drive", external("C:/secret.bin"), ["is not in the model"]),
    ("refuses backslashes", external("..\\outside\\secret.bin"), ["is not in the model"]),
    ("refuses NUL in a name", external("weights.bin\0.txt", beside), ["null byte"]),
    ("refuses a link to a file of the system",
        external("weights.bin", lambda folder: (folder / "weights.bin").symlink_to("/etc/passwd")),
        ["leads to '/etc/passwd'", "the system's", "copy"]),
    ("refuses a link to a folder where everybody may write", external("sub/secret.bin", linked_folder),
        ["outside' is another user's", "everybody may write", "copy"]),
    ("refuses a file of two names that everybody may write",
        external("weights.bin", lambda folder: (folder / "weights.bin").hardlink_to(writable(folder))),
        ["weights.bin' is another user's", "everybody may write", "copy"]),
    ("refuses external data that is not there", external("weights.bin"), ["No such file", "into the model"]),
    ("refuses a folder as external data", external("sub", lambda f: (f / "sub").mkdir()), ["not a regular"]),
    ("refuses a pipe as external data", external("p", lambda f: os.mkfifo(f / "p")), ["not a regular"]),
    ("refuses a file as a folder", external("weights.bin/x", beside), ["Not a directory"]),
    ("refuses a name of 5,000 characters", external("a" * 5000), ["too long"]),
    ("refuses a negative offset", external("weights.bin", beside, offset=-16), ["offset '-16'"]),
    ("refuses an offset that is no number", external("weights.bin", beside, offset="1e3"), ["'1e3'"]),
    ("refuses an offset past the end", external("weights.bin", beside, offset=8), ["8 to 24", "has 16"]),
    ("refuses an offset that overflows", external("weights.bin", beside, offset=2**63), ["offset"]),
    ("refuses a wrong length", external("weights.bin", beside, length=12), ["12", "16"]),
    ("refuses external data without a file", weight(refer), ["is not in the model"]),
    ("refuses external data beside raw data", weight(lambda t: setattr(t, "data_location", TensorProto.EXTERNAL)),
        ["and external data"]),
    ("refuses external data in an attribute", write(external_in_attribute), ["the_constant", "attribute"]),
    ("refuses external data above, in a body", write(external_in_body), ["'w", "is not in the model"]),
    ("refuses external strings", weight(lambda t: (t.CopyFrom(TensorProto(name="w", data_type=8, dims=[4])),
        refer(t, location="weights.bin"))), ["strings cannot be external"]),
    ("refuses external data of a model in memory",
        lambda folder: external("weights.bin", beside)(folder).read_bytes(), ["no folder", "path"]),
    ("refuses a function in the place of an operator", write(lambda: overriding("")), ["Relu", "domain of its own"]),
    ("refuses a function in the place of an operator, by the domain's other name",
        write(lambda: overriding("ai.onnx")), ["Relu", "domain of its own"]),
    # functions and bodies
    ("refuses a function that calls itself", write(lambda: calling({"f0": ["f0"]})), ["my::f0", "circle"]),
    ("refuses functions that call each other", write(lambda: calling({"f0": ["f1"], "f1": ["f0"]})),
        ["my::f0", "my::f1", "circle"]),
    ("refuses functions that multiply", write(lambda: bomb(30)), ["my::f0", "Limits.nodes"]),
    ("refuses functions that multiply beyond counting", write(lambda: bomb(85)), ["10^26"]),
    ("refuses functions 91 deep",
        write(lambda: calling({**{f"f{i}": [f"f{i + 1}"] for i in range(90)}, "f90": ["Relu"]})), ["91 deep"]),
    ("refuses a function defined twice", write(lambda: calling({"f0": ["Relu"]}, copies=2)),
        ["my::f0", "more than once"]),
    ("refuses a call with too many inputs", write(wrong_call), ["'call'", "my::f0", "2 inputs"]),
    ("refuses bodies deeper than protobuf reads", content(too_deep(b"")), ["MaxDepth"]),
    ("refuses large bodies deeper than that", content(too_deep(bytes(9999))), ["MaxDepth"]),
    # sizes
    ("bounds ConstantOfShape", sized("ConstantOfShape", "s", array("s", [HUGE], np.int64)),
        ["the_constantofshape", "value_bytes"]),
    ("bounds a product that overflows", sized("ConstantOfShape", "s", array("s", [1 << 32] * 2, np.int64)), ["GiB"]),
    ("bounds Expand", sized("Expand", "w s", array("w", 1), array("s", [1 << 16] * 2, np.int64)), ["16 GiB"]),
    ("bounds Tile", sized("Tile", "w s", array("w", [1] * 8), array("s", [HUGE], np.int64)), ["the_tile"]),
    ("bounds a Tile that wraps to nothing",
        sized("Tile", "w s", array("w", [1] * 8), array("s", [1 << 61], np.int64)), ["the_tile"]),
    ("bounds Pad", sized("Pad", "w s", array("w", [1]), array("s", [0, HUGE], np.int64)), ["the_pad"]),
    ("bounds Range",
        sized("Range", "a b c", array("a", 0, np.int64), array("b", HUGE, np.int64), array("c", 1, np.int64)),
        ["the_range"]),
    ("bounds a Range of tiny steps", sized("Range", "a b c", array("a", 0), array("b", 1e6), array("c", 1e-6)),
        ["GiB"]),
    ("bounds OneHot",
        sized("OneHot", "i d v", array("i", [1], np.int64), array("d", HUGE, np.int64), array("v", [0, 1])),
        ["the_onehot"]),
    ("bounds RandomNormal", sized("RandomNormal", "", shape=[HUGE]), ["the_randomnormal"]),
    ("bounds Resize",
        sized("Resize", "w - - s", array("w", np.ones((1, 1, 2, 2))), array("s", [1, 1, 1 << 20, 1 << 20], np.int64)),
        ["the_resize"]),
    ("bounds what a body makes", within(node("ConstantOfShape", "s", "b"), array("s", [HUGE], np.int64)),
        ["the_constantofshape", "the_if"]),
    ("bounds a chain that doubles", write(lambda: doubled(40)), ["value_bytes"]),
    ("bounds ranks that double", write(lambda: ranks("Gather", 60)), ["dimensions", "64"]),
    ("bounds ranks that grow in steps", write(lambda: ranks("Unsqueeze", 3000)), ["dimensions", "64"]),
    ("bounds ranks that double in a body", write(tall_body), ["dimensions", "64"]),
    ("bounds the names that bodies see", write(lambda: branches(10_100)), ["bodies", "names in all"]),
    ("bounds a sparse tensor when it is dense", write(lambda: sparse([HUGE, HUGE], 1)), ["'w'", "elements"]),
    ("bounds a declared input", changed(lambda m: m.graph.input[0].CopyFrom(info("x", shape=[HUGE, HUGE]))),
        ["'x'", "GiB"]),
]  # fmt: skip

ROWS = [(claim, writer, *(error or [ModelError]), words) for claim, writer, words, *error in _ROWS]
IDS = [row[0] for row in ROWS]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The model's folder; beside it `outside`, which is not to be touched."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.bin").write_bytes(SECRET)
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.fixture
def watched(folder: Path) -> Iterator[Callable[[], list[str]]]:
    """What happened in `outside` since the last look: opened or read, by whatever code of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    in_access, in_open, in_nonblock = 0x1, 0x20, 0x800
    descriptor = libc.inotify_init1(in_nonblock)
    assert descriptor >= 0
    assert libc.inotify_add_watch(descriptor, os.fsencode(outside(folder).parent), in_access | in_open) >= 0

    def look() -> list[str]:
        try:
            events = os.read(descriptor, 65536)
        except BlockingIOError:
            return []
        names, at = [], 0
        while at < len(events):
            _, _, _, length = struct.unpack_from("iIII", events, at)
            names.append(events[at + 16 : at + 16 + length].rstrip(b"\0").decode())
            at += 16 + length
        return names

    yield look
    os.close(descriptor)


def test_the_watch_sees_a_read(folder: Path, watched: Callable[[], list[str]]) -> None:
    assert outside(folder).read_bytes() == SECRET
    assert "secret.bin" in watched()


@pytest.mark.parametrize(("writer", "error", "words"), [row[1:] for row in ROWS], ids=IDS)
def test_refuses(writer, error, words, folder, watched):
    source = writer(folder)
    watched()
    with pytest.raises(error) as caught:
        load(source)  # type: ignore[arg-type]
    assert watched() == []
    assert type(caught.value) is error
    message = str(caught.value)
    assert "cannot load" in message
    assert [word for word in words if word not in message] == []
    assert SECRET.decode() not in message
    if isinstance(caught.value, (ModelError, UnsupportedOpError)):
        assert caught.value.problems


def test_tells_all_that_the_guards_see_at_once() -> None:
    made = model(
        node("Softmax", "x", "y", axis=1 << 40), node("Einsum", "x", "z", equation="....a->a"), out="y z"
    )
    made.graph.initializer.append(TensorProto(name="w", data_type=77))
    made.graph.initializer.append(TensorProto(name="v", data_type=1, dims=[3], float_data=[1.0]))
    with pytest.raises(ModelError) as caught:
        load(made)
    told = "\n".join(caught.value.problems)
    for word in ("the_softmax", "the_einsum", "'w'", "77", "'v'"):
        assert word in told


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        (Limits(nodes=1), "Limits.nodes"),
        (Limits(value_bytes=8), "Limits.value_bytes"),
    ],
)
def test_limits_name_themselves(limits: Limits, word: str) -> None:
    made = model(node("Relu", "w", "r"), node("Add", "x r", "y"), weights=(array("w", [1, 2, 3, 4]),))
    with pytest.raises(ModelError, match=word):
        load(made, limits=limits)


def test_plans_of_other_tools_are_left_out() -> None:
    made = model(node("Relu", "x", "y"))
    made.configuration.add(name="pair", num_devices=2)
    told = made.graph.node[0].device_configurations.add(configuration_id="pair")
    for name in ("x", "ghost"):
        for _ in range(20_000):
            told.sharding_spec.add(tensor_name=name)
    loaded = load(made)
    assert [value.name for value in loaded.model.graph.outputs] == ["y"]
    assert not loaded.model.device_configurations
    assert not any(node.device_configurations for node in loaded.model.graph)


CHILD = """
import json, pathlib, resource, sys
from tests.graph.model.test_hostile import ROWS, make_folder
from dask_ferro.errors import InputError, ModelError, UnsupportedOpError
from dask_ferro.graph.model.load import load

work = pathlib.Path(sys.argv[1])
cases = [(row[0], row[1](make_folder(work / str(i)))) for i, row in enumerate(ROWS)]
size = 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize")))
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30), resource.RLIM_INFINITY))
for name, source in cases:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        load(source)
        error = "none"
    except (InputError, ModelError, UnsupportedOpError) as caught:
        error = type(caught).__name__
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([name, error, grown / 1024]), flush=True)
"""


def make_folder(root: Path) -> Path:
    """What the fixture `folder` gives, for the process of `test_memory_stays_bounded`."""
    for name in ("outside", "model"):
        (root / name).mkdir(parents=True)
    outside(root / "model").write_bytes(SECRET)
    return root / "model"


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """All rows again in a process that may take 1 GiB more than it has; none may take more than 100 MiB."""
    child = ran([sys.executable, "-c", CHILD, str(tmp_path)], cwd=Path(__file__).parents[3])
    rows = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0, child.stderr[-2000:]
    assert [(name, error) for name, error, _ in rows] == [(row[0], row[2].__name__) for row in ROWS]
    assert [(name, mib) for name, _, mib in rows if mib > 100] == []
