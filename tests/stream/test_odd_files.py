"""What is read is what others read, or it is refused: odd files against pandas, pyarrow, dask, Pillow and xarray.

Each case makes a source, and tells what another library reads from it as a frame with the column `x`, which goes to a
model that negates it, and columns that are kept; or the words with which it is refused.
"""

from __future__ import annotations

import bz2
import datetime
import decimal
import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dask_ferro as ff
from tests.graphs import close, written

pd = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

ROWS = 7
X = np.arange(ROWS) * 0.5
NEGATED = written("(float[N,1] x) => (float[N,1] y) { [n] y = Neg (x) }")
TEXTS = written("(string[N,1] x) => (string[N,1] y) { [n] y = Identity (x) }")
Case = Callable[[Path], tuple[Any, Any, dict[str, Any]]]


def read_csv(
    content: str | bytes, name: str = "t.csv", how: dict[str, Any] | None = None, **pandas: Any
) -> Case:
    """Make a case of the content of a CSV file, with options of `ff.predict_files` and of pandas."""

    def make(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path), lambda: pd.read_csv(path, **pandas), how or {}

    return make


def read_parquet(*tables: Any, names: tuple[str, ...] = (), **options: Any) -> Case:
    """Make a case of the tables of a folder of parquet files."""

    def make(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
        for number, table in enumerate(tables):
            path = folder / "t" / (names[number] if names else f"{number}.parquet")
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, path, **options)
        return str(folder / "t"), lambda: pd.read_parquet(folder / "t"), {}

    return make


