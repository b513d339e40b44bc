"""Makespans of the workloads under stock Dask, stock Dask without stealing, and dask_ferro's scheduler plugin.

    python benchmarks/scheduling.py                               # all workloads, eight worker processes each
    python benchmarks/scheduling.py --only cholesky --rounds 3 --in-process

Tasks sleep, so that eight workers do not need eight cores, and the benchmark measures the schedule and its overhead.
The contenders take turns on one cluster, on which the plugin is installed and uninstalled.  The first run of each
workload is not part of the median.  Block-sparse GEMM, the workload of the paper on stealing, also runs under our
placement without stealing.

makespan   seconds from submission to the last output, over max(critical path, work / threads).
steals     from the scheduler's own log of them; moved: bytes sent between workers.
CPU        of the scheduler's thread, per task; with --in-process it includes the workers' messages.
simulated  the seconds that `dask_ferro.simulate` projects for worker processes on this machine's number of cores,
           divided by the measured ones.  Two runs of independent tasks, measured in the same minutes, calibrate its
           costs (`simulated.calibration`).  Scale-up is not simulated: workers and graph arrive in random order.
tick       one tick of the scheduling core, requests included, on 20,000 tasks; no cluster.
no-op      10,000 tasks that do nothing.
floor      100 tasks of 20 ms for each worker under stock Dask, with nothing to decide: the lower limit of any policy on
           this machine.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import dask  # noqa: E402
import dask.order  # noqa: E402
import measure  # noqa: E402
from distributed import Client  # noqa: E402
from emulated import workload_kernels  # noqa: E402
from simulated.calibration import Calibration, calibrate, independent, probes  # noqa: E402
from simulated.contenders import simulate  # noqa: E402
from simulated.generators import NAMES, build  # noqa: E402

import dask_ferro as ff  # noqa: E402
from dask_ferro.policy.events import (  # noqa: E402
    Ask,
    MessagesSent,
    StealAnswered,
    TaskAssigned,
    Tick,
    WorkerJoined,
    WorkerReported,
)
from dask_ferro.policy.facts import Key, Replica, TaskFacts  # noqa: E402
from dask_ferro.policy.scheduling_core import SchedulingCore  # noqa: E402
from dask_ferro.policy.stealing.informed import StealingParameters  # noqa: E402
from dask_ferro.policy.stealing.policies import make_policy  # noqa: E402
from dask_ferro.policy.worker_load import Entry, WorkerLoad  # noqa: E402
from dask_ferro.simulate.cluster import VirtualCluster, VirtualWorker  # noqa: E402
from dask_ferro.simulate.graphs.taskgraph import TaskGraph  # noqa: E402

WORKERS = 8
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
# Latencies and the order of events vary from run to run: take the median of this many simulations.
SEEDS = 8
STOCK = "stock"
CONTENDERS = (STOCK, "no-stealing", "ferro")
# Our placement without stealing, to show the gain of stealing on the workload of the paper on PaRSEC.
PLACING = "ferro-placing"
OTHERS = ("tick", "no-op", "floor")
SIMULATED = {STOCK: "stock", "no-stealing": "stock-none", PLACING: "none", "ferro": "informed"}
TOY: Mapping[str, Mapping[str, Any]] = {
    "cholesky": {"nt": 3, "seconds": 0.01},
    "pinned": {"tasks": 8, "seconds": 0.01},
    "scale-up": {"tasks": 16, "seconds": 0.02},
    "straggler": {"tasks": 20, "seconds": 0.01},
}
# Entries of the stealing log for failed moves: the victim had started the task; the answer came too late.
REFUSED = ("already-computing",)
STALE = ("reschedule", "stale-response", "already-aborted")
Note = Callable[[str], None]


class Site(NamedTuple):
    """A cluster for one contender: its initial number of workers, in this process or their own."""

    workers: int
    processes: bool


class Sample(NamedTuple):
    """One run."""

    seconds: float
    confirmed: int
    refused: int
    stale: int
    moved: int
    cpu: float


class Running(NamedTuple):
    """A contender on the cluster that all share: the idle workers of three clusters would use half a core."""

    name: str
    cluster: Any
    client: Client

    def take_over(self) -> None:
        """Install this contender's scheduler."""
        if self.name == "ferro":
            ff.install(self.client)
        elif self.name == PLACING:
            ff.install(self.client, stealing="none")
        else:
            ff.uninstall(self.client)
            self.client.run_on_scheduler(_set_stealing, on=self.name == STOCK)


