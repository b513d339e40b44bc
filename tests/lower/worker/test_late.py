"""Inputs that come late are checked when they are there: byte order, masks, dtypes, ranks and sizes, by name."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
from onnx import TensorProto, helper

import dask_ferro as ff
from tests.clusters import running
from tests.each import every
from tests.graphs import model, written

SCHEDULERS = ("sync", "threads")
WRONG = {
    "big-endian": (lambda: np.ones((2, 3), ">f4"), r"dtype >f4, wanted float32"),
    "masked": (lambda: np.ma.masked_array(np.ones((2, 3), np.float32), [[True, False, False]] * 2), "masked"),
    "double": (lambda: np.ones((2, 3)), "dtype float64, wanted float32"),
    "integers": (lambda: np.ones((2, 3), np.int64), "dtype int64, wanted float32"),
    "too wide": (lambda: np.ones((2, 4), np.float32), "has 4 on axis 1, wanted 3"),
    # An engine would broadcast it.
    "one column": (lambda: np.ones((2, 1), np.float32), "has 1 on axis 1, wanted 3"),
    "too flat": (lambda: np.ones(3, np.float32), "wanted 2 axes"),
    "text": (lambda: "1", "no array|holds|wanted"),
    "nothing": (lambda: None, "NoneType"),
    "frame": (lambda: {"a": 1}, "dict"),
}


def added(batch="N", **kwargs):
    text = f"(float[{batch},3] x) => (float[{batch},3] y) {{ a = Add (x, w) y = Relu (a) }}"
    return ff.from_onnx(written(text, {"w": np.ones((1, 3), np.float32)}), **kwargs)


@every("kind", WRONG)
@every("granularity", ["op", "model"])
def test_a_delayed_value_that_does_not_fit_is_refused_by_name(kind, granularity):
    make, words = WRONG[kind]
    call = added(granularity=granularity)(dask.delayed(make)())
    for scheduler in SCHEDULERS:
        with pytest.raises(ff.InputError, match=f"input 'x'.*({words})"):
            call.compute(scheduler=scheduler)


@pytest.mark.parametrize("kind", ["big-endian", "masked", "double", "integers", "too wide", "one column"])
def test_a_chunk_that_differs_from_its_array_is_refused_by_name(kind):
    make, words = WRONG[kind]
    x = da.ones((4, 3), chunks=(2, 3), dtype=np.float32).map_blocks(
        lambda _: make(), dtype=np.float32, meta=np.empty((0, 0), np.float32)
    )
    with pytest.raises(ff.InputError, match=f"input 'x'.*({words})"):
        added()(x).compute(scheduler="sync")


def test_inputs_that_share_a_size_have_to_agree_when_they_come():
    made = written("(float[N,2] a, float[N,2] b) => (float[N,2] y) { y = Add (a, b) }")
    late = {n: dask.delayed(np.ones)((k, 2), np.float32) for n, k in {"a": 3, "b": 1}.items()}
    with pytest.raises(ff.InputError, match=r"'b' has 1 on axis 0 .*'a' has 3"):
        ff.from_onnx(made)(late).compute(scheduler="sync")


@pytest.mark.parametrize("given", [[[1, 2, 3]], ((0.5, 1, 2),), np.ones((0, 3), np.float32)])
def test_what_fits_is_taken_as_in_a_call(given):
    got = added()(dask.delayed(given)).compute(scheduler="sync")
    wanted = np.maximum(np.asarray(given, np.float32).reshape(-1, 3) + 1, 0)
    np.testing.assert_array_equal(got, wanted)


def test_a_future_is_checked_on_its_worker():

    with running(1, processes=False) as client:
        late = client.submit(np.ones, (2, 3), ">f4", pure=False)
        with pytest.raises(ff.InputError, match=r"input 'x' has dtype >f4"):
            added()(late).compute()


@pytest.mark.parametrize("wraps", [lambda v: v, dask.delayed], ids=["in the call", "late"])
@pytest.mark.parametrize("kind", ["big-endian", "masked"])
def test_arrays_in_a_sequence_are_looked_at_too(kind, wraps):
    made = model([helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0)], {}, {"y": ["N", 3]})
    made.graph.input.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None))
    make, words = WRONG[kind][0], {"big-endian": ">f4", "masked": "masked"}[kind]
    with pytest.raises(ff.InputError, match=f"input 's' holds .*{words}"):
        ff.from_onnx(made)({"s": wraps([np.ones((2, 3), np.float32), make()])}).compute(scheduler="sync")


@every("kind", WRONG)
@every("batch", ["N", 1])
def test_what_fitted_the_last_time_lets_nothing_else_through(kind, batch):
    """What one task found of dtypes and shapes serves the next alone where it has the same."""
    opened = added(batch)
    make, words = WRONG[kind]
    right = np.ones((2 if batch == "N" else 1, 3), np.float32)
    for given in (right, right[:1], right):
        got = opened(dask.delayed(given)).compute(scheduler="sync")
        np.testing.assert_array_equal(got, given + 1)
    with pytest.raises(ff.InputError, match=f"input 'x'.*({words})"):
        opened(dask.delayed(make)()).compute(scheduler="sync")
    np.testing.assert_array_equal(opened(dask.delayed(right)).compute(scheduler="sync"), right + 1)
