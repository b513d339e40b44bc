"""xarray's arrays as inputs: dimensions, coordinates and attributes of the results, and what is refused."""

from __future__ import annotations

import warnings

import dask.array as da
import numpy as np
import pytest

import dask_ferro as ff
from tests.each import every
from tests.graphs import close, diamond, diamond_reference, mlp, mlp_reference, written
from tests.waiting import result

xr = pytest.importorskip("xarray")

X = np.random.default_rng(1).standard_normal((10, 6), dtype=np.float32)
A = xr.DataArray(
    X,
    dims=("time", "band"),
    coords={
        "time": np.arange(10) * 2,
        "band": list("abcdef"),
        "night": ("time", np.arange(10) % 2),
        "site": 3,
    },
    attrs={"units": "K"},
    name="radiance",
)
CHUNKED = A.chunk({"time": 4, "band": 3})
# Two inputs, and two outputs of other shapes.
SUMS = "y = Add (a, b) z = ReduceSum <keepdims = 0> (a, axes)"
TWO = f"(float[N,T] a, float[N,T] b) => (float[N,T] y, float[N] z) {{ {SUMS} }}"
AXES = {"axes": np.array([1])}


def two():
    return ff.from_onnx(written(TWO, AXES))


# ---- one input and one output --------------------------------------------------------------------------------


@every("given", [A, CHUNKED], ids=["numpy", "dask"])
@every("batch", [None, 3])
@every("granularity", ["auto", "op", "model"])
def test_dimensions_and_coordinates_of_the_batch_are_kept(given, batch, granularity):
    got = ff.from_onnx(mlp(), granularity=granularity)(given, batch_size=batch)
    assert isinstance(got, xr.DataArray)
    assert isinstance(got.data, da.Array)
    assert (got.name, got.dims) == ("scores", ("time", "scores_dim_1"))
    assert set(got.coords) == {"time", "night", "site"}
    assert got.chunks[0] == ((3, 3, 3, 1) if batch else (10,) if given is A else (4, 4, 2))
    close(got.compute(scheduler="sync").values, mlp_reference(X))
    assert got.night.equals(A.night)


@pytest.mark.parametrize("given", [A, CHUNKED], ids=["numpy", "dask"])
@pytest.mark.parametrize("dims", ["time", ["time", "band"], ("time",)])
def test_the_batch_dimension_may_be_anywhere_and_is_named(given, dims):
    wanted = ff.from_onnx(mlp())(given).compute(scheduler="sync")
    got = ff.from_onnx(mlp())(given.transpose("band", "time"), dims=dims)
    assert got.compute(scheduler="sync").identical(wanted)


def test_dimensions_with_the_names_of_the_model_need_no_order():
    model = ff.from_onnx(written("(float[time,band] x) => (float[time,band] y) { y = Relu (x) }"))
    got = model(A.transpose("band", "time"))
    assert got.dims == ("time", "band")
    close(got.compute(scheduler="sync").values, np.maximum(X, 0))
    assert set(got.coords) == {"time", "band", "night", "site"}


def test_a_new_axis_has_its_name_in_the_model_unless_an_input_has_it():
    text = "(float[N,K] x) => (float[N,{name}] y) {{ y = Concat <axis = 1> (x, x) }}"
    assert ff.from_onnx(written(text.format(name="feature")))(A).dims == ("time", "feature")
    assert ff.from_onnx(written(text.format(name="band")))(A).dims == ("time", "y_dim_1")
    # A result as an input again.
    once = ff.from_onnx(mlp(6, 8, 6))
    assert once(once(A)).dims == ("time", "scores_dim_1_")


def test_classes_are_the_coordinate_of_scores():
    text = (
        "(float[N,6] x) => (int64[N] label, float[N,2] scores) {"
        " label, p = ai.onnx.ml.LinearClassifier <classlabels_strings = [\"no\", \"yes\"], multi_class = 0,"
        f" post_transform = \"SOFTMAX\", intercepts = [0.1, 0.2], coefficients = [{', '.join(['0.5'] * 12)}]> (x)"
        " scores = ai.onnx.ml.ZipMap <classlabels_strings = [\"no\", \"yes\"]> (p) }"
    )  # fmt: skip
    made = written(text, domains='"ai.onnx.ml": 3')
    made.graph.output[0].type.tensor_type.elem_type = 8
    got = ff.from_onnx(made)(A)
    assert got.scores.dims == ("time", "scores_dim_1")
    assert got.scores_dim_1.values.tolist() == ["no", "yes"]
    assert got.label.compute(scheduler="sync").isin(["no", "yes"]).all()


@pytest.mark.parametrize("given", [A, CHUNKED], ids=["numpy", "dask"])
def test_a_model_of_batch_1_runs_row_by_row(given):
    model = ff.from_onnx(mlp(rows=1))
    close(model(given).compute(scheduler="sync").values, mlp_reference(X))
    assert model(given).dims == ("time", "scores_dim_1")


def test_predict_computes_at_once_with_labels():
    model = ff.from_onnx(mlp())
    got = model.predict(A)
    assert model.predict(A.T, dims="time", batch_size=2).identical(got)
    assert type(got.data) is np.ndarray
    assert got.identical(model(A).compute(scheduler="sync"))
    with pytest.raises(ff.InputError, match="is lazy"):
        model.predict(CHUNKED)
    assert ff.from_onnx(mlp(rows=1)).predict(A).dims == ("time", "scores_dim_1")


# ---- several -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [A, CHUNKED], ids=["numpy", "dask"])
def test_several_outputs_are_a_dataset(given):
    got = ff.from_onnx(diamond())(given.isel(band=slice(4)), batch_size=4)
    assert list(got.data_vars) == ["total", "b0", "b1", "b2"]
    assert set(got.coords) == {"time", "night", "site"}
    for name, value in diamond_reference(X[:, :4]).items():
        close(got[name].compute(scheduler="sync").values, value)


