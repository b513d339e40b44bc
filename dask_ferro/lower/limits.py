"""The limits on models, of which `ferro.limits.*` configures some."""

from __future__ import annotations

from dask_ferro import config
from dask_ferro.graph.model.load import Limits


def limits(*, ours: bool = False) -> Limits:
    """Return the limits for a model that is to be loaded.

    Parameters
    ----------
    ours : bool, optional
        Whether it was made by this package, or was accepted when the graph was built: it may sleep.

    Raises
    ------
    ConfigError
        For an invalid value in the configuration.
    """
    configured = Limits(
        value_bytes=config.value("limits.value-bytes"), mapped_above=config.value("limits.mapped-above")
    )
    return configured.of_ours() if ours else configured
