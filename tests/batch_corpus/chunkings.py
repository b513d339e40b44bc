"""Random chunkings of a model's rows, and the claim that they give what all rows give, or are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import dask.array as da
import numpy as np

import dask_ferro as ff
from tests.batch_corpus.cases import CUT, REFUSED, TRIED

# Products of one row and of several are summed in another order; the values are of the size of 10.
_RELATIVE, _ABSOLUTE = 2e-5, 2e-5

# The first of the chunkings are of single rows: by `batch`, and of dask arrays.
SINGLE_ROWS = 2
# Inputs that go whole to each chunk.
TABLES = ("t", "m")


def random_sizes(rng: np.random.Generator, rows: int, *, empty: bool) -> tuple[int, ...]:
    """Return sizes of chunks: single rows, uneven ones, all, and now and then one of none."""
    kind = rng.integers(4)
    if kind == 0 or rows < 2:
        sizes = [1] * rows
    elif kind == 1:
        sizes = [rows]
    else:
        cuts = np.sort(rng.choice(np.arange(1, rows), rng.integers(1, min(rows, 6)), replace=False))
        sizes = np.diff([0, *cuts, rows]).tolist()
    if empty and rng.random() < 0.15:
        sizes.insert(int(rng.integers(len(sizes) + 1)), 0)
    return tuple(sizes) or (0,)


def check(
    model: Any,
    verdict: str,
    feeds: Callable[[int, np.random.Generator], Mapping[str, np.ndarray]],
    *,
    rows: tuple[int, int],
    times: int,
    seed: int,
    empty: bool = True,
    is_array: bool = True,
    is_random: bool = False,
) -> int:
    """Run a model under random chunkings; return how many were cut into several chunks.

    Parameters
    ----------
    feeds : callable
        Random inputs of so many rows.
    rows : (int, int)
        From and below.
    times : int
        Chunkings.
    empty : bool
        Whether chunks without rows are among them, and no rows at all.
    is_array : bool
        Whether the outputs can be dask arrays.
    is_random : bool
        Whether all rows twice give other numbers too.
    """
    rng, cut = np.random.default_rng(seed), 0
    for turn in range(times):
        count = int(rng.integers(rows[0] if empty else max(1, rows[0]), rows[1]))
        if turn < SINGLE_ROWS:  # whatever is drawn after: each row by itself, of several
            count = max(count, min(3, rows[1] - 1))
        given = dict(feeds(count, rng))
        sizes = random_sizes(rng, count, empty=empty and is_array)
        by_batch = not is_array or rng.random() < 0.4
        batch = int(rng.integers(1, count + 3)) if turn >= SINGLE_ROWS else 1
        if turn < SINGLE_ROWS:
            sizes, by_batch = (1,) * count, turn == 0 or not is_array
        pieces = -(-count // batch) if by_batch else len(sizes)
        if by_batch:
            call = _by_batch(model, given, batch)
        else:
            call = _by_arrays(model, given, sizes, count)
        if pieces > 1:
            cut += 1
        try:
            whole = model(given).compute(scheduler="sync")
        except ff.ModelError:  # of no rows, by an engine
            if count:
                raise
            continue
        if not is_random or pieces > 1:
            _claim(call, whole, verdict, several=pieces > 1, has_empty=0 in sizes or not count)
    return cut


def _by_batch(model: Any, given: Mapping[str, Any], batch: int) -> Callable[[], Any]:
    return lambda: model(dict(given), batch_size=batch).compute(scheduler="sync")


def _by_arrays(model: Any, given: Mapping[str, Any], sizes: tuple[int, ...], count: int) -> Callable[[], Any]:
    def call() -> Any:
        arrays = {
            n: da.from_array(a, chunks=(sizes, *((d,) for d in a.shape[1:]))) if len(a) == count else a
            for n, a in given.items()
            if n not in TABLES
        }
        found = model({**given, **arrays})
        if isinstance(found, dict):
            return {n: one.compute(scheduler="sync") for n, one in found.items()}
        return found.compute(scheduler="sync")

    return call


def _claim(call: Callable[[], Any], whole: Any, verdict: str, *, several: bool, has_empty: bool) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            got = call()
        except (ff.InputError, ff.ModelError) as error:
            if not has_empty and (verdict == CUT or isinstance(error, ff.ModelError)):
                raise
            return
    told = [w for w in told if "its rows may depend" in str(w.message)]
    assert not (several and verdict == REFUSED), "not refused"
    assert not told or verdict == TRIED, f"warned: {told[0].message}"
    assert_equal(got, whole)


def assert_equal(got: Any, wanted: Any) -> None:
    """Assert that results are the same, of the same types, but for the order of sums."""
    if isinstance(wanted, dict):
        assert isinstance(got, dict), type(got)
        assert got.keys() == wanted.keys()
        for key in wanted:
            assert_equal(got[key], wanted[key])
    elif isinstance(wanted, list):
        assert isinstance(got, list), type(got)
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_equal(one, other)
    elif np.asarray(wanted).dtype.kind == "f":
        np.testing.assert_allclose(got, wanted, rtol=_RELATIVE, atol=_ABSOLUTE)
    else:
        np.testing.assert_array_equal(got, wanted)
        assert np.asarray(got).dtype == np.asarray(wanted).dtype
