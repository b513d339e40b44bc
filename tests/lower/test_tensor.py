"""Tensors get values, by the path that ONNX files take."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest

import dask_ferro as ff
from dask_ferro.graph.tensor.namespace import mean
from dask_ferro.graph.tensor.tensor import asarray, input
from dask_ferro.lower.tensor import Tensor, compute, to_graph

X = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture
def x() -> Tensor:
    return input("x", ("N", 3))


def test_a_tensor_computes(x):
    y = (x * 2 + 1).compute({"x": X}, scheduler="sync")
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, X * 2 + 1)


def test_a_constant_computes():
    assert (asarray([1.0, 2.0]) * 2).compute(scheduler="sync").tolist() == [2.0, 4.0]
    assert asarray(np.arange(3)).compute(scheduler="sync").tolist() == [0, 1, 2]


def test_a_dask_array_is_one_array_whatever_its_chunks():
    z = asarray(da.from_array(X, chunks=(2, 2)))
    np.testing.assert_array_equal((z - mean(z, axis=0)).compute(scheduler="sync"), X - X.mean(axis=0))


def test_several_tensors_have_the_form_they_were_given_in(x):
    first, second = compute([x + 1, x.sum()], {"x": X}, scheduler="sync")
    np.testing.assert_array_equal(first, X + 1)
    assert second == 66
    (only,) = compute([x.sum()], {"x": X}, scheduler="sync")
    assert only == 66
    assert compute({"total": x.sum()}, {"x": X}, scheduler="sync") == {"total": np.float32(66)}


def test_what_an_argument_is_bound_to_gives_way_to_what_is_passed():
    x = input("x", (2,), data=np.ones(2, np.float32))
    assert (x + 1).compute(scheduler="sync").tolist() == [2, 2]
    assert (x + 1).compute({"x": [3, 4]}, scheduler="sync").tolist() == [4, 5]


def test_a_graph_of_tensors_is_a_dask_array(x):
    y = to_graph(x + 1, {"x": X})
    assert (type(y), y.shape) == (da.Array, X.shape)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        pytest.param({}, r"missing input 'x'; the model takes x: float32", id="no value"),
        pytest.param({"x": X, "y": X}, "unknown input 'y'", id="no such argument"),
        pytest.param({"x": X[:, :2]}, "2 on axis 1, wanted 3", id="another shape"),
    ],
)
def test_values_that_do_not_fit_are_refused(x, inputs, said):
    with pytest.raises(ff.InputError, match=said):
        (x + 1).compute(inputs, scheduler="sync")
