"""Tables as inputs: pandas, polars, pyarrow, dask.dataframe; columns by name and as a matrix; errors before a run."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import dask_ferro as ff
from tests.graphs import mlp, mlp_reference
from tests.waiting import BOUND_S

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")
pl = pytest.importorskip("polars")
dd = pytest.importorskip("dask.dataframe")

ROWS = 12
COLUMNS = [f"c{k}" for k in range(6)]
INDEX = pd.date_range("2026-01-01", periods=ROWS, name="day")
X = np.random.default_rng(1).standard_normal((ROWS, 6), dtype=np.float32)
LIBRARIES = ["pandas", "polars", "pyarrow"]
F, INT, STR = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING


def by_columns(axes: int = 1) -> onnx.ModelProto:
    """A model of three inputs, a float, an integer and a string, and three outputs."""
    shape: list[Any] = ["N", 1][:axes]
    inputs = [
        helper.make_tensor_value_info(n, k, shape) for n, k in (("price", F), ("count", INT), ("city", STR))
    ]
    outputs = [
        helper.make_tensor_value_info(n, k, shape) for n, k in (("total", F), ("more", INT), ("town", STR))
    ]
    nodes = [
        helper.make_node("Cast", ["count"], ["c"], to=F),
        helper.make_node("Mul", ["price", "c"], ["total"]),
        helper.make_node("Add", ["count", "one"], ["more"]),
        helper.make_node("Identity", ["city"], ["town"]),
    ]
    one = onnx.numpy_helper.from_array(np.int64([1]), "one")
    graph = helper.make_graph(nodes, "shop", inputs, outputs, [one])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


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


def computed(model: Any, table: Any, how: str, **options: Any) -> Any:
    return model.predict(table) if how == "predict" else model(table, **options).compute(scheduler="sync")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("how", ["predict", "call"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
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


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("how", ["predict", "call"])
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("granularity", ["auto", "op", "model"])
def test_columns_go_to_inputs_by_name(
    library: str, how: str, axes: int, batch: int | None, granularity: Any
) -> None:
    model = ff.from_onnx(by_columns(axes), granularity=granularity)
    frame = sales()
    got = pandas_of(computed(model, of(library, frame), how, batch=batch))
    assert list(got.columns) == ["total", "more", "town"]
    np.testing.assert_allclose(got["total"], (frame["price"] * frame["count"]).astype("f4"))
    assert got["more"].tolist() == (frame["count"] + 1).tolist()
    assert got["town"].tolist() == frame["city"].tolist()


@pytest.mark.parametrize(
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
    for missing in (np.nan, None, pd.NA):
        prices = (
            pd.array([missing] + [1.0] * (ROWS - 1), dtype="Float64")
            if missing is pd.NA
            else [missing] + [1.0] * (ROWS - 1)
        )
        got = ff.from_onnx(by_columns()).predict(sales(price=prices))
        assert np.isnan(got["total"].iloc[0])
        assert not np.isnan(got["total"].iloc[1:]).any()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            {"city": ["Bern", None, "Rome", None] * 3}, ["'city'", "6 missing values", "fill"], id="no string"
        ),
        pytest.param(
            {"price": ["cheap"] * ROWS}, ["'price'", "wanted float32", ".astype('float32')"], id="a word"
        ),
        pytest.param(
            {"count": np.linspace(0, 1, ROWS)}, ["'count'", "wanted int64"], id="floats for integers"
        ),
        pytest.param({"price": np.full(ROWS, 1e300)}, ["'price'", "too large for float32"], id="too large"),
        pytest.param(
            {"city": np.arange(ROWS)}, ["'city'", "takes strings", ".astype(str)"], id="numbers for strings"
        ),
        pytest.param({"price": INDEX}, ["'price'", "wanted float32"], id="dates"),
    ],
)
@pytest.mark.parametrize("how", ["predict", "call"])
def test_a_column_that_does_not_fit_is_named(library: str, change: Any, words: list[str], how: str) -> None:
    with pytest.raises(ff.ConfigError) as error:
        computed(ff.from_onnx(by_columns()), of(library, sales(**change)), how)
    assert all(word in str(error.value) for word in words), error.value


def test_all_that_is_wrong_is_told_at_once() -> None:
    frame = sales(price=["cheap"] * ROWS, count=np.linspace(0, 1, ROWS))
    with pytest.raises(ff.ConfigError, match=r"'price'.*'count'"):
        ff.from_onnx(by_columns()).predict(frame)


def test_a_missing_integer_is_refused() -> None:
    counts = pd.array([None, *range(1, ROWS)], dtype="Int64")
    with pytest.raises(ff.ConfigError, match=r"'count'.*1 missing values"):
        ff.from_onnx(by_columns()).predict(sales(count=counts))


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        pytest.param(
            lambda: sales().drop(columns=["price", "city"]),
            "no column for input 'price', input 'city'",
            id="missing",
        ),
        pytest.param(lambda: pd.DataFrame(), "no column for input 'price'", id="no columns at all"),
    ],
)
def test_columns_that_are_not_there_are_named(frame: Any, words: str) -> None:
    with pytest.raises(ff.ConfigError, match=words):
        ff.from_onnx(by_columns())(frame())


@pytest.mark.parametrize("columns", [COLUMNS[:4], [*COLUMNS, "c6"]])
def test_a_matrix_of_another_width_is_refused(columns: list[str]) -> None:
    frame = pd.DataFrame(np.zeros((3, len(columns))), columns=columns)
    with pytest.raises(ff.ConfigError, match=f"{len(columns)} columns .*takes 6"):
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


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("how", ["predict", "call"])
def test_a_dict_of_columns_is_a_table(library: str, how: str) -> None:
    table = of(library, sales())
    columns = {name: table[name] for name in ("count", "price", "city")}
    if library == "pyarrow":
        columns = {name: table.column(name) for name in columns}
    got = computed(ff.from_onnx(by_columns()), columns, how)
    assert type(got) is type(table)
    assert pandas_of(got)["more"].tolist() == list(range(1, ROWS + 1))
    if library == "pandas":
        assert got.index.equals(INDEX)


def test_columns_of_different_tables_are_refused() -> None:
    frame, other = sales(), sales().sort_values("price", ascending=False)
    model = ff.from_onnx(by_columns())
    with pytest.raises(ff.ConfigError, match=r"different indexes.*align"):
        model({"price": frame["price"], "count": other["count"], "city": frame["city"]})
    with pytest.raises(ff.ConfigError, match="different tables"):
        model({"price": frame["price"].iloc[:3], "count": frame["count"], "city": frame["city"]})
    with pytest.raises(ff.ConfigError, match="'count' is no column of a table"):
        model({"price": frame["price"], "count": np.arange(ROWS), "city": frame["city"]})


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("library", LIBRARIES)
def test_tables_of_no_row_and_of_one(library: str, rows: int) -> None:
    table = of(library, sales().iloc[:rows])
    assert len(pandas_of(ff.from_onnx(by_columns()).predict(table))) == rows


def test_an_output_without_a_row_for_each_row_is_refused() -> None:
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)],
        "sum",
        [helper.make_tensor_value_info("x", F, ["N", 2])],
        [helper.make_tensor_value_info("y", F, [])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    frame = pd.DataFrame(np.ones((3, 2)), columns=["a", "b"])
    for how in ("predict", "call"):
        with pytest.raises(ff.ConfigError, match=r"output 'y' has shape \(\).*3 rows"):
            computed(ff.from_onnx(proto), frame, how)


def test_the_same_arrays_of_another_table_are_another_result() -> None:
    """The keys of the values are equal, the tables are not."""
    import dask

    model, frame = ff.from_onnx(by_columns()), sales()
    first, second = model(frame), model(frame.reset_index(drop=True))
    assert dask.base.tokenize(first) != dask.base.tokenize(second)
    assert first.compute(scheduler="sync").index.equals(INDEX)
    assert second.compute(scheduler="sync").index.equals(pd.RangeIndex(ROWS))


def test_how_columns_are_mapped_is_in_the_repr() -> None:
    assert "tables    a column for each input, by name" in repr(ff.from_onnx(by_columns()))
    assert "tables    6 columns in order as" in repr(ff.from_onnx(mlp()))


# ---- dask.dataframe -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3, 5])
@pytest.mark.parametrize("source", ["bytes", "file"])
def test_a_dask_dataframe_is_computed_partition_by_partition(parts: int, source: str, tmp_path: Any) -> None:
    onnx.save(by_columns(), tmp_path / "shop.onnx")
    model = ff.from_onnx(by_columns() if source == "bytes" else str(tmp_path / "shop.onnx"))
    frame = sales()
    table = dd.from_pandas(frame, npartitions=parts)
    lazy = model(table)
    assert isinstance(lazy, dd.DataFrame)
    assert (lazy.divisions, lazy.npartitions) == (table.divisions, table.npartitions)
    assert lazy.dtypes[["total", "more"]].astype(str).tolist() == ["float32", "int64"]
    wanted = model.predict(frame)
    pd.testing.assert_frame_equal(lazy.compute(scheduler="sync"), wanted, check_freq=False, check_dtype=False)
    joined = table[["id"]].join(lazy)
    joined = joined[joined["more"] > 3]
    assert joined.compute(scheduler="sync")["id"].tolist() == list(range(103, 112))


def test_empty_partitions_stay_empty() -> None:
    table = dd.from_pandas(sales(), npartitions=3)
    lazy = ff.from_onnx(by_columns())(table[table["count"] < 2])
    assert lazy.map_partitions(len).compute(scheduler="sync").tolist() == [2, 0, 0]
    assert lazy.compute(scheduler="sync")["more"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda m, t: m(t.drop(columns="price")), "no column for input 'price'", id="a column"),
        pytest.param(lambda m, t: m(t.assign(price="x")), "'price'.*wanted float32", id="a dtype"),
        pytest.param(lambda m, t: m(t, batch=3), "repartition", id="a batch"),
        pytest.param(lambda m, t: m.predict(t), "call the model itself", id="predict"),
    ],
)
def test_what_does_not_fit_a_dask_dataframe_is_told_before_anything_runs(call: Any, words: str) -> None:
    with pytest.raises(ff.ConfigError, match=words):
        call(ff.from_onnx(by_columns()), dd.from_pandas(sales(), npartitions=2))


def test_rows_that_depend_on_each_other_are_not_cut() -> None:
    graph = helper.make_graph(
        [helper.make_node("Softmax", ["x"], ["y"], axis=0)],
        "softmax",
        [helper.make_tensor_value_info("x", F, ["N", 2])],
        [helper.make_tensor_value_info("y", F, ["N", 2])],
    )
    model = ff.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    frame = pd.DataFrame(np.ones((4, 2)), columns=["a", "b"])
    with pytest.raises(ff.ConfigError, match="cannot be cut"):
        model(dd.from_pandas(frame, npartitions=2))
    whole = model(dd.from_pandas(frame, npartitions=1)).compute(scheduler="sync")
    np.testing.assert_allclose(whole.to_numpy(), 0.25)


@pytest.mark.cluster
def test_tables_on_worker_processes(tmp_path: Any) -> None:
    from distributed import Client, LocalCluster

    model, frame = ff.from_onnx(by_columns()), sales()
    wanted = model.predict(frame)
    table = dd.from_pandas(frame, npartitions=3)
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", "processes": True}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        for lazy in (
            model(table),
            model(frame),
            table.map_partitions(model.predict, meta=wanted.iloc[:0]),
        ):
            got = client.compute(lazy).result(timeout=BOUND_S)
            pd.testing.assert_frame_equal(got, wanted, check_freq=False, check_dtype=False)
        eager = client.submit(model.predict, frame).result(timeout=BOUND_S)
        pd.testing.assert_frame_equal(eager, wanted, check_dtype=False)
        kept = model(frame).persist()
        pd.testing.assert_frame_equal(kept.compute(), wanted, check_dtype=False)


def test_a_pickled_model_takes_tables() -> None:
    model = pickle.loads(pickle.dumps(ff.from_onnx(by_columns())))
    assert model.predict(sales())["more"].tolist() == list(range(1, ROWS + 1))


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
    for table in (frame, dd.from_pandas(frame, npartitions=3)):
        got = pandas_of(model(table).compute(scheduler="sync"))
        assert got.iloc[:, 0].tolist() == pipeline.predict(features).tolist()
        np.testing.assert_allclose(got.iloc[:, 1:].to_numpy(), pipeline.predict_proba(features), atol=1e-5)


# ---- what a reader of the code found ------------------------------------------------------------------------


def twins() -> onnx.ModelProto:
    """Outputs "a" of two columns and "a_0" of one, whose columns have one name."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["a"]), helper.make_node("ReduceSum", ["x", "last"], ["a_0"])],
        "twins",
        [helper.make_tensor_value_info("x", F, ["N", 2])],
        [helper.make_tensor_value_info("a", F, ["N", 2]), helper.make_tensor_value_info("a_0", F, ["N", 1])],
        [onnx.numpy_helper.from_array(np.int64([1]), "last")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("how", ["predict", "call"])
def test_two_results_of_one_name_are_refused(how: str) -> None:
    with pytest.raises(ff.ConfigError, match=r"output 'a_0' gives columns \['a_0'\]"):
        computed(ff.from_onnx(twins()), pd.DataFrame(np.ones((3, 2)), columns=["p", "q"]), how)


@pytest.mark.parametrize("labels", [range(6), [None, *range(5)], [("a", k) for k in range(6)]])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_labels_that_are_no_names(labels: Any, is_lazy: bool) -> None:
    frame = pd.DataFrame(X)
    frame.columns = pd.MultiIndex.from_tuples(labels) if isinstance(labels[0], tuple) else pd.Index(labels)
    if is_lazy and isinstance(labels[0], tuple):
        return  # dask.dataframe has no MultiIndex
    table = dd.from_pandas(frame, npartitions=2) if is_lazy else frame
    got = ff.from_onnx(mlp())(table).compute(scheduler="sync")
    np.testing.assert_allclose(got.to_numpy(), mlp_reference(X), rtol=1e-4, atol=1e-5)


def test_columns_of_one_name_are_refused() -> None:
    frame = pd.DataFrame(X)
    frame.columns = ["a", "a", "b", "c", "d", "b"]
    with pytest.raises(ff.ConfigError, match="several columns named 'a', 'b'; rename"):
        ff.from_onnx(mlp()).predict(frame)


@pytest.mark.parametrize("width", [3, "K"])
def test_a_matrix_has_a_column_of_the_inputs_name(width: Any) -> None:
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x", "last"], ["y"])],
        "sums",
        [helper.make_tensor_value_info("x", F, ["N", width])],
        [helper.make_tensor_value_info("y", F, ["N", 1])],
        [onnx.numpy_helper.from_array(np.int64([1]), "last")],
    )
    model = ff.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": [10.0, 20.0], "z": [100.0, 200.0]})
    assert model.predict(frame)["y"].tolist() == [111.0, 222.0]


