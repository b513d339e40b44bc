"""Recorded programs, replayed in the simulator under stock Dask's scheduling and ours, on 4 to 256 workers.

    python benchmarks/replay.py                           # the table, from benchmarks/recorded
    python benchmarks/replay.py --only svd words --workers 4 16
    python benchmarks/replay.py --markdown FILE           # the tables of docs/performance-data.md, of a record
    python benchmarks/replay.py --decide                  # store what each policy decides now, for the test
    python benchmarks/replay.py --record                  # run the programs of real.py, and record them again
    python benchmarks/replay.py --workflows WfInstances   # convert instances of https://github.com/wfcommons

The programs are recorded under stock Dask on four worker processes, in their second run.  A task's seconds are those
of its thread on a core, so that they are the same on a busy machine.  Programs on more than four workers have as many
copies of the graph side by side (weak scaling), up to 3,000 tasks; each worker has a core.  Large chunks have 100
times the seconds and bytes: the programs' results have 0.1 to 3 MB, and Dask recommends 100 MB.  The scheduler knows
no durations yet.  Seconds of tasks vary by a tenth from seed to seed, and a ratio is the median of those of the
seeds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import exp, log
from operator import truediv
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple
from zlib import crc32

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import dask.order  # noqa: E402
import measure  # noqa: E402
from simulated import records  # noqa: E402
from simulated.clusters import hosts  # noqa: E402
from simulated.contenders import simulate  # noqa: E402

from dask_ferro.graph.bundling.partition import DASK  # noqa: E402
from dask_ferro.lower.upstream import List, Task, TaskRef  # noqa: E402
from dask_ferro.simulate.cluster import VirtualCluster  # noqa: E402
from dask_ferro.simulate.graphs.bundles import in_bundles  # noqa: E402
from dask_ferro.simulate.graphs.taskgraph import TaskGraph  # noqa: E402
from dask_ferro.trace import Trace  # noqa: E402

WORKERS = (4, 16, 64, 256)
HOSTS = (1, 8)
RECORDED_ON = 4
SPREAD = 0.1
MOST_TASKS = 3_000
CONTENDERS = {"stock": "stock", "ours": "informed", "bundled": "informed"}
OWN = ("ours", "bundled")
# From this ratio to stock Dask on, a table shows a loss.
SLOWER = 1.02
CHUNKS = {"recorded": 1, "large": 100}
DECISIONS = records.FOLDER / "decisions.json"
# Bytes of p2p pass between workers outside of the graph.
NOT_IN_THE_GRAPH = ("rechunk_p2p",)
SCALES = {"anomaly": 0.15}
# Workflows take hours, and each tick of many virtual workers takes time.
MOST_OF_WORKFLOWS = 64
INSTANCES = {
    "montage": "pegasus/montage/montage-chameleon-2mass-01d-001.json",
    "epigenomics": "pegasus/epigenomics/epigenomics-chameleon-hep-2seq-100k-001.json",
    "1000genome": "pegasus/1000genome/1000genome-chameleon-4ch-100k-001.json",
}


# ---- recording -----------------------------------------------------------------------------------------------


def record_programs(names: Sequence[str], scale: float, note: Any) -> None:
    """Run programs of `real.py` under stock Dask, and store their graphs."""
    import dask
    import real
    from distributed.diagnostics.plugin import SchedulerPlugin

    from dask_ferro.scheduler.recorder import task_run, trace_of
    from dask_ferro.simulate.compare import of_trace, order_of

    class Recorder(SchedulerPlugin):  # type: ignore[misc]
        """The runs of all tasks since it was added."""

        def __init__(self, scheduler: Any) -> None:
            self.scheduler, self.runs = scheduler, []  # type: ignore[var-annotated]

        def transition(self, key: Any, start: str, finish: str, *args: Any, **message: Any) -> None:
            if (start, finish) == ("processing", "memory"):
                run = task_run(self.scheduler.tasks[key], message, 1)
                if run is not None:
                    self.runs.append(run)

    with (
        tempfile.TemporaryDirectory() as folder,
        real.cluster("stock", RECORDED_ON, str(Path(folder, "costs"))) as client,
        client.as_current(),
        dask.config.set(
            {
                "scheduler": "dask.distributed",
                "dataframe.shuffle.method": "tasks",
                "array.rechunk.method": "tasks",
            }
        ),
    ):
        client.run(_count_cpu)
        for name in names:
            size = scale * SCALES.get(name, 1.0)
            for _ in range(2):
                recorder = Recorder(client.cluster.scheduler)
                client.cluster.scheduler.add_plugin(recorder, name="recorder")
                client.compute(real.PROGRAMS[name](size)).result()
                client.cluster.scheduler.remove_plugin("recorder")
            trace = trace_of(recorder.runs, (), {}, 0.0)
            order = order_of(trace)
            assert order is not None
            versions = measure.provenance()["versions"]
            source = f"benchmarks/real.py, scale {size:g}, 4 workers, dask {versions['dask']}"
            path = records.save(of_trace(trace, name), order, source)
            note(f"{name}: {len(trace.tasks):,} tasks, {path.stat().st_size / 1e3:.0f} kB")


def _count_cpu() -> None:
    """Let a worker report the seconds of a task's thread on a core as the task's duration."""
    import time

    from distributed import worker

    run = worker._run_task_simple

    def run_on_core(*args: Any) -> Any:
        start = time.thread_time()
        message = run(*args)
        message["stop"] = message["start"] + time.thread_time() - start
        return message

    worker._run_task_simple = run_on_core


def convert_workflows(folder: Path, note: Any) -> None:
    """Store instances of WfCommons' collection, in Dask's order."""
    from dask_ferro.simulate.graphs import wfcommons

    for name, path in INSTANCES.items():
        graph = wfcommons.load(folder / path)
        source = f"https://github.com/wfcommons/WfInstances, {path}"
        stored = records.save(TaskGraph(name, graph.tasks), dask_order(graph), source)
        note(f"{name}: {len(graph.tasks):,} tasks, {stored.stat().st_size / 1e3:.0f} kB")


def dask_order(graph: TaskGraph) -> dict[Any, int]:
    """Return the order in which Dask runs the tasks of a graph."""
    # By numbers: the hashes of names, and so Dask's order of equals, differ from process to process.
    number = {task.key: i for i, task in enumerate(graph.tasks)}
    tasks = {
        i: Task(i, len, List(*(TaskRef(number[key]) for key in graph.tasks[i].dependencies)))
        for i in number.values()
    }
    places = dask.order.order(tasks)  # type: ignore[arg-type]
    return {key: places[i] for key, i in number.items()}


# ---- replay --------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A cluster of some workers, on so many hosts or on one each."""

    workers: int
    hosts: int

    @property
    def cluster(self) -> VirtualCluster:
        count = min(self.hosts, self.workers)
        return hosts(count, self.workers // count)

    def __str__(self) -> str:
        return f"{self.workers}, {'1 host' if self.hosts == 1 else f'{self.hosts} hosts'}"


def run(content: Mapping[str, Any], case: Case, contender: str, *, seed: int = 0, **options: Any) -> Trace:
    """Simulate a case; the options are those of `records.graph_of`."""
    copies = max(min(case.workers // RECORDED_ON, MOST_TASKS // len(content["back"])), 1)
    graph, order = records.graph_of(content, copies, seed=seed, **options)
    cluster = case.cluster
    if contender == "bundled":
        link = cluster.same_host if case.hosts == 1 else cluster.other_host
        made = in_bundles(graph, case.workers, replace(DASK, bytes_per_s=link.bandwidth))
        graph, order = (graph, order) if made is graph else (made, dask_order(made))
    return simulate(graph, cluster, policy=CONTENDERS[contender], order=order, seed=seed)


def compare(content: Mapping[str, Any], case: Case, chunks: str, seeds: int) -> dict[str, Any]:
    """Return the makespans and bytes moved of all contenders, and ratios to stock Dask's."""
    again = partial(run, content, case, spread=SPREAD, factor=CHUNKS[chunks])
    traces = {contender: [again(contender, seed=seed) for seed in range(seeds)] for contender in CONTENDERS}
    seconds = {name: [trace.counts["elapsed"] for trace in own] for name, own in traces.items()}
    return {
        name: {
            "seconds": median(seconds[name]),
            "over_stock": median(map(truediv, seconds[name], seconds["stock"])),
            "megabytes": median(trace.counts["bytes_moved"] for trace in own) / 1e6,
            "tasks": len(own[0].tasks),
        }
        for name, own in traces.items()
    }


def show(results: Mapping[str, Mapping[str, Any]], contender: str, chunks: str) -> dict[str, float]:
    """Print ratios to stock Dask's makespans, and return their geometric means by cluster."""
    ratios = {
        name: {column: found[contender]["over_stock"] for column, found in own.items()}
        for name, own in results.items()
    }
    ratios = {name: own for name, own in ratios.items() if own}
    columns = list(dict.fromkeys(column for own in ratios.values() for column in own))
    means = {
        column: exp(mean(log(own[column]) for own in ratios.values() if column in own)) for column in columns
    }
    rows = [
        (name, *(f"{own[column]:.2f}" if column in own else "-" for column in columns))
        for name, own in {**ratios, "geometric mean": means}.items()
    ]
    measure.show(f"makespan: {contender} / stock, {chunks} chunks", ("", *columns), rows)
    return means


def markdown(record: Mapping[str, Any]) -> str:
    """Return the tables of a record as in docs/performance-data.md: ours / stock; bundled / stock."""
    tables = []
    for chunks, programs in record["results"].items():
        rows = {name: own for name, own in programs.items() if own}
        columns = list(dict.fromkeys(column for own in rows.values() for column in own))
        ratios = {
            name: {column: [runs[who]["over_stock"] for who in OWN] for column, runs in own.items()}
            for name, own in rows.items()
        }
        means = record["means"][chunks]
        ratios["geometric mean"] = {column: [means[who][column] for who in OWN] for column in columns}
        lines = [f"| {chunks} chunks | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
        for name, own in ratios.items():
            cells = ("; ".join(map(_ratio, own[column])) if column in own else "-" for column in columns)
            lines.append(f"| {name} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _ratio(ratio: float) -> str:
    return f"**{ratio:.2f}**" if ratio > SLOWER else f"{ratio:.2f}"


# ---- decisions -----------------------------------------------------------------------------------------------


def decide(name: str) -> dict[str, Any]:
    """Return what our policy and stock Dask's decide for a recorded graph on four workers, on one host each."""
    content, case = records.read(name), Case(RECORDED_ON, 8)
    decisions: dict[str, Any] = {}
    for contender in ("stock", "ours"):
        trace = run(content, case, contender)
        where = sorted((str(span.key), span.worker) for span in trace.of("compute"))
        decisions[contender] = {
            "tasks": sorted(Counter(worker for _, worker in where).values()),
            "placement": f"{crc32(json.dumps(where).encode()):08x}",
            "moves": int(trace.counts["confirmed"]),
            "megabytes": round(trace.counts["bytes_moved"] / 1e6, 1),
            "seconds": round(trace.counts["elapsed"], 3),
        }
    decisions["over_stock"] = round(decisions["ours"]["seconds"] / decisions["stock"]["seconds"], 3)
    return decisions


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options("Recorded programs on virtual clusters, beside stock Dask.", rounds=3)
    parser.add_argument("--only", nargs="*", help="these graphs")
    parser.add_argument("--workers", nargs="*", type=int, default=WORKERS)
    parser.add_argument("--chunks", nargs="*", choices=CHUNKS, default=list(CHUNKS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the data of recorded programs")
    parser.add_argument("--record", action="store_true", help="run and record programs of real.py")
    parser.add_argument("--workflows", type=Path, metavar="FOLDER", help="a clone of wfcommons/WfInstances")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print the tables of this record")
    parser.add_argument("--decide", action="store_true", help="store what the policies decide now")
    options = parser.parse_args(arguments)
    note = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    if options.record:
        import real

        programs = options.only or [name for name in real.PROGRAMS if name not in NOT_IN_THE_GRAPH]
        record_programs(programs, options.scale, note)
        return {}
    if options.workflows:
        convert_workflows(options.workflows, note)
        return {}
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text())))
        return {}
    if options.decide:
        decisions = {name: decide(name) for name in records.names()}
        measure.write(DECISIONS, decisions)
        return decisions
    names = options.only or records.names()
    workers, rounds = (options.workers, options.rounds) if not options.toy else ((4,), 1)
    record = measure.provenance(rounds=rounds, spread=SPREAD, most_tasks=MOST_TASKS)
    record["results"], record["means"] = {}, {}
    for chunks in options.chunks:
        results: dict[str, dict[str, Any]] = {name: {} for name in names}
        for case, name in product(map(Case._make, product(workers, HOSTS)), names):
            if name in INSTANCES and (chunks != "recorded" or case.workers > MOST_OF_WORKFLOWS):
                continue
            runs = results[name][str(case)] = compare(records.read(name), case, chunks, rounds)
            note(f"{name}, {case}: {runs['ours']['over_stock']:.2f}, {runs['bundled']['over_stock']:.2f}")
        means = {own: show(results, own, chunks) for own in OWN}
        record["results"][chunks], record["means"][chunks] = results, means
    if options.json:
        measure.write(options.json, record)
    return record


if __name__ == "__main__":
    main()
