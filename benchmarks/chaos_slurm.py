"""What is lost when a batch system misbehaves: stock dask-jobqueue and `ff.SLURMCluster`, on a real SLURM.

    eval "$(tests/slurm/slurm-up)"; python benchmarks/chaos_slurm.py      # all of it: some 50 minutes a round
    python benchmarks/chaos_slurm.py --only scancel --only squeue-empty --rounds 5
    python benchmarks/chaos_slurm.py --list
    python benchmarks/chaos_slurm.py --table benchmarks/results/chaos_slurm.json     # what was measured, as Markdown

Four jobs of one thread, two on a node; 50 results of 2 MB are held and 60 tasks of a second run when something goes
wrong.  Counted: results that were computed again, tasks that were started twice, wrong values, tasks that failed,
whether all was done in time, what is left a minute after the cluster was closed (jobs, and processes of workers),
jobs at once beyond the most that was asked for, seconds, the longest time in which no task ended, jobs and
node-seconds.

A row changes the SLURM that it runs on (nodes, partitions, the controller) and puts it back.  Commands that fail, hang
or lie are scripts in front of SLURM's own, which a folder on the PATH has.
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
# For all of it to be done; and without the end of any task, beyond the longest of them, in seconds.
IN_TIME, STALL = 180.0, 60.0
# When what went wrong is right again, for what follows of it, in seconds.
AFTER = 3.0
# Harm is told by its worst round, the rest by the median.
HARM = ("lost", "twice", "wrong", "failed", "hung", "orphans", "beyond")
FIGURES = (*HARM, "seconds", "stall", "jobs", "node_seconds")


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


class Gathered:
    """The results, by their number, of what was done in time and did not fail."""

    def __init__(self) -> None:
        self.values: dict[str, dict[int, Any]] = {"held": {}, "fly": {}}
        self.ends = [time.monotonic()]

    def take(self, futures: Sequence[Any], seconds: float) -> None:
        """Wait for results until all are there or the time is over."""
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
        """The longest time in which nothing ended, in seconds."""
        return max((b - a for a, b in zip(self.ends, self.ends[1:], strict=False)), default=0.0)

    def wrong(self) -> int:
        """Return how many have another value than theirs."""
        fly, held = self.values["fly"], self.values["held"]
        return sum(value != i * i for i, value in fly.items()) + sum(
            value != i.to_bytes(4, "big") * (NBYTES // 4) for i, value in held.items()
        )


def submit_held(client: Client, count: int, log: str) -> list[Any]:
    """Submit what is to be held."""
    return client.map(hold, range(count), log=log, key=[f"held-{i}" for i in range(count)])


def submit_fly(client: Client, numbers: range, seconds: Sequence[float], log: str) -> list[Any]:
    """Submit what is to be at work."""
    return client.map(fly, numbers, [log] * len(numbers), seconds, key=[f"fly-{i}" for i in numbers])


# ---- one run -----------------------------------------------------------------------------------------------


def once(contender: str, name: str, toy: bool) -> dict[str, float]:
    """Let something go wrong once; return the figures."""
    with tempfile.TemporaryDirectory(prefix="ferro-chaos-") as folder, Meter(folder) as meter:
        if ROWS[name].is_killed:
            return killed(contender, folder, meter, toy)
        return at_work(contender, ROWS[name], folder, meter, toy)


def at_work(contender: str, row: Row, folder: str, meter: Meter, toy: bool) -> dict[str, float]:
    """Let something go wrong with a cluster at work."""
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
    """Kill a program that has a cluster at work; the results end with it, the jobs should."""
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
    """Have a cluster at work until somebody kills this process."""
    log = str(Path(folder, "starts"))
    with opened(contender, folder, {}) as cluster, Client(cluster) as client:
        cluster.adapt(minimum=JOBS, maximum=JOBS)
        client.wait_for_workers(JOBS, timeout=120)
        flying = submit_fly(client, range(60), [1.0] * 60, log)
        print("at work", flush=True)
        Gathered().take(flying, IN_TIME)
        time.sleep(IN_TIME)


def _orphans(meter: Meter, folder: str) -> int:
    """Return how many jobs and processes are left a minute after the end, and end them."""
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
    parser.add_argument("--only", choices=list(ROWS), action="append", help="this row alone")
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="this one alone")
    parser.add_argument("--list", action="store_true", help="name the rows, and end")
    parser.add_argument(
        "--table", metavar="FILE", type=Path, action="append", help="join records, as Markdown"
    )
    parser.add_argument("--program", metavar="FOLDER", help="be the program that is killed")
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
    """Return what was measured of all rounds, each figure as a summary."""
    return {key: measure.Summary.of([one[key] for one in ones]) for key in FIGURES if key in ones[0]}


def together(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several records as one: the rounds of a row, of whichever record, are rounds of that row."""
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
    """Return the worst of all rounds where that counts, else the median; nothing where nothing was measured."""
    if key not in told:
        return "-"
    figure = told[key] if isinstance(told[key], Mapping) else vars(told[key])
    return f"{figure['high' if key in HARM else 'median']:.0f}"


def show(results: Mapping[str, Mapping[str, Mapping[str, measure.Summary]]]) -> None:
    """Print the table, and where ours did what it must not."""
    rows = [
        (name, contender, *(_cell(told, key) for key in FIGURES))
        for name, found in results.items()
        for contender, told in found.items()
    ]
    title = "a batch system that misbehaves (harm: the worst round; else medians)"
    measure.show(title, ("", "", *FIGURES), rows, list(broken(results)))


def broken(results: Mapping[str, Mapping[str, Mapping[str, measure.Summary]]]) -> Iterable[str]:
    """Name what ours promises and did not hold, a line each."""
    for name, found in results.items():
        for key in HARM:
            never = key not in ("lost", "twice") or (key == "lost" and ROWS[name].warned)
            if never and _cell(found.get("ferro", {}), key) not in ("-", "0"):
                yield f"NOT HELD: {name}: {key} {_cell(found['ferro'], key)}"


def markdown(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterable[str]:
    """Return a table with a line a row, each figure as stock's and ours."""
    yield "| | " + " | ".join(key.replace("_", "-") for key in FIGURES) + " |"
    yield "|---" * (1 + len(FIGURES)) + "|"
    for name in (name for name in ROWS if name in results):
        cells = (
            ", ".join(_cell(results[name][c], key) for c in CONTENDERS if c in results[name])
            for key in FIGURES
        )
        yield f"| {name} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
