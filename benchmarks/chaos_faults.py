"""The faults of `chaos_slurm.py`: wrapper scripts around SLURM's commands, and a table of faults.

A fault is a function of a `Run`.  It restores its changes to the SLURM (nodes, partitions, the controller), at the
latest when the run is over.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask_jobqueue
import psutil
from distributed import Client
from slurm_jobs import Meter

import dask_ferro as ff

JOBS, FLYING = 4, 60
SLURM_UP = Path(__file__).resolve().parents[1] / "tests" / "slurm" / "slurm-up"
# How long jobs and processes may take to end after their cluster was closed, in seconds.
TO_END = 60.0


def command(*words: str, check: bool = True) -> str:
    """Run one of SLURM's own commands."""
    path = os.environ["PATH"]
    real = shutil.which(words[0], path=path.partition(":")[2] if Lies.folder else path) or words[0]
    return subprocess.run([real, *words[1:]], capture_output=True, text=True, check=check, timeout=60).stdout


# ---- wrappers of SLURM's commands --------------------------------------------------------------------------

_LIE = """\
#!/bin/sh
mode=$(cat {folder}/{name}.mode 2>/dev/null)
dice=$(od -An -N1 -tu1 /dev/urandom | tr -d ' ')
refuse() {{ echo "{name}: error: Batch job submission failed: $1" >&2; exit 1; }}
case "$mode" in
    fail) [ "$dice" -ge 77 ] || {{ echo "{name}: error: Slurm temporarily unable to accept" >&2; exit 1; }} ;;
    hang) [ "$dice" -ge 77 ] || sleep 20 ;;
    empty) exit 0 ;;
    silent) {real} "$@" >/dev/null; exit 0 ;;
    stale) asked={folder}/$(echo "$@" | cksum | cut -d' ' -f1); mkdir -p "$asked"; now=$(date +%s)
        {real} "$@" > "$asked/$now"
        for at in $(ls "$asked" | sort -rn); do
            [ $((now - at)) -lt 25 ] || {{ cat "$asked/$at"; exit 0; }}
        done
        exit 0 ;;
    no-arrays) case "$*" in *--array=*) refuse "Invalid job array specification" ;; esac ;;
    full) [ "$({squeue} -h -r | wc -l)" -lt 5 ] ||
        refuse "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)" ;;
esac
exec {real} "$@"
"""


class Lies:
    """Wrapper scripts in front of SLURM's commands, with the current behaviour of each.

    fail, hang: in 30 % of its calls (hang: 20 s); empty: does nothing, prints nothing, status 0; silent: works, but
    prints nothing; stale: answers as of 25 s ago; no-arrays: refuses job arrays; full: refuses a sixth job.
    """

    folder: Path | None = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        for name in ("sbatch", "squeue", "scancel"):
            script = folder / name
            real = shutil.which(name)
            script.write_text(_LIE.format(folder=folder, name=name, real=real, squeue=shutil.which("squeue")))
            script.chmod(0o755)

    def __enter__(self) -> Lies:
        Lies.folder = self._folder
        os.environ["PATH"] = f"{self._folder}:{os.environ['PATH']}"
        return self

    def __exit__(self, *error: object) -> None:
        os.environ["PATH"] = os.environ["PATH"].partition(":")[2]
        Lies.folder = None

    def tell(self, name: str, mode: str = "") -> None:
        """Set the behaviour of a command to one that the class names, or back to normal."""
        (self._folder / f"{name}.mode").write_text(mode)


# ---- a run and its faults -----------------------------------------------------------------------------------


@dataclass
class Run:
    """A cluster at work, as a fault sees it; `maximum` is the most jobs that were ever requested."""

    contender: str
    cluster: Any
    client: Client
    meter: Meter
    lies: Lies
    undo: ExitStack
    maximum: int = JOBS

    def worker(self) -> int:
        """Return the process of a worker."""
        return sorted(self.client.run(os.getpid).items())[0][1]

    def job(self) -> str:
        """Return a running job."""
        return next(job for job, state in self.meter.rows() if state == "RUNNING")

    def node(self) -> str:
        """Return the node of a running job."""
        return command("squeue", "-h", "-o", "%N", "-j", self.job()).split()[0]

    def later(self, seconds: float, then: Callable[[], Any]) -> None:
        """Call a function after some seconds, at the latest when the run ends."""
        timer = threading.Timer(seconds, then)
        timer.start()
        self.undo.callback(timer.join)

    def ask(self, jobs: int) -> None:
        """Request another number of jobs, in the background, since the call may block."""
        self.maximum = max(self.maximum, jobs)
        self.later(0.0, lambda: self.cluster.adapt(minimum=jobs, maximum=jobs))


