"""The options of dask_ferro: each is declared once, with its default, unit, bounds and meaning.

    "cache.bytes": size("2GiB", "Maximum size of the sessions and weights that one worker process keeps; ...")

`OPTIONS` has all options of the section `ferro` of Dask's configuration by key, and `config` reads their values.
Parameters that no user needs to set are constants, or fields of a policy's parameters, with the reason for their value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from os import PathLike, fspath
from typing import Any

from dask.utils import parse_bytes, parse_timedelta

from dask_ferro.policy.stealing.policies import POLICIES as NAMED

AUTO, OFF = "auto", "none"
POLICIES = (AUTO, *NAMED)
DEVICES = ("cpu", "gpu")

# The same word arrives as different values: YAML turns `off` into False and leaves `none` a string; from the
# environment, Dask turns `none` into None and leaves `off` a string.
_WORDS = {
    **dict.fromkeys(("true", "on", "yes"), True),
    **dict.fromkeys(("false", "off", "no"), False),
    **dict.fromkeys(("none", "null", "~", ""), None),
}


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes
    ----------
    default : object
        As it is written in YAML.
    help : str
        Its meaning, in sentences; the first one begins with what could be its long name.
    unit : str
        The unit of a bare number; for a choice, its words.
    allowed : str
        The allowed values in words, for error messages.
    reader : callable
        Converts a value in which words such as "off" are replaced; raises an error for an invalid one.
    """

    default: Any
    help: str
    unit: str
    allowed: str
    reader: Callable[[Any], Any]

    def parsed(self, written: Any) -> Any:
        """Return a value, parsed from how it was written.

        Raises
        ------
        ValueError
            If it is not valid for the option.
        """
        plain = written.strip() if isinstance(written, str) else written
        try:
            return self.reader(_WORDS.get(plain.lower(), plain) if isinstance(plain, str) else plain)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError):
            raise ValueError from None

    def fault(self, written: Any, name: str = "") -> str:
        """Return what is wrong with a value, as "got NAME=VALUE, wanted ..."; "" if it is valid."""
        try:
            self.parsed(written)
        except ValueError:
            return f"got {name}{'=' * bool(name)}{written!r}, wanted {self.allowed}"
        return ""


# ---- fields ------------------------------------------------------------------------------------------------


def _field(default: Any, help: str, unit: str, allowed: str, reader: Callable[[Any], Any]) -> Any:
    option = Option(default, help, unit, allowed, reader)
    return field(default=option.parsed(default), metadata={"option": option})


def _refuse() -> Any:
    raise ValueError


def _number(
    default: Any,
    help: str,
    unit: str,
    allowed: str,
    convert: Callable[[Any], float],
    *,
    least: float = 0.0,
    most: float = inf,
    above: bool = False,
    none: str = "",
    nothing: Any = None,
) -> Any:
    """Return a field with a number within bounds.

    Parameters
    ----------
    above : bool
        Whether the number must be greater than `least`, not equal to it.
    none : str
        "auto" or "null": the word that stands for `nothing`, as null does.
    """
    allowed += f" {'above' if above else 'of at least'} {least:g}" + (
        f", at most {most:g}" if most < inf else ""
    )
    allowed += {AUTO: ', or "auto"', "null": ", or null", "": ""}[none]

    def read(value: Any) -> Any:
        is_off = value is False if none == "null" else str(value).lower() == AUTO
        if none and (value is None or value == nothing or is_off):
            return nothing
        # In Python True is 1: `yes` would be a second, or a byte.
        result = _refuse() if isinstance(value, bool) else convert(value)
        return result if (least < result if above else least <= result) and result <= most else _refuse()

    return _field(default, help, unit, allowed, read)


def seconds(default: str | None, help: str, **bounds: Any) -> Any:
    """Return a field in seconds; a number may be infinite."""

    def convert(value: Any) -> float:
        # `parse_timedelta` refuses infinity.
        return value if isinstance(value, float) else float(parse_timedelta(value, default="s"))

    return _number(
        default, help, "seconds", "a duration such as 5ms, or a number of seconds,", convert, **bounds
    )


def size(default: str, help: str, **bounds: Any) -> Any:
    """Return a field in bytes."""

    def convert(value: Any) -> int:
        return int(parse_bytes(value))

    return _number(default, help, "bytes", "a size such as 2GiB, or a number of bytes,", convert, **bounds)


def count(default: Any, help: str, unit: str, *, least: int = 1, **bounds: Any) -> Any:
    """Return a field with a whole number."""

    def convert(value: Any) -> int:
        return int(value) if float(value).is_integer() else _refuse()

    return _number(default, help, unit, "a whole number", convert, least=least, **bounds)


def number(default: float | None, help: str, unit: str = "share", **bounds: Any) -> Any:
    """Return a field with a number."""
    return _number(default, help, unit, "a number", float, **bounds)


