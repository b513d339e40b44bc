"""What is wrong with a cluster, by its facts; pure, a rule for each kind of fault.

"error": something fails there.  "warning": something may fail, or figures may mislead.  "slow": it works, and takes
longer than it has to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from dask_ferro.lower.absent import NONE, remedy
from dask_ferro.runtime.check.facts import EXTRAS, ClusterFacts, ProcessFacts, WorkerFacts

SEVERITIES = ("error", "warning", "slow")
# Clocks that NTP sets differ by milliseconds; what Dask and traces make of times across hosts is off by the difference.
SKEW_S = 0.5
# What spills there waits for other hosts, and for each other.
NETWORK_DISKS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "glusterfs", "afs", "fuse.sshfs"}
)
# The most places, and the most different values, that a sentence names.
_FEW = 3
# Packages without which a worker runs no task of a model.
_NEEDED = ("dask_ferro", "numpy", "onnx", "onnxruntime")
_CALENDAR = ("dask", "distributed")


@dataclass(frozen=True)
class ClusterFinding:
    """A fault of a cluster.

    Attributes
    ----------
    severity : str
        One of `SEVERITIES`.
    where : tuple of str
        "client", "scheduler", a worker's address or a host.
    what, got, wanted, remedy : str
    """

    severity: str
    where: tuple[str, ...]
    what: str
    got: str
    wanted: str
    remedy: str

    def __str__(self) -> str:
        return f"{few(self.where)}: {self.what}: got {self.got}, wanted {self.wanted}; {self.remedy}"


Rule = Callable[[ClusterFacts], Iterator[ClusterFinding]]


def findings(facts: ClusterFacts) -> list[ClusterFinding]:
    """Return all faults, the most severe first; the same fault of several processes is one finding."""
    alike: dict[tuple[str, str, str, str], list[ClusterFinding]] = defaultdict(list)
    for rule in _RULES:
        for found in rule(facts):
            alike[found.severity, found.what, found.wanted, found.remedy].append(found)
    merged = [_merged(group) for group in alike.values()]
    return sorted(merged, key=lambda found: SEVERITIES.index(found.severity))


def _merged(group: Sequence[ClusterFinding]) -> ClusterFinding:
    where = tuple(chain.from_iterable(found.where for found in group))
    return replace(group[0], where=where, got=few([found.got for found in group]))


def few(texts: Iterable[str]) -> str:
    """Return the first different texts, and how many others there are.

    >>> few(["a", "b", "a"]), few(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c and 2 more')
    """
    different = list(dict.fromkeys(texts))
    more = f" and {len(different) - _FEW} more" if len(different) > _FEW else ""
    return ", ".join(different[:_FEW]) + more


def fits(ours: str, theirs: str) -> bool:
    """Return whether two releases of dask_ferro may work together: by semantic versioning, 0.1 and 0.2 need not.

    >>> fits("0.1.0", "0.1.3"), fits("0.1.0", "0.2.0"), fits("1.4.0", "1.2.1")
    (True, False, True)
    """
    ours_parts, theirs_parts = ours.split("."), theirs.split(".")
    depth = 2 if "0" in (ours_parts[0], theirs_parts[0]) else 1
    return ours_parts[:depth] == theirs_parts[:depth]


# ---- versions ----------------------------------------------------------------------------------------------


def missing_ferro(where: Iterable[str], wanted: str) -> ClusterFinding:
    """Return the finding for processes without dask_ferro."""
    return ClusterFinding(
        "error",
        tuple(where),
        "dask_ferro",
        NONE,
        wanted or "the client's",
        remedy(wanted),
    )


def other_ferro(where: Iterable[str], got: str, wanted: str) -> ClusterFinding:
    """Return the finding for processes with another release of dask_ferro."""
    return ClusterFinding(
        "warning" if fits(wanted, got) else "error",
        tuple(where),
        "dask_ferro",
        got,
        f"{wanted} as in the client",
        f"install the same release on both sides: pip install dask-ferro=={wanted}",
    )


def versions_differ(got: str | None, wanted: str | None) -> bool:
    """Return whether two known versions of a package differ."""
    return bool(got and wanted and got != wanted)


def _processes(facts: ClusterFacts) -> Iterator[tuple[str, ProcessFacts]]:
    """Yield the scheduler and the workers that answered, by where they are."""
    if facts.scheduler.process is not None:
        yield "scheduler", facts.scheduler.process
    yield from _workers(facts)


def _workers(facts: ClusterFacts) -> Iterator[tuple[str, ProcessFacts]]:
    yield from ((one.address, one.process) for one in facts.workers if one.process is not None)


def _ferro(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    wanted = facts.client.versions.get("dask_ferro") or ""
    for where, process in _processes(facts):
        got = process.versions.get("dask_ferro", "")
        if got is None:
            yield missing_ferro([where], wanted)
        elif versions_differ(got, wanted):
            yield other_ferro([where], got, wanted)


def _pythons(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    wanted = _minor(facts.client.python)
    for where, process in _processes(facts):
        if _minor(process.python) != wanted:
            yield ClusterFinding(
                "error", (where,), "Python", process.python, f"{wanted} as in the client",
                "start it from an environment with the client's Python: functions are sent as its bytecode",
            )  # fmt: skip


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _dask(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    for where, process in _processes(facts):
        for package in _CALENDAR:
            yield from _differing(facts, where, process, package, "messages and tasks of releases may differ")


def _engines(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    for where, process in _workers(facts):
        # A worker that lacks dask_ferro needs its whole environment, which `_ferro` says.
        for package in () if process.lacks("dask_ferro") else _NEEDED[1:]:
            if process.lacks(package):
                wanted = facts.client.versions.get(package) or "the client's"
                yield ClusterFinding(
                    "error", (where,), package, NONE, wanted,
                    f"install it in the worker's environment: pip install {package}=={wanted}",
                )  # fmt: skip
            else:
                yield from _differing(facts, where, process, package, "results may differ in the last digits")


def _differing(
    facts: ClusterFacts, where: str, process: ProcessFacts, package: str, why: str
) -> Iterator[ClusterFinding]:
    got, wanted = process.versions.get(package), facts.client.versions.get(package)
    if got and wanted and got != wanted:
        yield ClusterFinding(
            "warning", (where,), package, got, f"{wanted} as in the client",
            f"install one release everywhere, since {why}: pip install {package}=={wanted}",
        )  # fmt: skip


def _extras(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    scheduler = facts.scheduler
    if scheduler.process is not None and "bokeh" not in scheduler.process.modules:
        yield ClusterFinding(
            "warning", ("scheduler",), "extra dashboard", "no bokeh", "bokeh, for the dashboard and its Ferro pages",
            "pip install 'dask-ferro[dashboard]' in the scheduler's environment",
        )  # fmt: skip
    for where, process in _workers(facts):
        # Only what the client has: a program that reads zarr has it there too.
        wanted = [name for name in EXTRAS["io"] if name in facts.client.modules]
        if lacking := [name for name in wanted if name not in process.modules]:
            yield ClusterFinding(
                "warning", (where,), "extra io", f"no {', '.join(lacking)}", "what the client has",
                "pip install 'dask-ferro[io]' in the worker's environment, if tasks read such files",
            )  # fmt: skip


# ---- processes ---------------------------------------------------------------------------------------------


def _answers(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    named = [("scheduler", facts.scheduler.process, facts.scheduler.failure)]
    named += [(one.address, one.process, one.failure) for one in facts.workers]
    for where, process, failure in named:
        if process is None:
            yield ClusterFinding(
                "error", (where,), "does not answer", failure, f"an answer within {facts.seconds:g} s",
                "read its log, and end it if it is stopped: by a signal, a debugger, or a file system that hangs",
            )  # fmt: skip


def _plugin(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    scheduler = facts.scheduler
    # Without dask_ferro there, `_ferro` says what to do first.
    if scheduler.process is None or scheduler.process.lacks("dask_ferro"):
        return
    if not scheduler.plugin:
        then = "remove the reason, then ff.install(client)" if scheduler.off else "ff.install(client)"
        yield ClusterFinding(
            "slow", ("scheduler",), "scheduler plugin", f"off ({scheduler.off or 'it was not installed'})",
            "on: stealing and placement are stock Dask's without it", then,
        )  # fmt: skip
        return
    if not scheduler.steals and scheduler.stealing == "auto":
        yield ClusterFinding(
            "slow", ("scheduler",), "work stealing", "distributed.scheduler.work-stealing: False", "True",
            "remove it from the scheduler's configuration, or ff.install(client, stealing='informed')",
        )  # fmt: skip
    for one in facts.workers:
        if one.process is not None and not one.plugin and not one.process.lacks("dask_ferro"):
            yield ClusterFinding(
                "slow", (one.address,), "worker plugin", "none", "ferro-worker, which measures device and links",
                "ff.uninstall(client), then ff.install(client); the scheduler's log has the reason",
            )  # fmt: skip


def _validation(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    if facts.scheduler.validates:
        yield ClusterFinding(
            "slow", ("scheduler",), "validation of each transition", "distributed.scheduler.validate: True", "False",
            "remove it from the scheduler's configuration; it is for tests",
        )  # fmt: skip


def _clocks(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    clocks = [("scheduler", facts.scheduler.clock), *((one.address, one.clock) for one in facts.workers)]
    for where, clock in clocks:
        if clock is not None and abs(clock.ahead) - clock.doubt > SKEW_S:
            yield ClusterFinding(
                "warning", (where,), "clock", f"{clock.ahead:+.1f} s from the client's", f"within {SKEW_S:g} s",
                "set the clocks of both hosts by NTP (timedatectl set-ntp true)",
            )  # fmt: skip


# ---- workers -----------------------------------------------------------------------------------------------


def _there(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    if not facts.workers and facts.scheduler.process is not None:
        yield ClusterFinding(
            "warning",
            ("scheduler",),
            "workers",
            "none",
            "at least 1",
            "start workers, or wait for their jobs",
        )


def _memory(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    for one in facts.workers:
        if not one.memory_limit:
            yield ClusterFinding(
                "warning", (one.address,), "memory limit", "none", "a limit, at which it spills and pauses",
                "start it with --memory-limit, such as --memory-limit 4GiB",
            )  # fmt: skip
        if one.status == "paused":
            yield ClusterFinding(
                "warning", (one.address,), "status", "paused, which takes no task", "running",
                "release results, give it more memory, or start more workers; see its memory on the dashboard",
            )  # fmt: skip


def _folders(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    if facts.unseen:
        yield ClusterFinding(
            "warning", ("client",), "shared folder", facts.unseen, f"a file in {facts.path} to look for",
            "ff.check(client, path=...) with a folder that may be written, or a file",
        )  # fmt: skip
    told = {"no": "not visible", "other": "a file with other content", "hangs": "a file system that hangs"}
    for one in facts.workers:
        if one.sees in told:
            yield ClusterFinding(
                "warning", (one.address,), "shared folder", told[one.sees], f"the client's {facts.path}",
                "put models and data on a file system that client and workers share, at one path: a model that"
                " workers do not see is sent to them, and ff.run reads and writes files there",
            )  # fmt: skip
        if one.disk in NETWORK_DISKS:
            yield ClusterFinding(
                "slow", (one.address,), "local directory", f"{one.local_directory} on {one.disk}", "a local disk",
                "start it with --local-directory on a disk of its host, such as /tmp",
            )  # fmt: skip


def _devices(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    for one in facts.workers:
        if one.process is not None and one.gpus and "cupy" not in one.process.modules:
            yield ClusterFinding(
                "slow", (one.address,), "extra gpu", "a GPU and no cupy", "cupy, which computes on it",
                "pip install 'dask-ferro[gpu]' in the worker's environment",
            )  # fmt: skip


def _threads(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    """Yield groups of workers, on the same cores of a host, that may run more threads than these have."""
    groups: dict[tuple[str, tuple[int, ...]], list[WorkerFacts]] = defaultdict(list)
    for one in facts.workers:
        if one.process is not None:
            groups[one.process.host, tuple(one.cores)].append(one)
    for (_, cores), workers in groups.items():
        tasks = sum(one.threads for one in workers)
        threads = sum(one.threads * (one.math_threads or len(cores)) for one in workers)
        if threads <= len(cores):
            continue
        some = workers[0].math_threads
        math = "no OMP_NUM_THREADS" if some is None else f"{some} of OMP_NUM_THREADS or the like"
        yield ClusterFinding(
            "slow", tuple(one.address for one in workers), "threads",
            f"{threads} on the {len(cores)} cores of one host ({tasks} of tasks, with {math} each)",
            f"at most {len(cores)}",
            "start workers with OMP_NUM_THREADS=1" if tasks <= len(cores) else "start fewer workers, or --nthreads",
        )  # fmt: skip


_RULES: tuple[Rule, ...] = (
    _answers, _ferro, _pythons, _engines, _dask, _extras, _there, _memory, _folders, _clocks, _plugin, _threads,
    _devices, _validation,
)  # fmt: skip
