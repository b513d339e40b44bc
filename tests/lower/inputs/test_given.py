"""What a model is given that is no array: taken where it holds the same numbers, refused by name where it does not."""

from __future__ import annotations

from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from onnx import TensorProto, helper

import dask_ferro as ff
from tests.each import every
from tests.graphs import FLOAT, model, written


def echo(dtype=FLOAT, name="x"):
    node = helper.make_node("Identity", [name], ["y"])
    return ff.from_onnx(model([node], {name: ["N"]}, {"y": ["N"]}, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        (FLOAT, [1, 2]),
        (FLOAT, (0.5, 2.0)),
        (TensorProto.INT64, range(3)),
        (TensorProto.UINT8, [0, 255]),
        (TensorProto.INT64, []),
    ],
)
def test_numbers_that_the_dtype_holds_are_taken(dtype, given):
    got = echo(dtype)({"x": given}).compute(scheduler="sync")
    assert got.tolist() == list(given)


@every(
    ("dtype", "given"),
    [
        (TensorProto.INT64, [0.5, 1.7]),
        (TensorProto.UINT8, [-1, 3]),
        (TensorProto.UINT8, [256]),
        (FLOAT, [1j]),
        (FLOAT, ["1"]),
        (FLOAT, "1"),
        (FLOAT, [[1.0], [1.0, 2.0]]),
        (FLOAT, {1.0, 2.0}),
        (FLOAT, (x for x in (1.0, 2.0))),
        (FLOAT, Path("x.npy")),
        (FLOAT, None),
        (FLOAT, memoryview(b"12")),
        (FLOAT, [dask.delayed(1.0)]),
        (FLOAT, np.ma.masked_array(np.ones(2, np.float32), mask=[True, False])),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_it_does_not_hold_is_refused_by_name(dtype, given):
    with pytest.raises(ff.InputError, match="input 'x'"):
        echo(dtype)({"x": given})


@pytest.mark.parametrize("inputs", ["float[N,2] x, float[1] scale", "float[1] scale, float[N,2] x"])
@pytest.mark.parametrize("chunks", [(1, 2), (2, 2), (3, 2)])
def test_an_initializer_that_is_an_input_is_a_default(inputs, chunks):
    made = written(f"({inputs}) => (float[N,2] y) {{ y = Mul (x, scale) }}", {"scale": np.float32([2])})
    x, five = np.ones((3, 2), np.float32), np.float32([5])
    m = ff.from_onnx(made)
    lazy = da.from_array(x, chunks=chunks)
    for given, wanted in (({"x": x}, 2), ({"x": x, "scale": five}, 5), ({"scale": five * 2, "x": x}, 10)):
        for y in (m(given, batch_size=chunks[0]), m({**given, "x": lazy})):
            np.testing.assert_array_equal(y.compute(scheduler="sync"), x * wanted)
        np.testing.assert_array_equal(m.predict(given), x * wanted)
    made.ir_version = 3
    for model_, name in ((m, "other"), (ff.from_onnx(made), "scale")):
        with pytest.raises(ff.InputError, match=f"unknown input '{name}'"):
            model_({"x": x, name: five})


@every("lazy", [np.asarray, dask.delayed, lambda x: da.from_array(x, chunks=2)])
@every("dtype", [np.dtypes.StringDType(), object, "U9"])
def test_texts_of_each_dtype_of_numpy_are_taken(dtype, lazy):
    texts = np.array(["a", "", "bytes: é"], dtype)
    assert echo(TensorProto.STRING)({"x": lazy(texts)}).compute(scheduler="sync").tolist() == list(texts)
    with pytest.raises(ff.InputError, match="input 'x' has dtype"):
        echo(FLOAT)({"x": lazy(texts)}).compute(scheduler="sync")


def test_an_object_that_numpy_reads_is_an_array():
    class Held:
        shape, dtype = (2,), np.dtype(np.float32)

        def __array__(self, dtype=None, copy=None):
            return np.array([1, 2], np.float32)

    assert echo()(Held()).compute(scheduler="sync").tolist() == [1, 2]


@pytest.mark.parametrize("name", ["batch_size", "self", "args"])
def test_an_input_may_have_any_name_in_a_dict(name):
    x = np.ones(2, np.float32)
    assert echo(name=name)({name: x}).compute(scheduler="sync").tolist() == [1, 1]


def test_an_input_named_as_an_argument_is_told_of():
    x = np.ones(2, np.float32)
    with pytest.raises(ff.InputError, match="pass inputs as a dict"):
        echo(name="batch_size")(batch_size=x)
    assert echo(name="self")(self=x).compute(scheduler="sync").tolist() == [1, 1]