def _word(known: Mapping[Any, Any]) -> Callable[[Any], Any]:
    return lambda value: known[value.lower() if isinstance(value, str) else value]


def flag(default: bool | None, help: str) -> Any:
    """Return a boolean field; if its default is None, "auto" and null are allowed too."""
    if default is None:
        known = {True: True, False: False, None: None, AUTO: None}
        return _field(AUTO, help, "true, false", 'True, False or "auto"', _word(known))
    return _field(
        default, help, "true, false", "True or False", _word({True: True, False: False, None: False})
    )


def choice(words: tuple[str, ...], help: str, off: str = "") -> Any:
    """Return a field with one of some words, the first by default.

    Parameters
    ----------
    off : str, optional
        The word for false and null; then true is the first one.  Without it, null is the first one.
    """
    known = dict(zip(words, words, strict=True)) | {None: off or words[0]}
    reader = _word(known | ({True: words[0], False: off} if off else {}))
    return _field(words[0], help, ", ".join(words), "one of " + ", ".join(words), reader)


def path(default: str | None, help: str) -> Any:
    """Return a field with a path; null is None."""

    def read(value: Any) -> str | None:
        if value is None or value is False:
            return None
        return str(fspath(value)) if isinstance(value, str | PathLike) else _refuse()

    return _field(default, help, "path", "a path, or null", read)


def mapping(help: str, unit: str) -> Any:
    """Return a field with values by name; null is None."""

    def read(value: Any) -> Mapping[str, Any] | None:
        return value if value is None or isinstance(value, Mapping) else _refuse()

    return _field(None, help, unit, "a mapping of names to values, or null", read)


def options_of(kind: type) -> dict[str, Option]:
    """Return the options of a class by the names of their fields."""
    return {one.name: one.metadata["option"] for one in fields(kind) if "option" in one.metadata}


# ---- all options of the configuration ----------------------------------------------------------------------


@dataclass(frozen=True)
class PluginOptions:
    """`ferro.scheduler`, also the keywords of `ff.install`."""

    stealing: str = choice(
        POLICIES,
        'Policy of stealing. "informed" examines the longest queues. "last-victim" asks the last victim, then any'
        ' worker. "none" (or off, false, null) moves nothing, so that nothing corrects a wrong placement.'
        ' "auto": informed, but none if Dask\'s own switch, `distributed.scheduler.work-stealing`, is off.',
        off=OFF,
    )
    placement: bool = flag(
        True,
        "Whether to assign a ready task to the worker that should finish it first. false: Dask's own choice, a worker"
        " that holds its data.",
    )
    rank: bool = flag(
        True,
        "Whether to run the longest chains of narrow graphs first; wide graphs keep Dask's order, which needs less"
        " memory.",
    )
    timeout: float = seconds(
        "15s",
        "How long `ff.install`, `ff.uninstall`, `ff.check_cluster` and `ff.profile(ops=True)` wait for each worker. A"
        " worker that hangs is reported, and set up when it reconnects. On a busy machine, a worker may need some"
        " seconds to import the package.",
    )
    # Beside stealing's policy, since a recording is used to examine it.
    record: str | None = path(
        None,
        "File on the scheduler's machine to which the decisions of stealing are appended, one line of JSON each, for"
        " `dask ferro replay`. If the file cannot be written, the scheduler logs one warning and continues.",
    )


@dataclass(frozen=True)
class ElasticOptions:
    """`ferro.elastic`, also the keywords of `ff.Elastic`."""

    interval: float = seconds("1s", "Interval at which the controller takes a snapshot, decides and acts.")
    minimum: int = count(0, "Minimum number of workers (processes).", "workers", least=0)
    maximum: float = count(
        None,
        "Maximum number of workers (processes); null: no limit.",
        "workers",
        least=0,
        none="null",
        nothing=inf,
    )
    efficiency: float = number(
        0.6,
        "Minimum parallel efficiency at which another job is worth its node-seconds: the share of these seconds,"
        " including the job's start, in which the job runs tasks. Near 1, hardly any job is started; small values buy"
        " speed at any price.",
        most=1.0,
        above=True,
    )
    max_pending: float = count(
        None,
        "Maximum number of jobs that are pending in the queue; null: no limit.",
        "jobs",
        none="null",
        nothing=inf,
    )
    surge: float = number(
        0.0,
        "Number of workers beyond the maximum while successors take over from jobs that are about to end (walltime, a"
        " drained node, a preemption). 0: none; jobs that end at the same time are then replaced one after the other,"
        " early enough. Set 1 if the maximum is one job, because no other worker could then take over its data.",
        "workers",
    )
    idle_timeout: float = seconds(
        "10s",
        "Minimum idle time of a job before it ends; the time is longer if a new job would take longer to start.",
    )
    failures: float = count(
        3,
        "Number of batch jobs that end before their worker connects, minus the jobs whose workers connect, at which"
        " their pool closes for a while. null: a pool never closes for that reason.",
        "jobs",
        none="null",
        nothing=inf,
    )
    copy_share: float = number(
        0.5,
        "Share of a worker's memory up to which the worker receives copies of results that only preemptible jobs hold."
        " 0: no copies are made.",
        most=1.0,
    )


