"""Dropout: the generator's bits, on every engine, cut and sharded; its gradient, and what it refuses."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dask_ferro.errors import InputError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.regions import region
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.emit import to_model
from dask_ferro.graph.tensor.tensor import Tensor, input
from tests.each import every
from tests.graph.sharding.shard_run import evaluate_sharded

from .runs import by_onnxruntime, by_reference, values

MASK = 2**64 - 1
SHAPE = (8, 6, 4)
X = np.random.default_rng(2).standard_normal(SHAPE)


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def _squares(counter: int, key: int) -> int:
    """squares64 of arXiv:2004.06278, section 5, in Python's integers."""
    x = y = counter * key & MASK
    z = y + key & MASK
    for more in (y, z, y, z):
        t = x * x + more & MASK
        x = t >> 32 | t << 32 & MASK
    return t ^ (x * x + y & MASK) >> 32


def kept(shape: tuple[int, ...], rate: float, seed: int, layer: int | str, step: int = 0) -> np.ndarray:
    """Which elements a dropout keeps, one by one."""
    golden = 0x9E3779B97F4A7C15
    told = int.from_bytes(hashlib.blake2b(str(layer).encode(), digest_size=8).digest(), "little")
    key = _mix(_mix(seed + golden & MASK) ^ told)
    key = _mix(key + step * golden & MASK) | 1
    columns = shape[-1] if shape else 1
    groups = -(-columns // 64) * 16
    found = []
    for number in range(int(np.prod(shape))):
        row, column = divmod(number, columns)
        block, inside = divmod(column, 64)
        lane, place = divmod(inside, 16)
        bits = _squares(row * groups + block * 16 + place, key) >> 16 * lane & 0xFFFF
        found.append(bits >= round(rate * 65536))
    return np.reshape(found, shape)


# What 1 - 0.4 is, in parts of 2 ** 16.
LEFT = 1 - 26214 / 65536


def dropped(x: Tensor, p: float = 0.4, **options: Any) -> Tensor:
    return nn.dropout(x, p, **{"seed": 11, "layer": "a", **options})


def test_splitmix_is_the_published_one():
    # The first output of SplitMix64 with seed 1234567 (Vigna's splitmix64.c).
    assert _mix(1234567 + 0x9E3779B97F4A7C15 & MASK) == 6457827717110365317


@every(
    ("shape", "names"),
    [
        ((), ()),
        ((7,), ("N",)),
        (SHAPE, ("N", 6, 4)),
        (SHAPE, SHAPE),
        (SHAPE, ("N", "T", 4)),
        (SHAPE, ("N", None, 4)),
        (SHAPE, ("N", 6, "D")),
        ((3, 2, 6), (3, "T", 6)),
        ((2, 130), ("N", 130)),
        ((3, 128), ("N", 128)),
        ((2, 3, 64), ("N", "T", 64)),
        ((2, 3, 64), ("N", "T", "D")),
    ],
    ids=["a scalar", "a vector", "a batch", "sizes", "names", "an unknown size", "an open last dimension",
         "columns of six", "two blocks and a rest", "two blocks", "blocks and names", "an unknown number of blocks"],
)  # fmt: skip
def test_the_bits_are_those_of_squares(shape, names):
    data = np.ones(shape)
    for step in (0, 3, 2**40):
        y = dropped(input("x", names, np.float64), step=step)
        wanted = np.where(kept(shape, 0.4, 11, "a", step), data / LEFT, 0.0)
        np.testing.assert_allclose(values(y, {"x": data})["y"], wanted, rtol=1e-15, err_msg=f"step {step}")


def test_a_seed_and_a_step_that_are_inputs_give_the_same():
    x = input("x", ("N", 6, 4))
    y = dropped(x, seed=input("seed", (), np.int64), step=input("step", (), np.int32))
    feeds = {"x": X.astype(np.float32), "seed": np.asarray(-5), "step": np.asarray(9, np.int32)}
    wanted = np.where(kept(SHAPE, 0.4, -5, "a", 9), feeds["x"] / np.float32(LEFT), np.float32(0))
    for found in (values(y, feeds), by_onnxruntime(y, feeds), by_reference(to_model(y), feeds)):
        np.testing.assert_allclose(found["y"], wanted, rtol=1e-6)
        np.testing.assert_array_equal(found["y"] == 0, wanted == 0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_drops_the_same(dtype):
    data = np.ones(SHAPE, dtype)
    y = dropped(input("x", SHAPE, dtype))
    assert y.type.dtype.numpy() == dtype
    found = by_reference(to_model(y), {"x": data})["y"]
    np.testing.assert_array_equal(found != 0, kept(SHAPE, 0.4, 11, "a"))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_for_and_neighbours_are_independent(rate):
    x = input("x", (200, 300), np.float64)
    masks = {name: dropped(x, rate, layer=name) for name in "ab"} | {"c": dropped(x, rate, layer="a", step=1)}
    found = {name: y == 0 for name, y in values(masks, {"x": np.ones((200, 300))}).items()}
    # Five standard deviations of 60,000 draws.
    bound = 5 * np.sqrt(rate * (1 - rate) / 60_000)
    for mask in found.values():
        assert abs(mask.mean() - rate) < bound
    pairs = {
        "along a row": (found["a"][:, 1:], found["a"][:, :-1]),
        "along a column": (found["a"][1:], found["a"][:-1]),
        "of two layers": (found["a"], found["b"]),
        "of two steps": (found["a"], found["c"]),
    }
    for name, (one, other) in pairs.items():
        both = (one & other).mean()
        assert abs(both - rate * rate) < 5 * np.sqrt(rate * rate * (1 - rate * rate) / one.size), name


def test_rates_of_0_and_1():
    x = input("x", SHAPE, np.float64)
    assert dropped(x, 0.0) is x
    assert not values(dropped(x, 1.0), {"x": X})["y"].any()


def test_a_gradient_passes_where_an_element_is_kept():
    x = input("x", SHAPE, np.float64)
    found = values({"g": grad((dropped(x) * x).sum(), x)}, {"x": X}, [x])["g"]
    np.testing.assert_allclose(found, np.where(kept(SHAPE, 0.4, 11, "a"), 2 * X / LEFT, 0), rtol=1e-14)


# ---- parts: by chunks, and on ranks -------------------------------------------------------------------------


def test_micro_batches_with_their_rows_drop_what_the_whole_batch_does():
    x, rows = input("x", ("N", 6, 4), np.float64), input("rows", ("N",), np.int64)
    y = dropped(x, rows=rows)
    parts = [values(y, {"x": X[i : i + 3], "rows": np.arange(i, min(i + 3, 8))})["y"] for i in (0, 3, 6)]
    np.testing.assert_array_equal(np.concatenate(parts), values(dropped(x), {"x": X})["y"])


def training(options: dict[str, Any] | None = None) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    x, w = input("x", (8, 6), np.float64), input("w", (6, 128), np.float64)
    with region("layer"):
        h = dropped(nn.relu(x @ w), **(options or {}))
    loss = (h * h).sum()
    rng = np.random.default_rng(3)
    feeds = {"x": rng.standard_normal((8, 6)), "w": rng.standard_normal((6, 128))}
    return {"h": h, "loss": loss, "dx": grad(loss, x), "dw": grad(loss, w)}, feeds


PLANS = {
    "data": {"mesh": {"data": 2}, "inputs": {"x": 0}},
    "data, 4 ranks": {"mesh": {"data": 4}, "inputs": {"x": 0}},
    "columns": {"layer": {"shard": {"w": 1}, "workers": [0, 1]}},
    "rows of the weight": {"layer": {"shard": {"w": 0}, "workers": [0, 1]}},
    "data and columns": {"mesh": {"data": 2, "tensor": 2}, "inputs": {"x": {"data": 0}},
        "layer": {"shard": {"w": {"tensor": 1}}}},
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_ranks_drop_what_one_process_does(name):
    outputs, feeds = training()
    whole = values(outputs, feeds)
    found = evaluate_sharded(apply_plan(to_model(outputs), PLANS[name]).spmd(), feeds)
    np.testing.assert_array_equal(found["h"] == 0, whole["h"] == 0)
    assert 0 < (whole["h"] == 0).sum() < whole["h"].size
    for key, wanted in whole.items():
        np.testing.assert_allclose(found[key], wanted, rtol=1e-12, atol=1e-12, err_msg=key)


@pytest.mark.parametrize(("name", "ranks"), [("data", 2), ("columns", 2), ("data and columns", 4)])
def test_each_rank_draws_the_bits_of_its_part_alone(name, ranks):
    outputs, _ = training()
    spmd = apply_plan(to_model(outputs), PLANS[name]).spmd()
    shifts = [node for node in spmd.model.graph if node.op_type == "BitShift"]
    drawn = {tuple(node.outputs[0].shape.numpy()) for node in shifts}
    # A draw is for four elements.
    assert {int(np.prod(shape)) for shape in drawn} == {8 * 128 // 4 // ranks}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"p": 1.5}, "dropout: p: got 1.5, wanted a number from 0 to 1", id="a p above 1"),
        pytest.param({"seed": 0.5}, "dropout: seed: takes integers", id="a seed that is no integer"),
        pytest.param({"step": [1, 2]}, "dropout: step: got", id="two steps"),
        pytest.param({"rows": np.arange(3)}, "wanted (8,), the number of each row", id="other rows"),
        pytest.param({"rows": np.zeros(8)}, "dropout: rows: takes integers", id="rows in floats"),
    ],
)
def test_is_refused(options, said):
    with pytest.raises(InputError, match=re.escape(said)):
        dropped(input("x", SHAPE), **options)