def frame(make: Callable[[Any], Any]) -> Case:
    """Make a case of a frame of some library, made of one of pandas."""

    def case(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
        there = pd.DataFrame(
            {"x": X, "id": [f"{k:07}" for k in range(ROWS)], "when": pd.date_range("2026", periods=ROWS)}
        )
        return make(there), lambda: there, {}

    return case


def column(values: Any, kind: Any = None, **others: Any) -> Any:
    """Return a table with x, and a column to keep."""
    return pa.table({"x": X[: len(values)], "k": pa.array(values, kind), **others})


def lines(*rows: str, head: str = "x,k", end: str = "\n") -> str:
    return "".join(row + end for row in (head, *rows))


def polars(there: Any) -> Any:
    return pytest.importorskip("polars").from_pandas(there)


def of_dask(there: Any) -> Any:
    import dask.dataframe as dd

    return dd.from_pandas(there, npartitions=3)


ZONE = pa.timestamp("us", "Europe/Zurich")
NOON = datetime.datetime(2026, 3, 29, 12, tzinfo=datetime.UTC)
STRUCT = pa.struct([("a", pa.int64()), ("b", pa.string())])


def categories(number: int) -> Any:
    """Return a table with a column of so many categories."""
    kinds = pd.Categorical([f"kind {k}" for k in range(number)])
    return pa.Table.from_pandas(pd.DataFrame({"x": np.arange(number) * 1.0, "k": kinds}))


def indexed(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    path = folder / "t.parquet"
    pd.DataFrame({"x": X, "k": list("abcdefg")}).set_index("k").to_parquet(path)
    return str(path), lambda: pd.read_parquet(path).reset_index(), {}


def mixed(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    return pd.DataFrame({"x": [1.0, 2.0], "k": pd.Series([1, "a"], dtype=object)}), None, {}


READ: dict[str, Case] = {
    # ---- CSV
    "ids with zeros before them": read_csv(lines("1,0000001", "2,0000020"), dtype={"k": str}),
    "numbers for the model with zeros before them": read_csv(lines("007,a", "010,b")),
    "ids of twenty digits": read_csv(lines("1,11898508762506083287", "2,14160410518916347259")),
    "ids of twenty digits among short ones": read_csv(lines("1,7", "2,14160410518916347259"), dtype={"k": str}),
    "floats as they are": read_csv(lines("1,0.1", "2,1e300", "3,-0.0")),
    "whole numbers": read_csv(lines("1,5", "2,-6")),
    "a line break in quotes": read_csv(lines('1,"a\nb"', '2,"c, d"', '3,"say ""no"""')),
    "line breaks in quotes at the ends of records": read_csv(lines(*[f'{k},"\na{k}\n"' for k in range(9)])),
    "Windows' line ends": read_csv(lines("1,a", "2,b", end="\r\n")),
    "no line end at the end": read_csv(lines("1,a", "2,b").rstrip()),
    "empty lines": read_csv("\nx,k\n\n1,a\n\n\n2,b\n\n"),
    "empty lines of Windows": read_csv("x,k\r\n1,a\r\n\r\n2,b\r\n\r\n"),
    "a byte order mark": read_csv(b"\xef\xbb\xbf" + lines("1,a", "2,b").encode()),
    "Latin-1": read_csv(lines("1,Zürich", "2,b").encode("latin-1"), how={"encoding": "latin-1"}, encoding="latin-1"),
    "UTF-16": read_csv(lines("1,Zürich", "2,b").encode("utf-16"), how={"encoding": "utf-16"}, encoding="utf-16"),
    "gzip": read_csv(gzip.compress(lines("1,a", "2,b", "3,c").encode()), "t.csv.gz"),
    "bzip2": read_csv(bz2.compress(lines("1,a", "2,b", "3,c").encode()), "t.csv.bz2"),
    "semicolons": read_csv("x;k\n1;a\n2;b\n", how={"separator": ";"}, sep=";"),
    "tabs": read_csv("x\tk\n1\ta\n2\tb\n", how={"separator": "\t"}, sep="\t"),
    "words for missing values": read_csv(lines("1,a", "-,b", "3,c"), how={"null_values": ["-"]}, na_values=["-"]),
    "missing numbers": read_csv(lines("1,a", ",b", "NaN,c", "NA,d")),
    "missing texts": read_csv(lines("1,a", "2,", '3,""', "4,NA")),
    "True and False": read_csv(lines("True,a", "False,b")),
    "fractions after whole numbers": read_csv(lines(*[f"{k},a" for k in range(300_000)], "0.5,b")),
    "dates": read_csv(lines("1,2026-01-01", "2,2026-12-31")),
    "types that are given": read_csv(lines("1,7", "2,8"), how={"types": {"k": "string"}}, dtype={"k": str}),
    "a name in quotes": read_csv('"x","k"\n1,a\n2,b\n'),
    "another order of columns": read_csv("k,z,x\na,0,1\nb,0,2\n", usecols=["x", "k"]),
    "no rows": read_csv("x,k\n"),
    # ---- parquet
    "categories that differ from file to file": read_parquet(
        *[pa.Table.from_pandas(pd.DataFrame({"x": X[:3], "k": pd.Categorical(list(v))})) for v in ("aba", "cbd")]
    ),
    "many categories in one file": lambda folder: (
        read_parquet(categories(3), categories(300))(folder)[0],
        lambda: pd.concat([categories(n).to_pandas() for n in (3, 300)], ignore_index=True).astype({"k": object}), {},
    ),
    "instants with a zone": read_parquet(column([NOON, None, NOON], ZONE)),
    "nanoseconds": read_parquet(column([1, 2, 3], pa.timestamp("ns"))),
    "dates of parquet": read_parquet(column([datetime.date(2026, 1, 1)] * 3)),
    "times": read_parquet(column([datetime.time(12, 30)] * 3)),
    "durations": read_parquet(column([datetime.timedelta(days=1), None], pa.duration("us"))),
    "decimals": read_parquet(column([decimal.Decimal("1.10"), decimal.Decimal("22.25")])),
    "lists": read_parquet(column([[1, 2], [], None])),
    "structs": read_parquet(column([{"a": 1, "b": "c"}, None], STRUCT)),
    "bytes": read_parquet(column([b"\x00\xff", b""])),
    "large texts": read_parquet(column(["a", None, "c"], pa.large_string())),
    "whole numbers with missing ones": read_parquet(column([1, None, 3])),
    "booleans": read_parquet(column([True, None, False])),
    "numbers beyond 2 ** 63": read_parquet(column([2**64 - 1, 2**63], pa.uint64())),
    "x of whole numbers": read_parquet(pa.table({"x": [1, 2, 3], "k": ["a", "b", "c"]})),
    "x with missing values": read_parquet(pa.table({"x": [1.0, None, 3.0], "k": ["a", "b", "c"]})),
    "small row groups": read_parquet(column([f"{k}" for k in range(ROWS)]), row_group_size=1),
    "another order of columns in a file": read_parquet(column(["a", "b"]), column(["c"]).select(["k", "x"])),
    "int32 and int64": read_parquet(column([1, 2], pa.int32()), column([3], pa.int64())),
    "a column that is missing in all rows of a file": read_parquet(column(["a"]), column([None, None], pa.null())),
    "an empty file among others": read_parquet(column(["a"]), column([], pa.string()), column(["b", "c"])),
    "folders of keys": read_parquet(
        column(["a", "b"]), column(["c"]), names=("year=2025/0.parquet", "year=2026/0.parquet")
    ),
    "keys of text": read_parquet(
        column(["a"]), column(["b"]), names=("city=Gen%C3%A8ve/0.parquet", "city=St. Gallen/0.parquet")
    ),
    "a key with a space": read_parquet(column(["a"]), column(["b"]), names=("a%20b=1/0.parquet", "a%20b=2/0.parquet")),
    "folders in folders": read_parquet(column(["a"]), column(["b"]), names=("a/0.parquet", "b/c/0.parquet")),
    "files of the writer's own": read_parquet(column(["a"]), column(["z"]), names=("0.parquet", "_tmp/1.parquet")),
    "zstd and dictionaries": read_parquet(column(["a", "b", "a"]), compression="zstd", use_dictionary=True),
    "an index of pandas": indexed,
    # ---- frames
    "a frame of pandas": frame(lambda t: t),
    "a frame of pandas with an index": frame(lambda t: t.set_index(np.arange(ROWS)[::-1])),
    "a frame of polars": frame(polars),
    "a lazy frame of polars": frame(lambda t: polars(t).lazy()),
    "a table of pyarrow": frame(lambda t: pa.Table.from_pandas(t)),
    "a frame of dask": frame(of_dask),
}  # fmt: skip

REFUSED: dict[str, tuple[Case, str]] = {
    "Latin-1 as UTF-8": (read_csv(lines("1,Zürich").encode("latin-1")), 'encoding="latin-1"'),
    "semicolons as commas": (read_csv("x;k\n1;a\n"), "pass separator=';'"),
    "a decimal comma": (read_csv("x;k\n1,5;a\n", how={"separator": ";"}), "types="),
    "a short line": (read_csv(lines("1,a", "2")), "Expected 2 columns, got 1"),
    "a quote that is not closed": (read_csv(lines('1,"a', "2,b")), "quote|no CSV"),
    "two columns of one name": (read_csv("x,k,k\n1,a,b\n"), "several columns named 'k'"),
    "carriage returns alone": (read_csv("x,k\r1,a\r"), "carriage return|no CSV"),
    "a zero before an id further on": (
        read_csv(lines(*[f"{k},{k}" for k in range(200_000)], "1,007")), "'007'.*types="),
    "a word among numbers": (read_csv(lines(*[f"{k},a" for k in range(200_000)], "-,b")), "null_values"),
    "texts and numbers in two files": (read_parquet(column(["a"]), column([1])), "different types"),
    "zones that differ": (
        read_parquet(column([NOON], ZONE), column([NOON], pa.timestamp("us", "UTC"))), "different types"),
    "a column that a file lacks": (
        read_parquet(column(["a"]), pa.table({"x": [1.0]})), r"has no column \['k'\]"),
    "a key that is a column": (read_parquet(column(["a"]), names=("k=a/0.parquet",)), "as a column and as a folder's"),
    "decimals for the model": (read_parquet(pa.table({"x": [decimal.Decimal("1.5")], "k": ["a"]})), "wanted float32"),
    "dates for the model": (read_parquet(pa.table({"x": [NOON], "k": ["a"]})), "wanted float32"),
    "objects of several kinds": (mixed, "no one type"),
}  # fmt: skip


def texts(values: Any) -> list[str | None]:
    """Return values as texts, None for a missing one."""
    return [None if v is None or v is pd.NaT or v is pd.NA or v != v else str(v) for v in map(plain, values)]


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batch", [2, None])
@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_what_others_read(name: str, batch: int | None, tmp_path: Path) -> None:
    source, reference, how = READ[name](tmp_path)
    right = reference()
    keep = [str(c) for c in right.columns if c != "x"]
    batch = batch and max(batch, len(right) // 20)
    ff.predict_files(NEGATED, source, tmp_path / "out.parquet", passthrough=keep, batch_size=batch, **how)
    got = pd.read_parquet(tmp_path / "out.parquet")
    assert list(got.columns) == [*keep, "y"]
    close(got["y"].to_numpy(), -right["x"].to_numpy("f4"))
    for column in keep:
        assert texts(got[column]) == texts(right[column]), column


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused(name: str, tmp_path: Path) -> None:
    make, words = REFUSED[name]
    source, _, how = make(tmp_path)
    with pytest.raises(ff.InputError, match=words) as error:
        ff.predict_files(NEGATED, source, tmp_path / "out.parquet", passthrough=["k"], **how)
    assert len(str(error.value)) < 1500
    assert not os.path.exists(tmp_path / "out.parquet")


@pytest.mark.parametrize("source", ["t.parquet", "t.csv"])
def test_missing_texts_are_refused_wherever_they_are(source: str, tmp_path: Path) -> None:
    there = pd.DataFrame({"x": ["a", None, "c"]})
    there.to_csv(tmp_path / source, index=False) if source.endswith("csv") else there.to_parquet(
        tmp_path / source
    )
    (tmp_path / "t.csv").write_text('x,k\na,1\n"",2\n') if source.endswith("csv") else None
    with pytest.raises(ff.InputError, match="1 missing values"):
        ff.predict_files(TEXTS, tmp_path / source, tmp_path / "out.parquet", passthrough=[])


def test_arrays_of_another_byte_order_are_those_numbers(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X[:, None].astype(">f4"))
    for source in (tmp_path / "x.npy", X[:, None].astype(">f4")):
        ff.predict_files(NEGATED, source, tmp_path / "y.npy", batch_size=3, overwrite=True)
        close(np.load(tmp_path / "y.npy"), -X[:, None])


def test_fifty_thousand_columns_are_linear(tmp_path: Path) -> None:
    """The same values in a quarter of the columns take no less than an eighth of the calls."""
    import cProfile
    import pstats

    calls = []
    for columns in (2_000, 8_000):
        table = pa.table({f"gene {k}": pa.array([1.0, 2.0], pa.float32()) for k in range(columns)})
        pq.write_table(table.append_column("id", pa.array([1, 2])), tmp_path / f"{columns}.parquet")
        made = written(
            f"(float[N,{columns}] X) => (float[N,1] y) {{ [m] y = ReduceSum <keepdims = 1> (X, a) }}",
            {"a": np.int64([1])},
        )
        with cProfile.Profile() as profile:
            ff.predict_files(
                made, tmp_path / f"{columns}.parquet", tmp_path / f"{columns}.out.parquet", passthrough=["id"]
            )
        calls.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
        assert pd.read_parquet(tmp_path / f"{columns}.out.parquet")["y"].tolist() == [columns, 2 * columns]
    assert calls[1] < 8 * calls[0]