_FIELDS: dict[str, Any] = {
    "store": path(
        None,
        "Folder that the client and every worker can read and write. Models that are passed as bytes are written to it,"
        " and the workers map them. null: they are written to a temporary folder, and a copy is sent to workers that"
        " cannot read it.",
    ),
    "onnxruntime.intra-op-threads": count(
        AUTO,
        'Number of threads inside one session run. "auto": the cores of the worker divided by its threads, at least 1.'
        " More threads oversubscribe the machine: two worker threads with two threads each ran at 0.77 of the speed.",
        "threads",
        none=AUTO,
    ),
    "onnxruntime.prepack": flag(
        True,
        "Whether to let a session repack weights for its kernels. That gains up to 15 % of speed, and each process then"
        " has its own copy of the weights; without it, processes of one host share the pages of the file.",
    ),
    "cache.bytes": size(
        "2GiB",
        "Maximum size of the sessions and weights that one worker process keeps; the least recently used are evicted"
        " first.",
    ),
    "limits.value-bytes": size(
        "8GiB",
        "Maximum size of a value that a model may make, if the size is known before the model runs. A hostile file"
        " could otherwise fill the memory of a worker. Weights stored in the file are exempt, because a large file on"
        " disk is mapped, not read.",
    ),
    "limits.mapped-above": size(
        "128MiB",
        "Maximum size of a model, including external data, that is read into the memory of each process; later changes"
        " to its files have no effect. The weights of a larger model are mapped from its files, and the processes of"
        " one host share their pages. These files are examined before and after each use, and an error names a file"
        " that changed. A file that is truncated while a bundle uses it ends that process (SIGBUS), so replace such"
        " files with a rename.",
    ),
    "limits.run": seconds(
        None,
        "How long one bundle may run on its chunk, because a Loop may never end. A task over the limit fails. null: no"
        " limit.",
        none="null",
    ),
    "ranks.checkpoint-calls": count(
        20,
        "Number of successive submissions of `dask_ferro.parallel.Ranks`, `ff.parallelize` or groups of steps of"
        " `ff.fit`, after which the client fetches persisted results that are inputs of the next call, and sends them"
        " with that call's graph. A dead worker then costs at most this many submissions, and the scheduler keeps the"
        " tasks of this many. The call waits for these results. null: they are never fetched.",
        "calls",
        none="null",
    ),
    "bundle.workers": count(
        AUTO,
        'Number of worker threads that granularity "auto" plans for. "auto": the threads of the current cluster,'
        " or the cores of this machine if there is none.",
        "threads",
        none=AUTO,
    ),
    # Beside `workers`, as both decide into how many tasks a graph is cut.
    "bundle.costs": path(
        "~/.cache/dask_ferro/task-costs",
        "File on the scheduler's machine that stores the costs of tasks, so that `ff.bundle_tasks` can use them in the"
        " next program. null: the costs are lost when the scheduler ends.",
    ),
    "worker.device": choice(
        (AUTO, *DEVICES), 'Device class of a worker\'s tasks; "auto": gpu if CuPy sees a device.'
    ),
    "device.tf32": flag(
        False,
        "Whether to compute float32 matrix products in TF32, which rounds the factors to 10 bits of mantissa: several"
        " times as fast on a recent GPU, with errors of 1e-3 instead of 1e-6.",
    ),
    "device.weights-bytes": size(
        AUTO,
        'Maximum GPU memory for cached weights; each weight is stored once, even if several bundles read it. "auto":'
        " half of the free memory. Weights, results and inputs together take at most 0.75 of the free memory, or the"
        " larger of these two settings.",
        none=AUTO,
    ),
    "device.results-bytes": size(
        AUTO,
        'Maximum GPU memory for results and inputs; beyond it, the oldest move to host memory. "auto": 0.6 of'
        " the free memory.",
        none=AUTO,
    ),
    "device.onnxruntime": choice(
        (AUTO, "never", "anywhere"),
        'Devices on which ONNX Runtime may compute instead of dask_ferro\'s own array kernels. "auto": GPUs on which'
        ' its CUDA provider works. "never": none. "anywhere": also a device whose memory is the host\'s (an emulated'
        " one).",
        off="never",
    ),
}
# All options by key without "ferro.", such as "cache.bytes".
OPTIONS: dict[str, Option] = {key: one.metadata["option"] for key, one in _FIELDS.items()}
for _prefix, _kind in (("scheduler.", PluginOptions), ("elastic.", ElasticOptions)):
    OPTIONS |= {_prefix + name.replace("_", "-"): option for name, option in options_of(_kind).items()}
