"""Which models' rows depend on each other: small graphs, as claims."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, parser

from dask_ferro.graph.batch_independence import dependence
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.model.load import load
from tests.each import every
from tests.graphs import model

ROWS, OTHER_ROWS = 251, 509


def ints(*numbers):
    return np.array(numbers, np.int64)


def ones(*shape):
    return np.ones(shape, np.float32)


# Weights by name; a model has those that it reads.
WEIGHTS = {
    **{f"v{n}": ints(n) for n in (0, 1, 2)},
    "s0": np.array(0, np.int64),
    "f0": np.float32(0),
    "f1": np.float32(1),
    "b": ones(4),
    "wide": ones(1, 4, 4),
    "twice": ints(2, 1),
    "both": ints(0, 1),
}


def written(text, shape, declared, weights):
    """Return the loaded model of nodes in ONNX's text form, from `x`, with the weights that they read."""
    nodes = parser.parse_graph(f"g () => () {{ {text} }}").node
    read = {name for one in nodes for name in one.input}
    held = {name: np.asarray(value) for name, value in (WEIGHTS | weights).items() if name in read}
    proto = model(nodes, {"x": list(shape)}, declared, held, opset=17)
    for output in proto.graph.output:
        if declared[output.name] is None:
            output.type.tensor_type.elem_type = TensorProto.UNDEFINED
    return load(proto).model


def found(text, shape=("N", 4), *, outputs=("y",), **weights):
    """Return what `dependence` finds of `x` [*shape]: whether sure, by output."""
    loaded = written(text, shape, dict.fromkeys(outputs), weights)
    types, others = (infer(loaded, shapes={"x": [rows, *shape[1:]]}) for rows in (ROWS, OTHER_ROWS))
    return {name: (f.sure, f.why) for name, f in dependence(loaded, types, others, ["x"], ROWS).items()}


SURE = {
    "a mean over the rows is subtracted": "m = ReduceMean <axes = [0], keepdims = 1> (x) y = Sub (x, m)",
    "a sum over all axes is subtracted": "m = ReduceSum <keepdims = 1> (x) y = Sub (x, m)",
    "a softmax runs over the rows": "y = Softmax <axis = 0> (x)",
    "a sum runs along the rows": "y = CumSum (x, s0)",
    "each row is multiplied with each": "t = Transpose (x) y = MatMul (x, t)",
    "each row is subtracted from each": "p = Unsqueeze (x, v1) q = Unsqueeze (x, v0) y = Sub (p, q)",
    "the largest rows are taken": "y, i = TopK <axis = 0> (x, v2)",
    "the statistics are those of the batch": "y, m, v = BatchNormalization <training_mode = 1> (x, b, b, b, b)",
    "a softmax runs over the rows of a transposed value":
        "t = Transpose (x) s = Softmax <axis = 1> (t) y = Transpose (s)",
    "the first row is added": "f = Gather <axis = 0> (x, v0) y = Add (x, f)",
    "the first two rows are taken": "y = Slice (x, v0, v2, v0)",
    "the rows are divided by their number": "t = Shape (x) n = Gather (t, s0) f = Cast <to = 1> (n) y = Div (x, f)",
    "the output has the rows on axis 1": "y = Transpose (x)",
    "the output is a shape": "y = Shape (x)",
}  # fmt: skip


@every("case", SURE)
def test_rows_surely_depend_on_each_other_when(case):
    (sure, why) = found(SURE[case])["y"]
    assert sure, why


OF_ANY_SIZE = {
    "distinct rows": "y = Unique <axis = 0> (x)",
    "distinct columns": "y = Unique <axis = 1> (x)",
    "distinct elements": "y = Unique (x)",
    "what is not zero": "y = NonZero (x)",
    "boxes that overlap little": "y = NonMaxSuppression (boxes, x)",
    "rows that are picked": "y = Compress <axis = 0> (x, all)",
    "rows picked from behind": "y = Compress <axis = -2> (x, all)",
    "elements that are picked": "y = Compress (x, all)",
}


@every("what", OF_ANY_SIZE)
def test_rows_surely_depend_on_each_other_though_the_size_is_known_only_when_it_runs(what):
    before = "all = Greater (b, b) boxes = Identity (wide) "
    shape = ("N", 1, 4) if "boxes" in what else ("N", 4)
    (sure, why) = found(before + OF_ANY_SIZE[what], shape)["y"]
    assert sure, why


def test_indices_of_a_pool_count_through_all_rows_and_its_values_do_not():
    got = found("y, i = MaxPool <kernel_shape = [2,2]> (x)", ("N", 1, 4, 4), outputs=("y", "i"))
    assert list(got) == ["i"]
    assert got["i"][0]


def test_each_row_beside_each_column_combines_them():
    (sure, why) = found("t = Transpose (x) y = PRelu (x, t)", ("N", ROWS))["y"]
    assert sure
    assert why == "node 'PRelu:y' (PRelu) combines each of them with the others"


UNSURE = {
    "a branch": "s = ReduceSum <keepdims = 0> (b) c = Greater (s, f0)"
        " y = If (c) <then_branch = t () => (r) { r = Relu (x) }, else_branch = e () => (r) { r = Neg (x) }>",
    "rows by indices of any number": "z = NonZero (b) some = Squeeze (z, v0) y = Gather (x, some)",
    "as many of the largest as are not zero": "z = NonZero (b) s = Shape (z) many = Slice (s, v1, v2, v0)"
        " y, i = TopK <axis = 0> (x, many)",
    "rows after rows": "y = Concat <axis = 0> (x, x)",
    "rows up to their number": "s = Shape (x) n = Gather (s, v0) y = Slice (x, v0, n, v0)",
}  # fmt: skip


@every("what", UNSURE)
def test_a_trial_decides_on(what):
    (sure, why) = found(UNSURE[what])["y"]
    assert not sure, why


def test_what_no_output_needs_is_not_asked():
    assert found("dead = Softmax <axis = 0> (x) y = Relu (x)") == {}


@pytest.mark.parametrize("call", ["Slice (x, v0, v2, v0)", "Tile (x, twice)", "Gather (x, both)"])
def test_what_is_declared_is_not_believed(call):
    """The output is declared to be as many rows, whatever the node gives."""
    loaded = written(f"y = {call}", ("N", 4), {"y": ["N", 4]}, {})
    probes = (infer(loaded, shapes={"x": [rows, 4]}, trusts_declared=False) for rows in (ROWS, OTHER_ROWS))
    assert dependence(loaded, *probes, ["x"], ROWS)["y"].sure


@pytest.mark.parametrize(("starts", "ends"), [(0, 300), (-300, 2**62), (0, ROWS), (0, 2**31 - 2)])
def test_a_slice_longer_than_the_probe_is_a_slice(starts, ends):
    sure, why = found("y = Slice (x, from, to, v0)", **{"from": ints(starts), "to": ints(ends)})["y"]
    assert sure, why


@pytest.mark.parametrize("ends", [2**31 - 1, 2**62, 2**63 - 1])
def test_a_slice_to_the_end_is_none(ends):
    assert found("y = Slice (x, v0, to, v0)", to=ints(ends)) == {}
