"""The keys of a job in a configuration file: the known ones, the required ones, and the check of their values.

The keys are those of the installed dask-jobqueue, and those of `ff.SLURMCluster`.  Keys with a surprising default (30
minutes of walltime, a number of processes near the square root of the cores) are required.  Durations are seconds, or
text such as 2m.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from inspect import signature
from typing import Any

import distributed
import yaml
from dask.utils import parse_bytes

from dask_ferro.config import fault
from dask_ferro.options import Option, meant, options_of
from dask_ferro.runtime.jobs.keywords import ClusterKeywords, PoolKeywords, as_written
from dask_ferro.runtime.slurm.parsing import is_job_name

# Required keys and their meaning; most may be null, on purpose.
REQUIRED = {
    "cores": "threads of one job, for instance 8",
    "memory": "of one job, for instance 32GiB",
    "processes": "that share a job's cores and memory, for instance 1",
    "walltime": "how long a job may run, for instance '01:00:00'",
    "queue": "the partition or queue; null: the site's default",
    "account": "who pays; null: your default",
    "interface": "the network of the nodes, for instance ib0; null: that of the default route",
    "local-directory": "where workers spill to, for instance /tmp",
    "log-directory": "where the batch system writes what jobs print, for instance dask-logs",
}
_NEVER_NULL = frozenset(("cores", "memory", "processes", "walltime"))

# Keys of `ff.SLURMCluster` beside dask-jobqueue's.
OURS = frozenset(key for key, _ in options_of(ClusterKeywords))

# Old keys that dask-jobqueue still reads, with a warning.
_RENAMED = {
    "extra": "worker-extra-args",
    "env-extra": "job-script-prologue",
    "job-extra": "job-extra-directives",
    "header-skip": "job-directives-skip",
    "project": "account",
}

# Keys read by the job's shell: their variables are the node's, not this machine's.
_OF_THE_NODE = frozenset(
    ("local-directory", "job-script-prologue", "worker-extra-args", "worker-command", "python", "shebang")
)
_FOLDERS = frozenset(("log-directory", "shared-temp-directory", "journal"))

# Keys of the cluster alone: a pool is another kind of job of the same cluster.
_OF_THE_CLUSTER = frozenset(
    [
        "pools",
        "patience",
        "name",
        "scheduler-options",
        "interface",
        "shared-temp-directory",
        "journal",
        "keep",
    ]
)
# Keys of a pool alone.
_OF_A_POOL = frozenset(key for key, _ in options_of(PoolKeywords)) - OURS
# Keys read like options: numbers, durations, booleans.  Paths and mappings are text with variables at first.
_READ = {"death-timeout": Option("seconds", "60s", "", "seconds")}
for _kind in (ClusterKeywords, PoolKeywords):
    _READ |= {key: one for key, one in options_of(_kind) if one.kind not in ("file", "mapping")}

_WALLTIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{(\w+)\})")


def problems(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield all errors in a section of job keys, a clause each."""
    where = "jobqueue.slurm"
    known = dask_jobqueue_keys() | OURS
    for key, says in REQUIRED.items():
        if key not in section:
            yield f"key {where}.{key} is missing: {says}"
    yield from _wrong(where, section, known, section)
    pools = section.get("pools")
    for name, pool in pools.items() if isinstance(pools, Mapping) else ():
        if not isinstance(pool, Mapping):
            continue  # reported once as an error of `pools`
        own = dashed(pool)
        yield from _wrong(
            f"{where}.pools.{name}", own, known - _OF_THE_CLUSTER | _OF_A_POOL, {**section, **own}
        )


