"""Rows of a matrix of options: those that cover all pairs run in the suite, the others in `make soak`.

A fault of two options together is met by every pair of values; only a fault of three at once waits for the whole
matrix.  The choice is greedy and depends on the order of the values alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[tuple[int, int], tuple[int, int]]


def all_pairs(*axes: Sequence[Any], when: Callable[..., bool] = lambda *values: True) -> list[Any]:
    """Return all rows of a matrix for `parametrize`; those that are not needed to cover all pairs are marked `soak`.

    Parameters
    ----------
    *axes : sequence
        The values of each option.
    when : callable (*values) -> bool, optional
        Whether a row exists.
    """
    places = product(*(range(len(axis)) for axis in axes))
    rows = [row for row in places if when(*(axis[i] for axis, i in zip(axes, row, strict=True)))]
    kept = covering(rows)
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, row, strict=True)),
            marks=() if row in kept else pytest.mark.soak,
        )
        for row in rows
    ]


def covering(rows: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return rows in which every pair of values of two columns occurs that occurs in `rows`, few of them."""
    pairs = {row: _pairs(row) for row in rows}
    missing = set[Pair]().union(*pairs.values())
    kept = set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        kept.add(best)
        missing -= pairs[best]
    return kept


def _pairs(row: tuple[int, ...]) -> set[Pair]:
    return set(combinations(enumerate(row), 2))
