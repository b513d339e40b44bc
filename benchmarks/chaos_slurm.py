"""What is lost when a batch system misbehaves: stock dask-jobqueue and `ff.SLURMCluster`, on a real SLURM.

    eval "$(tests/slurm/slurm-up)"; python benchmarks/chaos_slurm.py      # all of it: some 40 minutes a round
    python benchmarks/chaos_slurm.py --only scancel --only squeue-empty --rounds 5
    python benchmarks/chaos_slurm.py --list

Four jobs of one thread, two on a node; 50 results of 2 MB are held and 60 tasks of a second run when something goes
wrong.  Counted: results that were computed again, tasks that were started twice, wrong values, tasks that failed,
whether all was done in time, what is left after the cluster was closed (jobs, and processes of workers), seconds, jobs
and node-seconds.

A row changes the SLURM that it runs on (nodes, partitions, the controller) and puts it back.  Commands that fail, hang
or lie are scripts in front of SLURM's own, which a folder on the PATH has.
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import dask_jobqueue  # noqa: E402
import measure  # noqa: E402
import psutil  # noqa: E402
from distributed import Client, as_completed  # noqa: E402
from distributed import TimeoutError as DaskTimeout  # noqa: E402

import dask_ferro as ff  # noqa: E402

CONTENDERS = ("stock", "ferro")
JOBS, HELD, NBYTES, FLYING = 4, 50, 2_000_000, 60
# For all of it to be done, and for jobs and processes to end after that.
IN_TIME, TO_END = 180.0, 60.0
SLURM_UP = Path(__file__).resolve().parents[1] / "tests" / "slurm" / "slurm-up"
FIGURES = ("lost", "twice", "wrong", "failed", "hung", "orphans", "seconds", "jobs", "most", "node_seconds")
SQUEUE = shutil.which("squeue") or "squeue"


def command(*words: str, check: bool = True) -> str:
    """Run one of SLURM's commands, the real one."""
    real = (
        shutil.which(words[0], path=os.environ["PATH"].partition(":")[2] if _Lies.folder else None)
        or words[0]
    )
    done = subprocess.run([real, *words[1:]], capture_output=True, text=True, check=check, timeout=60)
    return done.stdout


# ---- what the cluster works at -----------------------------------------------------------------------------


