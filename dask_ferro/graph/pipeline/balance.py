"""Cuts of a sequence into pieces of about equal weight, with few bytes across the cuts.

The heaviest piece limits the speed of a pipeline, so its weight is minimized first; then, among the cuts within a few
per cent of that minimum, the bytes across the cuts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from dask_ferro.errors import ConfigError

# The share by which the heaviest piece may exceed the minimum to save bytes: less than the error of projections.
_SLACK = 0.05
# Bisections until the interval is as narrow as the precision of a float.
_HALVINGS = 50


def balanced(weights: Sequence[float], crossing: Sequence[float], pieces: int) -> tuple[int, ...]:
    """Return where each piece starts.

    Parameters
    ----------
    weights : sequence of float
        The weights of the items in order, not negative.
    crossing : sequence of float
        The bytes across a cut after each item but the last.
    pieces : int
        The number of pieces; none is empty.

    Raises
    ------
    ConfigError
        There are fewer items than pieces.

    Examples
    --------
    >>> balanced([1, 1, 1, 3], [0, 0, 0], 2)
    (0, 3)
    """
    if not 1 <= pieces <= len(weights):
        raise ConfigError(f"cut: got {len(weights)} items, wanted at least the {pieces} pieces")
    sums = [0.0, *accumulate(weights)]
    limit = _lightest(sums, pieces) * (1 + _SLACK)
    return _cheapest(sums, crossing, pieces, limit)


def _lightest(sums: Sequence[float], pieces: int) -> float:
    """Return the least possible weight of the heaviest piece, by bisection."""
    low, high = 0.0, sums[-1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(sums, pieces, middle) else (middle, high)
    return high


def _fits(sums: Sequence[float], pieces: int, limit: float) -> bool:
    """Return whether the items fit into the pieces; an empty piece can take an item of a neighbour."""
    at = 0
    for _ in range(pieces):
        at = max(at, bisect_right(sums, sums[at] + limit) - 1)
    return at == len(sums) - 1


def _cheapest(sums: Sequence[float], crossing: Sequence[float], pieces: int, limit: float) -> tuple[int, ...]:
    """Return the starts of pieces within the limit with the fewest bytes across; early cuts break ties."""
    count = len(sums) - 1
    # For each end of the pieces so far: the bytes across their starts, and the starts.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for piece in range(pieces):
        left = pieces - piece - 1
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (cost, starts) in best.items():
            over = cost + (crossing[start - 1] if start else 0.0)
            for end in range(start + 1, count - left + 1):
                if sums[end] - sums[start] > limit and end > start + 1:
                    break
                if (left or end == count) and (over, (*starts, start)) < longer.get(end, (float("inf"), ())):
                    longer[end] = (over, (*starts, start))
        best = longer
    return best[count][1]
