"""The options of `ff.Elastic` as the policy's parameters: the configuration's, and what a caller gave."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.policy.scaling import step
from dask_ferro.policy.scaling.facts import Pool

# What `ff.Elastic` takes by name.
_NAMED = ("interval", "minimum", "maximum")
# Options of Dask's own Adaptive that mean nothing here, and what to say instead.
_FOREIGN = {
    "target_duration": "efficiency",
    "wait_count": "cooldown",
    "worker_key": "nothing: jobs leave as a whole",
}


def scale_parameters(
    minimum: float | None, maximum: float | None, options: Mapping[str, object], ordered: bool = False
) -> step.ScalingParameters:
    """Return the policy's parameters: the configuration's, with what the caller gave.

    Parameters
    ----------
    ordered : bool
        Whether the maximum is an order.

    Raises
    ------
    ConfigError
        For an option that does not exist, or a value out of its range.
    """
    for name, instead in _FOREIGN.items():
        if name in options:
            raise ConfigError(
                f"ff.Elastic: {name} is of Dask's own Adaptive and has no meaning here; use {instead}"
            )
    taken = config.names_of(step.ScalingParameters)
    config.refuse_unknown("ff.Elastic", options, [*_NAMED, *sorted([*taken, "fail_unrunnable"])])
    least = 0 if minimum is None else minimum
    most = math.inf if maximum is None else maximum
    if not 0 <= least <= most:
        raise ConfigError(f"ff.Elastic: got minimum={least}, maximum={most}; wanted 0 <= minimum <= maximum")
    fails_unrunnable(options)
    # What is None is left to the configuration, but for `max_pending`, where it says that there is no bound.
    given = {
        name: value
        for name, value in options.items()
        if name in taken and (value is not None or name == "max_pending")
    }
    bounds = {"minimum": least, "maximum": most, "ordered": ordered}
    return config.read(step.ScalingParameters, "elastic.", given, "ff.Elastic", **bounds)


def check_room(minimum: float | None, maximum: float | None, kinds: Iterable[Pool]) -> None:
    """Refuse a maximum of some workers, but fewer than any job has: there would never be one, and nobody told.

    Raises
    ------
    ConfigError
        With how many workers a job has.
    """
    least = min((kind.processes for kind in kinds), default=1)
    if maximum is not None and 0 < maximum < least and not minimum:
        raise ConfigError(
            f"ff.Elastic: got maximum={maximum:g} workers, and each job has {least}; wanted at least {least}, "
            "or no job fits"
        )


def fails_unrunnable(options: Mapping[str, object]) -> bool:
    """Return whether tasks fail that wait for a worker while every pool is closed.

    Raises
    ------
    ConfigError
        For a value that is neither true nor false.
    """
    return config.given("elastic.fail-unrunnable", options.get("fail_unrunnable"), "ff.Elastic")
