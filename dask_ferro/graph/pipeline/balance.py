"""Cuts of a sequence into pieces of about equal weight, with few bytes across the cuts.

The heaviest piece sets the pace of a pipeline, so first the lightest possible heaviest piece is found; then, of all
cuts that keep within a few per cent of it, those over which the fewest bytes go.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from dask_ferro.errors import ConfigError

# What the heaviest piece may weigh more where that saves bytes: less than projections are off by.
_SLACK = 0.05
# Halvings of an interval until it is as narrow as a float's last bits.
_HALVINGS = 50


def balanced(weights: Sequence[float], crossing: Sequence[float], pieces: int) -> tuple[int, ...]:
    """Return where each piece starts.

    Parameters
    ----------
    weights : sequence of float
        Of the items in order, none below 0.
    crossing : sequence of float
        What goes over a cut behind each item but the last.
    pieces : int
        None of them is empty.

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
    """Return the starts of pieces within the limit with the least bytes across; early cuts break ties."""
    count = len(sums) - 1
    # For each end of the pieces so far: what crosses their starts, and the starts.
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
