"""What is wrong with a cluster, by its facts; pure, a rule for each kind of fault.

A fault of several processes is one finding, with all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from dask_ferro.lower.absent import NONE, remedy
from dask_ferro.runtime.check.facts import EXTRAS, ClusterFacts, ProcessFacts, WorkerFacts
from dask_ferro.runtime.telemetry.findings import ClusterFinding, fault, ordered

# Clocks that NTP sets differ by milliseconds; what Dask and traces make of times across hosts is off by the difference.
SKEW_S = 0.5
# What spills there waits for other hosts, and for each other.
NETWORK_DISKS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "glusterfs", "afs", "fuse.sshfs"}
)
# Packages without which a worker runs no task of a model, beside dask_ferro.
_NEEDED = ("numpy", "onnx", "onnxruntime")
_SEES = {"no": "not visible", "other": "a file with other content", "hangs": "a file system that hangs"}

Rule = Callable[[ClusterFacts], Iterator[ClusterFinding]]


def findings(facts: ClusterFacts) -> tuple[ClusterFinding, ...]:
    """Return all faults, the most severe first."""
    return ordered(chain.from_iterable(rule(facts) for rule in _RULES))


# ---- versions ----------------------------------------------------------------------------------------------


def fits(ours: str, theirs: str) -> bool:
    """Return whether two releases of dask_ferro may work together: by semantic versioning, 0.1 and 0.2 need not.

    >>> fits("0.1.0", "0.1.3"), fits("0.1.0", "0.2.0"), fits("1.4.0", "1.2.1")
    (True, False, True)
    """
    ours_parts, theirs_parts = ours.split("."), theirs.split(".")
    depth = 2 if "0" in (ours_parts[0], theirs_parts[0]) else 1
    return ours_parts[:depth] == theirs_parts[:depth]


def releases_differ(releases: Mapping[str, str | None], wanted: str) -> Iterator[ClusterFinding]:
    """Yield the findings for places without dask_ferro (None), or with another release than the client's."""
    missing = {where: NONE for where, got in releases.items() if got is None}
    yield from fault("error", "dask_ferro", missing, wanted or "the client's", remedy(wanted))
    others = {where: got for where, got in releases.items() if got and wanted and got != wanted}
    for severity, works in (("error", False), ("warning", True)):
        yield from fault(
            severity, "dask_ferro", {where: got for where, got in others.items() if fits(wanted, got) == works},
            f"{wanted} as in the client", f"install the same release on both sides: pip install dask-ferro=={wanted}",
        )  # fmt: skip


def _processes(facts: ClusterFacts) -> dict[str, ProcessFacts]:
    """Return the scheduler and the workers that answered, by where they are."""
    scheduler = facts.scheduler.process
    return {"scheduler": scheduler, **_workers(facts)} if scheduler is not None else _workers(facts)


def _workers(facts: ClusterFacts) -> dict[str, ProcessFacts]:
    return {one.address: one.process for one in facts.workers if one.process is not None}


