"""A value that loses all of its elements inside a model: the same at every granularity, or refused alike."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import dask_ferro as ff
from dask_ferro.engines.selection import route, support
from dask_ferro.graph.model.load import load
from tests.each import each, every
from tests.hostile.zygote import Zygote, zygote

from .empty_models import READERS, WAYS, X, inside, made

GRANULARITIES = ("op", "auto", "model")


@pytest.fixture(scope="module")
def children() -> Iterator[Zygote]:
    with zygote("tests.lower.worker.empty_models") as running:
        yield running


def everywhere(children: Zygote, source: str) -> list[dict[str, Any]]:
    """Return what a model gives at all granularities, which has to be the same, and no process may die of it."""
    ended = children.run(
        "tests.lower.worker.empty_models:computed", source=source, granularities=GRANULARITIES
    )
    assert ended.is_alive, ended
    assert "raised" not in ended.answer, ended
    answers = [ended.answer[granularity] for granularity in GRANULARITIES]
    assert all(answer == answers[0] for answer in answers), ended
    return answers


OFTEN, SELDOM = [], []  # the suite runs two ways of each reader, `make soak` the others
for (i, _reader), (j, _way) in product(enumerate(READERS), enumerate([*WAYS, "in a branch"])):
    (OFTEN if (i + j) % ((len(WAYS) + 1) // 2) == 0 else SELDOM).append((_way, _reader))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the reference's mean of nothing
@pytest.mark.parametrize(
    "rows", [OFTEN, pytest.param(SELDOM, marks=pytest.mark.soak)], ids=["often", "seldom"]
)
def test_it_is_the_same_at_every_granularity(children: Zygote, rows: list[tuple[str, str]]) -> None:
    each(rows, lambda row: same_everywhere(children, *row))


def same_everywhere(children: Zygote, way: str, reader: str) -> None:
    source = inside("sliced", reader) if way == "in a branch" else f"{WAYS[way]} {READERS[reader]}"
    answers = everywhere(children, source)
    wanted = by_reference(source)
    if wanted is not None and "refused" not in answers[0]:
        assert (answers[0]["shape"], answers[0]["dtype"]) == (list(wanted.shape), str(wanted.dtype))
        np.testing.assert_array_equal(np.array(answers[0]["values"], wanted.dtype), wanted.ravel())


# Bodies that read, carry or make a value without elements.
BODIES = {
    "a branch reads it": """s = Slice(x, v9, v99, v0) m = ReduceMax<keepdims=0>(x) c = Greater(m, low)
        y = If(c)<then_branch = t () => (a) { q, a = GRU<hidden_size=3>(s, wg, rg) },
        else_branch = e () => (b) { b = Identity(x) }>""",
    "a loop reads it": """s = Slice(x, v9, v99, v0) t = Transpose<perm=[1,0,2]>(s) n = Squeeze(v2)
        y = Loop(n, yes, t)<body = l (int64 i, bool c, float[A,B,C] z) => (d, w) {
        d = Identity(c) p, q = GRU<hidden_size=3>(z, wg, rg) k = Identity(q) w = Identity(z) }>""",
    "a scan reduces a part": """m = ReduceMax<keepdims=0>(x, v12)
        o, y = Scan<num_scan_inputs=1, body = l (float[A] z, float[B,C] r) => (w, k)
        { w = Identity(z) q = Slice(r, v9, v99, v0) k = ReduceMean<keepdims=0>(q, v0) }>(m, x)""",
    "a loop lets it grow": """s = Slice(x, v9, v99, v0) n = Squeeze(v2)
        y = Loop(n, yes, s)<body = l (int64 i, bool c, float[A,B,C] z) => (d, w)
        { d = Identity(c) w = Concat<axis=0>(z, x) }>""",
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", BODIES)
def test_bodies_are_the_same_at_every_granularity(children: Zygote, name: str) -> None:
    answer, *_ = everywhere(children, BODIES[name])
    wanted = by_reference(BODIES[name])
    if wanted is not None and "refused" not in answer:
        np.testing.assert_array_equal(np.array(answer["values"], wanted.dtype), wanted.ravel())


def by_reference(source: str) -> np.ndarray | None:
    """What onnx's reference gives; None where it cannot compute it."""
    try:
        with np.errstate(all="ignore"):
            return np.asarray(ReferenceEvaluator(made(source)).run(None, {"x": X})[0])
    except Exception:  # noqa: BLE001 - it raises whatever numpy does of nothing
        return None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@every("reader", [*(r for r in READERS if r.startswith("Reduce")), "Einsum", "Unique", "Split"])
