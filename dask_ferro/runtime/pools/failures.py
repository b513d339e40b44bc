"""When jobs that end before a worker came close their pool: so many in a row, or so many within a window of time.

A broken script fails each time, and a few jobs in a row tell.  What fails now and then (a node without its file system,
a licence that is short) has jobs that work in between: then the window tells.  Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from dask_ferro import config


class FailureLimits(NamedTuple):
    """How many failures close a pool.

    Attributes
    ----------
    row : float
        One after the other, with no job in between whose workers all came; inf: never for that.
    window : float
        Within `seconds`, whatever was in between; inf: never for that.
    seconds : float
    """

    row: float
    window: float
    seconds: float


def limits() -> FailureLimits:
    """Return what the configuration says.

    Raises
    ------
    ConfigError
        For a value that is none.
    """
    return FailureLimits(
        config.value("elastic.failures"),
        config.value("elastic.failures-in-window"),
        config.value("elastic.failures-window"),
    )


def recent(times: Sequence[float], now: float, limit: FailureLimits) -> list[float]:
    """Return the failures that are within the window, the newest of them, as many as may matter."""
    inside = [at for at in times if now - at < limit.seconds]
    return inside if limit.window == inf else inside[-int(limit.window) :]


def too_many(row: int, times: Sequence[float], now: float, limit: FailureLimits) -> str:
    """Return in words that a pool has had too many failures; empty: not yet.

    Parameters
    ----------
    row : int
        Failures since a job's workers all came.
    times : sequence of float
        When jobs failed.

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