@every(
    "call",
    [
        pytest.param(lambda model, a, b: model(a, b), id="by position"),
        pytest.param(lambda model, a, b: model({"a": a, "b": b}), id="a dict"),
        pytest.param(lambda model, a, b: model(a=a, b=b), id="keywords"),
        pytest.param(lambda model, a, b: model(xr.Dataset({"b": b, "a": a, "c": 1})), id="a dataset"),
        pytest.param(lambda model, a, b: model(a=a, b=b.values), id="beside a numpy array"),
        pytest.param(lambda model, a, b: model(a=a.values, b=b), id="the second alone"),
    ],
)
@every("given", [A, CHUNKED], ids=["numpy", "dask"])
def test_several_inputs(given, call):
    got = call(two(), given, 2 * given)
    assert (got.y.dims, got.z.dims) == (("time", "band"), ("time",))
    assert set(got.coords) == {"time", "band", "night", "site"}
    close(got.y.compute(scheduler="sync").values, 3 * X)


REFUSED = {
    "more dimensions": (
        lambda: ff.from_onnx(mlp())(A.expand_dims(day=2)),
        r"has dimensions \{'day': 2, .*x\.stack\(row=\('day', 'time'\)\)\.transpose\('row', 'band'\).*unstack\('row'\)",
    ),
    "fewer dimensions": (lambda: ff.from_onnx(mlp())(A.isel(time=0)), "x.expand_dims"),
    "sizes in another order": (lambda: ff.from_onnx(mlp())(A.T), "name the batch dimension, as dims='time'"),
    "dims that are not there": (lambda: ff.from_onnx(mlp())(A, dims="day"), r"names 'day'.*\['band', 'time'\]"),
    "dims without xarray": (lambda: ff.from_onnx(mlp())(X, dims="time"), "no input is one"),
    "dims of another kind": (lambda: ff.from_onnx(mlp())(A, dims=3), "dims=3, wanted the batch dimension"),
    "a dtype": (lambda: ff.from_onnx(mlp())(A.astype("f8")), r"wanted float32.*\.astype\('float32'\)"),
    "a dataset of other names": (
        lambda: ff.from_onnx(mlp())(A.to_dataset()), r"no variable for input 'x'; it has 'radiance'.*ds\.rename"
    ),
    "a dataset among others": (lambda: two()(a=A, b=A.to_dataset()), "pass only the Dataset"),
    "other coordinates": (lambda: two()(A, A.assign_coords(time=range(10))), "xr.align"),
    "other sizes": (
        lambda: two()(A, A.isel(band=slice(3)).drop_vars("band")), r"b: \{'time': 10, 'band': 3\}.*'band' .*sizes"
    ),
    "other names of the batch": (
        lambda: two()(A, A.rename(time="day")), r"axis 0 of output y.*'time' or 'day'.*x\.rename\(\{'day': 'time'\}\)"
    ),
    "other names of an axis": (lambda: two()(A, A.rename(band="b")), "axis 1 of output y.*'band' or 'b'"),
    "a coordinate named as an output": (lambda: two()(A.rename(night="z"), A), "output 'z' has the name of a coord"),
    "an input named dims": (
        lambda: ff.from_onnx(written("(float[N] dims) => (float[N] y) { y = Relu (dims) }"))(dims=X[0]),
        "'dims' is an input and an argument",
    ),
}  # fmt: skip


@every("name", REFUSED)
def test_what_is_ambiguous_is_refused_with_a_remedy(name):
    call, words = REFUSED[name]
    with pytest.raises(ff.InputError, match=words):
        call()


def test_chunks_that_combine_rows_are_refused_as_those_of_dask_arrays():
    model = ff.from_onnx(written("(float[N,6] x) => (float[N,6] y) { y = Softmax <axis = 0> (x) }"))
    with pytest.raises(ff.InputError, match="rows"):
        model(CHUNKED)
    assert model(A).dims == ("time", "y_dim_1")


# ---- a cube in a zarr store ----------------------------------------------------------------------------------


@pytest.fixture
def cube(tmp_path):
    """A path of a cube of time, y, x and band in a zarr store."""
    pytest.importorskip("zarr")
    values = np.random.default_rng(2).standard_normal((4, 5, 6, 6), dtype=np.float32)
    coords = {"time": range(4), "y": np.linspace(0, 1, 5), "band": list("abcdef")}
    made = xr.Dataset({"cube": (("time", "y", "x", "band"), values)}, coords)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.chunk(time=2).to_zarr(tmp_path / "c.zarr")
    return tmp_path / "c.zarr"


def scored(path, **kwargs):
    """Return a cube's pixels, and their scores as a cube."""
    pixels = xr.open_zarr(path, **kwargs).cube
    rows = pixels.stack(pixel=("time", "y", "x")).transpose("pixel", "band")
    return pixels, ff.from_onnx(mlp())(rows).unstack("pixel")


def assert_scored(pixels, got):
    assert set(got.dims) == {"scores_dim_1", "time", "y", "x"}
    assert got.y.equals(pixels.y)
    wanted = mlp_reference(pixels.values.reshape(-1, 6)).reshape(4, 5, 6, 3)
    close(got.transpose("time", "y", "x", ...).values, wanted)


@pytest.mark.cluster
def test_a_cube_on_worker_processes(client, cube, tmp_path):
    pixels, got = scored(cube)
    assert_scored(pixels, result(client.compute(got)))
    assert_scored(pixels, got.persist().compute())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got.to_dataset(name="s").to_zarr(tmp_path / "out.zarr")
    assert_scored(pixels, xr.open_zarr(tmp_path / "out.zarr").s.compute())