def test_what_can_be_computed_of_nothing_is(reader: str) -> None:
    source = f"{WAYS['sliced']} {READERS[reader]}"
    wanted = by_reference(source)
    assert wanted is not None
    got = ff.from_onnx(made(source), granularity="model")(X).compute(scheduler="sync")
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(got, wanted)


# Ordinary models: values that cannot be empty where the inputs are not.  One run of ONNX Runtime each.
WHOLE = {
    "a recurrence over symbolic steps": "y, h = GRU<hidden_size=3>(x, wg, rg)",
    "batch first": "t = Transpose<perm=[1,0,2]>(x) y, h = LSTM<hidden_size=3>(t, wl, rl) z = Squeeze(y, v1)",
    "a mean over symbolic steps": "t = Relu(x) y = ReduceMean(t, v1) z = Neg(y)",
    "the last step": "t = Relu(x) q = Slice(t, m1, vmax, v1) y = ReduceMean(q, v1) z = Neg(y)",
    "all but a part of a known axis": "t = Relu(x) q = Slice(t, v0, v2, v2) y = ReduceMean(q, v2) z = Neg(y)",
    "positions up to a size of a shape":
        "s = Shape(x) n = Gather(s, v1) p = Slice(long, v0, n, v1) t = Add(x, p) y = ReduceMean(t, v1) z = Neg(y)",
    "what is expanded to a shape":
        "s = Shape(x) e = ConstantOfShape(s) t = Add(x, e) u = Relu(t) y = ReduceMean(u, v1)",
    "twice the size": 't = Unsqueeze(x, v1) p = Resize<mode="nearest">(t, , twice) r = Relu(p) y = ReduceMean(r, v2)',
    "windows with padding":
        "t = Unsqueeze(x, v1) p = MaxPool<kernel_shape=[3,3],pads=[1,1,1,1]>(t) r = Relu(p) y = ReduceMean(r, v2)",
    "windows along a known axis, of a batch that is not known":
        "t = Unsqueeze(x, v1) p = MaxPool<kernel_shape=[1,3]>(t) r = Relu(p) y = ReduceMean(r, v2)",
}  # fmt: skip
MORE = {
    "v1": np.array([1]),
    "m1": np.array([-1]),
    "vmax": np.array([2**63 - 1]),
    "twice": np.float32([1, 1, 2, 2]),
    "long": np.ones((1, 512, 4), np.float32),
}


def loaded(source: str) -> onnx.ModelProto:
    model = made(source)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "steps"
    names = {name for node in model.graph.node for name in node.input}
    given = {value.name for value in model.graph.initializer}
    missing = {name: value for name, value in MORE.items() if name in names - given}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in missing.items()
    )
    return load(model).model


@every("name", WHOLE)
def test_ordinary_models_stay_in_one_run(name: str) -> None:
    model = loaded(WHOLE[name])
    rows = support(model)
    nodes = range(len(rows))
    assert [engine for engine, _ in route(rows, nodes)] == ["onnxruntime"]


def test_one_look_is_enough_for_all_that_follows() -> None:
    read = ["s", *(f"m{i}" for i in range(5))]
    layers = [f"a{i} = Relu({name}) m{i} = MatMul(a{i}, square)" for i, name in enumerate(read)]
    source = " ".join([WAYS["sliced"], *layers])
    model = made(source + " y = Neg(m5)")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "square"))
    rows = support(load(model).model)
    assert [engine for engine, _ in route(rows, range(len(rows)))] == ["onnxruntime"] * 2


def test_an_answer_without_steps_is_told_by_its_node() -> None:
    call = ff.from_onnx(made("s = Slice(x, v9, v99, v0) y, h = GRU<hidden_size=3>(s, wg, rg)"))
    with pytest.raises(ff.ConfigError, match=r"GRU.*gets arrays without elements"):
        call(X).compute(scheduler="sync")
