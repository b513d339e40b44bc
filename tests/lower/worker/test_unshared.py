"""Results share no memory with the caller's input, with weights, or with each other, on any scheduler."""

from __future__ import annotations

import itertools

import numpy as np
from onnx import TensorProto, helper

import dask_ferro as ff
from tests.each import every
from tests.graphs import model, written

NODES = {
    "Identity": (["x"], {}, {}, 1),
    "Reshape": (["x", "s"], {}, {"s": np.array([3, 4])}, 1),
    "Flatten": (["x"], {}, {}, 1),
    "Unsqueeze": (["x", "s"], {}, {"s": np.array([0])}, 1),
    "Transpose": (["x"], {}, {}, 1),
    "Slice": (["x", "s", "e"], {}, {"s": np.array([1]), "e": np.array([3])}, 1),
    "Split": (["x"], {"axis": 0, "num_outputs": 2}, {}, 2),
    "Expand": (["x", "s"], {}, {"s": np.array([2, 4, 3])}, 1),
    "Cast": (["x"], {"to": TensorProto.FLOAT}, {}, 1),
    "Dropout": (["x"], {}, {}, 1),
    "Concat": (["x"], {"axis": 0}, {}, 1),
    "Sum": (["x"], {}, {}, 1),
    "Max": (["x"], {}, {}, 1),
    "Clip": (["x"], {}, {}, 1),
    "Tile": (["x", "s"], {}, {"s": np.array([1, 1])}, 1),
    "Pad": (["x", "s"], {}, {"s": np.array([0, 0, 0, 0])}, 1),
    "ReduceSum": (["x"], {"noop_with_empty_axes": 1}, {}, 1),
}


def one_node(op):
    inputs, attributes, weights, count = NODES[op]
    outputs = [f"y{i}" for i in range(count)]
    node = helper.make_node(op, inputs, outputs, **attributes)
    return model([node], {"x": [4, 3]}, dict.fromkeys(outputs), weights)


def arrays_of(result):
    return list(result.values()) if isinstance(result, dict) else [result]


@every("op", NODES)
@every("scheduler", ["sync", "threads"])
def test_a_result_is_not_the_callers_memory(op, scheduler):
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    before = x.copy()
    for granularity in ("op", "model"):
        call = ff.from_onnx(one_node(op), granularity=granularity)(x)
        results = arrays_of(call.compute(scheduler=scheduler))
        for one, other in itertools.combinations([x, *results], 2):
            assert not np.shares_memory(one, other)
        for result in results:
            assert result.flags.writeable
            result[...] = -1
        np.testing.assert_array_equal(x, before)


def test_chains_of_views_and_outputs_that_are_inputs_or_weights_are_copies():
    nodes = "a = Reshape (x, s) b = Transpose (a) y = Identity (b) z = Identity (b) v = Identity (w)"
    weights = {"s": [3, 4], "w": np.ones(5, np.float32)}
    made = written(f"(float[4,3] x) => (y, z, v, float[4,3] x, float[5] w) {{ {nodes} }}", weights)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    for granularity in ("op", "auto", "model"):
        opened = ff.from_onnx(made, granularity=granularity)
        first = opened(x).compute(scheduler="sync")
        for one, other in itertools.combinations([x, *first.values()], 2):
            assert not np.shares_memory(one, other)
        for result in first.values():
            result[...] = -1
        second = opened(x).compute(scheduler="sync")
        assert second["v"].tolist() == second["w"].tolist() == [1] * 5
        np.testing.assert_array_equal(second["x"], np.arange(12, dtype=np.float32).reshape(4, 3))
