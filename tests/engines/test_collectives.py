"""Sums of ranks: half precision is added in float32, and infinite sums are results without a warning."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dask_ferro.engines.collectives import reduce_arrays
from dask_ferro.lower.worker.rank_functions import divide_sum

F16, BF16 = np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)
INF = np.inf
# dtype, terms -> sum
ROWS = {
    "float16 has no such sum": (F16, [6e4, 6e4], INF),
    "float16 has it once all terms are added": (F16, [6e4, 6e4, -6e4], F16.type(6e4)),
    "opposite infinities": (F16, [INF, -INF], np.nan),
    "of bfloat16": (BF16, [INF, -INF], np.nan),
    "of float32": (np.dtype("f4"), [INF, -INF], np.nan),
    "float32 has no such sum": (np.dtype("f4"), [3e38, 3e38], INF),
    "bfloat16 counts to 257": (BF16, [256, 1, 1], 258),
}


@pytest.mark.parametrize("row", ROWS)
def test_sums_of_ranks_and_of_micro_batches(row):
    """Warnings are errors here."""
    dtype, values, wanted = ROWS[row]
    terms = [np.array([value], dtype) for value in values]
    with np.errstate(all="ignore"):
        total = sum(term.astype("f4") for term in terms)
    for found in (reduce_arrays(terms), divide_sum((total,), 0, 1, dtype)):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.astype("f8"), [float(wanted)])
