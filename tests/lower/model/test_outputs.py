"""`from_onnx(outputs=)`: some of a model's outputs, however the model is called, and nothing that only others need."""

from __future__ import annotations

import itertools
import pickle

import dask
import dask.array as da
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import dask_ferro as ff
from dask_ferro.graph.model.load import load
from dask_ferro.lower.worker import models
from tests.each import each
from tests.graphs import close, diamond, diamond_reference, written

X = np.random.default_rng(1).standard_normal((10, 4), dtype=np.float32)
WANTED = diamond_reference(X)
# Names as given, and as the result has them.
SELECTIONS = {
    "one": ("b1", ["b1"]),
    "one in a list": (["total"], ["total"]),
    "two": (["b2", "total"], ["b2", "total"]),
}
CALLS = {
    "numpy": lambda model: model(X),
    "by name": lambda model: model({"x": X}),
    "batch": lambda model: model(X, batch_size=3),
    "dask": lambda model: model(da.from_array(X, chunks=(4, 4))),
    "dask, rechunked": lambda model: model(da.from_array(X, chunks=(2, 2)), batch_size=5),
    "delayed": lambda model: model(dask.delayed(X)),
}


@pytest.fixture
def path(tmp_path):
    onnx.save(diamond(), tmp_path / "diamond.onnx")
    return str(tmp_path / "diamond.onnx")


def assert_selected(got, names):
    """Assert that a value, or a dict of values by name, is what these outputs are."""
    if isinstance(got, dict):
        assert list(got) == names
    else:
        assert len(names) == 1
        got = {names[0]: got}
    for name in names:
        close(got[name], WANTED[name])


@pytest.mark.parametrize("selection", SELECTIONS)
def test_however_it_is_called(selection):
    given, names = SELECTIONS[selection]

    def is_selected(row):
        call, granularity = row
        made = CALLS[call](ff.from_onnx(diamond(), outputs=given, granularity=granularity))
        assert_selected(made.compute(scheduler="sync"), names)

    each(itertools.product(CALLS, ["auto", "op", "model"]), is_selected)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_predict_and_pickling(path, selection):
    given, names = SELECTIONS[selection]
    sources = {"path": path, "bytes": diamond().SerializeToString(), "proto": diamond()}

    def is_selected(row):
        source, is_pickled = row
        model = ff.from_onnx(sources[source], outputs=given)
        model = pickle.loads(pickle.dumps(model)) if is_pickled else model
        assert list(model.outputs) == names
        assert_selected(model.predict(X), names)
        assert_selected(model(X, batch_size=4).compute(scheduler="sync"), names)

    each(itertools.product(sources, [False, True]), is_selected)


def test_the_graph_has_only_what_it_needs():
    model = ff.from_onnx(diamond(), outputs="b1", granularity="op")
    assert model.ops == {"Relu": 1, "Sin": 1, "Mul": 1}
    assert len(model.planned(X).bundles) == 3
    assert "outputs   b1: float32[N, 4]\n" in repr(model)
    assert "b0" not in repr(model)


def test_selections_have_keys_of_their_own_and_share_no_session(path):
    models = [ff.from_onnx(path, outputs=o) for o in (None, "b0", "b1", ["b1", "b0"], ["b0", "b1"])]
    assert len({m.digest for m in models}) == len(models)
    keys = [set(m(X).__dask_graph__()) for m in models]
    assert len(set().union(*keys)) == sum(map(len, keys))
    for _ in range(2):
        for model in models:
            assert_selected(model.predict(X), list(model.outputs))


def test_a_pickled_selection_tells_a_file_that_has_no_such_output_any_more(path):
    sent = pickle.dumps(ff.from_onnx(path, outputs="b1"))
    models._models.trim(0)  # as in another process
    onnx.save(diamond(1), path)
    with pytest.raises(
        ff.InputError, match=r"changed after it was opened, and cannot be loaded any more: .*'b1'"
    ):
        pickle.loads(sent)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        pytest.param("nope", r"names 'nope', wanted some of its outputs: 'total', 'b0', 'b1' and 'b2'$", id="unknown"),
        pytest.param(["b0", "a1"], r"'a1' is a value of the graph, and only outputs can be requested", id="inside"),
        pytest.param("x", r"'x' is a value of the graph", id="an input"),
        pytest.param([], r"outputs=\[\]: wanted at least one name; leave outputs= out", id="none"),
        pytest.param(["b0", "b0"], r"'b0' more than once", id="twice"),
        pytest.param(3, r"outputs=3: wanted the name of an output", id="a number"),
        pytest.param([3], r"outputs=\[3\]: wanted the name of an output", id="numbers"),
    ],
)  # fmt: skip
def test_what_is_no_selection_is_refused(outputs, words):
    with pytest.raises(ff.InputError, match=words):
        ff.from_onnx(diamond(), outputs=outputs)


