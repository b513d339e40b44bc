"""The options of `ff.Elastic`, from the configuration and a call, and the policy's parameters of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from dask_ferro import config
from dask_ferro.errors import InputError
from dask_ferro.options import ElasticOptions
from dask_ferro.policy.scaling import step
from dask_ferro.policy.scaling.facts import Pool

_NAME = "ff.Elastic"
# Options of Dask's Adaptive in scripts that are ported, and which one takes their place.
_OF_ADAPTIVE = {
    "target_duration": "use efficiency, the price of another job",
    "wait_count": "use idle_timeout, the time for which a job may be idle",
    "worker_key": "leave it out: jobs leave as a whole",
}


def elastic_options(options: Mapping[str, object]) -> ElasticOptions:
    """Return the caller's options, and those of the configuration for the rest, also for None.

    Raises
    ------
    InputError
        For an unknown option, one of Dask's Adaptive, or a value out of range.
    """
    for name in sorted(_OF_ADAPTIVE.keys() & options.keys()):
        raise InputError(f"{_NAME}: got {name}, an option of Dask's Adaptive; {_OF_ADAPTIVE[name]}")
    # In a call, None leaves an option to the configuration, except for a bound, where it means none.
    stated = {name: value for name, value in options.items() if value is not None or name == "max_pending"}
    settings = config.read(ElasticOptions, "elastic.", stated, _NAME)
    if settings.minimum > settings.maximum:
        raise InputError(
            f"{_NAME}: got minimum={settings.minimum}, maximum={settings.maximum:g}; wanted 0 <= minimum <= maximum"
        )
    return settings


def bounds_of(minimum: int | None, maximum: int | None) -> dict[str, float]:
    """Return both bounds, of the command line or the configuration, for a cluster that nobody attends.

    Raises
    ------
    InputError
        If they cross, or there is no maximum.
    """
    options = elastic_options({"minimum": minimum, "maximum": maximum})
    if options.maximum == inf:
        raise InputError(
            "configuration ferro.elastic.maximum: got null, wanted a number of workers; give --maximum"
        )
    return {"minimum": options.minimum, "maximum": options.maximum}


def scale_parameters(options: ElasticOptions, ordered: bool = False) -> step.ScalingParameters:
    """Return the policy's parameters.

    Parameters
    ----------
    ordered : bool
        Whether the maximum is an order.
    """
    names = ("minimum", "maximum", "efficiency", "max_pending", "surge", "idle_timeout")
    return step.ScalingParameters(ordered=ordered, **{name: getattr(options, name) for name in names})


def check_room(options: ElasticOptions, kinds: Iterable[Pool]) -> None:
    """Refuse a maximum smaller than the workers of any job, with which no job would ever start.

    Raises
    ------
    InputError
        With the number of workers of a job.
    """
    least = min((kind.processes for kind in kinds), default=1)
    if 0 < options.maximum < least and not options.minimum:
        raise InputError(
            f"{_NAME}: got maximum={options.maximum:g} workers, and each job has {least}; wanted at least {least}, "
            "or no job fits"
        )