async def _set_stealing(on: bool, dask_scheduler: Any) -> None:
    stealing = dask_scheduler.extensions["stealing"]
    await (stealing.start() if on else stealing.stop())


# ---- clusters ----------------------------------------------------------------------------------------------


@contextmanager
def contenders(names: Sequence[str], site: Site) -> Iterator[dict[str, Running]]:
    log = {"distributed.admin.low-level-log-length": 20_000}  # the stealing log keeps so many entries
    with ExitStack() as stack:
        with dask.config.set(log):
            cluster = stack.enter_context(
                ff.LocalCluster(
                    n_workers=site.workers,
                    threads_per_worker=1,
                    processes=site.processes,
                    dashboard_address=":0",
                    scheduler_kwargs={"preload": []},  # stock to begin with
                )
            )
        # Connect by address: a client of the cluster object would share the scheduler's thread, whose CPU is measured.
        client = stack.enter_context(Client(cluster.scheduler_address))
        yield {name: Running(name, cluster, client) for name in names}


# ---- one run -----------------------------------------------------------------------------------------------


def once(on: Running, graph: TaskGraph, **options: Any) -> Sample:
    """Run a graph and read the scheduler's and the workers' meters around it."""
    on.take_over()
    began, cpu = on.client.run_on_scheduler(_meter)
    sent = on.client.run(_sent)
    seconds = workload_kernels.run(on.client, graph, **options)
    log, cpu_after = on.client.run_on_scheduler(_tally, since=began)
    sent_after = on.client.run(_sent)
    moved = sum(total - sent.get(address, 0) for address, total in sent_after.items())
    return Sample(
        seconds,
        log["confirm"],
        sum(log[kind] for kind in REFUSED),
        sum(log[kind] for kind in STALE),
        moved,
        (cpu_after - cpu) / len(graph.tasks),
    )


def _meter() -> tuple[float, float]:
    return time.time(), time.thread_time()


def _tally(since: float, dask_scheduler: Any) -> tuple[Counter[str], float]:
    """Return the counts of the stealing log's entries by kind, and the thread's CPU seconds before the reading."""
    cpu = time.thread_time()
    events = dask_scheduler.get_events("stealing")
    return Counter(str(entry[0]) for stamp, entry in events if stamp >= since), cpu


def _sent(dask_worker: Any) -> int:
    return dask_worker.transfer_outgoing_bytes_total


def straggling(on: Running, graph: TaskGraph) -> Sample:
    return once(on, graph, slow_worker=max(on.client.scheduler_info(n_workers=-1)["workers"]))


def scaled_up(on: Running, graph: TaskGraph, first: int, last: int) -> Sample:
    """Run with the initial workers; the others start when the graph has been submitted."""
    sample = once(on, graph, submitted=partial(on.cluster.scale, last))
    on.cluster.scale(first)
    while len(on.client.scheduler_info(n_workers=-1)["workers"]) > first:
        time.sleep(0.05)
    return sample


# ---- one workload ------------------------------------------------------------------------------------------


def compare(
    graph: TaskGraph,
    threads: float,
    running: Mapping[str, Running],
    rounds: int,
    note: Note,
    run: Callable[[Running, TaskGraph], Sample] = once,
) -> dict[str, Any]:
    """Return the results of all contenders for one graph."""
    samples: dict[str, list[Sample]] = {name: [] for name in running}
    runs = {name: partial(run, on, graph) for name, on in running.items()}
    measure.in_turn(runs, rounds, check=lambda name, sample: samples[name].append(sample), note=note)
    bound = max(graph.critical_path, graph.work / threads)
    kept = {name: taken[1:] for name, taken in samples.items()}
    reference = kept.get(STOCK, next(iter(kept.values())))
    return {
        "workload": graph.name,
        "tasks": len(graph.tasks),
        "bound": bound,
        "load": os.getloadavg()[0],  # of the machine: a crowded one makes everything late
        "contenders": {name: _summary(samples[name][0], kept[name], reference, bound) for name in running},
    }


def _summary(
    first: Sample, kept: Sequence[Sample], reference: Sequence[Sample], bound: float
) -> dict[str, Any]:
    of = measure.Summary.of
    pairs = zip(kept, reference, strict=True)
    return {
        "seconds": of([s.seconds for s in kept]),
        "over_bound": of([s.seconds / bound for s in kept]) if bound else None,
        "first_over_bound": first.seconds / bound if bound else None,
        "over_stock": of([own.seconds / base.seconds for own, base in pairs]),
        **{field: of([getattr(s, field) for s in kept]) for field in Sample._fields[1:]},
    }


