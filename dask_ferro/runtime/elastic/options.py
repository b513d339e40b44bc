"""The options of `ff.Elastic`, from the configuration and a call, as the policy's parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.policy.scaling import step
from dask_ferro.policy.scaling.facts import Pool

# Named parameters of `ff.Elastic` that are no options.
_NAMED = ("interval", "minimum", "maximum")
# Options of Dask's own Adaptive without meaning here, and what to use instead.
_FOREIGN = {
    "target_duration": "worth, the seconds for which another job has to be busy, and efficiency for its price",
    "wait_count": "cooldown",
    "worker_key": "nothing: jobs leave as a whole",
}


def scale_parameters(
    minimum: float | None, maximum: float | None, options: Mapping[str, object], ordered: bool = False
) -> step.ScalingParameters:
    """Return the policy's parameters from the configuration and the caller's options.

    Parameters
    ----------
    ordered : bool
        Whether the maximum is an order.

    Raises
    ------
    ConfigError
        For an unknown option, or a value out of range.
    """
    for name, instead in _FOREIGN.items():
        if name in options:
            raise ConfigError(
                f"ff.Elastic: {name} is an option of Dask's own Adaptive without meaning here; use {instead}"
            )
    taken = config.names_of(step.ScalingParameters)
    config.refuse_unknown("ff.Elastic", options, [*_NAMED, *sorted([*taken, "fail_unrunnable"])])
    least = 0 if minimum is None else minimum
    most = math.inf if maximum is None else maximum
    if not 0 <= least <= most:
        raise ConfigError(f"ff.Elastic: got minimum={least}, maximum={most}; wanted 0 <= minimum <= maximum")
    fails_unrunnable(options)
    # None leaves an option to the configuration, except for `max_pending`, where it means no bound.
    given = {
        name: value
        for name, value in options.items()
        if name in taken and (value is not None or name == "max_pending")
    }
    bounds = {"minimum": least, "maximum": most, "ordered": ordered}
    return config.read(step.ScalingParameters, "elastic.", given, "ff.Elastic", **bounds)


def check_room(minimum: float | None, maximum: float | None, kinds: Iterable[Pool]) -> None:
    """Refuse a maximum smaller than the workers of any job, with which no job would ever start.

    Raises
    ------
    ConfigError
        With the number of workers of a job.
    """
    least = min((kind.processes for kind in kinds), default=1)
    if maximum is not None and 0 < maximum < least and not minimum:
        raise ConfigError(
            f"ff.Elastic: got maximum={maximum:g} workers, and each job has {least}; wanted at least {least}, "
            "or no job fits"
        )


def fails_unrunnable(options: Mapping[str, object]) -> bool:
    """Return whether waiting tasks fail while every pool is closed.

    Raises
    ------
    ConfigError
        For a value that is neither true nor false.
    """
    return config.given("elastic.fail-unrunnable", options.get("fail_unrunnable"), "ff.Elastic")
