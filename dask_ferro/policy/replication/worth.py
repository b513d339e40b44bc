"""The order in which results leave a worker that has little time: the most expensive to compute again per byte first.

Results that cannot be computed again (scattered data) come before all others.  The rule is that of the fractional
knapsack: whenever the time is over, no other order would have saved more seconds in as many bytes, except for the
last result.  Seconds are of compute, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan
from typing import NamedTuple

from dask_ferro.policy.facts import Key


class UniqueResult(NamedTuple):
    """A result that only retiring workers hold.

    Attributes
    ----------
    seconds : float
        Seconds to compute it again; infinite where that is impossible.
    """

    key: Key
    nbytes: int
    seconds: float


def by_worth(results: Iterable[UniqueResult]) -> list[Key]:
    """Return the keys in the order in which they should be copied.

    Ties go to the smaller result, then to the one given first.

    >>> rows = [("large", 10**9, 5.0), ("small", 10**3, 5.0), ("cheap", 10**3, 0.1)]
    >>> by_worth(UniqueResult(*row) for row in rows)
    ['small', 'cheap', 'large']
    """
    return [held.key for held in sorted(results, key=lambda held: rank(held.nbytes, held.seconds))]


def rank(nbytes: int, seconds: float) -> tuple[float, int]:
    """Return the sort key of a result, smallest for the one that is worth most.

    >>> rank(10, 5.0) < rank(1000, 5.0) < rank(1000, 0.1)
    True
    """
    nbytes = max(nbytes, 1)
    # A duration that was not measured properly counts as 0.
    seconds = 0.0 if isnan(seconds) else max(seconds, 0.0)
    return -seconds / nbytes, nbytes