def simulated(graph: TaskGraph, cluster: VirtualCluster, contender: str) -> float:
    """Return the seconds that the simulator projects, given the graph's durations and Dask's order.

    The scheduler knows the durations too, as the first run of a graph is not part of the median.
    """
    tasks, _ = workload_kernels.dask_graph(graph)
    order = dask.order.order(dict(tasks))
    known = {t.prefix: mean(o.seconds for o in graph.tasks if o.prefix == t.prefix) for t in graph.tasks}
    run = partial(simulate, graph, cluster, policy=SIMULATED[contender], order=order, known=known)
    return median(run(seed=seed).counts["elapsed"] for seed in range(SEEDS))


def project(record: Mapping[str, Any], graph: TaskGraph, cluster: VirtualCluster) -> None:
    """Add the simulator's projection to each contender, and its ratio to the measured seconds."""
    for contender, found in record["contenders"].items():
        found["simulated"] = simulated(graph, cluster, contender)
        found["simulated_over_measured"] = found["simulated"] / found["seconds"].median


def show(record: Mapping[str, Any], where: str) -> None:
    rows = [
        (
            name,
            f"{c['over_bound'].median:.3f}",
            f"{c['over_bound'].low:.2f} to {c['over_bound'].high:.2f}",
            f"{c['first_over_bound']:.2f}",
            f"{c['over_stock'].median:.3f}",
            *(f"{c[field].median:.0f}" for field in ("confirmed", "refused", "stale")),
            f"{c['moved'].median / 1e6:.1f}",
            f"{1e6 * c['cpu'].median:.0f}",
            _projected(c),
        )
        for name, c in record["contenders"].items()
    ]
    columns = (
        "makespan / bound", "spread", "first", "/ stock", "steals", "refused", "stale", "MB moved", "CPU us/task",
        "simulated / measured",
    )  # fmt: skip
    title = f"{record['workload']}: {record['tasks']:,} tasks, bound {record['bound']:.2f} s, {where}"
    measure.show(title, ("", *columns), rows)


def _projected(found: Mapping[str, Any]) -> str:
    return f"{found['simulated_over_measured']:.2f}" if "simulated" in found else "-"


