"""The functions of ranks' tasks except bundles and collectives: tuples of values, and sums over micro-batches.

A task reads values from its arguments: each value is an argument, or an item of an argument that is a tuple.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from dask_ferro.graph.ir.dtypes import HALF_NAMES

# Arrays of this process or of a device.
Terms: TypeAlias = tuple[Any, ...]
# For each value the argument, and the position in it; -1: the argument itself.
Picks: TypeAlias = tuple[tuple[int, int], ...]


def select_values(picks: Picks, *arguments: Any) -> Terms:
    """Return values in arguments as a tuple."""
    return tuple(arguments[p] if i < 0 else arguments[p][i] for p, i in picks)


def add_terms(before: Terms | None, picks: Picks, *arguments: Any) -> Terms:
    """Return values in arguments, added to the sums before; half precision is float32 until `divide_sum` rounds it."""
    wide = [_widen(term) for term in select_values(picks, *arguments)]
    # An infinite gradient is a result of the model, and needs no warning from numpy.
    with np.errstate(all="ignore"):
        return tuple(wide if before is None else (b + term for b, term in zip(before, wide, strict=True)))


def divide_sum(sums: Terms, index: int, parts: int, dtype: np.dtype[Any] | None) -> Any:
    """Return one of the sums of `add_terms`, divided by `parts`, in the dtype of its terms (None: the sum's own)."""
    with np.errstate(all="ignore"):
        found = np.asarray(sums[index] / parts)
        return found if dtype is None else found.astype(dtype, copy=False)


def _widen(term: Any) -> Any:
    """Return half precision as float32: sums of ten float16 or bfloat16 terms already lose their last digits."""
    array = np.asarray(term)
    return array.astype(np.float32) if array.dtype.name in HALF_NAMES else array


def run_after(waits: int, call: Any, *arguments: Any, **by_name: Any) -> Any:
    """Return the result of `call` without its last `waits` arguments, which are dependencies only."""
    return call(*arguments[: len(arguments) - waits], **by_name)