def _ferro(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    releases = {where: process.versions.get("dask_ferro", "") for where, process in _processes(facts).items()}
    yield from releases_differ(releases, facts.client.versions.get("dask_ferro") or "")


def _pythons(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    wanted = _minor(facts.client.python)
    pythons = {where: process.python for where, process in _processes(facts).items()}
    yield from fault(
        "error", "Python", {where: got for where, got in pythons.items() if _minor(got) != wanted},
        f"{wanted} as in the client",
        "start it from an environment with the client's Python: functions are sent as its bytecode",
    )  # fmt: skip


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _dask(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    for package in ("dask", "distributed"):
        yield from _differ(facts, _processes(facts), package, "messages and tasks of releases may differ")


def _engines(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    # A worker that lacks dask_ferro needs its whole environment, which `_ferro` says.
    workers = {
        where: process for where, process in _workers(facts).items() if not process.lacks("dask_ferro")
    }
    for package in _NEEDED:
        wanted = facts.client.versions.get(package) or "the client's"
        yield from fault(
            "error", package, {where: NONE for where, process in workers.items() if process.lacks(package)}, wanted,
            f"install it in the worker's environment: pip install {package}=={wanted}",
        )  # fmt: skip
        yield from _differ(facts, workers, package, "results may differ in the last digits")


def _differ(
    facts: ClusterFacts, processes: Mapping[str, ProcessFacts], package: str, why: str
) -> Iterator[ClusterFinding]:
    wanted = facts.client.versions.get(package)
    releases = {where: process.versions.get(package) for where, process in processes.items()}
    yield from fault(
        "warning", package, {where: got for where, got in releases.items() if got and wanted and got != wanted},
        f"{wanted} as in the client", f"install one release everywhere, since {why}: pip install {package}=={wanted}",
    )  # fmt: skip


def _extras(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    scheduler, workers = facts.scheduler.process, _workers(facts)
    bare = scheduler is not None and "bokeh" not in scheduler.modules
    yield from fault(
        "warning", "extra dashboard", {"scheduler": "no bokeh"} if bare else {},
        "bokeh, for the dashboard and its Ferro pages",
        "pip install 'dask-ferro[dashboard]' in the scheduler's environment",
    )  # fmt: skip
    # Only what the client has: a program that reads zarr has it there too.
    io = [name for name in EXTRAS["io"] if name in facts.client.modules]
    lacking = {where: [n for n in io if n not in process.modules] for where, process in workers.items()}
    yield from fault(
        "warning", "extra io", {where: f"no {', '.join(names)}" for where, names in lacking.items() if names},
        "what the client has", "pip install 'dask-ferro[io]' in the worker's environment, if tasks read such files",
    )  # fmt: skip
    gpus = {one.address for one in facts.workers if one.gpus}
    yield from fault(
        "slow", "extra gpu",
        {w: "a GPU and no cupy" for w, process in workers.items() if w in gpus and "cupy" not in process.modules},
        "cupy, which computes on it", "pip install 'dask-ferro[gpu]' in the worker's environment",
    )  # fmt: skip


# ---- processes ---------------------------------------------------------------------------------------------


def _answers(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    scheduler = facts.scheduler
    silent = {"scheduler": scheduler.failure} if scheduler.process is None else {}
    silent |= {one.address: one.failure for one in facts.workers if one.process is None}
    yield from fault(
        "error", "does not answer", silent, f"an answer within {facts.seconds:g} s",
        "read its log, and end it if it is stopped: by a signal, a debugger, or a file system that hangs",
    )  # fmt: skip


def _plugin(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    scheduler = facts.scheduler
    # Without dask_ferro there, `_ferro` says what to do first.
    if scheduler.process is None or scheduler.process.lacks("dask_ferro"):
        return
    if not scheduler.plugin:
        yield from fault(
            "slow", "scheduler plugin", {"scheduler": f"off ({scheduler.off or 'it was not installed'})"},
            "on: stealing and placement are stock Dask's without it",
            "remove the reason, then ff.install(client)" if scheduler.off else "ff.install(client)",
        )  # fmt: skip
        return
    is_off = not scheduler.steals and scheduler.stealing == "auto"
    yield from fault(
        "slow", "work stealing", {"scheduler": "distributed.scheduler.work-stealing: False"} if is_off else {}, "True",
        "remove it from the scheduler's configuration, or ff.install(client, stealing='informed')",
    )  # fmt: skip
    able = [one for one in facts.workers if one.process is not None and not one.process.lacks("dask_ferro")]
    yield from fault(
        "slow", "worker plugin", {one.address: "none" for one in able if not one.plugin},
        "ferro-worker, which measures device and links",
        "ff.uninstall(client), then ff.install(client); the scheduler's log has the reason",
    )  # fmt: skip


def _validation(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    yield from fault(
        "slow", "validation of each transition",
        {"scheduler": "distributed.scheduler.validate: True"} if facts.scheduler.validates else {}, "False",
        "remove it from the scheduler's configuration; it is for tests",
    )  # fmt: skip


def _clocks(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    clocks = {"scheduler": facts.scheduler.clock, **{one.address: one.clock for one in facts.workers}}
    skewed = {w: clock for w, clock in clocks.items() if clock and abs(clock.ahead) - clock.doubt > SKEW_S}
    yield from fault(
        "warning", "clock", {where: f"{clock.ahead:+.1f} s from the client's" for where, clock in skewed.items()},
        f"within {SKEW_S:g} s", "set the clocks of both hosts by NTP (timedatectl set-ntp true)",
    )  # fmt: skip


# ---- workers -----------------------------------------------------------------------------------------------


def _there(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    is_empty = not facts.workers and facts.scheduler.process is not None
    remedy = "start workers, or wait for their jobs"
    yield from fault("warning", "workers", {"scheduler": "none"} if is_empty else {}, "at least 1", remedy)


def _memory(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    yield from fault(
        "warning", "memory limit", {one.address: "none" for one in facts.workers if not one.memory_limit},
        "a limit, at which it spills and pauses", "start it with --memory-limit, such as --memory-limit 4GiB",
    )  # fmt: skip
    yield from fault(
        "warning", "status",
        {one.address: "paused, which takes no task" for one in facts.workers if one.status == "paused"}, "running",
        "release results, give it more memory, or start more workers; see its memory on the dashboard",
    )  # fmt: skip


def _folders(facts: ClusterFacts) -> Iterator[ClusterFinding]:
    yield from fault(
        "warning", "shared folder", {"client": facts.unseen} if facts.unseen else {},
        f"a file in {facts.path} to look for",
        "ff.check(client, path=...) with a folder that may be written, or a file",
    )  # fmt: skip
    yield from fault(
        "warning", "shared folder", {one.address: _SEES[one.sees] for one in facts.workers if one.sees in _SEES},
        f"the client's {facts.path}",
        "put models and data on a file system that client and workers share, at one path: a model that workers do not"
        " see is sent to them, and ff.run reads and writes files there",
    )  # fmt: skip
    remote = [one for one in facts.workers if one.disk in NETWORK_DISKS]
    yield from fault(
        "slow", "local directory", {one.address: f"{one.local_directory} on {one.disk}" for one in remote},
        "a local disk", "start it with --local-directory on a disk of its host, such as /tmp",
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
        got = f"{threads} on the {len(cores)} cores of one host ({tasks} of tasks, with {math} each)"
        yield from fault(
            "slow", "threads", {one.address: got for one in workers}, f"at most {len(cores)}",
            "start workers with OMP_NUM_THREADS=1" if tasks <= len(cores) else "start fewer workers, or --nthreads",
        )  # fmt: skip


_RULES: tuple[Rule, ...] = (
    _answers, _ferro, _pythons, _engines, _dask, _extras, _there, _memory, _folders, _clocks, _plugin, _threads,
    _validation,
)  # fmt: skip
