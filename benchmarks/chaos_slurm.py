"""Losses under faults of a batch system: stock dask-jobqueue and `ff.SLURMCluster` on a real SLURM.

    eval "$(tests/on_slurm/slurm-up)"; python benchmarks/chaos_slurm.py      # all of it: some 50 minutes a round
    python benchmarks/chaos_slurm.py --only scancel --only squeue-empty --rounds 5
    python benchmarks/chaos_slurm.py --list
    python benchmarks/chaos_slurm.py --table benchmarks/results/chaos_slurm.json     # recorded results, as Markdown

Four jobs of one thread, two on a node, hold 50 results of 2 MB and run 60 tasks of a second when the fault occurs.
Counted: results that were computed again, tasks that were started twice, wrong values, tasks that failed, whether all
was done in time, jobs and worker processes that are left a minute after the cluster was closed, jobs at once beyond
the most that were requested, seconds, the longest time in which no task ended, jobs and node-seconds.

A row changes the SLURM that it runs on (nodes, partitions, the controller) and restores it.  Commands that fail, hang
or give wrong answers are wrapper scripts in a folder in front of the PATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import measure  # noqa: E402
import psutil  # noqa: E402
from chaos_faults import JOBS, ROWS, TO_END, Lies, Row, Run, command, opened  # noqa: E402
from distributed import Client, as_completed  # noqa: E402
from distributed import TimeoutError as DaskTimeout  # noqa: E402
from slurm_jobs import Meter  # noqa: E402

CONTENDERS = ("stock", "ferro")
HELD, NBYTES = 50, 2_000_000
# Limits in seconds: for all tasks; and without the end of any task, beyond the longest of them.
IN_TIME, STALL = 180.0, 60.0
# How long the consequences of a fault may take after it has ended, in seconds.
AFTER = 3.0
# Figures of harm are reported by their worst round, the rest by the median.
HARM = ("lost", "twice", "wrong", "failed", "hung", "orphans", "beyond")
FIGURES = (*HARM, "seconds", "stall", "jobs", "node_seconds")
# The figures of the documentation; the others are in the records.
PAGE = ("lost", "twice", "failed", "seconds", "node_seconds")


# ---- the workload ------------------------------------------------------------------------------------------


def hold(number: int, log: str) -> bytes:
    """Run for 0.2 s, and return 2 MB."""
    _note(log, f"held-{number}")
    time.sleep(0.2)
    return number.to_bytes(4, "big") * (NBYTES // 4)


def fly(number: int, log: str, seconds: float) -> int:
    """Run for some time."""
    _note(log, f"fly-{number}")
    time.sleep(seconds)
    return number * number


def _note(log: str, words: str) -> None:
    with open(log, "a") as file:
        file.write(words + "\n")


class Gathered:
    """The results of tasks that finished in time and did not fail, by task number."""

    def __init__(self) -> None:
        self.values: dict[str, dict[int, Any]] = {"held": {}, "fly": {}}
        self.ends = [time.monotonic()]

    def take(self, futures: Sequence[Any], seconds: float) -> None:
        """Wait for results until all are done or the time is over."""
        with suppress(TimeoutError, DaskTimeout):
            batches = as_completed(futures, with_results=True, raise_errors=False, timeout=seconds).batches()
            for batch in batches:
                for future, value in batch:
                    if future.status == "finished":
                        kind, _, number = future.key.partition("-")
                        self.values[kind][int(number)] = value
                self.ends.append(time.monotonic())

    @property
    def stall(self) -> float:
        """Return the longest time in which no task ended, in seconds."""
        return max((b - a for a, b in zip(self.ends, self.ends[1:], strict=False)), default=0.0)

    def wrong(self) -> int:
        """Return the number of results with a wrong value."""
        fly, held = self.values["fly"], self.values["held"]
        return sum(value != i * i for i, value in fly.items()) + sum(
            value != i.to_bytes(4, "big") * (NBYTES // 4) for i, value in held.items()
        )


def submit_held(client: Client, count: int, log: str) -> list[Any]:
    """Submit the tasks whose results are held."""
    return client.map(hold, range(count), log=log, key=[f"held-{i}" for i in range(count)])


def submit_fly(client: Client, numbers: range, seconds: Sequence[float], log: str) -> list[Any]:
    """Submit the tasks that run when the fault occurs."""
    return client.map(fly, numbers, [log] * len(numbers), seconds, key=[f"fly-{i}" for i in numbers])


# ---- one run -----------------------------------------------------------------------------------------------


def once(contender: str, name: str, toy: bool) -> dict[str, float]:
    """Run a row once; return its figures."""
    with tempfile.TemporaryDirectory(prefix="ferro-chaos-") as folder, Meter(folder) as meter:
        if ROWS[name].is_killed:
            return killed(contender, folder, meter, toy)
        return at_work(contender, ROWS[name], folder, meter, toy)


def at_work(contender: str, row: Row, folder: str, meter: Meter, toy: bool) -> dict[str, float]:
    """Run a row's fault on a cluster at work; return the figures."""
    log = str(Path(folder, "starts"))
    waves = [(pause, seconds[:8]) for pause, seconds in row.waves[:1]] if toy else row.waves
    per_job = row.options.get("processes", 1)
    least, most = row.bounds or (JOBS, JOBS)
    done = Gathered()
    with row.context(folder) as more:
        with (
            Lies(Path(folder, "bin")) as lies,
            ExitStack() as undo,
            opened(contender, folder, {**row.options, **more}) as cluster,
            Client(cluster) as client,
        ):
            cluster.adapt(minimum=JOBS * per_job, maximum=most * per_job)
            client.wait_for_workers(JOBS * per_job, timeout=120)
            held = submit_held(client, 8 if toy else HELD, log)
            done.take(held, 120.0)
            if row.bounds:
                cluster.adapt(minimum=least * per_job, maximum=most * per_job)
            run = Run(contender, cluster, client, meter, lies, undo, most)
            done.ends = [began := time.monotonic()]
            flying: list[Any] = []
            for pause, seconds in waves:
                done.take(flying, IN_TIME)
                time.sleep(pause)
                new = submit_fly(client, range(len(flying), len(flying) + len(seconds)), seconds, log)
                if not flying:
                    time.sleep(0.5 if toy else 2.0)
                    row.fault(run)
                flying += new
            done.take(flying, IN_TIME)
            took = time.monotonic() - began
            stall = done.stall
            undo.close()
            time.sleep(0.0 if toy else AFTER)
            done.values["held"].clear()
            done.take(held, IN_TIME)
            failed = sum(future.status in ("error", "cancelled", "lost") for future in [*flying, *held])
        orphans = _orphans(meter, folder)
    starts = Counter(Path(log).read_text().split())
    longest = max(max(seconds) for _, seconds in waves)
    got = sum(map(len, done.values.values()))
    return {
        "lost": sum(count > 1 for key, count in starts.items() if key.startswith("held")),
        "twice": sum(count > 1 for key, count in starts.items() if key.startswith("fly")),
        "wrong": done.wrong(),
        "failed": failed,
        "hung": float(got < len(held) + len(flying) or stall > STALL + longest),
        "orphans": orphans,
        "beyond": max(0, meter.most - run.maximum),
        "seconds": took,
        "stall": stall,
        "jobs": len(meter.jobs),
        "node_seconds": meter.node_seconds,
    }


