"""Losses by preemption without a warning, and the cost of copies of results that are made ahead of it.

    eval "$(tests/on_slurm/slurm-up)"; python benchmarks/preemption.py    # all parts: some 20 minutes
    python benchmarks/preemption.py --only shuffle --only no-op        # without SLURM
    python benchmarks/preemption.py --only killed --contender on --contender off --rounds 1

preempted  three jobs of four threads in a partition with GraceTime=0, preempted three times at random moments, the same
           for all contenders of a round.  48 blocks of 2 MB (1.5 s each) are held while 12 passes read each of them
           (0.5 s each); all tasks sleep.  Counted: seconds of finished tasks that ran again, their results, seconds of
           tasks that were interrupted (no copy helps them), bytes copied, the largest share of a worker's memory limit
           that results took, and the makespan.  SLURM sends SIGTERM first, and SIGKILL 5 s later.
killed     the same with SIGKILL at once, as with KillWait=0, a node that fails, or a reclaimed virtual machine.
small      400 results of 1 kB, 20 ms of arithmetic each, held until the end.
large      60 results of 2 MB, 0.1 s each, held while 40 tasks of 0.1 s compute.
shuffle    a product of two matrices of 8 x 8 tiles of 1 MB, tile by tile: each tile is read by eight tasks.
no-op      6,000 held results of tasks that do nothing, for the cost of examining them.

The last four run on two workers of one thread, in pairs: once declared as two preemptible jobs ("on"), once as safe
workers ("off").  Overhead is the median of the pairs' ratios, of seconds and of the CPU seconds of all processes minus
those when idle; other programs on the machine affect the latter less.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import dask  # noqa: E402
import measure  # noqa: E402
import psutil  # noqa: E402
from distributed import Client  # noqa: E402
from preemption_overhead import WORKLOADS, overhead  # noqa: E402

import dask_ferro as ff  # noqa: E402
from dask_ferro.elastic.scheduler_rpc import ScalingRPC  # noqa: E402
from dask_ferro.scheduler.plugin import part_of  # noqa: E402

SEED = 0
CONTENDERS = ("stock", "off", "on")
PARTITION = "spot"
ON_SLURM = ("preempted", "killed")
FIGURES = ("again", "lost", "cut", "copied", "results", "memory", "seconds", "preemptions")
Note = Callable[[str], None]


class Work(NamedTuple):
    """The graph that is preempted: numbers of blocks and passes, and their seconds."""

    jobs: int = 3
    threads: int = 4
    blocks: int = 48
    block_seconds: float = 1.5
    nbytes: int = 2_000_000
    passes: int = 12
    pass_seconds: float = 0.5
    preemptions: int = 3
    first: tuple[float, float] = (9.0, 13.0)
    """Seconds after the start within which the first comes."""
    then: tuple[float, float] = (8.0, 12.0)
    """Seconds from one to the next."""


TOY = Work(2, 2, 8, 0.3, 10_000, 16, 0.3, 1, (4.0, 4.0))


# ---- with preemption, on SLURM -----------------------------------------------------------------------------


def block(number: int, log: str, seconds: float, nbytes: int) -> bytes:
    """Run for some time, and return some bytes."""
    return _logged(log, f"block-{number}", seconds, bytes(nbytes))


def read(number: str, own: bytes, before: Any, log: str, seconds: float) -> int:
    """Read a block, and its result of the previous pass."""
    return _logged(log, f"read-{number}", seconds, len(own))


def _logged(log: str, name: str, seconds: float, result: Any) -> Any:
    _note(log, f"start {name} {time.time()}")
    time.sleep(seconds)
    _note(log, f"end {name} {time.time()}")
    return result


def _note(log: str, words: str) -> None:
    with open(log, "a") as file:
        file.write(words + "\n")


class Again(NamedTuple):
    """Repeated and interrupted computations.

    Attributes
    ----------
    seconds : float
        Seconds of finished tasks that ran again.
    results : int
        The number of these repetitions.
    cut : float
        Seconds of tasks that did not finish, as far as the times of the workers' ends are known.
    """

    seconds: float
    results: int
    cut: float

    @classmethod
    def of(cls, lines: Sequence[str], ends: Sequence[float] = ()) -> Again:
        """Read a log of starts and ends.

        >>> log = ["start a 0", "end a 2", "start a 5", "end a 7.5", "start b 7", "start b 9", "end b 10"]
        >>> Again.of(log, ends=[8.0])
        Again(seconds=2.5, results=1, cut=1.0)
        """
        begun: dict[str, list[float]] = {}
        took: dict[str, list[float]] = {}
        cut = 0.0
        for what, name, at in map(str.split, lines):
            if what == "start":
                begun.setdefault(name, []).append(float(at))
            else:
                took.setdefault(name, []).append(float(at) - begun[name].pop())
        for starts in begun.values():
            cut += sum(min((end - start for end in ends if end >= start), default=0.0) for start in starts)
        return cls(sum(sum(each[1:]) for each in took.values()), sum(len(t) - 1 for t in took.values()), cut)


class Memory:
    """The largest share of a worker's memory limit that its results took, sampled ten times a second."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self.most = scheduler, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            for ws in list(self._scheduler.workers.values()):
                if ws.memory_limit:
                    self.most = max(self.most, ws.nbytes / ws.memory_limit)


