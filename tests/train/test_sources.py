"""Every source gives the batches that its rows have, in an order by seed, from any position."""

from __future__ import annotations

from itertools import chain, islice

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from dask_ferro.errors import InputError
from dask_ferro.train.batches import Batch, batches_of
from tests.each import every

ROWS, SIZE = 23, 5
X = np.arange(2 * ROWS, dtype="f4").reshape(ROWS, 2)
Y = np.arange(ROWS)


@pytest.fixture
def table(tmp_path):
    """Two parquet files of 12 and 11 rows, in row groups of 6."""
    for number, rows in enumerate((slice(0, 12), slice(12, ROWS))):
        frame = pd.DataFrame({"x": list(X[rows]), "y": Y[rows]})
        frame.to_parquet(tmp_path / f"part.{number}.parquet", row_group_size=6)
    return str(tmp_path)


class Numbers(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return torch.from_numpy(X[index]), int(Y[index])


def listed():
    return [{"x": X[i : i + SIZE], "y": Y[i : i + SIZE]} for i in range(0, ROWS, SIZE)]


def loader():
    return DataLoader(Numbers(), batch_size=SIZE)


def generated(epoch):
    return iter(listed())


SOURCES = {
    "arrays": lambda table: ({"x": X, "y": Y}, SIZE),
    "a tuple of arrays": lambda table: ((X, Y), SIZE),
    "dask arrays": lambda table: ({"x": da.from_array(X, (7, 2)), "y": da.from_array(Y, 7)}, SIZE),
    "a dask array and one in memory": lambda table: ({"x": da.from_array(X, (7, 1)), "y": Y}, SIZE),
    "parquet files": lambda table: (table, SIZE),
    "a list of batches": lambda table: (listed(), None),
    "a loader": lambda table: (loader(), None),
    "a function of the epoch": lambda table: (generated, None),
}
SHUFFLED = [name for name in SOURCES if name not in ("a loader", "a function of the epoch")]
sources = pytest.mark.parametrize("name", SOURCES)


def taken(source, epoch=0, start=0, most=None):
    return [
        [np.asarray(value) for value in batch.arrays.values()]
        for batch in islice(source.epoch(epoch, start), most)
    ]


def pairs(batches):
    """The numbers of the rows, of both arrays."""
    found = list(chain.from_iterable(zip(x.tolist(), y.tolist(), strict=True) for x, y in batches))
    assert all(x == X[y].tolist() for x, y in found)
    return [y for _, y in found]


@sources
def test_without_a_seed_the_rows_are_in_order(name, table):
    source = batches_of(*SOURCES[name](table), None)
    batches = taken(source)
    assert pairs(batches) == list(range(ROWS))
    assert [len(x) for x, _ in batches] == [5, 5, 5, 5, 3]
    assert {x.dtype.name for x, _ in batches} == {"float32"}
    assert source.sizes in ((5, 3), ())


@pytest.mark.parametrize("name", SHUFFLED)
def test_each_epoch_has_an_order_of_its_own_by_the_seed(name, table):
    orders = [
        pairs(taken(batches_of(*SOURCES[name](table), seed), epoch))
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert [sorted(order) for order in orders] == [list(range(ROWS))] * 3
    assert len(set(map(tuple, orders))) == 3
    assert pairs(taken(batches_of(*SOURCES[name](table), 0), 1)) == orders[1]


@sources
@pytest.mark.parametrize("start", [1, 3, 5])
def test_an_epoch_goes_on_from_any_position(name, start, table):
    source = batches_of(*SOURCES[name](table), 3)
    assert pairs(taken(source, 2, start)) == pairs(taken(source, 2)[start:])


@pytest.mark.parametrize("name", ["arrays", "dask arrays", "parquet files"])
def test_the_last_rows_can_be_left_out(name, table):
    source = batches_of(*SOURCES[name](table), 0, keeps_last=False)
    assert [len(x) for x, _ in taken(source)] == [5] * 4
    assert (source.sizes, source.count) == ((5,), 4)


def test_dask_arrays_stay_lazy():
    def fails(block):
        raise AssertionError("a chunk was computed")

    lazy = da.from_array(X, (7, 2)).map_blocks(fails, meta=np.empty((0, 0), "f4"))
    batches = list(batches_of({"x": lazy}, SIZE, 0).epoch(0, 0))
    assert [batch.rows for batch in batches] == [5, 5, 5, 5, 3]
    assert batches[0].digest == ""


def test_only_columns_of_numbers_are_read(tmp_path):
    pd.DataFrame({"x": X[:, 0], "name": ["a"] * ROWS}).to_parquet(tmp_path / "t.parquet")
    (batch,) = batches_of(str(tmp_path / "t.parquet"), SIZE, None).epoch(0, 4)
    assert list(batch.arrays) == ["x"]
    assert "string, wanted numbers; encode it before" in batch.left_out["name"]


def test_a_table_without_numbers_is_refused(tmp_path):
    pd.DataFrame({"name": ["a"] * ROWS}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"'name': '.*t.parquet' has .*string, wanted numbers"):
        batches_of(str(tmp_path / "t.parquet"), SIZE, None)


def test_a_sampler_is_told_the_epoch():
    class Sampled(list):
        def set_epoch(self, epoch):
            self[:] = [np.array([epoch])]

    class Loader:
        sampler = Sampled()

        def __iter__(self):
            return iter(self.sampler)

    source = batches_of(Loader(), None, 0)
    assert [next(source.epoch(epoch, 0)).arrays["batch"].item() for epoch in (4, 7)] == [4, 7]


@every(
    ("batches", "size", "message"),
    [
        ({"x": X, "y": Y}, None, "batch_size: got None, wanted the number of rows of a batch"),
        (
            {"x": X, "y": Y[:3]},
            SIZE,
            r"got shapes {'x': \(23, 2\), 'y': \(3,\)}, wanted arrays of one number of rows",
        ),
        ({"x": X[:0]}, SIZE, "0 rows give no batch of 5"),
        (
            {"x": da.from_array(X, (7, 2))[da.from_array(Y, 7) > 3]},
            SIZE,
            "unknown lengths.*compute_chunk_sizes",
        ),
        ("nowhere.parquet", SIZE, "'nowhere.parquet' does not exist; wanted a parquet file"),
        ([X], SIZE, "batch_size and drop_last are for arrays and files"),
        ([], None, "an empty sequence"),
        (7, None, "got int, wanted arrays with batch_size="),
        (
            pd.DataFrame({"x": Y}),
            SIZE,
            r"got a DataFrame, wanted its columns as arrays: {name: frame\[name\]",
        ),
    ],
    ids=[
        "no size",
        "lengths",
        "no rows",
        "unknown chunks",
        "no file",
        "size of batches",
        "empty",
        "int",
        "a DataFrame",
    ],
)
def test_what_gives_no_batches_is_refused(batches, size, message):
    with pytest.raises(InputError, match=message):
        batches_of(batches, size, 0)


def test_an_iterator_has_one_epoch():
    source = batches_of(iter(listed()), None, 0)
    assert len(taken(source)) == 5
    with pytest.raises(
        InputError, match=r"epoch 1 of a list_iterator has none, .*; an iterator can be read once"
    ):
        taken(source, 1)


@every(
    ("batch", "message"),
    [
        ({"x": np.float32(1)}, "wanted arrays of one number of rows"),
        ({}, "wanted arrays of one number of rows"),
        (pd.DataFrame({"x": Y}), "got a DataFrame, wanted its columns as arrays"),
    ],
)
def test_a_batch_without_rows_is_refused(batch, message):
    with pytest.raises(InputError, match=message):
        assert Batch.of(batch).rows
