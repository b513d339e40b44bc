"""The check of options of `ff.SLURMCluster`, with error messages for unknown ones.

Options are those of the installed dask-jobqueue, and ours.  Errors name the class and the arguments that the user
wrote, not the classes that pass them on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from inspect import Parameter, signature
from numbers import Integral
from typing import Any

import dask

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.options import options_of
from dask_ferro.scheduler.upstream_jobqueue import JobQueueCluster
from dask_ferro.slurm.keywords import NAME, ClusterKeywords, PoolKeywords

# Keywords of a cluster beside those of dask-jobqueue, and of a pool beside the options of a job.
_OF_A_CLUSTER, _OF_A_POOL = options_of(ClusterKeywords).keys(), options_of(PoolKeywords).keys()
# Options of a job in dask-jobqueue that are the cluster's alone here, since its jobs are listed by them.
_OF_THE_CLUSTER = frozenset(("scheduler", "name", "job_name"))
# A name that is one word for a shell and for `squeue --name`, which splits at commas.
_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:+-]*")
# A name that workers' names can begin with: without a number at its end.
_POOL_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(-[A-Za-z][A-Za-z0-9_]*)*")
# What a shell would replace, or take for the end of the quotes around a name in the script.
_UNQUOTABLE = re.compile(r"[\"`$\\\x00-\x1f\x7f]")


def section_of(job_cls: type, options: Mapping[str, object]) -> tuple[str, dict[str, Any]]:
    """Return the section of Dask's configuration that a cluster reads, and its keywords of ours that are set there.

    Raises
    ------
    ConfigError
        If there is no such section.
    """
    config_name = options.get("config_name") or getattr(job_cls, "config_name", "slurm")
    section = f"jobqueue.{config_name}"
    if not isinstance(dask.config.get(section, None), Mapping):
        raise ConfigError(
            f"{NAME}: got config_name={config_name!r}, and Dask's configuration has no {section}"
        )
    values = _replace_hyphens(dask.config.get(section))
    own = {name: values[name] for name in _OF_A_CLUSTER if values.get(name) is not None}
    if isinstance(own.get("pools"), Mapping):
        own["pools"] = {
            name: _replace_hyphens(pool) if isinstance(pool, Mapping) else pool
            for name, pool in own["pools"].items()
        }
    return section, own


def _replace_hyphens(section: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key).replace("-", "_"): value for key, value in section.items()}


def check_options(
    job_cls: type,
    section: str,
    options: Mapping[str, object],
    pools: Mapping[str, Mapping[str, object]],
) -> None:
    """Refuse unknown options, in the call and in Dask's configuration, jobs without cores or memory, and pools whose
    name no worker can have.

    Parameters
    ----------
    job_cls : type
        The class of a job, whose options are accepted.
    section : str
        The section of Dask's configuration.
    pools : mapping of str to mapping
        The options that the pools replace.

    Raises
    ------
    ConfigError
        Names each unknown option, with a suggestion.
    """
    config.check()
    job = _job_options(job_cls)
    known = sorted((job | _keyword_names(JobQueueCluster) | _OF_A_CLUSTER) - {"scheduler"})
    config.refuse_unknown(f"configuration {section}", _replace_hyphens(dask.config.get(section)), known)
    config.refuse_unknown(NAME, options, known)
    for name, overrides in pools.items():
        # Names of workers are made from it: "gpu-1" and its element 2 would be "gpu" and its process 1-2.
        if not isinstance(name, str) or not _POOL_NAME.fullmatch(name):
            raise ConfigError(f"{NAME}: pool {name!r}; wanted letters, digits, _ and -, no number after a -")
        if not isinstance(overrides, Mapping):
            raise ConfigError(f"{NAME}: pool {name!r}: got {overrides!r}, wanted keywords")
        config.refuse_unknown(
            f"{NAME}: pool {name!r}", overrides, sorted((job - _OF_THE_CLUSTER) | _OF_A_POOL)
        )
    for shape in (options, *({**options, **overrides} for overrides in pools.values())):
        _check_shape(shape, job_cls, section)


def check_job_name(name: object) -> str:
    """Return a job name by which SLURM can list and cancel jobs.

    Raises
    ------
    ConfigError
        For a name that SLURM's commands would split.
    """
    if not _JOB_NAME.fullmatch(str(name)):
        raise ConfigError(
            f"{NAME}: job_name: got {name!r}, wanted letters, digits, and _ . : + - after the first: "
            "squeue and scancel would split it; choose another, or set jobqueue.slurm.name"
        )
    return str(name)


def check_cluster_name(name: object) -> str:
    """Return a cluster's name, with which its workers' names begin.

    Raises
    ------
    ConfigError
        For an empty one, or one that a job's shell would change.
    """
    is_text = isinstance(name, str | int) and not isinstance(name, bool)
    if not is_text or not str(name).strip() or _UNQUOTABLE.search(str(name)):
        raise ConfigError(
            f"{NAME}: name: got {name!r}, wanted text without quotes, $, backslashes and line ends: workers' names"
            " begin with it, in the job script; cluster.jobs() has the ids of their jobs"
        )
    return str(name)


def _check_shape(options: Mapping[str, object], job_cls: type, section: str) -> None:
    """Refuse jobs without cores or memory, invalid numbers of cores or processes, and a walltime that is a number."""
    shape: dict[str, Any] = {
        name: dask.config.get(f"{section}.{name}", None) if options.get(name) is None else options[name]
        for name in ("cores", "memory", "processes", "walltime")
    }
    if missing := [name for name in ("cores", "memory") if shape[name] is None]:
        cores, memory = shape["cores"] or 8, shape["memory"] or "24GB"
        raise ConfigError(
            f"{NAME}: {' and '.join(missing)} of a job must be given, for example "
            f"{NAME}(cores={cores}, memory={memory!r}), or {section}.{missing[0]} in Dask's configuration"
        )
    for name in ("cores", "processes"):
        value = shape[name]
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{NAME}: got {name}={value!r}, wanted a whole number of at least 1")
    if shape["processes"] is not None and shape["processes"] > shape["cores"]:
        raise ConfigError(
            f"{NAME}: got processes={shape['processes']} and cores={shape['cores']}, wanted at most as many processes"
            " as cores: each has a thread of its own"
        )
    if not isinstance(shape["walltime"], str | None):
        raise ConfigError(
            f"{NAME}: got walltime={shape['walltime']!r}, wanted text such as '01:30:00': SLURM reads a number as"
            " minutes, and YAML reads 01:30:00 without quotes as the number 5400"
        )


@cache
def _job_options(job_cls: type) -> frozenset[str]:
    """Return the keyword arguments of a job's class and its base classes."""
    return frozenset().union(*(_keyword_names(kind) for kind in job_cls.__mro__ if "__init__" in vars(kind)))


@cache
def _keyword_names(kind: type) -> frozenset[str]:
    parameters = signature(kind.__init__).parameters.values()  # type: ignore[misc]
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in named and p.name != "self")