@contextmanager
def opened(contender: str, folder: str, options: Mapping[str, Any]) -> Iterator[Any]:
    """Open a cluster without jobs, stock dask-jobqueue's or `ff.SLURMCluster`."""
    kind = ff.SLURMCluster if contender == "ferro" else dask_jobqueue.SLURMCluster
    shape = {"queue": "cpu", "cores": 1, "processes": 1, "memory": "1900MB", "walltime": "00:10:00"}
    where = {"log_directory": folder, "local_directory": folder, "job_name": "chaos", "interface": "lo"}
    options = {**shape, **where, **options}
    local = {"dashboard_address": "127.0.0.1:0", "interface": "lo"}
    cluster = kind(scheduler_options=local, **options)
    try:
        yield cluster
    finally:
        with suppress(AssertionError):  # stock's, of jobs that were never submitted
            cluster.close(timeout=TO_END)


def kill_worker(run: Run) -> None:
    os.kill(run.worker(), signal.SIGKILL)


def kill_nanny(run: Run) -> None:
    os.kill(psutil.Process(run.worker()).ppid(), signal.SIGKILL)


def stop_worker(run: Run) -> None:
    pid = run.worker()
    os.kill(pid, signal.SIGSTOP)
    run.later(20.0, lambda: psutil.pid_exists(pid) and os.kill(pid, signal.SIGCONT))


def _node_state(state: str, for_seconds: float) -> Callable[[Run], None]:
    def fault(run: Run) -> None:
        node = run.node()
        command("scontrol", "update", f"nodename={node}", f"state={state}", "reason=chaos")
        resume = ("scontrol", "update", f"nodename={node}", "state=resume")
        run.later(for_seconds, lambda: command(*resume, check=False))

    return fault


def reboot(run: Run) -> None:
    """Kill all processes on a node, its daemon included; the daemon restarts 15 s later and reports a boot."""
    node, conf = run.node(), os.environ["SLURM_CONF"]
    daemon = psutil.Process(int((Path(conf).parents[1] / "d" / f"{node}.pid").read_text()))
    steps = [p for p in psutil.process_iter(["name"]) if _is_step(p, node, conf)]
    for process in [daemon, *(child for step in steps for child in step.children(recursive=True)), *steps]:
        with suppress(psutil.Error):
            process.kill()
    again = ["slurmd", "-N", node, "-f", conf, "-b"]
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"

    def back() -> None:
        subprocess.run(again, check=True, capture_output=True, timeout=60, env={**os.environ, "PATH": path})
        command("scontrol", "update", f"nodename={node}", "state=resume", check=False)

    run.later(15.0, back)


def _is_step(process: psutil.Process, node: str, conf: str) -> bool:
    """Return whether a process is a job step on a node of this SLURM, by the environment of its children."""
    if process.info["name"] != "slurmstepd":
        return False
    with suppress(psutil.Error):
        of_job = [p.environ() for p in process.children(recursive=True)]
        return any((env.get("SLURMD_NODENAME"), env.get("SLURM_CONF")) == (node, conf) for env in of_job)
    return False


def _preempted(partition: str, grace: int) -> Callable[[Run], None]:
    def fault(run: Run) -> None:
        command("scontrol", "update", f"partitionname={partition}", f"gracetime={grace}")
        run.undo.callback(command, "scontrol", "update", f"partitionname={partition}", "gracetime=5")
        words = f"sbatch --parsable -p cpu -w {run.node()} -n1 -c4 -o /dev/null --wrap".split()
        other = command(*words, "sleep 30").strip()
        run.undo.callback(command, "scancel", other, check=False)

    return fault


