"""Tables as inputs: pandas, polars, pyarrow, dask.dataframe; columns by name and as a matrix; errors before a run."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
from dask.dataframe.dispatch import meta_nonempty

import dask_ferro as ff
from tests.each import each, every
from tests.graphs import mlp, mlp_reference, written
from tests.pairs import all_pairs

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")
pl = pytest.importorskip("polars")
dd = pytest.importorskip("dask.dataframe")

ROWS = 12
COLUMNS = [f"c{k}" for k in range(6)]
INDEX = pd.date_range("2026-01-01", periods=ROWS, name="day")
X = np.random.default_rng(1).standard_normal((ROWS, 6), dtype=np.float32)
LIBRARIES = ["pandas", "polars", "pyarrow"]


def by_columns(axes: int = 1) -> onnx.ModelProto:
    """A model of three inputs, a float, an integer and a string, and three outputs."""
    dims = ["N", "N,1"][axes - 1]
    return written(
        f"(float[{dims}] price, int64[{dims}] count, string[{dims}] city)"
        f" => (float[{dims}] total, int64[{dims}] more, string[{dims}] town) <int64[1] one = {{1}}>"
        " { c = Cast<to=1>(count) total = Mul(price, c) more = Add(count, one) town = Identity(city) }",
        name="shop",
    )


def sales(**others: Any) -> Any:
    values = {
        "city": ["Bern", "Rome", "Bern", "Oslo"] * 3,
        "id": np.arange(ROWS) + 100,
        "price": np.linspace(0.5, 6.0, ROWS),
        "count": np.arange(ROWS),
    }
    return pd.DataFrame(values | others, index=INDEX)


def of(library: str, frame: Any) -> Any:
    plain = frame.reset_index(drop=True)
    return {
        "pandas": lambda: frame,
        "polars": lambda: pl.from_pandas(plain),
        "pyarrow": lambda: arrow(plain),
    }[library]()


def arrow(frame: Any) -> Any:
    return pa.Table.from_pandas(frame, preserve_index=False)


def pandas_of(table: Any) -> Any:
    return table if isinstance(table, pd.DataFrame) else table.to_pandas()


def computed(model: Any, table: Any, how: str) -> Any:
    if how in ("predict", "batch"):
        return model.predict(table, **({"batch_size": 5} if how == "batch" else {}))
    return model(table).compute(scheduler="sync")


@every("library", LIBRARIES)
@every("batch", [None, 5])
def test_a_call_gives_a_dask_array_for_each_output(library: str, batch: int | None) -> None:
    total, more, town = ff.from_onnx(by_columns())(of(library, sales()), batch_size=batch)
    assert total.chunks == ((5, 5, 2),) if batch else ((ROWS,),)
    frame = sales()
    np.testing.assert_allclose(
        total.compute(scheduler="sync"), (frame["price"] * frame["count"]).astype("f4")
    )
    assert (more - 1).compute(scheduler="sync").tolist() == frame["count"].tolist()
    assert town.compute(scheduler="sync").tolist() == frame["city"].tolist()


@every("library", LIBRARIES)
@every("how", ["predict", "batch"])
@every("dtype", ["float32", "float64", "int64"])
def test_a_matrix_takes_all_columns_in_order_and_the_same_kind_comes_back(
    library: str, how: str, dtype: str
) -> None:
    x = (10 * X).astype(dtype)
    given = of(library, pd.DataFrame(x, columns=COLUMNS, index=INDEX))
    got = computed(ff.from_onnx(mlp()), given, how)
    assert type(got) is type(given)
    wanted = mlp_reference(x.astype("f4"))
    (name,) = ff.from_onnx(mlp()).outputs
    assert list(pandas_of(got).columns) == [f"{name}_{k}" for k in range(wanted.shape[1])]
    np.testing.assert_allclose(pandas_of(got).to_numpy(), wanted, rtol=1e-4, atol=1e-5)
    if library == "pandas":
        assert got.index.equals(INDEX)


@every("library", LIBRARIES)
@every("how", ["predict", "batch"])
@every("axes", [1, 2])
def test_columns_go_to_inputs_by_name(library: str, how: str, axes: int) -> None:
    model = ff.from_onnx(by_columns(axes))
    frame = sales()
    got = pandas_of(computed(model, of(library, frame), how))
    assert list(got.columns) == ["total", "more", "town"]
    assert "tables    a column for each input, by name" in repr(model)
    np.testing.assert_allclose(got["total"], (frame["price"] * frame["count"]).astype("f4"))
    assert got["more"].tolist() == (frame["count"] + 1).tolist()
    assert got["town"].tolist() == frame["city"].tolist()


@every(
    "change",
    [
        pytest.param({"city": pd.Categorical(["Bern", "Rome", "Bern", "Oslo"] * 3)}, id="a category"),
        pytest.param({"city": pd.array(["Bern", "Rome", "Bern", "Oslo"] * 3, dtype="string")}, id="strings"),
        pytest.param({"city": np.array(["Bern", "Rome", "Bern", "Oslo"] * 3, object)}, id="objects"),
        pytest.param({"count": pd.array(range(ROWS), dtype="Int64")}, id="a nullable integer"),
        pytest.param({"count": np.arange(ROWS, dtype="int8")}, id="a smaller integer"),
        pytest.param({"count": pd.Categorical(range(ROWS))}, id="a category of numbers"),
        pytest.param(
            {"price": pd.array(np.linspace(0.5, 6.0, ROWS), dtype="Float32")}, id="a nullable float"
        ),
        pytest.param({"price": np.linspace(0.5, 6.0, ROWS).astype("f2").astype("f8")}, id="rounded"),
    ],
)
def test_columns_of_other_kinds(change: dict[str, Any]) -> None:
    frame = sales(**change)
    got = ff.from_onnx(by_columns()).predict(frame)
    assert got["town"].tolist() == ["Bern", "Rome", "Bern", "Oslo"] * 3
    assert got["more"].tolist() == list(range(1, ROWS + 1))
    np.testing.assert_allclose(got["total"], frame["price"].to_numpy(float) * np.arange(ROWS), rtol=1e-6)


def test_a_missing_number_is_a_nan_where_the_input_takes_floats() -> None:
    for prices in (
        [np.nan] + [1.0] * 11,
        [None] + [1.0] * 11,
        pd.array([pd.NA] + [1.0] * 11, dtype="Float64"),
    ):
        got = ff.from_onnx(by_columns()).predict(sales(price=prices))
        assert np.isnan(got["total"].iloc[0])
        assert not np.isnan(got["total"].iloc[1:]).any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            {"city": ["Bern", None, "Rome", None] * 3}, ["'city'", "6 missing values", "fill"], id="no string"
        ),
        pytest.param({"price": ["cheap"] * ROWS}, ["'price'", "wanted float32", "encode it"], id="a word"),
        pytest.param(
            {"count": np.linspace(0, 1, ROWS)}, ["'count'", "wanted int64"], id="floats for integers"
        ),
        pytest.param({"price": np.full(ROWS, 1e300)}, ["'price'", "too large for float32"], id="too large"),
        pytest.param(
            {"city": np.arange(ROWS)}, ["'city'", "int among its texts", "str()"], id="numbers for strings"
        ),
        pytest.param({"price": INDEX}, ["'price'", "wanted float32"], id="dates"),
        pytest.param({"count": pd.array([None] * ROWS, "Int64")}, ["'count'", "12 missing"], id="no integer"),
    ],
)
def test_a_column_that_does_not_fit_is_named(change: Any, words: list[str]) -> None:
    def is_named(way: tuple[str, str]) -> None:
        library, how = way
        with pytest.raises(ff.InputError) as error:
            computed(ff.from_onnx(by_columns()), of(library, sales(**change)), how)
        assert all(word in str(error.value) for word in words), error.value

    each(product(LIBRARIES, ["predict", "call"]), is_named)


def test_all_that_is_wrong_is_told_at_once() -> None:
    frame = sales(price=["cheap"] * ROWS, count=np.linspace(0, 1, ROWS))
    for given, words in (
        (frame, r"'price'.*'count'"),
        (frame[["count"]], "no column for input 'price', input 'city'"),
    ):
        with pytest.raises(ff.InputError, match=words):
            ff.from_onnx(by_columns()).predict(given)


@pytest.mark.parametrize("columns", [COLUMNS[:4], [*COLUMNS, "c6"]])
def test_a_matrix_of_another_width_is_refused(columns: list[str]) -> None:
    frame = pd.DataFrame(np.zeros((3, len(columns))), columns=columns)
    with pytest.raises(ff.InputError, match=f"{len(columns)} columns .*takes 6"):
        ff.from_onnx(mlp())(frame)


def test_a_column_of_vectors_is_a_matrix() -> None:
    (name,) = ff.from_onnx(mlp()).inputs
    for given in (
        pd.DataFrame({name: list(X)}),
        pl.DataFrame({name: X.tolist()}),
        pa.table({name: X.tolist()}),
    ):
        got = pandas_of(ff.from_onnx(mlp()).predict(given))
        np.testing.assert_allclose(got.to_numpy(), mlp_reference(X), rtol=1e-4, atol=1e-5)


NOT_COMPUTED, ROW = (
    r"LazyFrame, which is not computed.*table\.collect\(\)",
    r"Series.*table\.loc\[\[label\]\]",
)
FORMS: list[Any] = [
    ("pandas", lambda f: f, pd.DataFrame),
    ("a class of its own", type("Sales", (pd.DataFrame,), {}), pd.DataFrame),
    ("polars", lambda f: of("polars", f), pl.DataFrame),
    ("pyarrow", lambda f: of("pyarrow", f), pa.Table),
    ("dict of pandas", dict, pd.DataFrame),
    ("dict of polars", lambda f: of("polars", f).to_dict(), pl.DataFrame),
    ("dict of pyarrow", lambda f: dict(zip(f, of("pyarrow", f).columns, strict=True)), pa.Table),
    (
        "a column of dask",
        lambda f: dd.from_pandas(f, npartitions=2)["price"],
        "the data frame to the model itself",
    ),
    (
        "columns of dask",
        lambda f: dict(dd.from_pandas(f, npartitions=2).items()),
        "the data frame to the model itself",
    ),
    ("polars lazy", lambda f: of("polars", f).lazy(), NOT_COMPUTED),
    ("record batch", lambda f: pa.RecordBatch.from_pandas(f), r"RecordBatch.*pyarrow\.Table"),
    ("list of dicts", lambda f: f.to_dict("records"), r"list of rows.*pandas\.DataFrame\(rows\)"),
    ("one row", lambda f: f.iloc[0], ROW),
    ("one column", lambda f: f["price"], ROW),
    ("one row as a dict", lambda f: dict(f.iloc[0]), r"one row as a dict.*DataFrame\(\[row\]\)"),
    ("records", lambda f: f.to_records(index=False), r"structured array.*pandas\.DataFrame\(records\)"),
]


@every(("form", "outcome"), [pytest.param(*form[1:], id=form[0]) for form in FORMS])
def test_what_a_table_may_be(form: Any, outcome: Any) -> None:
    ways = product(["predict", "batch"], [ROWS, 1, 0])
    each(ways, lambda way: _check_form(form, outcome, *way))


def _check_form(form: Any, outcome: Any, how: str, rows: int) -> None:
    model, frame = ff.from_onnx(by_columns()), sales()[["price", "count", "city"]].iloc[: rows or 1]
    if isinstance(outcome, str):
        with pytest.raises(ff.InputError, match=outcome):
            computed(model, form(frame), how)
        return
    got, full, wanted = computed(model, form(frame.iloc[:rows]), how), form(frame), model.predict(frame)
    assert type(got) is outcome
    # Texts are of one type, whether there are rows or not.
    assert pandas_of(got)["town"].dtype == pandas_of(computed(model, full, how))["town"].dtype
    table = pandas_of(got).set_axis(wanted.index[:rows], axis=0)
    pd.testing.assert_frame_equal(table, wanted.iloc[:rows], check_dtype=False, check_freq=False)


@every(
    "change",
    [
        {},
        {"city": pd.array(["Bern"] * ROWS, dtype="string"), "count": pd.array(range(ROWS), dtype="Int64")},
        {"city": pd.Categorical(["Bern"] * ROWS), "price": pd.array(range(ROWS), dtype="Float32")},
    ],
)
@every("how", ["partitions", "batch", "a function", "overlap", "the model"])
def test_a_function_of_partitions_needs_no_meta(how: str, change: Any) -> None:
    model, frame = ff.from_onnx(by_columns()), sales(**change)
    table = dd.from_pandas(frame, npartitions=3)
    table = table[table["id"] < 107]
    lazy = {
        "partitions": lambda: table.map_partitions(model.predict),
        "batch": lambda: table.map_partitions(model.predict, batch_size=2),
        "a function": lambda: table.map_partitions(partial(computed, model, how="predict")),
        "the model": lambda: model(table),
        "overlap": lambda: table.map_overlap(model.predict, 0, 0),
    }[how]()
    got, wanted = lazy.compute(scheduler="sync"), model.predict(frame.iloc[:7])
    assert lazy.dtypes.tolist() == got.dtypes.tolist() == wanted.dtypes.tolist()
    assert lazy.map_partitions(len).compute(scheduler="sync").tolist() == [4, 3, 0]
    pd.testing.assert_frame_equal(got, wanted, check_freq=False)


def test_missing_values_of_the_callers_own_are_not_made_up() -> None:
    """Those of the rows by which Dask asks for metadata are, there alone."""
    model, table = ff.from_onnx(by_columns()), dd.from_pandas(sales(city=["Bern", None] * 6), npartitions=2)
    with pytest.raises(ff.InputError, match="1 missing values"):
        model.predict(meta_nonempty(table._meta))
    with pytest.raises(ff.InputError, match="3 missing values"):
        table.map_partitions(model.predict).compute(scheduler="sync")


def test_columns_of_different_tables_are_refused() -> None:
    frame, other = sales(), sales().sort_values("price", ascending=False)
    model = ff.from_onnx(by_columns())
    with pytest.raises(ff.InputError, match=r"different indexes.*align"):
        model({"price": frame["price"], "count": other["count"], "city": frame["city"]})
    with pytest.raises(ff.InputError, match="different tables"):
        model({"price": frame["price"].iloc[:3], "count": frame["count"], "city": frame["city"]})
    with pytest.raises(ff.InputError, match="'count' is not a column of a table"):
        model({"price": frame["price"], "count": np.arange(ROWS), "city": frame["city"]})


def test_an_output_without_a_row_for_each_row_is_refused() -> None:
    proto = written("(float[N,2] x) => (float y) { y = ReduceSum<keepdims=0>(x) }")
    frame = pd.DataFrame(np.ones((3, 2)), columns=["c0", "c1"])
    with pytest.raises(ff.InputError, match=r"output 'y' has shape \(\).*3 rows"):
        ff.from_onnx(proto).predict(frame)


# ---- dask.dataframe -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3, 5])
@pytest.mark.parametrize("source", ["bytes", "file"])
def test_a_dask_dataframe_is_computed_partition_by_partition(parts: int, source: str, tmp_path: Any) -> None:
    onnx.save(by_columns(), tmp_path / "shop.onnx")
    model = ff.from_onnx(by_columns() if source == "bytes" else str(tmp_path / "shop.onnx"))
    table = dd.from_pandas(sales(), npartitions=parts)
    lazy = model(table)
    assert (lazy.divisions, lazy.npartitions) == (table.divisions, table.npartitions)
    joined = table[["id"]].join(lazy)
    joined = joined[joined["more"] > 3]
    assert joined.compute(scheduler="sync")["id"].tolist() == list(range(103, 112))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda m, t: m(t.drop(columns="price")), "no column for input 'price'", id="a column"),
        pytest.param(lambda m, t: m(t.assign(price="x")), "'price'.*wanted float32", id="a dtype"),
        pytest.param(lambda m, t: m.predict(t), "to the model itself", id="predict"),
    ],
)
def test_what_does_not_fit_a_dask_dataframe_is_told_before_anything_runs(call: Any, words: str) -> None:
    with pytest.raises(ff.InputError, match=words):
        call(ff.from_onnx(by_columns()), dd.from_pandas(sales(), npartitions=2))


# ---- scikit-learn -------------------------------------------------------------------------------------------


def test_a_pipeline_of_scikit_learn_takes_the_table_that_it_was_trained_on() -> None:
    pytest.importorskip("skl2onnx")
    from skl2onnx import to_onnx
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    frame = sales().reset_index(drop=True).astype({"price": "float32"})
    answer = (frame["price"] * frame["count"] > 10).map({True: "large", False: "small"})
    features = frame[["price", "count", "city"]]
    steps = ColumnTransformer([("n", StandardScaler(), ["price", "count"]), ("s", OneHotEncoder(), ["city"])])
    pipeline = make_pipeline(steps, LogisticRegression()).fit(features, answer)
    named = ff.from_onnx(to_onnx(pipeline, features)).predict(frame)
    assert list(named.columns) == ["output_label", "output_probability_large", "output_probability_small"]
    model = ff.from_onnx(to_onnx(pipeline, features, options={"zipmap": False}))
    for got in (model.predict(frame), model(dd.from_pandas(frame, npartitions=3)).compute(scheduler="sync")):
        assert got.iloc[:, 0].tolist() == pipeline.predict(features).tolist()
        np.testing.assert_allclose(got.iloc[:, 1:].to_numpy(), pipeline.predict_proba(features), atol=1e-5)


# ---- what a reader of the code found ------------------------------------------------------------------------


def test_columns_of_one_name_are_refused() -> None:
    frame = pd.DataFrame(X)
    frame.columns = ["a", "a", "b", "c", "d", "b"]
    with pytest.raises(ff.InputError, match="several columns named 'a', 'b'; rename"):
        ff.from_onnx(mlp()).predict(frame)


NAMES = ["", '["b", "x", "y"]', "b,x, y", '["b", 0, "y"]', "[b, x, y]", "[" * 100_000]


@pytest.mark.parametrize(
    ("width", "names", "how"), all_pairs([3, "K"], NAMES, ["predict", "partitions", "run"])
)
def test_a_matrix_takes_columns_by_the_names_in_the_model_and_else_warns(
    width: int | str, names: str, how: str, tmp_path: Any
) -> None:
    text = f"(float[N,{width}] x) => (float[N,1] z) <float[3,1] w = {{1, 10, 100}}> {{ z = MatMul(x, w) }}"
    # A process warns once for a model.
    onnx.helper.set_model_props(proto := written(text), {"feature_names": names, "row": str(tmp_path)})
    model, is_named = ff.from_onnx(proto), names in ('["b", "x", "y"]', "b,x, y")
    source, sink = f"{tmp_path}/in.parquet", f"{tmp_path}/z.parquet"
    # One column has the name of the input, which takes it alone only where there are no others.
    frame = pd.DataFrame({"y": [3.0, 4.0], "b": [1.0, 1.0], "x": [2.0, 5.0]})

    def scored(table: Any) -> list[float]:
        if how == "run":
            table.assign(k=0).to_parquet(source, index=False)
            ff.predict_files(model, source, sink, passthrough=["k"], overwrite=True)
            return list(pd.read_parquet(sink)["z"])
        given = table.assign(k=0) if is_named else table
        given = dd.from_pandas(given, npartitions=2) if how == "partitions" else given
        return list(computed(model, given, how)["z"])

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            assert scored(frame) == ([321.0, 451.0] if is_named else [213.0, 514.0])
    warned = [w for w in seen if "does not name its columns" in str(w.message)]
    assert len(warned) == (0 if is_named or how == "run" else 1)
    assert f"columns {'by name' if is_named else 'in order'} as 'x'" in repr(model)
    if is_named:
        with pytest.raises(ff.InputError, match="no column for 'y' of input 'x'"):
            scored(frame.drop(columns="y").assign(v=0))
    # Labels that are numbers in order say no more than the order.
    numbered = frame[["b", "x", "y"]].set_axis([f"f{k}" for k in range(3)], axis=1)
    assert model.predict(numbered)["z"].tolist() == [321.0, 451.0]


def test_a_model_in_memory_is_in_the_graph_of_partitions_once() -> None:
    import cloudpickle

    weight = np.random.default_rng(0).standard_normal((6, 50_000)).astype("f4")
    text = "(float[N,6] x) => (float[N,1] y) { h = MatMul(x, w) y = ReduceMax(h, last) }"
    model = ff.from_onnx(written(text, {"w": weight, "last": np.int64([1])}))
    table = dd.from_pandas(pd.DataFrame(np.ones((40, 6), "f4")).add_prefix("c"), npartitions=20)
    tasks = dict(model(table).optimize().__dask_graph__())
    assert sum(len(cloudpickle.dumps(task)) for task in tasks.values()) < 2 * weight.nbytes


def test_a_batch_of_the_model_is_no_argument_of_the_call() -> None:
    lazy = ff.from_onnx(by_columns(), batch_size=2)(dd.from_pandas(sales(), npartitions=2))
    assert lazy.compute(scheduler="sync")["more"].tolist() == list(range(1, ROWS + 1))