# ---- what only other outputs need is not even checked --------------------------------------------------------


def with_more(*nodes, outputs, functions=(), inputs=()):
    """Return a model x -> y = Relu(x) with more nodes and outputs."""
    made = written("(float[N,4] x) => (float[N,4] y) { y = Relu (x) }")
    made.graph.node.extend(nodes)
    made.graph.input.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 4]) for n in inputs)
    made.graph.output.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs)
    made.functions.extend(functions)
    made.opset_import.append(helper.make_opsetid("com.example", 1))
    return made


FUNCTION = helper.make_function(
    "com.example",
    "Wrap",
    ["i"],
    ["o"],
    [helper.make_node("Foo", ["i"], ["o"])],
    [helper.make_opsetid("", 21)],
)
OTHERS = {
    "an operator of another domain": with_more(
        helper.make_node("Foo", ["x"], ["z"], domain="com.example"), outputs=["z"]
    ),
    "an operator that ONNX lacks": with_more(helper.make_node("Foo", ["x"], ["z"]), outputs=["z"]),
    "a function of such": with_more(
        helper.make_node("Wrap", ["x"], ["z"], domain="com.example"), outputs=["z"], functions=[FUNCTION]
    ),
    "nodes in a circle": with_more(
        helper.make_node("Relu", ["w"], ["z"]), helper.make_node("Relu", ["z"], ["w"]), outputs=["z"]
    ),
    "a value that is defined nowhere": with_more(helper.make_node("Relu", ["gone"], ["z"]), outputs=["z"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_fault_that_only_another_output_needs_is_none(name):
    with pytest.raises((ff.ModelError, ff.UnsupportedOpError)):
        ff.from_onnx(OTHERS[name])
    with pytest.raises((ff.ModelError, ff.UnsupportedOpError)):
        ff.from_onnx(OTHERS[name], outputs="z")
    model = ff.from_onnx(OTHERS[name], outputs="y")
    close(model(X).compute(scheduler="sync"), np.maximum(X, 0))
    close(pickle.loads(pickle.dumps(model)).predict(X), np.maximum(X, 0))


def test_inputs_and_weights_that_only_other_outputs_need_are_not_passed():
    made = with_more(helper.make_node("Add", ["k", "w"], ["z"]), outputs=["z"], inputs=["k"])
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "w"))
    assert list(ff.from_onnx(made, outputs="y").inputs) == ["x"]
    assert load(made, outputs="y").weight_bytes == 0
    both = ff.from_onnx(made, outputs="z")
    assert list(both.inputs) == ["k"]
    close(both.predict(X), X + 1)


def test_an_input_that_nothing_reads_stays():
    made = with_more(helper.make_node("Relu", ["x"], ["z"]), outputs=["z"], inputs=["unused"])
    assert list(ff.from_onnx(made, outputs="z").inputs) == ["x", "unused"]


def test_a_value_that_a_body_takes_from_outside_is_needed():
    made = written(
        "(float[N,4] x, bool c) => (float[N,4] y, float[N,4] z) {"
        " a = Neg (x) z = Exp (x)"
        " y = If (c) <then_branch = t () => (float[N,4] p) { p = Relu (a) },"
        " else_branch = e () => (float[N,4] q) { q = Identity (a) }> }"
    )
    model = ff.from_onnx(made, outputs="y")
    assert "Exp" not in model.ops
    close(model.predict({"x": X, "c": np.array(True)}), np.maximum(-X, 0))


def test_an_output_that_another_needs_is_computed_and_not_returned():
    made = written("(float[N,4] x) => (float[N,4] y, float[N,4] z) { y = Relu (x) z = Neg (y) }")
    close(ff.from_onnx(made, outputs="z").predict(X), -np.maximum(X, 0))
