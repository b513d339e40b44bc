"""`ff.predict_files` over tables: parquet and CSV in and out, columns of any type, key columns that are kept."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import numpy as np
import pytest

import dask_ferro as ff
from tests.each import each
from tests.graphs import mlp, mlp_reference
from tests.lower.model.test_tables import by_columns

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

ROWS = 2500  # more than two of the places that are remembered of a CSV file
KEPT = ["id", "when"]


def sales(rows: int = ROWS) -> Any:
    return pd.DataFrame(
        {
            "city": np.resize(["Bern", "Rome, the city", "Zürich"], rows),
            "id": np.arange(rows) + 10**12,
            "price": np.random.default_rng(0).random(rows),
            "count": np.arange(rows) % 7,
            "when": pd.date_range("2026-01-01", periods=rows, freq="h"),
        }
    )


def write(frame: Any, path: Any) -> str:
    if str(path).endswith(".csv"):
        frame.to_csv(path, index=False)
    elif str(path).endswith(".parquet"):
        frame.to_parquet(path, row_group_size=700)
    else:
        os.makedirs(path)
        half = len(frame) // 2
        frame.iloc[:half].to_parquet(path / "a.parquet")
        frame.iloc[half:].to_parquet(path / "b.parquet")
    return str(path)


def read(folder: Any) -> Any:
    if str(folder).endswith(".csv"):
        return pd.read_csv(folder)
    paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    return pd.concat([pd.read_parquet(p) for p in paths], ignore_index=True)


def check(folder: Any, frame: Any, keep: list[str]) -> None:
    got = read(folder)
    assert list(got.columns) == [*keep, "total", "more", "town"]
    assert got["town"].tolist() == frame["city"].tolist()
    assert got["more"].tolist() == (frame["count"] + 1).tolist()
    np.testing.assert_allclose(got["total"], frame["price"] * frame["count"], rtol=1e-5)
    for name in keep:
        values = pd.to_datetime(got[name]) if name == "when" else got[name]
        assert (values == frame[name]).all()


@pytest.mark.parametrize("source", ["t.parquet", "t.csv", "folder"])
@pytest.mark.parametrize("sink", ["out.parquet", "out.csv"])
def test_the_matrix_of_options(tmp_path: Any, source: str, sink: str) -> None:
    options = enumerate(product([None, 1, 700, 10**6], [[], KEPT], [1, 2]))
    each(options, lambda row: _check_options(tmp_path / str(row[0]), source, sink, *row[1]))


def _check_options(
    folder: Any, source: str, sink: str, batch: int | None, keep: list[str], axes: int
) -> None:
    folder.mkdir()
    frame = sales(40 if batch == 1 else ROWS)
    summary = ff.predict_files(
        by_columns(axes), write(frame, folder / source), folder / sink, batch_size=batch, passthrough=keep
    )
    assert summary.rows == len(frame)
    check(folder / sink, frame, keep)
    again = ff.predict_files(
        by_columns(axes), folder / source, folder / sink, batch_size=batch, passthrough=keep
    )
    assert (again.rows, again.chunks_computed) == (len(frame), 0)


@pytest.mark.parametrize("source", ["t.parquet", "t.csv"])
@pytest.mark.parametrize("sink", ["out.parquet", "out.csv"])
def test_a_matrix_takes_the_columns_that_are_not_kept(tmp_path: Any, source: str, sink: str) -> None:
    x = np.random.default_rng(1).standard_normal((50, 6))
    frame = pd.DataFrame(x, columns=[f"c{k}" for k in range(6)])
    frame.insert(2, "key", [f"row {k}" for k in range(50)])
    ff.predict_files(
        mlp(), write(frame, tmp_path / source), tmp_path / sink, passthrough="key", batch_size=20
    )
    got = read(tmp_path / sink)
    assert got["key"].tolist() == frame["key"].tolist()
    np.testing.assert_allclose(
        got.drop(columns="key").to_numpy(), mlp_reference(x.astype("f4")), rtol=1e-4, atol=1e-5
    )


def test_a_table_is_found_without_keep_where_nothing_else_fits(tmp_path: Any) -> None:
    frame = sales(30)
    write(frame, tmp_path / "t.parquet")
    ff.predict_files(by_columns(), tmp_path / "t.parquet", tmp_path / "out.parquet")
    check(tmp_path / "out.parquet", frame, [])


@pytest.mark.parametrize("source", ["t.parquet", "t.csv"])
@pytest.mark.parametrize("sink", ["out.parquet", "out.csv"])
def test_a_table_of_no_rows_gives_one_with_its_columns(tmp_path: Any, source: str, sink: str) -> None:
    frame = sales(3).iloc[:0]
    assert (
        ff.predict_files(
            by_columns(), write(frame, tmp_path / source), tmp_path / sink, passthrough=["id"]
        ).rows
        == 0
    )
    got = read(tmp_path / sink)
    assert (len(got), list(got.columns)) == (0, ["id", "total", "more", "town"])


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("rows", [1, 1023, 1024, 1025, 2048])
def test_lines_of_a_csv_file(tmp_path: Any, ending: str, is_closed: bool, rows: int) -> None:
    frame = sales(rows)
    text = frame.to_csv(index=False, lineterminator=ending)
    (tmp_path / "t.csv").write_bytes((text if is_closed else text.removesuffix(ending)).encode())
    ff.predict_files(
        by_columns(), tmp_path / "t.csv", tmp_path / "out.parquet", passthrough=KEPT, batch_size=500
    )
    check(tmp_path / "out.parquet", frame, KEPT)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            lambda t: t.replace("Bern", '"Bern', 1), "quote|no CSV", id="a quote that is not closed"
        ),
        pytest.param(
            lambda t: t + "Bern,1,cheap,2,2026-01-01\n", "rows .* failed", id="a word among numbers"
        ),
        pytest.param(lambda t: t + "Bern,1\n", "rows .* failed|no CSV", id="a short line"),
        pytest.param(lambda t: "", "no CSV with a header", id="an empty file"),
    ],
)
def test_a_csv_file_that_is_misread_is_an_error(tmp_path: Any, change: Any, words: str) -> None:
    rows = 60000  # pyarrow tells types by the first megabyte
    (tmp_path / "t.csv").write_text(change(sales(rows).to_csv(index=False)), encoding="utf-8")
    with pytest.raises(ff.InputError, match=words):
        ff.predict_files(by_columns(), tmp_path / "t.csv", tmp_path / "out.parquet", passthrough=["id"])
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(
            lambda p, o: ff.predict_files(by_columns(), p, o, passthrough=["nr"]),
            r"passthrough=\['nr'\].*it has city",
            id="no column",
        ),
        pytest.param(
            lambda p, o: ff.predict_files(by_columns(), p, o.removesuffix(".parquet"), passthrough=["id"]),
            "passthrough= writes a table",
            id="a sink",
        ),
        pytest.param(
            lambda p, o: ff.predict_files(by_columns(), np.zeros(3), o, passthrough=["id"]),
            "need a table",
            id="a source",
        ),
        pytest.param(
            lambda p, o: ff.predict_files(mlp(), p, o, columns=["a"]),
            r"columns=\['a'\].*it has city",
            id="no such columns",
        ),
        pytest.param(
            lambda p, o: ff.predict_files(by_columns(), p, o, columns=["price"]),
            "columns= is for a model",
            id="columns",
        ),
        pytest.param(
            lambda p, o: ff.predict_files(by_columns(), p, o, separator=";"),
            "a source that is CSV",
            id="an option",
        ),
        pytest.param(
            lambda p, o: ff.predict_files(mlp(), p, o, passthrough=["id"]),
            "takes 6",
            id="columns for a matrix",
        ),
        pytest.param(
            lambda p, o: ff.predict_files(by_columns(), p, p, passthrough=["id"]),
            "the same",
            id="onto itself",
        ),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_written(tmp_path: Any, call: Any, words: str) -> None:
    path, out = write(sales(20), tmp_path / "t.parquet"), str(tmp_path / "out.parquet")
    with pytest.raises(ff.InputError, match=words):
        call(path, out)
    assert os.listdir(tmp_path) == ["t.parquet"]


# ---- what a reader of the code found ------------------------------------------------------------------------


def folder_of(path: Any, *frames: Any) -> str:
    os.makedirs(path)
    for number, frame in enumerate(frames):
        frame.to_parquet(path / f"{number}.parquet")
    return str(path)


@pytest.mark.parametrize("batch", [2, 4, 100])
def test_files_of_other_types_are_one_table(tmp_path: Any, batch: int) -> None:
    first, second = sales(4).astype({"id": "int64"}), sales(4).assign(id=np.arange(4, dtype="int32"))
    path = folder_of(tmp_path / "t", first, second[second.columns[::-1]])
    ff.predict_files(by_columns(), path, tmp_path / "out.parquet", passthrough=["id"], batch_size=batch)
    got = pd.read_parquet(tmp_path / "out.parquet")
    assert got["id"].tolist() == [*first["id"], *range(4)]


def test_files_whose_types_do_not_go_together_are_refused(tmp_path: Any) -> None:
    path = folder_of(tmp_path / "t", sales(4), sales(4).assign(id=["a", "b", "c", "d"]))
    with pytest.raises(ff.InputError, match="different types"):
        ff.predict_files(by_columns(), path, tmp_path / "out.parquet", passthrough=["id"])


def test_a_kept_column_with_the_name_of_a_results_column_is_refused(tmp_path: Any) -> None:
    (name,) = ff.from_onnx(mlp()).outputs
    frame = pd.DataFrame(np.ones((4, 6))).add_prefix("c").assign(**{f"{name}_0": 1})
    with pytest.raises(ff.InputError, match="the table already has"):
        ff.predict_files(
            mlp(), write(frame, tmp_path / "t.parquet"), tmp_path / "out.parquet", passthrough=[f"{name}_0"]
        )
    assert os.listdir(tmp_path) == ["t.parquet"]


def test_lines_that_end_with_a_carriage_return_are_refused(tmp_path: Any) -> None:
    (tmp_path / "t.csv").write_bytes(sales(5).to_csv(index=False).replace("\n", "\r").encode())
    with pytest.raises(ff.InputError, match=r"carriage return|no CSV"):
        ff.predict_files(by_columns(), tmp_path / "t.csv", tmp_path / "out.parquet", passthrough=["id"])


def test_the_model_tells_types_of_a_csv_files_columns(tmp_path: Any) -> None:
    """The first megabyte has whole prices, and towns that are numbers."""
    rows = 60_000
    frame = sales(rows).assign(price=1, city="12")
    frame["price"] = frame["price"].astype(object)
    frame.loc[rows - 1, ["price", "city"]] = [1.5, "Bern"]
    ff.predict_files(
        by_columns(), write(frame, tmp_path / "t.csv"), tmp_path / "out.parquet", passthrough=["id"]
    )
    got = pd.read_parquet(tmp_path / "out.parquet")
    assert got["town"].iloc[[0, -1]].tolist() == ["12", "Bern"]
    assert got["total"].iloc[-1] == np.float32(1.5 * frame["count"].iloc[-1])


@pytest.mark.parametrize("dtype", ["float64", "mixed"])
def test_a_table_that_is_no_array_of_the_inputs_dtype_is_one(tmp_path: Any, dtype: str) -> None:
    frame = pd.DataFrame(np.ones((5, 6))).add_prefix("c")
    frame = frame.astype({"c1": "int64"}) if dtype == "mixed" else frame
    ff.predict_files(mlp(), write(frame, tmp_path / "t.parquet"), tmp_path / "out.parquet")
    got = pd.read_parquet(tmp_path / "out.parquet")
    np.testing.assert_allclose(got.to_numpy(), mlp_reference(np.ones((5, 6), "f4")), rtol=1e-4, atol=1e-5)


def test_other_kept_columns_are_another_run(tmp_path: Any) -> None:
    path, out = write(sales(20), tmp_path / "t.parquet"), tmp_path / "out.parquet"
    ff.predict_files(by_columns(), path, out, passthrough=["id"])
    with pytest.raises(ff.InputError, match="is of another run"):
        ff.predict_files(by_columns(), path, out, passthrough=["price"])
    ff.predict_files(by_columns(), path, out, passthrough=["price"], overwrite=True)
    check(out, sales(20), ["price"])
