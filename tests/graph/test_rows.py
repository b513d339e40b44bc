"""Which models' rows depend on each other: small graphs, as claims."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from dask_ferro.graph.load import load
from dask_ferro.graph.rows import dependence
from dask_ferro.graph.shapes import infer
from tests.graphs import model

ROWS = 251
node = helper.make_node
I64 = np.int64


def found(nodes, shape=("N", 4), *, weights=None, outputs=("y",), opset=17):
    """Return what `dependence` finds of `x` [*shape]: whether sure, by output."""
    proto = model(nodes, {"x": list(shape)}, dict.fromkeys(outputs), weights, opset=opset)
    for output in proto.graph.output:
        output.type.tensor_type.elem_type = TensorProto.UNDEFINED
    loaded = load(proto).model
    types = infer(loaded, shapes={"x": [ROWS, *shape[1:]]})
    return {name: (f.sure, f.why) for name, f in dependence(loaded, types, ["x"], ROWS).items()}


def ints(*numbers):
    return np.array(numbers, I64)


W = np.ones((4, 4), np.float32)
SURE = {
    "a mean over the rows is subtracted": ([node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1),
        node("Sub", ["x", "m"], ["y"])], {}),
    "a sum over all axes is subtracted": ([node("ReduceSum", ["x"], ["m"], keepdims=1),
        node("Sub", ["x", "m"], ["y"])], {}),
    "a softmax runs over the rows": ([node("Softmax", ["x"], ["y"], axis=0)], {}),
    "a sum runs along the rows": ([node("CumSum", ["x", "axis"], ["y"])], {"weights": {"axis": np.array(0, I64)}}),
    "each row is multiplied with each": ([node("Transpose", ["x"], ["t"]), node("MatMul", ["x", "t"], ["y"])], {}),
    "each row is subtracted from each": ([node("Unsqueeze", ["x", "one"], ["a"]),
        node("Unsqueeze", ["x", "zero"], ["b"]), node("Sub", ["a", "b"], ["y"])],
        {"weights": {"one": ints(1), "zero": ints(0)}}),
    "the largest rows are taken": ([node("TopK", ["x", "k"], ["y", "i"], axis=0)], {"weights": {"k": ints(2)}}),
    "the statistics are those of the batch": (
        [node("BatchNormalization", ["x", "s", "s", "s", "s"], ["y", "m", "v"], training_mode=1)],
        {"weights": {"s": np.ones(4, np.float32)}},
    ),
    "a softmax runs over the rows of a transposed value": ([node("Transpose", ["x"], ["t"]),
        node("Softmax", ["t"], ["s"], axis=1), node("Transpose", ["s"], ["y"])], {}),
    "the first row is added": ([node("Gather", ["x", "zero"], ["f"], axis=0), node("Add", ["x", "f"], ["y"])],
        {"weights": {"zero": ints(0)}}),
    "the first two rows are taken": ([node("Slice", ["x", "a", "b", "axis"], ["y"])],
        {"weights": {"a": ints(0), "b": ints(2), "axis": ints(0)}}),
    "the rows are divided by their number": ([node("Shape", ["x"], ["shape"]),
        node("Gather", ["shape", "zero"], ["n"]), node("Cast", ["n"], ["f"], to=TensorProto.FLOAT),
        node("Div", ["x", "f"], ["y"])], {"weights": {"zero": np.array(0, I64)}}),
    "the output has the rows on axis 1": ([node("Transpose", ["x"], ["y"])], {}),
    "the output is a shape": ([node("Shape", ["x"], ["y"])], {}),
}  # fmt: skip
INDEPENDENT = {
    "layers": ([node("MatMul", ["x", "w"], ["h"]), node("Softmax", ["h"], ["y"])], {"weights": {"w": W}}),
    "axes that are moved and moved back": ([node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        node("Reshape", ["t", "flat"], ["f"]), node("MatMul", ["f", "w"], ["h"]),
        node("Reshape", ["h", "back"], ["b"]), node("Transpose", ["b"], ["y"], perm=[1, 0, 2])],
        {"shape": ("N", 5, 4), "weights": {"w": W, "flat": ints(-1, 4), "back": ints(5, -1, 4)}}),
    "heads by a shape that is computed": ([node("Shape", ["x"], ["shape"]), node("Gather", ["shape", "zero"], ["n"]),
        node("Concat", ["n", "rest"], ["wanted"], axis=0), node("Reshape", ["x", "wanted"], ["h"]),
        node("Softmax", ["h"], ["y"])], {"weights": {"zero": ints(0), "rest": ints(2, 2)}}),
    "a division by the root of a width": ([node("Shape", ["x"], ["shape"]), node("Gather", ["shape", "one"], ["d"]),
        node("Cast", ["d"], ["f"], to=TensorProto.FLOAT), node("Sqrt", ["f"], ["r"]), node("Div", ["x", "r"], ["y"])],
        {"weights": {"one": np.array(1, I64)}}),
    "a token for each row": ([node("Shape", ["x"], ["shape"], end=1),
        node("Concat", ["shape", "width"], ["wanted"], axis=0), node("Expand", ["token", "wanted"], ["t"]),
        node("Concat", ["t", "x"], ["y"], axis=1)],
        {"weights": {"width": ints(4), "token": np.ones((1, 4), np.float32)}}),
    "two towers through one layer": ([node("Neg", ["x"], ["n"]), node("Concat", ["x", "n"], ["both"], axis=0),
        node("MatMul", ["both", "w"], ["h"]), node("Split", ["h"], ["a", "b"], axis=0),
        node("Add", ["a", "b"], ["y"])], {"weights": {"w": W}}),
    "given statistics": ([node("BatchNormalization", ["x", "s", "s", "s", "s"], ["y"])],
        {"weights": {"s": np.ones(4, np.float32)}}),
    "an image that is resized": ([node("Resize", ["x", "", "scales"], ["y"])],
        {"shape": ("N", 1, 4, 4), "weights": {"scales": np.array([1, 1, 2, 2], np.float32)}}),
}  # fmt: skip


@pytest.mark.parametrize("case", SURE)
def test_rows_surely_depend_on_each_other_when(case):
    nodes, how = SURE[case]
    (sure, why) = found(nodes, **how)["y"]
    assert sure, why


@pytest.mark.parametrize("case", INDEPENDENT)
def test_rows_are_independent_in(case):
    nodes, how = INDEPENDENT[case]
    assert found(nodes, **how) == {}


COUNT = [node("Shape", ["x"], ["shape"]), node("Gather", ["shape", "zero"], ["n"])]
TAKEN_FOR_ELSE = {
    "how often to repeat": ([node("Expand", ["x", "n"], ["y"])], ("N", 1)),
    "a new axis": ([node("Unsqueeze", ["x", "one"], ["u"]), node("Concat", ["one", "n", "one"], ["w"], axis=0),
        node("Expand", ["u", "w"], ["y"])], ("N", 4)),
    "a length of images": ([node("Concat", ["n", "one", "n", "one"], ["w"], axis=0),
        node("Resize", ["x", "", "", "w"], ["y"])], ("N", 1, 4, 4)),
    "a diagonal": ([node("Trilu", ["x", "n"], ["y"])], ("N", 4, 4)),
    "an axis to add": ([node("Unsqueeze", ["x", "n"], ["y"])], ("N", 4)),
    "an axis to take": ([node("Squeeze", ["x", "n"], ["y"])], ("N", 1, 4)),
    "an axis to sum": ([node("ReduceSum", ["x", "n"], ["y"])], ("N", 4)),
    "a count of copies": ([node("Concat", ["one", "n"], ["w"], axis=0), node("Tile", ["x", "w"], ["y"])], ("N", 4)),
    "a count of the largest": ([node("TopK", ["x", "n"], ["y", "i"])], ("N", 4)),
    "a margin": ([node("Concat", ["zero", "zero", "zero", "n"], ["w"], axis=0), node("Pad", ["x", "w"], ["y"])],
        ("N", 4)),
    "where columns end": ([node("Slice", ["x", "zero", "n", "one"], ["y"])], ("N", 4)),
    "a part of columns": ([node("Concat", ["n", "n"], ["w"], axis=0), node("Split", ["x", "w"], ["y", "z"], axis=1)],
        ("N", 4)),
}  # fmt: skip


@pytest.mark.parametrize("what", TAKEN_FOR_ELSE)
def test_the_number_of_rows_is_surely_taken_for(what):
    nodes, shape = TAKEN_FOR_ELSE[what]
    (sure, why) = found([*COUNT, *nodes], shape, weights={"zero": ints(0), "one": ints(1)})["y"]
    assert sure, why


def test_the_number_of_rows_may_be_the_length_of_their_axis():
    widened = [node("Concat", ["n", "four"], ["w"], axis=0), node("Expand", ["x", "w"], ["y"])]
    resized = [
        node("Concat", ["n", "one", "four", "four"], ["w"], axis=0),
        node("Resize", ["x", "", "", "w"], ["y"]),
    ]
    weights = {"zero": ints(0), "one": ints(1), "four": ints(4)}
    assert found([*COUNT, *widened], ("N", 1), weights={n: weights[n] for n in ("zero", "four")}) == {}
    assert found([*COUNT, *resized], ("N", 1, 2, 2), weights=weights) == {}


@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_a_part_of_the_number_of_rows_is_not_their_number(op):
    nodes = [
        *COUNT,
        node(op, ["n", "two"], ["h"]),
        node("Concat", ["h", "rest"], ["w"], axis=0),
        node("Reshape", ["x", "w"], ["y"]),
    ]
    weights = {"zero": ints(0), "two": ints(2), "rest": ints(-1)}
    assert "has a shape that is not known" in found(nodes, weights=weights)["y"][1]


OF_ANY_SIZE = {
    "distinct rows": node("Unique", ["x"], ["y"], axis=0),
    "distinct columns": node("Unique", ["x"], ["y"], axis=1),
    "distinct elements": node("Unique", ["x"], ["y"]),
    "what is not zero": node("NonZero", ["x"], ["y"]),
    "boxes that overlap little": node("NonMaxSuppression", ["boxes", "x"], ["y"]),
    "rows that are picked": node("Compress", ["x", "all"], ["y"], axis=0),
    "rows picked from behind": node("Compress", ["x", "all"], ["y"], axis=-2),
    "elements that are picked": node("Compress", ["x", "all"], ["y"]),
    "rows by indices of any number": node("Gather", ["x", "some"], ["y"]),
    "as many of the largest as are not zero": node("TopK", ["x", "many"], ["y", "i"], axis=0),
}


@pytest.mark.parametrize("what", OF_ANY_SIZE)
def test_rows_surely_depend_on_each_other_though_the_size_is_known_only_when_it_runs(what):
    before = [
        node("NonZero", ["w"], ["z"]),
        node("Squeeze", ["z", "zero"], ["some"]),
        node("Shape", ["some"], ["many"]),
        node("Greater", ["w", "w"], ["all"]),
        node("Identity", ["wide"], ["boxes"]),
    ]
    weights = {"w": np.ones(4, np.float32), "zero": ints(0), "wide": np.ones((1, 4, 4), np.float32)}
    shape = ("N", 1, 4) if "boxes" in what else ("N", 4)
    (sure, why) = found([*before, OF_ANY_SIZE[what]], shape, weights=weights)["y"]
    assert sure, why


def test_indices_of_a_pool_count_through_all_rows_and_its_values_do_not():
    got = found([node("MaxPool", ["x"], ["y", "i"], kernel_shape=[2, 2])], ("N", 1, 4, 4), outputs=("y", "i"))
    assert list(got) == ["i"]
    assert got["i"][0]


def test_a_body_may_hold_anything():
    flag = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
    bodies = [helper.make_graph([node(op, ["x"], ["r"])], op, [], [flag]) for op in ("Relu", "Neg")]
    nodes = [
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Greater", ["one", "zero"], ["c"]),
        node("If", ["c"], ["y"], then_branch=bodies[0], else_branch=bodies[1], name="branch"),
    ]
    scalars = {"one": np.float32(1), "zero": np.float32(0)}
    sure, why = found(nodes, weights={n: np.array(v) for n, v in scalars.items()})["y"]
    assert not sure
    assert "a value of a body has the name of another" in why


def test_what_no_output_needs_is_not_asked():
    assert found([node("Softmax", ["x"], ["dead"], axis=0), node("Relu", ["x"], ["y"])]) == {}


def wrongly_declared(nodes, *, weights):
    """Return what is found where the output is declared to be as many rows, whatever the nodes give."""
    loaded = load(model(nodes, {"x": ["N", 4]}, {"y": ["N", 4]}, weights, opset=17)).model
    types = infer(loaded, shapes={"x": [ROWS, 4]}, trusts_declared=False)
    return dependence(loaded, types, ["x"], ROWS)


@pytest.mark.parametrize(
    ("op", "more"), [("Slice", ("zero", "two", "zero")), ("Tile", ("twice",)), ("Gather", ("both",))]
)
def test_what_is_declared_is_not_believed(op, more):
    weights = {"zero": ints(0), "two": ints(2), "twice": ints(2, 1), "both": ints(0, 1)}
    found = wrongly_declared([node(op, ["x", *more], ["y"])], weights={n: weights[n] for n in set(more)})
    assert found["y"].sure


@pytest.mark.parametrize(("starts", "ends"), [(0, 300), (-300, 2**62), (0, ROWS), (0, 2**31 - 2)])
def test_a_slice_longer_than_the_probe_is_a_slice(starts, ends):
    weights = {"a": ints(starts), "b": ints(ends), "axis": ints(0)}
    sure, why = found([node("Slice", ["x", "a", "b", "axis"], ["y"])], weights=weights)["y"]
    assert sure, why


@pytest.mark.parametrize("ends", [2**31 - 1, 2**62, 2**63 - 1])
def test_a_slice_to_the_end_is_none(ends):
    weights = {"a": ints(0), "b": ints(ends), "axis": ints(0)}
    assert found([node("Slice", ["x", "a", "b", "axis"], ["y"])], weights=weights) == {}