def test_strings_of_partitions_are_those_of_pandas(tmp_path: Any) -> None:
    lazy = ff.from_onnx(by_columns())(dd.from_pandas(sales(), npartitions=2))
    assert lazy.dtypes["town"] == ff.from_onnx(by_columns()).predict(sales()).dtypes["town"]
    lazy.to_parquet(tmp_path / "t.parquet", write_index=False)
    assert pd.read_parquet(tmp_path / "t.parquet")["town"].tolist() == sales()["city"].tolist()


def test_a_model_in_memory_is_in_the_graph_of_partitions_once() -> None:
    import cloudpickle

    weight = np.random.default_rng(0).standard_normal((6, 50_000)).astype("f4")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("ReduceMax", ["h", "last"], ["y"])],
        "large",
        [helper.make_tensor_value_info("x", F, ["N", 6])],
        [helper.make_tensor_value_info("y", F, ["N", 1])],
        [onnx.numpy_helper.from_array(weight, "w"), onnx.numpy_helper.from_array(np.int64([1]), "last")],
    )
    model = ff.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    table = dd.from_pandas(pd.DataFrame(np.ones((40, 6), "f4")).add_prefix("c"), npartitions=20)
    tasks = dict(model(table).optimize().__dask_graph__())
    assert sum(len(cloudpickle.dumps(task)) for task in tasks.values()) < 2 * weight.nbytes


@pytest.mark.parametrize("options", [{"batch": 3}, {"batched": ["price"]}, {"dims": "row"}])
def test_options_of_rows_are_not_those_of_partitions(options: Any) -> None:
    with pytest.raises(ff.ConfigError, match="cut by its partitions"):
        ff.from_onnx(by_columns())(dd.from_pandas(sales(), npartitions=2), **options)


def test_a_batch_of_the_model_is_no_argument_of_the_call() -> None:
    lazy = ff.from_onnx(by_columns(), batch=2)(dd.from_pandas(sales(), npartitions=2))
    assert lazy.compute(scheduler="sync")["more"].tolist() == list(range(1, ROWS + 1))


def test_columns_of_a_dask_dataframe_are_refused_by_themselves() -> None:
    table = dd.from_pandas(sales(), npartitions=2)
    with pytest.raises(ff.ConfigError, match=r"column of a dask.dataframe.*model\(table\)"):
        ff.from_onnx(by_columns())({name: table[name] for name in ("price", "count", "city")})


def test_a_data_frame_of_a_class_of_its_own() -> None:
    class Sales(pd.DataFrame):
        pass

    assert ff.from_onnx(by_columns()).predict(Sales(sales()))["more"].tolist() == list(range(1, ROWS + 1))