def killed(contender: str, folder: str, meter: Meter, toy: bool) -> dict[str, float]:
    """Kill a program with a cluster at work; its results end with it, and its jobs should."""
    words = [sys.executable, __file__, "--program", folder, "--contender", contender]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        time.sleep(0.5 if toy else 2.0)
        program.kill()
    began = time.monotonic()
    orphans = _orphans(meter, folder)
    return {
        "orphans": orphans,
        "beyond": max(0, meter.most - JOBS),
        "seconds": time.monotonic() - began,
        "jobs": len(meter.jobs),
        "node_seconds": meter.node_seconds,
    }


def program(contender: str, folder: str) -> None:
    """Run a cluster at work until this process is killed."""
    log = str(Path(folder, "starts"))
    with opened(contender, folder, {}) as cluster, Client(cluster) as client:
        cluster.adapt(minimum=JOBS, maximum=JOBS)
        client.wait_for_workers(JOBS, timeout=120)
        flying = submit_fly(client, range(60), [1.0] * 60, log)
        print("at work", flush=True)
        Gathered().take(flying, IN_TIME)
        time.sleep(IN_TIME)


def _orphans(meter: Meter, folder: str) -> int:
    """Return how many jobs and processes are left a minute after the end, and kill them."""
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


# ---- the benchmark -----------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options(
        "What a batch system that misbehaves costs, beside stock dask-jobqueue.", rounds=5
    )
    parser.add_argument("--only", choices=list(ROWS), action="append", help="run only this row")
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="run only this contender")
    parser.add_argument("--list", action="store_true", help="list the rows and exit")
    parser.add_argument(
        "--table",
        metavar="FILE",
        type=Path,
        action="append",
        help="print recorded results, merged, as Markdown",
    )
    parser.add_argument("--program", metavar="FOLDER", help="internal: run as the program that is killed")
    options = parser.parse_args(arguments)
    contenders = options.contender or CONTENDERS
    if options.list:
        print("\n".join(ROWS))
        return {}
    if options.program:
        program(contenders[0], options.program)
        return {}
    if options.table:
        record = together([json.loads(file.read_text(encoding="utf-8")) for file in options.table])
        show(record["results"])
        print("\n".join(["", *markdown(record["results"])]))
        if options.json:
            measure.write(options.json, record)
        return record
    rounds = 1 if options.toy else options.rounds
    record = measure.provenance(rounds=rounds, toy=options.toy)
    record["runs"], record["results"] = {}, {}
    for name in options.only or ROWS:
        taken: dict[str, list[dict[str, float]]] = {c: [] for c in contenders}
        record["runs"][name] = taken
        for number in range(rounds):
            for contender in contenders[:: -1 if number % 2 else 1]:
                taken[contender].append(once(contender, name, options.toy))
                if not options.quiet:
                    print(f"{name} {contender} round {number + 1}: {taken[contender][-1]}", file=sys.stderr)
        record["results"][name] = {c: summaries(ones) for c, ones in taken.items()}
        if options.json:  # a row takes minutes
            measure.write(options.json, record)
    show(record["results"])
    return record


