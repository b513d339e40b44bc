"""Random graphs give what onnx.reference gives, whatever is asked for and wherever they are cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from dask_ferro.engines import array

OPSET = 21
# Continuous: none magnifies a rounding.
UNARY = ("Relu", "Neg", "Abs", "Tanh", "Sigmoid", "Softplus", "Identity")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")
MOVES = (
    "Transpose", "Flatten", "Unsqueeze", "Slice", "Gather", "Split", "ReduceSum", "ReduceMax", "Softmax", "Concat",
)  # fmt: skip


class Drawn(NamedTuple):
    """A random graph: nodes, weights by name, and every value's shape."""

    nodes: list[Any]
    weights: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]


@st.composite
def graphs(draw: st.DrawFn) -> Drawn:
    """Up to 12 nodes over inputs `a` and `b`; shapes are followed along, so that every graph is valid."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    drawn = Drawn([], {}, {"a": shape, "b": shape})
    for i in range(draw(st.integers(1, 12))):
        _grow(draw, drawn, f"n{i}")
    return drawn


def _grow(draw: st.DrawFn, graph: Drawn, name: str) -> None:
    x = draw(st.sampled_from(sorted(graph.shapes)))
    shape = graph.shapes[x]
    kind = draw(st.sampled_from(["unary", "binary", "move", "where"]))
    if kind == "unary":
        _add(graph, draw(st.sampled_from(UNARY)), [x], name, shape)
    elif kind == "binary":
        fits = [v for v, s in sorted(graph.shapes.items()) if s == shape or s == (1,) * len(s)]
        y = draw(st.sampled_from(fits))
        _add(graph, draw(st.sampled_from(BINARY)), [x, y], name, np.broadcast_shapes(shape, graph.shapes[y]))
    elif kind == "where":
        other = "a" if shape == graph.shapes["a"] else x
        graph.nodes.append(helper.make_node("Less", [x, other], [f"{name}_less"]))
        _add(graph, "Where", [f"{name}_less", x, x], name, shape)
    elif shape:
        _move(draw, graph, name, x, draw(st.sampled_from(MOVES)))


def _move(draw: st.DrawFn, graph: Drawn, name: str, x: str, op: str) -> None:
    shape = graph.shapes[x]
    rank = len(shape)
    axis = draw(st.integers(0, rank - 1))
    signed = draw(st.sampled_from([axis, axis - rank]))
    size = shape[axis]
    if op == "Transpose":
        order = draw(st.permutations(range(rank)))
        _add(graph, op, [x], name, tuple(shape[i] for i in order), perm=list(order))
    elif op == "Flatten":
        rows = int(np.prod(shape[:axis], dtype=int))
        _add(graph, op, [x], name, (rows, int(np.prod(shape[axis:], dtype=int))), axis=signed)
    elif op == "Unsqueeze":
        _add(graph, op, [x, _weight(graph, name, [axis])], name, (*shape[:axis], 1, *shape[axis:]))
    elif op == "Slice":
        start, stop = sorted(draw(st.tuples(st.integers(0, size - 1), st.integers(1, 9))))
        stop = max(stop, start + 1)
        bounds = [_weight(graph, f"{name}_{i}", [n]) for i, n in enumerate((start, stop, signed))]
        _add(graph, op, [x, *bounds], name, (*shape[:axis], min(stop, size) - start, *shape[axis + 1 :]))
    elif op == "Gather":
        index = draw(st.integers(-size, size - 1))
        left = (*shape[:axis], *shape[axis + 1 :])
        _add(graph, op, [x, _weight(graph, name, index)], name, left, axis=signed)
    elif op == "Split":
        first = draw(st.integers(0, size))
        sizes = _weight(graph, name, [first, size - first])
        graph.nodes.append(helper.make_node(op, [x, sizes], [f"{name}_head", name], axis=signed))
        graph.shapes[name] = (*shape[:axis], size - first, *shape[axis + 1 :])
        if size == first:
            del graph.shapes[name]  # nothing is left: maxima of it are undefined
    elif op in ("ReduceSum", "ReduceMax"):
        kept = draw(st.booleans())
        left = (*shape[:axis], *([1] if kept else []), *shape[axis + 1 :])
        _add(graph, op, [x, _weight(graph, name, [signed])], name, left, keepdims=int(kept))
    elif op == "Softmax":
        _add(graph, op, [x], name, shape, axis=signed)
    elif op == "Concat":
        _add(graph, op, [x, x], name, (*shape[:axis], 2 * size, *shape[axis + 1 :]), axis=signed)


def _add(graph: Drawn, op: str, inputs: list[str], name: str, shape: Any, **attributes: Any) -> None:
    if np.prod(shape, dtype=int) <= 256:  # keep them small
        graph.nodes.append(helper.make_node(op, inputs, [name], name, **attributes))
        graph.shapes[name] = shape


def _weight(graph: Drawn, name: str, value: Any) -> str:
    graph.weights[f"{name}_w"] = np.array(value, np.int64)
    return f"{name}_w"


def _model(graph: Drawn, outputs: list[str]) -> Any:
    inputs = [helper.make_tensor_value_info(n, 1, graph.shapes[n]) for n in ("a", "b")]
    results = [helper.make_tensor_value_info(n, 1, graph.shapes[n]) for n in outputs]
    weights = [numpy_helper.from_array(w, n) for n, w in graph.weights.items()]
    body = helper.make_graph(graph.nodes, "g", inputs, results, weights)
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


@settings(deadline=None, max_examples=150)
@given(graphs(), st.data())
def test_random_graphs_equal_the_reference(graph: Drawn, data: st.DataObject) -> None:
    made = sorted(set(graph.shapes) - {"a", "b"})
    outputs = data.draw(st.lists(st.sampled_from(made), min_size=1, max_size=4, unique=True)) if made else []
    late = data.draw(st.sets(st.sampled_from(sorted(graph.weights)))) if graph.weights else set()
    model = ir.from_proto(_model(graph, outputs))
    rng = np.random.default_rng(0)
    feeds = {n: rng.uniform(-2, 2, graph.shapes[n]).astype(np.float32) for n in ("a", "b")}
    weights = {n: ir.tensor(w, name=n) for n, w in graph.weights.items() if n not in late}
    feeds |= {n: graph.weights[n] for n in late}

    whole = array.Program(list(model.graph), list(feeds), outputs, opset=OPSET, weights=weights)
    got = whole(*feeds.values())
    wanted: Any = ReferenceEvaluator(_model(graph, outputs)).run(None, {n: feeds[n] for n in ("a", "b")})
    for name, y, z in zip(outputs, got, wanted, strict=True):
        assert y.shape == graph.shapes[name]
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5)

    cut = data.draw(st.integers(0, len(graph.nodes)))
    for y, z in zip(_in_two(model, cut, feeds, outputs, weights), got, strict=True):
        np.testing.assert_array_equal(y, z)


def _in_two(model: ir.Model, cut: int, feeds: dict[str, Any], outputs: list[str], weights: Any) -> Any:
    """The same by two programs, the nodes before `cut` and those after it."""
    nodes = list(model.graph)
    crossing = [str(v.name) for n in nodes[:cut] for v in n.outputs]
    first = array.Program(nodes[:cut], list(feeds), crossing, opset=OPSET, weights=weights)
    values = feeds | dict(zip(crossing, first(*feeds.values()), strict=True))
    second = array.Program(nodes[cut:], list(values), outputs, opset=OPSET, weights=weights)
    return second(*values.values())
