"""The keywords of `ff.SLURMCluster` beside dask-jobqueue's: default, unit, bounds and meaning, each defined once.

They are read in a call, in the `pools` of a call, or in dask-jobqueue's section of Dask's configuration, like its own.
docs/options.md is generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.options import AUTO, count, flag, mapping, number, seconds

NAME = "ff.SLURMCluster"
# Three years: values that go into a script or a shell's `sleep` have to be finite.
_MAX_SECONDS = 1e8

T = TypeVar("T")


@dataclass(frozen=True)
class JobKeywords:
    """Keywords of a cluster, for all its jobs, and of a pool, for its own."""

    retire_before: float = seconds(
        "60s",
        "How long before the end of a job's walltime its workers are retired, on SLURM by `--signal=B:USR1@N`; at most"
        " a quarter of the walltime. 0: never.",
        most=_MAX_SECONDS,
    )
    grace: float | None = seconds(
        AUTO,
        "How long a preempted job continues after SLURM's signal. By default the grace time of the partition, or 30 s"
        " if the partition has none.",
        none=AUTO,
        most=_MAX_SECONDS,
    )
    preemptible: bool | None = flag(
        None,
        "Whether the batch system may end the jobs without a warning; results that only one such job holds are then"
        " copied to other workers. By default the preemption mode of the SLURM partition; set it if a QOS preempts"
        " jobs.",
    )


@dataclass(frozen=True)
class PoolKeywords(JobKeywords):
    """Keywords of a pool."""

    minimum: int = count(0, "Minimum number of jobs.", "jobs", least=0)
    maximum: float = count(
        None, "Maximum number of jobs; null: no limit.", "jobs", least=0, none="null", nothing=inf
    )
    cost: float = number(1.0, "Price per second of one job, relative to other pools.", "times")


@dataclass(frozen=True)
class ClusterKeywords(JobKeywords):
    """Keywords of the cluster."""

    pools: Mapping[str, Mapping[str, object]] | None = mapping(
        "Further kinds of jobs by name, each with the keywords that replace the cluster's. The arguments"
        ' themselves are the pool "default". A pool may also have `minimum`, `maximum` and `cost`.',
        "by name",
    )
    timeouts: Mapping[str, float] | None = mapping(
        'How long to wait for conditions that may pass, by name, as in {"stuck": 60}.', "by name"
    )


def read(kind: type[T], where: str, values: Mapping[str, object]) -> T:
    """Return an instance of a class of keywords with the given values.

    Raises
    ------
    ConfigError
        For an unknown name, with a suggestion, or an invalid value.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: got {values!r}, wanted seconds or other values by name")
    return config.read(kind, None, values, where)
