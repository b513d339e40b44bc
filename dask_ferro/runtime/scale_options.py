"""The options of `ff.Elastic` as the policy's parameters: the configuration's, and what a caller gave."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dask.utils import parse_timedelta

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.policy import scale
from dask_ferro.policy.staff import Pool

# Parameters of the policy that are durations.
_DURATIONS = ("worth", "cooldown", "patience", "patience_most", "order_patience")
# A job is drained so long before it has to move what it holds: the next look may come too late.
_NOTICE = 1.5
# Options of Dask's own Adaptive that mean nothing here, and what to say instead.
_FOREIGN = {
    "target_duration": "efficiency",
    "wait_count": "cooldown",
    "worker_key": "nothing: jobs leave as a whole",
}


def scale_parameters(
    minimum: float | None, maximum: float | None, options: Mapping[str, Any], ordered: bool = False
) -> scale.Parameters:
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
    durations = {name: name.replace("_", "-") for name in _DURATIONS}
    known = {"efficiency", "max_pending", "surge", "fail_unrunnable", *durations}
    if unknown := sorted(set(options) - known):
        raise ConfigError(
            f"ff.Elastic: unknown {', '.join(unknown)}; wanted some of interval, minimum, maximum, "
            + ", ".join(sorted(known))
        )
    least = 0 if minimum is None else minimum
    most = math.inf if maximum is None else maximum
    if not 0 <= least <= most:
        raise ConfigError(f"ff.Elastic: got minimum={least}, maximum={most}; wanted 0 <= minimum <= maximum")
    efficiency = options.get("efficiency", config.number("elastic.efficiency", 0.0, 1.0))
    if isinstance(efficiency, bool) or not isinstance(efficiency, int | float) or not 0 < efficiency <= 1:
        raise ConfigError(f"ff.Elastic: got efficiency={efficiency!r}, wanted a number above 0, at most 1")
    pending = options["max_pending"] if "max_pending" in options else config.count("elastic.max-pending")
    pending = math.inf if pending is None else pending
    if isinstance(pending, bool) or not isinstance(pending, int | float) or pending < 1:
        raise ConfigError(f"ff.Elastic: got max_pending={pending!r}, wanted a number of jobs of at least 1")
    surge = config.number("elastic.surge") if options.get("surge") is None else options["surge"]
    if isinstance(surge, bool) or not isinstance(surge, int | float) or not surge >= 0:
        raise ConfigError(f"ff.Elastic: got surge={surge!r}, wanted a number of workers of at least 0")
    fails_unrunnable(options)
    seconds = {
        name: config.seconds(f"elastic.{key}") if options.get(name) is None else _seconds(name, options[name])
        for name, key in durations.items()
    }
    return scale.Parameters(
        efficiency=float(efficiency),
        minimum=least,
        maximum=most,
        surge=surge,
        max_pending=pending,
        notice=_NOTICE,
        ordered=ordered,
        **seconds,
    )


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


def fails_unrunnable(options: Mapping[str, Any]) -> bool:
    """Return whether tasks fail that wait for a worker while every pool is closed.

    Raises
    ------
    ConfigError
        For a value that is neither true nor false.
    """
    value = options.get("fail_unrunnable")
    if value is None:
        return config.flag("elastic.fail-unrunnable")
    if not isinstance(value, bool):
        raise ConfigError(f"ff.Elastic: got fail_unrunnable={value!r}, wanted True or False")
    return value


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(parse_timedelta(value, default="s"))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        seconds = -1.0
    if isinstance(value, bool) or seconds < 0:
        raise ConfigError(f"ff.Elastic: got {name}={value!r}, wanted a duration such as 10s, of at least 0")
    return seconds