def show_summary(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Print makespan / bound of all workloads side by side, measured and simulated."""
    rows = [
        (
            r["workload"],
            f"{r['bound']:.2f}",
            *(f"{r['contenders'][n]['over_bound'].median:.2f}" for n in names),
            *(_projected(r["contenders"][n]) for n in names),
        )
        for r in records
    ]
    columns = ("", "bound, s", *names, *(f"simulated / measured, {name}" for name in names))
    measure.show("makespan / bound, medians", columns, rows)


# ---- what it costs -----------------------------------------------------------------------------------------


def show_no_ops(record: Mapping[str, Any], where: str) -> None:
    rows = [
        (
            name,
            f"{1e6 * c['cpu'].median:.0f}",
            f"{1e6 * c['cpu'].low:.0f} to {1e6 * c['cpu'].high:.0f}",
            f"{record['tasks'] / c['seconds'].median:,.0f}",
        )
        for name, c in record["contenders"].items()
    ]
    title = f"no-op: {record['tasks']:,} tasks, {where}"
    measure.show(title, ("", "scheduler CPU us/task", "spread", "tasks/s"), rows)


def tick(tasks: int = 20_000, workers: int = 64, hungry: int = 8, repeats: int = 50) -> dict[str, Any]:
    """Time one tick of the scheduling core when a few workers are idle and the others have all tasks."""
    core = _full_core(tasks, workers, hungry)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        decided = core.handle(Tick(), 1.0)
        seconds.append(time.perf_counter() - start)
        moves = [told for told in decided if isinstance(told, Ask)]
        for key, victim, *_ in moves:
            running = frozenset(core.ledger.rows[victim].running)
            core.handle(StealAnswered(key, "kept"), 1.0)
            core.handle(WorkerReported(victim, 2.0, running), 1.0)  # for the next one all is as it was
    return {
        "tasks": tasks,
        "workers": workers,
        "hungry": hungry,
        "moves": len(moves),
        "ms": measure.Summary.of([1e3 * s for s in seconds]),
    }


class _Blocks:
    """Facts for a scheduling core: each task reads a block of a megabyte that two workers hold."""

    def __init__(self) -> None:
        self.blocks: dict[Key, Replica] = {}

    def begin(self, thieves: Sequence[str]) -> None:
        pass

    def waiting(self, entry: Entry, row: WorkerLoad) -> TaskFacts:
        return TaskFacts(entry.key, entry.seconds, entry.known, (self.blocks[entry.key],))

    def reserve(self, key: Key, victim: str, thief: str) -> bool:
        return True

    def unlocks(self, key: Key) -> bool:
        return False

    def live(self, address: str) -> int:
        return 0

    def holds(self, address: str) -> int:
        return 0

    def unbound(self, entries: list[Entry]) -> list[Entry]:
        return entries


def _full_core(tasks: int, workers: int, hungry: int) -> SchedulingCore:
    """Return a scheduling core whose first workers are idle, while the others have all tasks."""
    addresses = [f"tcp://10.0.0.{n % 4}:{9000 + n}" for n in range(workers)]
    facts = _Blocks()
    core = SchedulingCore(facts, make_policy("informed", StealingParameters()))
    core.ledger.durations.add("task", "cpu", 0.05)
    for address in addresses:
        core.handle(WorkerJoined(address, 1, address.split(":")[1]), 0.0)
    full = addresses[hungry:]
    for n in range(tasks):
        at, key = full[n % len(full)], ("task", n)
        facts.blocks[key] = Replica(1_000_000, frozenset((at, full[(n + 1) % len(full)])))
        core.handle(TaskAssigned(key, at, "task", n), 0.0)
    core.handle(MessagesSent(), 0.0)
    return core


def show_tick(record: Mapping[str, Any]) -> None:
    measure.show(
        f"tick: {record['tasks']:,} tasks on {record['workers']} workers, {record['hungry']} of them hungry",
        ("", "ms", "spread", "moves"),
        [
            (
                "informed",
                f"{record['ms'].median:.2f}",
                f"{record['ms'].low:.2f} to {record['ms'].high:.2f}",
                str(record["moves"]),
            )
        ],
    )


def floor(sites: Sequence[Site], rounds: int, each: int, seconds: float = 0.02) -> dict[str, Any]:
    """Time sleeping tasks without inputs, divided by the seconds that each worker sleeps."""
    over = {}
    for site in sites:
        with contenders((STOCK,), site) as running:
            client = running[STOCK].client
            naps = [seconds] * (each * site.workers)
            taken = []
            for _ in range(rounds + 1):
                start = time.perf_counter()
                client.gather(client.map(time.sleep, naps, pure=False))
                taken.append(time.perf_counter() - start)
            over[site.workers] = measure.Summary.of([s / (each * seconds) for s in taken[1:]])
    return {"each": each, "seconds": seconds, "over_sum": over}


def show_floor(record: Mapping[str, Any]) -> None:
    rows = [
        (str(n), f"{o.median:.3f}", f"{o.low:.2f} to {o.high:.2f}") for n, o in record["over_sum"].items()
    ]
    title = f"floor: {record['each']} x {1e3 * record['seconds']:g} ms a worker, stock Dask"
    measure.show(title, ("workers", "makespan / sum", "spread"), rows)


# ---- all of it ---------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options("Makespans of task graphs, beside stock Dask's.", rounds=5)
    parser.add_argument(
        "--only", choices=(*NAMES, *OTHERS), action="append", help="run only this workload or part"
    )
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"of most workloads ({WORKERS})")
    parser.add_argument("--in-process", action="store_true", help="workers in this process, not in their own")
    parser.add_argument("--contender", choices=CONTENDERS, action="append", help="run only this contender")
    options = parser.parse_args(arguments)
    note = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    rounds = 1 if options.toy else options.rounds
    names = options.only or [*(TOY if options.toy else NAMES), *OTHERS]
    settings = {"workers": options.workers, "in_process": options.in_process}
    record = measure.provenance(rounds=rounds, toy=options.toy, **settings)
    workers = 2 if options.toy else options.workers
    bench = Bench(options.contender or CONTENDERS, workers, not options.in_process, rounds, options.toy, note)
    record["results"] = bench.results(names)
    record["calibration"] = record["results"].pop("calibration", None)
    bounded = [r for r in record["results"].values() if r.get("bound")]
    if len(bounded) > 1:
        show_summary(bounded, bench.contenders)
    if options.json:
        measure.write(options.json, record)
    return record


class Bench(NamedTuple):
    """The benchmark's parts and options."""

    contenders: Sequence[str]
    workers: int
    processes: bool
    rounds: int
    toy: bool
    note: Note

    def results(self, names: Sequence[str]) -> dict[str, Any]:
        """Run the requested parts, print each result, and return all."""
        own = {
            "straggler": self._straggler,
            "scale-up": self._scale_up,
            "tick": self._tick,
            "floor": self._floor,
        }
        found = {name: own[name]() for name in names if name in own}
        shared = [name for name in names if name not in own]
        if shared:
            site = Site(self.workers, self.processes)
            cluster = VirtualCluster.local(site.workers, cores=CORES if site.processes else None)
            with contenders((STOCK, *self.contenders, PLACING), site) as running:
                if self.processes:
                    calibration = self._calibration(running[STOCK], cluster)
                    cluster = calibration.of(cluster)
                    found["calibration"] = calibration._asdict()
                usual = {name: running[name] for name in self.contenders}
                for name in shared:
                    found[name] = (
                        self._no_op(usual, site)
                        if name == "no-op"
                        else self._one(name, running if name == "sparse-gemm" else usual, site, cluster)
                    )
        return found

    def _graph(self, name: str) -> TaskGraph:
        return build(name, **(TOY.get(name, {}) if self.toy else {}))

    def _calibration(self, stock: Running, cluster: VirtualCluster) -> Calibration:
        """Return the simulator's costs on this machine, from runs of this minute."""
        measured = {}
        for probe, graph in probes(len(cluster.workers)).items():
            runs = [once(stock, graph).seconds for _ in range(self.rounds + 1)]
            measured[probe] = median(runs[1:])
        calibration = calibrate(cluster, measured)
        self.note(
            f"CPU costs {calibration.pace:.2f} of the simulator's, {1e3 * calibration.late:.1f} ms late"
        )
        return calibration

    def _one(
        self, name: str, running: Mapping[str, Running], site: Site, cluster: VirtualCluster
    ) -> dict[str, Any]:
        graph = self._graph(name)
        record = compare(graph, site.workers, running, self.rounds, self._about(name))
        project(record, graph, cluster)
        show(record, f"{site.workers} workers in {'processes' if site.processes else 'one process'}")
        return record

    def _no_op(self, running: Mapping[str, Running], site: Site) -> dict[str, Any]:
        graph = independent("no-op", 100 if self.toy else 10_000, 0.0)
        record = compare(graph, site.workers, running, self.rounds, self._about("no-op"))
        show_no_ops(record, f"{site.workers} workers in {'processes' if site.processes else 'one process'}")
        return record

    def _straggler(self) -> dict[str, Any]:
        workers = 3 if self.toy else 10
        threads = workers - 1 + 1 / workload_kernels.SLOWER
        with contenders(self.contenders, Site(workers, False)) as running:
            graph, note = self._graph("straggler"), self._about("straggler")
            record = compare(graph, threads, running, self.rounds, note, straggling)
        speeds = (1 / workload_kernels.SLOWER, *[1.0] * (workers - 1))
        project(
            record,
            graph,
            VirtualCluster(tuple(VirtualWorker(f"w{i}", speed=s) for i, s in enumerate(speeds))),
        )
        show(
            record, f"{workers} workers in one process, one of them {workload_kernels.SLOWER:g} times slower"
        )
        return record

    def _scale_up(self) -> dict[str, Any]:
        first, last = (1, 3) if self.toy else (2, 20)
        run = partial(scaled_up, first=first, last=last)
        with contenders(self.contenders, Site(first, False)) as running:
            graph, note = self._graph("scale-up"), self._about("scale-up")
            record = compare(graph, last, running, self.rounds, note, run)
        show(record, f"{first} workers in one process, {last} once it is submitted")
        return record

    def _tick(self) -> dict[str, Any]:
        record = tick(tasks=2_000, repeats=5) if self.toy else tick()
        show_tick(record)
        return record

    def _floor(self) -> dict[str, Any]:
        sites = [Site(workers, self.processes) for workers in ((1, 2) if self.toy else (1, WORKERS))]
        record = floor(sites, self.rounds, 5 if self.toy else 100)
        show_floor(record)
        return record

    def _about(self, name: str) -> Note:
        return lambda line: self.note(f"{name}: {line}")


if __name__ == "__main__":
    main()
