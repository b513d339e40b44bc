"""In which order results leave a worker whose time is bounded: what costs most to compute again, for each byte, first.

What nobody could compute again (scattered data) comes before all of that.  The rule is that of the fractional
knapsack: whenever the time is over, no other order would have saved more seconds in as many bytes, but for the last
result.  Seconds are of compute, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isnan
from typing import NamedTuple

from dask_ferro.policy.facts import Key


class UniqueResult(NamedTuple):
    """A result that only leavers hold.

    Attributes
    ----------
    seconds : float
        That computing it again would take; infinity where nobody could.
    """

    key: Key
    nbytes: int
    seconds: float


def by_worth(results: Iterable[UniqueResult]) -> list[Key]:
    """Return the keys in the order in which they are to be copied.

    Of equal worth the smaller comes first, and then the one named first.

    >>> rows = [("large", 10**9, 5.0), ("small", 10**3, 5.0), ("cheap", 10**3, 0.1)]
    >>> by_worth(UniqueResult(*row) for row in rows)
    ['small', 'cheap', 'large']
    """
    return [held.key for held in sorted(results, key=lambda held: rank(held.nbytes, held.seconds))]


def rank(nbytes: int, seconds: float) -> tuple[float, int]:
    """Return what results are sorted by, the one that is worth most first.

    >>> rank(10, 5.0) < rank(1000, 5.0) < rank(1000, 0.1)
    True
    """
    nbytes = max(nbytes, 1)
    # A duration that was not measured right says nothing.
    seconds = 0.0 if isnan(seconds) else max(seconds, 0.0)
    return -seconds / nbytes, nbytes
