"""The keywords of `ff.SLURMCluster` beside dask-jobqueue's own: default, unit, bounds and meaning of each, said once.

What reads Dask's configuration reads them too, wherever they were written: in a call, in the `pools` of a call, or in a
job configuration (`job_keys`).  The class' docstring, its signature and docs/options.md are made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from math import inf
from textwrap import fill
from typing import Any, TypeVar

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.options import Option, flag, given, number, option_of, seconds

WHO = "ff.SLURMCluster"
# Three years.  What goes into a script or a shell's `sleep` has to be a number with an end.
_MOST = 1e8
# Stands in a docstring where the keywords go.
_PLACE = "    <keywords>\n"

T = TypeVar("T")
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class JobKeywords:
    """Of a cluster, for all its jobs, and of a pool, for its own."""

    signal_ahead: float = seconds(
        "60s",
        "Seconds before the end of a job's walltime at which its workers are told to leave, on SLURM by"
        " `--signal=B:USR1@N`; of a short walltime a quarter at most; 0: not at all.",
        most=_MOST,
    )
    grace: float | None = seconds(
        "auto",
        "Seconds that a preempted job has, from that same signal on; by default what SLURM says that the partition"
        " grants, and 30 where it says nothing.",
        auto=True,
        most=_MOST,
    )
    preemptible: bool | None = flag(
        None,
        "Whether the batch system may end the jobs without a warning: then what only one of them holds is copied to"
        " other workers while there is time. By default what SLURM says of the partition; preemption by QOS has to be"
        " said here.",
    )
    queue_wait: float = seconds(
        "1s", "Seconds that a job is expected to wait in the queue, until that was measured."
    )
    start_up: float = seconds(
        "3s",
        "Seconds that a job is expected to take from its start until its workers are connected, until that was"
        " measured.",
    )


@dataclass(frozen=True)
class PoolKeywords(JobKeywords):
    """Of a pool."""

    minimum: float = number(0, "Jobs that there are at least.", unit="jobs")
    maximum: float = number(inf, "Jobs that there are at most.", unit="jobs")
    cost: float = number(1.0, "Of a second of one job, as a multiple of other pools'.", unit="times")


@dataclass(frozen=True)
class ClusterKeywords(JobKeywords):
    """Of the cluster."""

    pools: Mapping[str, Mapping[str, object]] | None = given(
        "mapping",
        "Further kinds of jobs: keywords of the class by name, which replace those given beside them. The arguments"
        ' themselves are the pool "default". A pool may also have `minimum`, `maximum` and `cost`. `pools` of a running'
        " cluster are added, removed, paused and resumed.",
        "by name",
    )
    patience: Mapping[str, float] | None = given(
        "mapping", 'For how long what may pass is waited for, by name, as in {"stuck": 60}.', "by name"
    )
    journal: str | None = given(
        "file",
        "A file for the record of all jobs (`jobs`). A cluster that is started again on it, after the one before was"
        " killed, adopts the jobs that wait, if they are what it would submit, and ends the others.",
    )
    keep: float = seconds(
        "0s",
        "Seconds for which the jobs of a cluster that was killed are left alone for that; 0: they end at once.",
        most=_MOST,
    )


def keywords_of(kind: type) -> dict[str, Option]:
    """Return the options of a class by the names that Python has for them."""
    found = ((one.name, option_of(one)) for one in fields(kind))
    return {name: option for name, option in found if option is not None}


def read(kind: type[T], where: str, values: Mapping[str, object]) -> T:
    """Return a record of keywords, some of them given by name.

    Raises
    ------
    ConfigError
        For a name that is none, with what was meant, or a value that is none.
    """
    known = keywords_of(kind)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: got {values!r}, wanted seconds or other values by name")
    config.refuse_unknown(where, values, tuple(known))
    for name, value in values.items():
        if wrong := config.fault(known[name], value, name):
            raise ConfigError(f"{where}: {wrong}")
    return kind(**{name: as_written(known[name], value) for name, value in values.items()})


def as_written(option: Option, value: object) -> object:
    """Return the value of an option; what was written as a number stays one of its kind: jobs are counted."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and option.kind in ("seconds", "number") else config.parsed(option, value)


# ---- where they are told -----------------------------------------------------------------------------------


def described(kind: type) -> Callable[[C], C]:
    """Return what gives a class its keywords: in its docstring, in place of `<keywords>`, and in its signature."""

    def describe(cls: C) -> C:
        options = keywords_of(kind)
        told = "".join(_paragraph(name, option) for name, option in options.items())
        cls.__doc__ = (cls.__doc__ or "").replace(_PLACE, told)
        init: Any = cls.__init__  # type: ignore[misc]
        *before, rest = signature(init).parameters.values()
        named = [
            Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
            for one in fields(kind)
        ]
        init.__signature__ = signature(init).replace(parameters=[*before, *named, rest])
        return cls

    return describe


def _paragraph(name: str, option: Option) -> str:
    default = "" if option.default is None else f", default {option.default}"
    text = fill(option.help, 112, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return f"    {name} : {option.unit}{default}\n{text}\n"