class Preemptor:
    """A thread that preempts jobs at given times: by a job of a higher partition on the node, or by SIGKILL.

    Attributes
    ----------
    ends : list of float
        When workers ended, in seconds since the epoch.
    """

    def __init__(self, client: Client, folder: str, waits: Sequence[float], seed: int, kills: bool) -> None:
        self._client, self._folder, self._waits, self._kills = client, folder, waits, kills
        self._random = random.Random(seed)
        self.ends: list[float] = []
        self._jobs: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Preemptor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        for job in self._jobs:
            _command("scancel", job)

    def _run(self) -> None:
        for seconds in self._waits:
            if self._over.wait(seconds):
                return
            self._preempt()

    def _preempt(self) -> None:
        before = set(self._client.cluster.scheduler.workers)
        if not before:
            return
        if self._kills:
            self._kill()
        elif running := sorted(self._nodes()):
            wrap = ("-n1", "-c4", "-o", "/dev/null", "--wrap", "sleep 3")
            node = self._random.choice(running)
            self._jobs.append(_command("sbatch", "--parsable", "-p", "cpu", "-w", node, *wrap).strip())
        while not before - set(self._client.cluster.scheduler.workers):
            if self._over.wait(0.02):
                return
        self.ends.append(time.time())

    def _kill(self) -> None:
        """Kill a worker, its nanny and its job script at once."""
        process: Any = psutil.Process(self._random.choice(sorted(self._client.run(os.getpid).items()))[1])
        processes = []
        while process is not None and not process.name().startswith("slurmstepd"):
            processes.append(process)
            process = process.parent()
        for one in reversed(processes):
            one.kill()

    def _nodes(self) -> Iterator[str]:
        for line in _command("squeue", "-h", "-r", "-O", "NodeList:40,State:20,STDOUT:300").splitlines():
            cells = line.split()
            if len(cells) == 3 and cells[1] == "RUNNING" and self._folder in cells[2]:
                yield cells[0]


def _command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout


@contextmanager
def on_slurm(contender: str, folder: str, work: Work) -> Iterator[Any]:
    """Open a cluster of preemptible jobs, and wait for all of them."""
    import dask_jobqueue

    kind = dask_jobqueue.SLURMCluster if contender == "stock" else ff.SLURMCluster
    share = {"ferro.elastic.copy-share": 0} if contender == "off" else {}
    options = {} if contender == "stock" else {"retire_before": 0}
    with dask.config.set({"distributed.scheduler.allowed-failures": 20} | share):
        cluster = kind(
            queue=PARTITION, cores=work.threads, memory="1900MB", processes=1, walltime="00:10:00", interface="lo",
            job_cpu=4, job_name="preemption", log_directory=folder, local_directory=folder,
            scheduler_options={"dashboard_address": "127.0.0.1:0", "interface": "lo"}, **options,
        )  # fmt: skip
        with cluster:
            cluster.adapt(minimum=work.jobs, maximum=work.jobs)
            yield cluster


