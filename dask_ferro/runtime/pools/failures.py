"""The limits of job failures that close a pool: consecutive ones, or a number within a time window.

A broken script fails each time, which a few consecutive jobs show.  Sporadic causes (a node without its file system,
a licence in short supply) let jobs in between succeed; the window detects those.  A failure is a job that ends before
all its workers connected.  Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from dask_ferro import config

# Twenty failures in ten minutes: a node that fails each of its jobs at once does that within the time of a few others.
_WINDOW = (20, 600.0)


class FailureLimits(NamedTuple):
    """The numbers of failures that close a pool.

    Attributes
    ----------
    row : float
        Consecutive failures, with no job in between whose workers all connected; inf: no limit.
    window : float
        Failures within `seconds`, whatever happened in between; inf: no limit.
    seconds : float
    """

    row: float
    window: float
    seconds: float


def limits() -> FailureLimits:
    """Return the limits, of which the first is an option.

    Raises
    ------
    ConfigError
        For an invalid value.
    """
    return FailureLimits(config.value("elastic.failures"), *_WINDOW)


def recent(times: Sequence[float], now: float, limit: FailureLimits) -> list[float]:
    """Return the newest failures within the window, as many as may matter."""
    inside = [at for at in times if now - at < limit.seconds]
    return inside if limit.window == inf else inside[-int(limit.window) :]


def too_many(row: int, times: Sequence[float], now: float, limit: FailureLimits) -> str:
    """Return a description of too many failures; empty: there are not too many yet.

    Parameters
    ----------
    row : int
        Failures since a job's workers all connected.
    times : sequence of float
        The times of failures.

    Examples
    --------
    >>> too_many(1, [0.0, 500.0, 590.0], 600.0, FailureLimits(row=3, window=3, seconds=700.0))
    '3 jobs ended before a worker came within 600 s'
    """
    if row >= limit.row:
        return f"{row} jobs ended before a worker came"
    inside = recent(times, now, limit)
    if len(inside) >= limit.window:
        return f"{len(inside)} jobs ended before a worker came within {now - inside[0]:.0f} s"
    return ""
