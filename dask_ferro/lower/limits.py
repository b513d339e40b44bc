"""The limits of models as they are configured: one place for all that loads one."""

from __future__ import annotations

import math

from dask_ferro import config
from dask_ferro.graph.load import Limits


def limits(*, ours: bool = False) -> Limits:
    """Return the bounds of `ferro.limits.*` for a model that is to be loaded.

    Parameters
    ----------
    ours : bool, optional
        Whether it was made by this package, or was accepted when the graph was built: it may sleep.
    """
    return Limits(
        value_bytes=config.size("limits.value-bytes"),
        mapped_above=config.size("limits.mapped-above"),
        sleep_seconds=math.inf if ours else config.seconds("limits.sleep"),
    )


def run_seconds() -> float | None:
    """Return how long one bundle may run, `ferro.limits.run`; None: as long as it takes."""
    return config.seconds("limits.run", off=True) or None
