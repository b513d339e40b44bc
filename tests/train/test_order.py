"""The order of rows: every epoch has all rows once, any position is found again, and the numbers never change."""

from __future__ import annotations

from itertools import chain, islice
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.train.order import block_order, cut, permutation

blocks = st.lists(st.integers(0, 9), min_size=1, max_size=6)
seeds = st.none() | st.integers(0, 2**64 - 1)
properties = settings(max_examples=60, deadline=None)


def rows_in(found):
    return [[(take.block, row) for take in batch for row in take.rows.tolist()] for batch in found]


@properties
@given(blocks, st.integers(1, 7), seeds, st.integers(0, 3))
def test_an_epoch_has_every_row_once(lengths, size, seed, epoch):
    found = rows_in(cut(lengths, size, seed, epoch))
    every = [(block, row) for block, length in enumerate(lengths) for row in range(length)]
    assert sorted(chain.from_iterable(found)) == every
    assert [len(batch) for batch in found[:-1]] == [size] * (len(found) - 1)
    assert len(found) == ceil(sum(lengths) / size)


@properties
@given(blocks, st.integers(1, 7), seeds, st.integers(0, 3), st.integers(0, 9))
def test_an_epoch_from_a_position_is_the_rest_of_it(lengths, size, seed, epoch, start):
    whole, rest = cut(lengths, size, seed, epoch), cut(lengths, size, seed, epoch, start)
    assert rows_in(rest) == rows_in(islice(whole, start, None))


@properties
@given(blocks, st.integers(1, 7))
def test_without_a_seed_rows_are_in_order(lengths, size):
    found = list(chain.from_iterable(rows_in(cut(lengths, size, None, 5))))
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("counter", "order"),
    [
        pytest.param((0, 0, 0), [3, 5, 2, 7, 0, 6, 1, 4], id="blocks of epoch 0"),
        pytest.param((1, 0, 0), [5, 3, 1, 0, 6, 7, 4, 2], id="blocks of epoch 1"),
        pytest.param((0, 0, 1), [4, 0, 5, 6, 2, 7, 3, 1], id="rows of block 0 of epoch 0"),
        pytest.param((0, 1, 1), [2, 4, 7, 1, 0, 6, 5, 3], id="rows of block 1 of epoch 0"),
    ],
)
def test_the_numbers_stay_what_they_are(counter, order):
    """A checkpoint of an earlier release goes on in its order."""
    assert permutation(8, 1, *counter).tolist() == order


def test_seeds_and_epochs_have_different_orders():
    orders = {tuple(block_order(30, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