def hold(number: int, log: str) -> bytes:
    """Take 0.2 s, and return 2 MB."""
    _note(log, f"held-{number}")
    time.sleep(0.2)
    return number.to_bytes(4, "big") * (NBYTES // 4)


def fly(number: int, log: str, seconds: float) -> int:
    """Take some time."""
    _note(log, f"fly-{number}")
    time.sleep(seconds)
    return number * number


def _note(log: str, words: str) -> None:
    with open(log, "a") as file:
        file.write(words + "\n")


# ---- commands that lie -------------------------------------------------------------------------------------

_LIE = """\
#!/bin/sh
mode=$(cat {folder}/{name}.mode 2>/dev/null)
dice=$(od -An -N1 -tu1 /dev/urandom | tr -d ' ')
case "$mode" in
    fail) [ "$dice" -ge 77 ] || {{ echo "{name}: error: Slurm temporarily unable to accept" >&2; exit 1; }} ;;
    hang) [ "$dice" -ge 77 ] || sleep 20 ;;
    empty) exit 0 ;;
    stale) asked={folder}/$(echo "$@" | cksum | cut -d' ' -f1); mkdir -p "$asked"; now=$(date +%s)
        {real} "$@" > "$asked/$now"
        for at in $(ls "$asked" | sort -rn); do
            [ $((now - at)) -lt 25 ] || {{ cat "$asked/$at"; exit 0; }}
        done
        exit 0 ;;
    few) case "$*" in *--array=*) echo "sbatch: error: Batch job submission failed: Invalid job array specification" >&2
        exit 1 ;; esac ;;
esac
exec {real} "$@"
"""


class _Lies:
    """Scripts in front of SLURM's commands, and what each does at the moment."""

    folder: Path | None = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("sbatch", "squeue", "scancel"):
            script = folder / name
            script.write_text(_LIE.format(folder=folder, name=name, real=shutil.which(name)))
            script.chmod(0o755)

    def __enter__(self) -> _Lies:
        _Lies.folder = self._folder
        os.environ["PATH"] = f"{self._folder}:{os.environ['PATH']}"
        return self

    def __exit__(self, *error: object) -> None:
        os.environ["PATH"] = os.environ["PATH"].partition(":")[2]
        _Lies.folder = None

    def tell(self, name: str, mode: str = "") -> None:
        """Let a command fail, hang (each in 30 % of its calls), be empty, be 25 s old, take no arrays; or be true."""
        (self._folder / f"{name}.mode").write_text(mode)


# ---- one run -----------------------------------------------------------------------------------------------


class Meter:
    """What SLURM did for a cluster's jobs, looked at five times a second."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.jobs: set[str] = set()
        self.node_seconds, self.most = 0.0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def rows(self) -> list[tuple[str, str]]:
        """Return id and state of each job whose output goes to the run's folder."""
        told = subprocess.run(
            [SQUEUE, "-h", "-r", "-O", "JobArrayID:40,State:20,STDOUT:300"],
            capture_output=True, text=True, check=False, timeout=60,
        ).stdout  # fmt: skip
        cells = [line.split(None, 2) for line in told.splitlines()]
        return [(c[0], c[1]) for c in cells if len(c) == 3 and self._folder in c[2]]

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.wait(0.2):
            with suppress(subprocess.SubprocessError):
                rows = self.rows()
                running = sum(state in ("RUNNING", "COMPLETING") for _, state in rows)
                self.jobs |= {job for job, _ in rows}
                self.most = max(self.most, len(rows))
                self.node_seconds += running * (time.monotonic() - last)
            last = time.monotonic()


@dataclass
class Run:
    """A cluster at work, for whoever makes it fail."""

    contender: str
    cluster: Any
    client: Client
    meter: Meter
    lies: _Lies
    undo: ExitStack

    def pids(self) -> dict[str, int]:
        """Return the process of each worker."""
        return dict(self.client.run(os.getpid))

    def job(self) -> str:
        """Return one of the jobs that run."""
        return next(job for job, state in self.meter.rows() if state == "RUNNING")

    def node(self) -> str:
        """Return the node of one of them."""
        return command("squeue", "-h", "-o", "%N", "-j", self.job()).split()[0]

    def later(self, seconds: float, then: Callable[[], Any]) -> None:
        """Do something after a while, in any case before the run is over."""
        timer = threading.Timer(seconds, then)
        timer.start()
        self.undo.callback(timer.join)


@dataclass(frozen=True)
class Row:
    """Something that goes wrong.

    Attributes
    ----------
    fault : callable
        Called with the run, two seconds after the tasks were submitted.
    options : mapping
        Of the cluster, of both contenders.
    warned : bool
        Whether there is a warning of some seconds, or time for a copy: then nothing may be lost.
    seconds : float
        That a task takes.
    """

    fault: Callable[[Run], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    warned: bool = False
    seconds: float = 1.0


def _one_worker(run: Run) -> int:
    return sorted(run.pids().items())[0][1]


def kill_worker(run: Run) -> None:
    os.kill(_one_worker(run), signal.SIGKILL)


def kill_nanny(run: Run) -> None:
    os.kill(psutil.Process(_one_worker(run)).ppid(), signal.SIGKILL)


def stop_worker(run: Run) -> None:
    pid = _one_worker(run)
    os.kill(pid, signal.SIGSTOP)
    run.later(20.0, lambda: psutil.pid_exists(pid) and os.kill(pid, signal.SIGCONT))


def _node_state(state: str, for_seconds: float) -> Callable[[Run], None]:
    def fault(run: Run) -> None:
        node = run.node()
        command("scontrol", "update", f"nodename={node}", f"state={state}", "reason=chaos")
        run.later(
            for_seconds,
            lambda: command("scontrol", "update", f"nodename={node}", "state=resume", check=False),
        )

    return fault


def _preempted(partition: str, grace: int) -> Callable[[Run], None]:
    def fault(run: Run) -> None:
        command("scontrol", "update", f"partitionname={partition}", f"gracetime={grace}")
        run.undo.callback(command, "scontrol", "update", f"partitionname={partition}", "gracetime=5")
        other = command(
            "sbatch",
            "--parsable",
            "-p",
            "cpu",
            "-w",
            run.node(),
            "-n1",
            "-c4",
            "-o",
            "/dev/null",
            "--wrap",
            "sleep 30",
        ).strip()
        run.undo.callback(command, "scancel", other, check=False)

    return fault


def controller_down(run: Run) -> None:
    pid = int((Path(os.environ["SLURM_CONF"]).parents[1] / "ctld" / "slurmctld.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    run.later(30.0, lambda: subprocess.run([SLURM_UP], check=True, capture_output=True, timeout=120))
    _scale(run, JOBS + 2)


def _scale(run: Run, count: int) -> None:
    """Ask for another number of workers, in the background: it may wait."""
    run.later(0.0, lambda: run.cluster.adapt(minimum=count, maximum=count))


def _lying(name: str, mode: str, for_seconds: float) -> Callable[[Run], None]:
    def fault(run: Run) -> None:
        run.lies.tell(name, mode)
        run.later(for_seconds, lambda: run.lies.tell(name))
        if mode != "empty":  # something to ask for
            _scale(run, JOBS + 2)

    return fault


def scheduler_stopped(run: Run) -> None:
    run.later(0.0, lambda: run.client.run_on_scheduler(time.sleep, 15.0))


def partition_down(run: Run) -> None:
    command("scontrol", "update", "partitionname=cpu", "state=down")
    run.later(15.0, lambda: command("scontrol", "update", "partitionname=cpu", "state=up"))
    _scale(run, JOBS + 2)


def second_cluster(run: Run) -> None:
    """Open and close another one of the same account and options."""
    with tempfile.TemporaryDirectory() as folder, opened(run.contender, folder, {}) as other:
        other.scale(1)
        time.sleep(5.0)


SKEWED = "date() { echo $(($(command date +%s) - 60)); }"
ROWS: Mapping[str, Row] = {
    "none": Row(lambda run: None, warned=True),
    "scancel": Row(lambda run: command("scancel", run.job()), warned=True),
    "worker-killed": Row(kill_worker),
    "nanny-killed": Row(kill_nanny),
    "worker-stopped": Row(stop_worker, warned=True),
    "node-down": Row(_node_state("down", 20.0)),
    "node-drained": Row(_node_state("drain", 40.0), warned=True),
    "time-limit": Row(lambda run: None, {"walltime": "00:01:00"}, warned=True, seconds=6.0),
    "preempted-grace": Row(
        _preempted("low", 5), {"queue": "low", "cores": 4, "processes": 4}, warned=True, seconds=4.0
    ),
    "preempted": Row(
        _preempted("spot", 0), {"queue": "spot", "cores": 4, "processes": 4}, warned=True, seconds=4.0
    ),
    "requeued": Row(lambda run: command("scontrol", "requeue", run.job())),
    "controller-down": Row(controller_down, warned=True),
    "sbatch-fails": Row(_lying("sbatch", "fail", 20.0), warned=True),
    "sbatch-hangs": Row(_lying("sbatch", "hang", 20.0), warned=True),
    "squeue-fails": Row(_lying("squeue", "fail", 20.0), warned=True),
    "squeue-hangs": Row(_lying("squeue", "hang", 20.0), warned=True),
    "squeue-empty": Row(_lying("squeue", "empty", 5.0), warned=True),
    "squeue-stale": Row(_lying("squeue", "stale", 40.0), warned=True),
    "scancel-fails": Row(_lying("scancel", "fail", 60.0), warned=True),
    "no-arrays": Row(_lying("sbatch", "few", 60.0), warned=True),
    "disk-full": Row(lambda run: None, {"job_extra_directives": ["--error=/dev/full"]}, warned=True),
    "scheduler-stopped": Row(scheduler_stopped, warned=True),
    "second-cluster": Row(second_cluster, warned=True),
    "clock-skew": Row(
        lambda run: None, {"job_script_prologue": [SKEWED], "walltime": "00:05:00"}, warned=True
    ),
    "four-processes": Row(kill_worker, {"cores": 4, "processes": 4}),
    "partition-down": Row(partition_down, warned=True),
}


@contextmanager
def opened(contender: str, folder: str, options: Mapping[str, Any]) -> Iterator[Any]:
    """Open a cluster without jobs."""
    kind = ff.SLURMCluster if contender == "ferro" else dask_jobqueue.SLURMCluster
    shape = {"queue": "cpu", "cores": 1, "processes": 1, "memory": "1900MB", "walltime": "00:10:00"} | dict(
        options
    )
    cluster = kind(
        interface="lo", log_directory=folder, local_directory=folder, job_name="chaos",
        scheduler_options={"dashboard_address": "127.0.0.1:0", "interface": "lo"}, **shape,
    )  # fmt: skip
    try:
        yield cluster
    finally:
        with suppress(AssertionError):  # stock's, of jobs that were never submitted
            cluster.close(timeout=TO_END)


def once(contender: str, name: str, toy: bool) -> dict[str, float]:
    """Let something go wrong once; return the figures."""
    row = ROWS[name]
    workers = JOBS * row.options.get("processes", 1)
    held_count, fly_count = (8, 8) if toy else (HELD, FLYING)
    with tempfile.TemporaryDirectory(prefix="ferro-chaos-") as folder, Meter(folder) as meter:
        log = str(Path(folder, "starts"))
        lies = Path(folder, "bin")
        lies.mkdir()
        with (
            _Lies(lies) as liar,
            ExitStack() as undo,
            opened(contender, folder, row.options) as cluster,
            Client(cluster) as client,
        ):
            cluster.adapt(minimum=workers, maximum=workers)
            client.wait_for_workers(workers, timeout=120)
            held = client.map(hold, range(held_count), log=log, key=[f"held-{i}" for i in range(held_count)])
            _gathered(client, held, 120.0)
            began = time.monotonic()
            seconds = [row.seconds] * fly_count
            flying = client.map(
                fly,
                range(fly_count),
                [log] * fly_count,
                seconds,
                key=[f"fly-{i}" for i in range(fly_count)],
            )
            time.sleep(0.5 if toy else 2.0)
            row.fault(Run(contender, cluster, client, meter, liar, undo))
            done = _gathered(client, flying, IN_TIME)
            took = time.monotonic() - began
            again = _gathered(client, held, IN_TIME)
            failed = sum(future.status in ("error", "cancelled", "lost") for future in [*flying, *held])
            undo.close()
        orphans = _orphans(meter, folder)
        starts = Counter(Path(log).read_text().split())
    return {
        "lost": sum(count > 1 for key, count in starts.items() if key.startswith("held")),
        "twice": sum(count > 1 for key, count in starts.items() if key.startswith("fly")),
        "wrong": sum(value != i * i for i, value in done.items())
        + sum(value != i.to_bytes(4, "big") * (NBYTES // 4) for i, value in again.items()),
        "failed": failed,
        "hung": float(len(done) + len(again) < fly_count + held_count),
        "orphans": orphans,
        "seconds": took,
        "jobs": len(meter.jobs),
        "most": meter.most,
        "node_seconds": meter.node_seconds,
    }


def _gathered(client: Client, futures: Sequence[Any], seconds: float) -> dict[int, Any]:
    """Return the results by number of what is done in time, and did not fail."""
    number = {future.key: i for i, future in enumerate(futures)}
    found = {}
    with suppress(TimeoutError, DaskTimeout):
        for batch in as_completed(futures, with_results=True, raise_errors=False, timeout=seconds).batches():
            found.update(
                (number[future.key], value) for future, value in batch if future.status == "finished"
            )
    return found


def _orphans(meter: Meter, folder: str) -> int:
    """Return how many jobs and processes are left a while after the end, and end them."""
    deadline = time.monotonic() + TO_END
    while (left := meter.rows()) or (alive := _processes(folder)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    else:
        return 0
    alive = _processes(folder)
    for job, _ in left:
        command("scancel", job, check=False)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    return len(left) + len(alive)


def _processes(folder: str) -> list[psutil.Process]:
    everything = [process for process in psutil.process_iter(["cmdline"]) if process.pid != os.getpid()]
    return [p for p in everything if any(folder in word for word in p.info["cmdline"] or ())]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options(
        "What a batch system that misbehaves costs, beside stock dask-jobqueue.", rounds=5
    )
    parser.add_argument("--only", choices=list(ROWS), action="append", help="this row alone")
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="this one alone")
    parser.add_argument("--list", action="store_true", help="name the rows, and end")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(ROWS))
        return {}
    rounds = 1 if options.toy else options.rounds
    contenders = options.contender or CONTENDERS
    record = measure.provenance(rounds=rounds, toy=options.toy)
    record["results"] = {}
    for name in options.only or ROWS:
        taken: dict[str, list[dict[str, float]]] = {c: [] for c in contenders}
        for number in range(rounds):
            for contender in contenders:
                taken[contender].append(once(contender, name, options.toy))
                if not options.quiet:
                    print(f"{name} {contender} round {number + 1}: {taken[contender][-1]}", file=sys.stderr)
        record["results"][name] = {
            c: {key: measure.Summary.of([one[key] for one in ones]) for key in FIGURES}
            for c, ones in taken.items()
        }
        if options.json:  # a row takes minutes
            measure.write(options.json, record)
    show(record["results"])
    return record


def show(results: Mapping[str, Mapping[str, Mapping[str, measure.Summary]]]) -> None:
    """Print the table: the worst of all rounds where that counts, else the median."""
    worst = FIGURES[:6]
    rows = [
        (
            name,
            contender,
            *(f"{s[key].high:.0f}" if key in worst else f"{s[key].median:.0f}" for key in FIGURES),
        )
        for name, found in results.items()
        for contender, s in found.items()
    ]
    measure.show("a batch system that misbehaves (worst, then medians)", ("", "", *FIGURES), rows)


if __name__ == "__main__":
    main()