def _wrong(
    where: str, given: Mapping[str, Any], known: frozenset[str], shape: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the errors in the keys of a cluster or a pool."""
    for key in [key for key in given if key in _RENAMED]:
        yield f"key {where}.{key} is now called {_RENAMED[key]}"
    yield from _unknown(where, [key for key in given if key not in _RENAMED], sorted(known))
    yield from _wrong_values(where, given, known)
    cores, processes = shape.get("cores"), shape.get("processes")
    if isinstance(cores, int) and _is_count(processes) and cores % int(processes or 1):
        yield f"{where}.cores: got {cores} for processes: {processes}, wanted a multiple: each has as many threads"


def keywords(section: Mapping[str, object]) -> dict[str, Any]:
    """Return a checked section as keywords of a cluster's class, with variables replaced.

    Null keys are left out: Dask's own configuration decides.
    """
    return {
        "job_name" if key == "name" else key.replace("-", "_"): _value(key, value)
        for key, value in section.items()
        if value is not None
    }


def _value(key: str, value: Any) -> Any:
    if key == "pools":
        return {str(name): keywords(dashed(pool)) for name, pool in value.items()}
    if key in _READ:
        return _plain(as_written(_READ[key], value))
    if key in _OF_THE_NODE:
        return value
    return os.path.expanduser(_replaced(value)) if key in _FOLDERS else _replaced(value)


def _plain(value: object) -> object:
    """Return whole seconds as an integer, the form in which dask-jobqueue writes them into a command."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def dashed(section: Mapping[str, object]) -> dict[str, Any]:
    """Return a section with its keys spelled with dashes, as in YAML; Dask accepts underscores too."""
    return {str(key).replace("_", "-"): value for key, value in section.items()}


@cache
def dask_jobqueue_keys() -> frozenset[str]:
    """Return the keys that the installed dask-jobqueue knows for SLURM, without renamed ones."""
    text = files("dask_jobqueue").joinpath("jobqueue.yaml").read_text(encoding="utf-8")
    return frozenset(yaml.safe_load(text)["jobqueue"]["slurm"]) - set(_RENAMED)


# ---- values ------------------------------------------------------------------------------------------------


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_name(value: Any) -> bool:
    """Whether jobs can have this name and be found by it once variables are replaced; unset ones are reported apart."""
    return _is_text(value) and is_job_name(_VARIABLE.sub("x", os.path.expandvars(value)))


def _is_lines(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


def _is_size(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and parse_bytes(value) >= 1
    except (ValueError, TypeError, AttributeError):
        return False


def _is_pools(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(pool, Mapping) for pool in value.values())


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_walltime(value: object) -> bool:
    return isinstance(value, str) and (_WALLTIME.fullmatch(value) is not None or value.upper() == "UNLIMITED")


_TEXT = "text"
_COUNT = "a whole number of at least 1"
_LINES = "a list of text"
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("cores", "processes", "job-cpu"), (_is_count, _COUNT)),
    "walltime": (_is_walltime, "text such as '01:30:00', in quotes, for YAML reads it otherwise"),
    "memory": (_is_size, "a size such as 32GiB"),
    "patience": (_is_mapping, "seconds by name, such as boot: 900"),
    "name": (_is_name, "letters, digits, and _ . : + - after the first, for commands take others apart"),
    **dict.fromkeys(("worker-extra-args", "job-script-prologue"), (_is_lines, _LINES)),
    **dict.fromkeys(("job-extra-directives", "job-directives-skip"), (_is_lines, _LINES)),
    "scheduler-options": (_is_mapping, "keys and values of distributed.Scheduler"),
    "pools": (_is_pools, "a name for each further kind of job, and below it the keys that differ"),
}


def _wrong_values(where: str, section: Mapping[str, Any], known: frozenset[str]) -> Iterator[str]:
    for key, value in section.items():
        if key not in known:
            continue
        fits, wanted = _CHECKS.get(key, (_is_text, _TEXT))
        if key in _READ:
            if value is not None and (wrong := fault(_READ[key], value)):
                yield f"{where}.{key}: {wrong}"
        elif value is None:
            if key in _NEVER_NULL:
                yield f"{where}.{key}: got null, wanted {wanted}: {REQUIRED[key]}"
        elif not fits(value):
            # In YAML 1.1, 01:30:00 is 5400, on is true, and 010 is 8.
            quotes = " in quotes, for YAML reads it otherwise" if wanted == _TEXT else ""
            yield f"{where}.{key}: got {value!r}, wanted {wanted}{quotes}"
        elif key not in _OF_THE_NODE and key != "pools":
            yield from _unset(f"{where}.{key}", value)
    if _is_mapping(section.get("scheduler-options")):
        yield from _unknown(f"{where}.scheduler-options", section["scheduler-options"], _scheduler_options())


def _unknown(where: str, given: Iterable[object], known: Sequence[str]) -> Iterator[str]:
    for key in given:
        if key not in known:
            yield f"unknown key {where}.{key}{meant(str(key), known) or '; wanted some of ' + ', '.join(known)}"


@cache
def _scheduler_options() -> tuple[str, ...]:
    return tuple(name for name in signature(distributed.Scheduler).parameters if name != "kwargs")


# ---- variables ---------------------------------------------------------------------------------------------


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _unset(where: str, value: object) -> Iterator[str]:
    for text in _texts(value):
        for plain, braced in _VARIABLE.findall(text):
            name = plain or braced
            if not os.environ.get(name):
                yield (
                    f"{where}: got {text!r}, and environment variable {name} is not set;"
                    f" export {name}=..., or write the value into a copy of the file"
                )


def _replaced(value: object) -> Any:
    if isinstance(value, Mapping):
        return {key: _replaced(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item) for item in value]
    return os.path.expandvars(value) if isinstance(value, str) else value