def preempted_once(contender: str, work: Work, seed: int, kills: bool) -> dict[str, float]:
    """Run the graph once under preemptions at times that the seed gives; return the figures."""
    times = random.Random(seed)
    waits = [times.uniform(*(work.then if i else work.first)) for i in range(work.preemptions)]
    with (
        tempfile.TemporaryDirectory(prefix="ferro-preempt-", ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):
        log = str(Path(folder, "log"))
        cluster = stack.enter_context(on_slurm(contender, folder, work))
        client = stack.enter_context(Client(cluster))
        client.wait_for_workers(work.jobs, timeout=120)
        memory = stack.enter_context(Memory(cluster.scheduler))
        began = time.monotonic()
        preemptor = stack.enter_context(Preemptor(client, folder, waits, seed, kills))
        futures = submitted(client, work, log)
        assert client.gather(futures) == [work.nbytes] * work.blocks
        seconds = time.monotonic() - began
        roster = part_of(cluster.scheduler, ScalingRPC)
        copies = {} if roster is None else dict(roster.copies.totals)
        again = Again.of(Path(log).read_text().splitlines(), preemptor.ends)
        return {
            "again": again.seconds,
            "lost": again.results,
            "cut": again.cut,
            "copied": copies.get("bytes", 0),
            "results": copies.get("results", 0),
            "memory": memory.most,
            "seconds": seconds,
            "preemptions": len(preemptor.ends),
        }


def submitted(client: Client, work: Work, log: str) -> list[Any]:
    """Submit the graph; return the futures of the last pass, the only outputs."""
    blocks = range(work.blocks)
    own = [
        client.submit(block, i, log, work.block_seconds, work.nbytes, key=("block", i), priority=1)
        for i in blocks
    ]
    last: list[Any] = [None] * work.blocks
    for number in range(work.passes):
        last = [
            client.submit(
                read, f"{number}-{i}", own[i], last[i], log, work.pass_seconds, key=(f"read-{number}", i)
            )
            for i in blocks
        ]  # fmt: skip
    return last


def preempted(part: str, contenders: Sequence[str], rounds: int, toy: bool, note: Note) -> dict[str, Any]:
    """Return the figures of each contender; the partition has no grace time meanwhile."""
    taken: dict[str, list[dict[str, float]]] = {contender: [] for contender in contenders}
    _command("scontrol", "update", f"partitionname={PARTITION}", "gracetime=0")
    try:
        for number in range(rounds):
            first = number % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                work = TOY if toy else Work()
                taken[contender].append(preempted_once(contender, work, SEED + number, part == "killed"))
                note(f"{part} {contender} round {number + 1}: {taken[contender][-1]}")
    finally:
        _command("scontrol", "update", f"partitionname={PARTITION}", "gracetime=5")
    found = {contender: _summed(runs) for contender, runs in taken.items()}
    rows = [
        (
            contender,
            f"{told['again_per_preemption'].median:.2f}",
            f"{told['lost_per_preemption'].median:.1f}",
            f"{told['cut_per_preemption'].median:.2f}",
            f"{told['copied'].median / 1e6:.1f}",
            f"{told['copied_per_second'].median / 1e6:.2f}",
            f"{100 * told['memory'].median:.1f}",
            f"{told['seconds'].median:.1f}",
            f"{told['preemptions'].median:.0f}",
        )
        for contender, told in found.items()
    ]
    columns = (
        "",
        "s again",
        "results again",
        "s cut off",
        "MB copied",
        "MB/s",
        "memory %",
        "makespan s",
        "preemptions",
    )
    measure.show(f"{part} without warning (of each preemption: the first three)", columns, rows)
    return found


def _summed(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    each = {
        f"{name}_per_preemption": measure.Summary.of([run[name] / max(run["preemptions"], 1) for run in runs])
        for name in ("again", "lost", "cut")
    }
    rate = measure.Summary.of([run["copied"] / run["seconds"] for run in runs])
    return (
        {name: measure.Summary.of([run[name] for run in runs]) for name in FIGURES}
        | each
        | {"copied_per_second": rate}
    )


# ---- all of it ---------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options(
        "What a preemption without warning loses, and what copies ahead of it cost.", rounds=5
    )
    parts = (*ON_SLURM, *WORKLOADS)
    parser.add_argument("--only", choices=parts, action="append", help="run only this part")
    parser.add_argument(
        "--contender",
        choices=CONTENDERS,
        action="append",
        help="for preempted and killed: run only this contender",
    )
    options = parser.parse_args(arguments)
    note: Note = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    rounds = 1 if options.toy else options.rounds
    names = options.only or [part for part in parts if part not in ON_SLURM or "SLURM_CONF" in os.environ]
    record = measure.provenance(
        seed=SEED, rounds=rounds, toy=options.toy, work=(TOY if options.toy else Work())._asdict()
    )
    record["results"] = {}
    contenders = options.contender or CONTENDERS
    for part in (name for name in names if name in ON_SLURM):
        record["results"][part] = preempted(part, contenders, rounds, options.toy, note)
    if workloads := [name for name in names if name in WORKLOADS]:
        record["results"]["overhead"] = overhead(workloads, rounds, options.toy, note)
    if options.json:
        measure.write(options.json, record)
    return record


if __name__ == "__main__":
    main()