def summaries(ones: Sequence[Mapping[str, float]]) -> dict[str, measure.Summary]:
    """Return a summary of each figure over all rounds."""
    return {key: measure.Summary.of([one[key] for one in ones]) for key in FIGURES if key in ones[0]}


def together(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge several records: the rounds of a row are those of all records."""
    runs: dict[str, dict[str, list[Any]]] = {}
    for record in records:
        for name, row in record["runs"].items():
            for contender, ones in row.items():
                runs.setdefault(name, {}).setdefault(contender, []).extend(ones)
    results = {name: {c: summaries(ones) for c, ones in row.items()} for name, row in runs.items()}
    parts = [
        {key: value for key, value in record.items() if key not in ("runs", "results")} for record in records
    ]
    return {"records": parts, "runs": runs, "results": results}


def _cell(told: Mapping[str, Any], key: str) -> str:
    """Return the worst round for figures of harm, else the median; "-" if nothing was measured."""
    if key not in told:
        return "-"
    figure = told[key] if isinstance(told[key], Mapping) else vars(told[key])
    return f"{figure['high' if key in HARM else 'median']:.0f}"


def show(results: Mapping[str, Mapping[str, Mapping[str, measure.Summary]]]) -> None:
    """Print the table, and the promises that `ff.SLURMCluster` broke."""
    rows = [
        (name, contender, *(_cell(told, key) for key in FIGURES))
        for name, found in results.items()
        for contender, told in found.items()
    ]
    title = "a batch system that misbehaves (harm: the worst round; else medians)"
    measure.show(title, ("", "", *FIGURES), rows, list(broken(results)))


def broken(results: Mapping[str, Mapping[str, Mapping[str, measure.Summary]]]) -> Iterable[str]:
    """Return a line for each promise of `ff.SLURMCluster` that did not hold."""
    for name, found in results.items():
        for key in HARM:
            never = key not in ("lost", "twice") or (key == "lost" and ROWS[name].warned)
            if never and _cell(found.get("ferro", {}), key) not in ("-", "0"):
                yield f"NOT HELD: {name}: {key} {_cell(found['ferro'], key)}"


def markdown(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterable[str]:
    """Yield the table of docs/performance-data.md: a line for each fault, two columns for each figure of PAGE."""
    titles = [f"{key.replace('_', '-')}, {who}" for key in PAGE for who in ("jobqueue", "dask_ferro")]
    yield f"| fault | {' | '.join(titles)} |"
    yield "|---" * (1 + len(titles)) + "|"
    for name in (name for name in ROWS if name in results):
        cells = [_cell(results[name].get(contender, {}), key) for key in PAGE for contender in CONTENDERS]
        yield f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
