"""What the tests on SLURM have in common: its commands, its queue, jobs that only wait, and a cluster with a client."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distributed import Client

import dask_ferro as ff
from dask_ferro.slurm.job_lifecycle import BatchJob
from tests.waiting import BOUND_S, until, until_async

# A job that need not run.
LATER = {"job_extra_directives": ["--begin=now+1hour"]}


def settings(folder: Path) -> dict[str, Any]:
    """Return the common options of these clusters: jobs of one thread, on this machine only."""
    return {
        "cores": 1,
        "memory": "400MB",
        "processes": 1,
        "interface": "lo",
        "job_name": f"test-{uuid.uuid4().hex[:8]}",
        "scheduler_options": {"dashboard_address": "127.0.0.1:0", "interface": "lo"},
        "log_directory": str(folder / "logs"),
    }


def watchdogs(name: str) -> list[int]:
    """Return the watchdog processes of the jobs with this name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"dask-ferro-watchdog" in words and name.encode() in words:
            found.append(int(path.parent.name))
    return found


def command(*words: object) -> str:
    """Return what a command prints, one of SLURM's as a rule."""
    line = list(map(str, words))
    return subprocess.run(line, check=True, capture_output=True, text=True, timeout=30).stdout


def queue(named: Any, *options: str, squeue: object = "squeue") -> dict[str, str]:
    """Return the state by job id, of a name or of the cluster that has it."""
    name = getattr(named, "job_name", named)
    return dict(
        line.split()
        for line in command(squeue, "-h", "-r", "-o", "%i %T", "--name", name, *options).splitlines()
    )


def partitions(named: Any) -> list[str]:
    """Return the partition of each job that there is."""
    name = getattr(named, "job_name", named)
    return sorted(command("squeue", "-h", "-r", "-o", "%P", "--name", name).split())


def refuses(words: str, who: str = "sbatch: error") -> str:
    """Return what a command does that refuses, in a shell's words."""
    return f"echo '{who}: {words}' >&2; exit 1"


def executable(path: Path, script: str) -> None:
    """Write a shell's script that can be called."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@contextmanager
def busy(node: str) -> Iterator[str]:
    """Have a job of higher priority on a node, which preempts others; yield its number."""
    where = ("-p", "cpu", "-w", node, "-n1", "-c4", "-o", "/dev/null")
    other = command("sbatch", "--parsable", *where, "--wrap", "sleep 60").strip()
    try:
        yield other
    finally:
        command("scancel", other)


@contextmanager
def away(node: str, state: str = "drain") -> Iterator[None]:
    """Have an administrator take a node away; give it back, where it is not there again already."""
    try:
        command("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")
        yield
    finally:
        with suppress(subprocess.CalledProcessError):
            command("scontrol", "update", f"nodename={node}", "state=resume")


def place_of(key: str, dask_scheduler: Any) -> str | None:
    """Return the name of the worker that a task is on; runs on the scheduler."""
    worker = dask_scheduler.tasks[key].processing_on if key in dask_scheduler.tasks else None
    return str(worker.name) if worker else None


def suspicion(key: str, dask_scheduler: Any) -> int:
    """Return how many deaths of workers a task is blamed for; runs on the scheduler."""
    return int(dask_scheduler.tasks[key].suspicious)


async def queued(named: Any, holds: Callable[[dict[str, str]], bool], what: str) -> None:
    """Wait for a state of the queue, by job id."""
    await until_async(
        lambda: asyncio.to_thread(lambda: holds(queue(named))), what, every=0.1, seen=lambda: queue(named)
    )


async def nothing_left(name: str) -> None:
    """Wait until neither a job nor a watchdog of a cluster is left."""
    await queued(name, lambda jobs: not jobs and not watchdogs(name), "the end of all jobs and watchdogs")


async def followed(cluster: ff.SLURMCluster) -> list[BatchJob]:
    """Reconcile; return the records of the jobs that the cluster follows."""
    names = {job.name for job in await cluster.reconcile()}
    return [job for job in await cluster.jobs() if job.name in names]


async def looked(cluster: ff.SLURMCluster, states: list[str]) -> Any:
    """Reconcile until the jobs are in these states, in the order of their submission; return them."""
    found: list[Any] = []

    async def agrees() -> bool:
        found[:] = await followed(cluster)
        return [job.state for job in found] == states

    await until_async(agrees, f"jobs that are {states}", every=0.1, seen=lambda: found)
    return tuple(found)


async def pending(cluster: ff.SLURMCluster, count: int) -> Any:
    """Ask for jobs that only wait; return them when they are in the queue."""
    cluster.request("default", count)
    await cluster.wait_submitted()
    return await looked(cluster, ["pending"] * count)


class Site:
    """A cluster on SLURM, its client, and the log of its workers."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.starts = folder / "starts"
        own = {"queue": "cpu", "local_directory": str(folder / "scratch")}
        self.cluster = ff.SLURMCluster(**(settings(folder) | own | options))
        self.client = Client(self.cluster)

    def close(self) -> None:
        self.client.close()
        self.cluster.close()
        assert queue(self.cluster) == {}

    @property
    def workers(self) -> dict[str, Any]:
        return dict(self.client.scheduler_info(n_workers=-1)["workers"])

    def connected(self, count: int, seconds: float = BOUND_S) -> None:
        until(
            lambda: len(self.workers) == count,
            f"{count} workers",
            seconds=seconds,
            seen=lambda: (list(self.workers), queue(self.cluster)),
        )

    def started(self) -> Counter[str]:
        """Return how often each task was started."""
        return Counter(self.starts.read_text().split()) if self.starts.exists() else Counter()

    def submit(self, count: int, seconds: float, **kwargs: Any) -> list[Any]:
        return self.client.map(
            sleeper, range(count), seconds=seconds, log=str(self.starts), pure=False, **kwargs
        )

    def queued(self, holds: Callable[[dict[str, str]], Any], what: str, seconds: float = BOUND_S) -> None:
        """Wait for a state of the queue."""
        until(lambda: holds(queue(self.cluster)), what, seconds=seconds, seen=lambda: queue(self.cluster))


def sleeper(number: int, seconds: float, log: str) -> int:
    with open(log, "a") as file:
        file.write(f"{number}\n")
    time.sleep(seconds)
    return number


def waits(file: str, log: str) -> int:
    """Wait in a task until a file is there."""
    with open(log, "a") as starts:
        starts.write("long\n")
    deadline = time.monotonic() + BOUND_S
    while not os.path.exists(file) and time.monotonic() < deadline:
        time.sleep(0.05)
    return 7


def closing(made: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield a function that makes sites, and close these at the end."""
    opened: list[Any] = []

    def make(**options: Any) -> Any:
        opened.append(made(**options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
