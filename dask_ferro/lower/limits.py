"""Bounds on models and on runs of bundles, as `ferro.limits.*` configures them."""

from __future__ import annotations

import math
from dataclasses import replace

from dask_ferro import config
from dask_ferro.graph.model.load import Limits


def limits(*, ours: bool = False) -> Limits:
    """Return the bounds of `ferro.limits.*` for a model that is to be loaded.

    Parameters
    ----------
    ours : bool, optional
        Whether it was made by this package, or was accepted when the graph was built: it may sleep.

    Raises
    ------
    ConfigError
        For a value that is none.
    """
    configured = config.read(Limits, "limits.")
    return replace(configured, sleep_seconds=math.inf) if ours else configured


def run_seconds() -> float | None:
    """Return the bound on one bundle's run in seconds, `ferro.limits.run`; None: no bound."""
    seconds: float = config.value("limits.run")
    return seconds or None
