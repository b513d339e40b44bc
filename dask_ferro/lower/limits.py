"""The limits on models that `ferro.limits.*` configures."""

from __future__ import annotations

from dask_ferro import config
from dask_ferro.graph.model.load import Limits


def limits(*, ours: bool = False) -> Limits:
    """Return the limits of `ferro.limits.*` for a model that is to be loaded.

    Parameters
    ----------
    ours : bool, optional
        Whether it was made by this package, or was accepted when the graph was built: it may sleep.

    Raises
    ------
    ConfigError
        For an invalid value in the configuration.
    """
    configured = config.read(Limits, "limits.")
    return configured.of_ours() if ours else configured