def controller_down(run: Run) -> None:
    pid = int((Path(os.environ["SLURM_CONF"]).parents[1] / "ctld" / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    run.later(30.0, lambda: subprocess.run([SLURM_UP], check=True, capture_output=True, timeout=120))
    run.ask(JOBS + 2)


def _lying(name: str, mode: str, for_seconds: float, jobs: int = JOBS + 2) -> Callable[[Run], None]:
    def fault(run: Run) -> None:
        run.lies.tell(name, mode)
        run.later(for_seconds, lambda: run.lies.tell(name))
        if jobs != JOBS:
            run.ask(jobs)

    return fault


def scheduler_stopped(run: Run) -> None:
    run.later(0.0, lambda: run.client.run_on_scheduler(time.sleep, 15.0))


def partition_down(run: Run) -> None:
    command("scontrol", "update", "partitionname=cpu", "state=down")
    run.later(15.0, lambda: command("scontrol", "update", "partitionname=cpu", "state=up"))
    run.ask(JOBS + 2)


def second_cluster(run: Run) -> None:
    """Open and close another cluster with the same account and options."""
    with tempfile.TemporaryDirectory() as folder, opened(run.contender, folder, {}) as other:
        other.scale(1)
        time.sleep(5.0)


_CLIENT = """\
import sys, time
from distributed import Client
client = Client(sys.argv[1])
futures = client.map(lambda number: time.sleep(1.0), range(20), pure=False)
print("submitted", flush=True)
time.sleep(60.0)
"""


def client_killed(run: Run) -> None:
    """Kill a second client whose tasks are at work."""
    words = [sys.executable, "-c", _CLIENT, run.client.scheduler.address]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        time.sleep(2.0)
        other.kill()


@contextmanager
def full_disk(folder: str) -> Iterator[dict[str, Any]]:
    """Write the jobs' logs to a full file system: a small one, or /dev/full where mounting is not allowed."""
    logs = Path(folder, "full")
    logs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(logs)]
    if subprocess.run(mount, capture_output=True, check=False, timeout=60).returncode:
        yield {"job_extra_directives": ["--error=/dev/full"]}
        return
    try:
        with suppress(OSError), open(logs / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        yield {"log_directory": str(logs)}
    finally:
        subprocess.run(["umount", "--lazy", str(logs)], check=True, capture_output=True, timeout=60)


# ---- the table ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A fault with its cluster and its workload.

    Attributes
    ----------
    fault : callable
        Called with the run, two seconds after the first tasks were submitted.
    options : mapping
        Options of the cluster, for both contenders.
    warned : bool
        Whether there is a warning of some seconds, or time for a copy; if so, nothing may be lost.
    waves : sequence
        Pairs of a pause in seconds and the seconds of each task that is submitted after it.
    bounds : tuple or None
        Minimum and maximum of `adapt`, if they are not four.
    context : callable
        Called with the run's folder; returns a context manager around the cluster, which yields more options.
    """

    fault: Callable[[Run], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    warned: bool = True
    waves: Sequence[tuple[float, Sequence[float]]] = ((0.0, (1.0,) * FLYING),)
    bounds: tuple[int, int] | None = None
    context: Callable[[str], AbstractContextManager[dict[str, Any]]] = lambda folder: nullcontext({})

    @property
    def is_killed(self) -> bool:
        """Return whether the fault kills the program itself."""
        return self.fault is program_killed


def program_killed(run: Run) -> None:
    """Mark the row in which the program with the cluster is killed; `chaos_slurm.py` runs and kills it."""
    raise AssertionError("chaos_slurm.py kills a program of its own")


def nothing(run: Run) -> None:
    """Do nothing: the row without a fault."""


def _each(seconds: float) -> tuple[tuple[float, Sequence[float]], ...]:
    return ((0.0, (seconds,) * FLYING),)


_SKEWED = "date() { echo $(($(command date +%s) - 60)); }"
_NODE = {"cores": 4, "processes": 1}  # a node each
ROWS: Mapping[str, Row] = {
    "none": Row(nothing),
    "scancel": Row(lambda run: command("scancel", run.job())),
    "worker-killed": Row(kill_worker, warned=False),
    "nanny-killed": Row(kill_nanny, warned=False),
    "four-processes": Row(kill_worker, {"cores": 4, "processes": 4}, warned=False),
    "worker-stopped": Row(stop_worker),
    "node-down": Row(_node_state("down", 20.0), warned=False),
    "node-drained": Row(_node_state("drain", 40.0)),
    "node-rebooted": Row(reboot, warned=False),
    "time-limit": Row(nothing, {"walltime": "00:01:00"}, waves=_each(6.0)),
    "preempted-grace": Row(_preempted("low", 5), {"queue": "low", **_NODE}, waves=_each(4.0)),
    "preempted": Row(_preempted("spot", 0), {"queue": "spot", **_NODE}, waves=_each(4.0)),
    "requeued": Row(lambda run: command("scontrol", "requeue", run.job())),
    "controller-down": Row(controller_down, waves=_each(3.0)),
    "sbatch-fails": Row(_lying("sbatch", "fail", 20.0)),
    "sbatch-hangs": Row(_lying("sbatch", "hang", 20.0)),
    "sbatch-empty": Row(_lying("sbatch", "empty", 10.0)),
    "sbatch-silent": Row(_lying("sbatch", "silent", 10.0)),
    "squeue-fails": Row(_lying("squeue", "fail", 20.0), waves=_each(2.0)),
    "squeue-hangs": Row(_lying("squeue", "hang", 20.0), waves=_each(2.0)),
    "squeue-empty": Row(_lying("squeue", "empty", 5.0, JOBS)),
    "squeue-stale": Row(_lying("squeue", "stale", 40.0), waves=_each(4.0)),
    "scancel-fails": Row(_lying("scancel", "fail", 30.0, JOBS - 2)),
    "scancel-hangs": Row(_lying("scancel", "hang", 30.0, JOBS - 2)),
    "scancel-empty": Row(_lying("scancel", "empty", 20.0, JOBS - 2)),
    "no-arrays": Row(_lying("sbatch", "no-arrays", 20.0)),
    "five-jobs": Row(_lying("sbatch", "full", 20.0)),
    "disk-full": Row(nothing, context=full_disk),
    "scheduler-stopped": Row(scheduler_stopped),
    "client-killed": Row(client_killed),
    "program-killed": Row(program_killed),
    "second-cluster": Row(second_cluster),
    "clock-skew": Row(nothing, {"job_script_prologue": [_SKEWED], "walltime": "00:05:00"}),
    "partition-down": Row(partition_down),
    "long-tail": Row(nothing, waves=((0.0, (60.0, *(0.3,) * 200)),), bounds=(0, 6)),
    "bursts": Row(nothing, waves=((0.0, (1.0,) * 40), *((10.0, (1.0,) * 40),) * 3), bounds=(0, 6)),
}
