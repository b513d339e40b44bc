"""Bundles of tasks: from which task length on a graph keeps the machine busy, and graphs of short tasks.

    python benchmarks/bundles.py                        # all parts, 2 workers
    python benchmarks/bundles.py --only metg --workers 2 4 8 --json bundles.json
    python benchmarks/bundles.py --only metg --steps 100 --contenders bundled
    python benchmarks/bundles.py --only hop --contenders stock bundled

metg    the shortest tasks of which a graph runs at half of the machine's speed: METG(50 %) of Task Bench (Slaughter et
        al., "Task Bench: a parameterized benchmark for evaluating parallel runtime performance", SC20), with its
        patterns stencil_1d, nearest, fft and tree.  A graph has a width of one task for each worker, as Task Bench has
        it, or of four, and 25 steps.  A task computes (a busy loop) for a given time, which is halved until a graph is
        below half speed, or doubled until it is not; between the two lengths, it is interpolated.  The record says for
        each length how many of the graphs ran as flows.
long    the same with the 1,000 steps of Task Bench, for the plugin with bundles alone: stock Dask takes minutes.
hop     from the end of a task to the start of its reader on another worker that waits for it, on this host's clock: two
        points of 300 steps of 1 ms, alone, and beside a thread in each worker that keeps Python's lock.
short   graphs of thousands of short tasks: seconds, over stock Dask's in the same round.  What it takes to make a graph
        (0.5 ms a delayed task) is not counted, here and below.
uneven  chains of tasks that sleep, where one worker takes three times as long, or where chains of one name take 0.1 to
        10 times what is known of them: the time over the bound of all workers busy.
simulated  a stencil on virtual clusters of 2 to 10,000 workers, two points for each: where bundles and flows stop
        paying.

Each contender has a cluster of its own: stock Dask, the plugin (`ff.install`), the plugin with bundles.  The first run
of each graph is not measured: there, bundles learn what its tasks cost.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import exp, log
from pathlib import Path
from random import Random
from statistics import median, quantiles
from time import perf_counter, sleep
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import dask  # noqa: E402
import dask.array as da  # noqa: E402
import measure  # noqa: E402
from distributed import Client, Scheduler, Worker, get_worker  # noqa: E402
from real import USUAL, clusters  # noqa: E402
from simulated.flows import simulate_flow  # noqa: E402
from simulated.graph_builder import GraphBuilder  # noqa: E402

from dask_ferro.lower.bundling.choice import FLOW_LASTS  # noqa: E402
from dask_ferro.lower.bundling.recent import FLOW_STARTS  # noqa: E402
from dask_ferro.scheduler.bundle_costs import MEMBERS as FLOW_MEMBERS  # noqa: E402
from dask_ferro.scheduler.bundle_costs import BundleCosts  # noqa: E402
from dask_ferro.scheduler.plugin import part_of  # noqa: E402
from dask_ferro.simulate.cluster import VirtualCluster  # noqa: E402
from dask_ferro.simulate.engine import simulate  # noqa: E402
from dask_ferro.simulate.graphs.bundles import in_bundles  # noqa: E402
from dask_ferro.simulate.graphs.taskgraph import TaskGraph  # noqa: E402

LONGEST_S, FIRST_S, SHORTEST_S = 0.064, 0.004, 0.00001
LONG_STEPS = 1000
HALF = 0.5


class Edges(NamedTuple):
    """A graph's width, its steps, and the points of the step before that a point reads."""

    width: int
    steps: int
    reads: Callable[[int, int], Sequence[int]]


def _near(width: int, radius: int) -> Callable[[int, int], Sequence[int]]:
    return lambda step, point: range(max(0, point - radius), min(width, point + radius + 1))


def _fft(width: int) -> Callable[[int, int], Sequence[int]]:
    stages = max(1, (width - 1).bit_length())

    def reads(step: int, point: int) -> Sequence[int]:
        distance = 1 << ((step - 1) % stages)
        return [p for p in (point - distance, point, point + distance) if 0 <= p < width]

    return reads


def _tree(width: int) -> Callable[[int, int], Sequence[int]]:
    # Task Bench's tree: from one point to all, each point reads its parent.
    return lambda step, point: [point // 2]


PATTERNS: dict[str, Callable[[int], Callable[[int, int], Sequence[int]]]] = {
    "stencil_1d": lambda width: _near(width, 1),
    "nearest": lambda width: _near(width, 2),
    "fft": _fft,
    "tree": _tree,
}


def busy(seconds: float, *values: Any) -> int:
    """Compute for a time; return the number of values."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass
    return len(values)


def pattern(edges: Edges, seconds: float) -> Any:
    """Return a graph of a pattern as a delayed value; its last task reads the last step, and takes no time.

    It also reads what no other task does, so that all tasks run.
    """
    task = dask.delayed(busy, pure=False)
    row = [task(seconds) for _ in range(edges.width)]
    unread: list[Any] = []
    for step in range(1, edges.steps):
        reads = [edges.reads(step, point) for point in range(edges.width)]
        unread += [row[p] for p in set(range(edges.width)).difference(*reads)]
        row = [task(seconds, *(row[p] for p in points)) for points in reads]
    return dask.delayed(_done, pure=False)(row, unread)


def _done(values: list[int], unread: Sequence[int] = ()) -> int:
    return len(values)


def timed(client: Client, graph: Any, width: int) -> float:
    start = perf_counter()
    found = client.compute(graph).result()
    elapsed = perf_counter() - start
    if found != width:
        raise AssertionError(f"got {found}, wanted {width}")
    return elapsed


def metg(client: Client, name: str, width: int, steps: int, cores: int, rounds: int) -> dict[str, Any]:
    """Return the shortest tasks at half speed, in ms; by task length, the efficiency and how many runs were flows."""
    edges = Edges(width, steps, PATTERNS[name](width))
    speeds: dict[float, float] = {}
    flows: dict[float, int] = {}

    def speed(seconds: float) -> float:
        timed(client, pattern(edges, seconds), width)
        before = client.run_on_scheduler(flows_so_far)
        elapsed = median(timed(client, pattern(edges, seconds), width) for _ in range(rounds))
        flows[seconds] = client.run_on_scheduler(flows_so_far) - before
        speeds[seconds] = width * steps * seconds / cores / elapsed
        return speeds[seconds]

    seconds = FIRST_S
    if speed(seconds) >= HALF:
        while seconds > SHORTEST_S and speed(seconds := seconds / 2) >= HALF:
            pass
    else:
        while seconds < LONGEST_S and speed(seconds := 2 * seconds) < HALF:
            pass
    by_length = [{f"{1e3 * s:g} ms": number for s, number in one.items()} for one in (speeds, flows)]
    return {"metg_ms": _at_half(speeds), "efficiency": by_length[0], "flows": by_length[1]}


def flows_so_far(*, dask_scheduler: Scheduler) -> int:
    """Return the number of flows so far."""
    part = part_of(dask_scheduler, BundleCosts)
    return 0 if part is None else part.flow_rows.total


def _at_half(speeds: dict[float, float]) -> float | None:
    """Return the length, in ms, at which the efficiency crosses a half on the way down; None: it is below at once."""
    best = None
    lengths = sorted(speeds, reverse=True)
    for longer, shorter in zip([None, *lengths], lengths, strict=False):
        if speeds[shorter] >= HALF:
            best = 1e3 * shorter
        elif longer is not None and speeds[longer] >= HALF:
            part = (speeds[longer] - HALF) / (speeds[longer] - speeds[shorter])
            best = 1e3 * exp(log(longer) + part * (log(shorter) - log(longer)))
    return best


# ---- the way from one worker to another ------------------------------------------------------------------------


def stamped(seconds: float, *inputs: tuple[str, float]) -> tuple[str, float]:
    """Compute for a time; note how long ago the input was made that came last, if elsewhere; return where and when."""
    start, worker = perf_counter(), get_worker()
    if inputs:
        where, end = max(inputs, key=lambda one: one[1])
        if where != worker.address:
            vars(worker).setdefault("ferro_hops", []).append(start - end)
    busy(seconds)
    return worker.address, perf_counter()


def hops(client: Client, steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the median and the 99th percentile of hops, in ms, in each round."""
    found: dict[str, list[float]] = {"p50": [], "p99": [], "hops": []}
    for number in range(-1, rounds):
        task = dask.delayed(stamped, pure=False)
        row = [task(1e-3) for _ in range(2)]
        for _ in range(1, steps):
            row = [task(1e-3, *row) for _ in range(2)]
        timed(client, dask.delayed(_done, pure=False)(row), 2)
        own = [1e3 * hop for of_worker in client.run(_taken).values() for hop in of_worker]
        if number >= 0 and len(own) > 1:
            parts = quantiles(own, n=100, method="inclusive")
            for name, value in (("p50", parts[49]), ("p99", parts[98]), ("hops", len(own))):
                found[name].append(value)
    return found


def _taken(dask_worker: Worker) -> list[float]:
    return vars(dask_worker).pop("ferro_hops", [])


def _load(dask_worker: Worker, is_on: bool) -> None:
    """Let a thread of the worker keep Python's lock, or end it."""

    def compute() -> None:
        while dask_worker.ferro_load:
            pass

    dask_worker.ferro_load = is_on
    if is_on:
        threading.Thread(target=compute, daemon=True).start()


def _hop(contenders: dict[str, Client], toy: bool, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rows = []
    for load in (False, True):
        for name, client in contenders.items():
            client.run(_load, is_on=load)
            own = hops(client, 20 if toy else 300, rounds)
            client.run(_load, is_on=False)
            title = f"{name}, {'beside a thread that computes' if load else 'alone'}"
            found[title] = own
            cells = [f"{median(own[part]):.3f}" if own[part] else "-" for part in ("p50", "p99")]
            rows.append([title, *cells, f"{median(own['hops']):.0f}" if own["hops"] else "0"])
    measure.show(f"From worker to worker, ms, {rounds} rounds", ["tasks", "p50", "p99", "hops"], rows)
    return found


# ---- graphs of short tasks ------------------------------------------------------------------------------------


def reduction(leaves: int, seconds: float) -> Any:
    """Return a binary tree that sums up leaves."""
    task = dask.delayed(busy, pure=False)
    row = [task(seconds) for _ in range(leaves)]
    while len(row) > 1:
        row = [task(seconds, *row[i : i + 2]) for i in range(0, len(row), 2)]
    return dask.delayed(_done, pure=False)(row)


def chunks(n: int, chunk: int) -> Any:
    x = da.random.default_rng(0).random((n, n), chunks=chunk)
    return ((x + x.T) > 1).sum()


def stencil(width: int, steps: int, seconds: float) -> Any:
    return pattern(Edges(width, steps, _near(width, 1)), seconds)


SHORT: dict[str, Callable[[bool], Any]] = {
    "stencil 12 x 150, 0.2 ms": lambda toy: stencil(4, 8, 2e-4) if toy else stencil(12, 150, 2e-4),
    "stencil 160 x 20, 0.2 ms": lambda toy: stencil(8, 4, 2e-4) if toy else stencil(160, 20, 2e-4),
    "stencil 16 x 100, 1 ms": lambda toy: stencil(4, 4, 1e-3) if toy else stencil(16, 100, 1e-3),
    "tree of 4,095, 1 ms": lambda toy: reduction(16 if toy else 2048, 1e-3),
    "tree of 511, 5 ms": lambda toy: reduction(8 if toy else 256, 5e-3),
    "4000 x 4000, chunks of 100": lambda toy: chunks(400 if toy else 4000, 100),
    "tree of 127, 50 ms": lambda toy: reduction(4 if toy else 64, 5e-2),
}


def computed(client: Client, graph: Any) -> Any:
    return client.compute(graph).result()


def short(
    contenders: dict[str, Client], toy: bool, rounds: int, note: Callable[[str], None]
) -> dict[str, Any]:
    """Return the seconds of each contender by graph."""
    found = {}
    for name, make in SHORT.items():
        found[name] = measure.in_turn(
            {contender: partial(computed, client) for contender, client in contenders.items()},
            rounds,
            prepare=lambda make=make: (make(toy),),
            note=lambda line, name=name: note(f"{name}, {line}"),
        )
    return found


def link(seconds: float, slowness: float, *before: Any) -> None:
    """Sleep, on the first worker for longer."""
    sleep(seconds * (slowness if get_worker().name == 0 else 1.0))


def chains(lengths: Sequence[float], steps: int, slowness: float) -> Any:
    task = dask.delayed(link, pure=False)
    ends = []
    for seconds in lengths:
        last = task(seconds, slowness)
        for _ in range(steps - 1):
            last = task(seconds, slowness, last)
        ends.append(last)
    return dask.delayed(_done, pure=False)(ends)


def uneven(contenders: dict[str, Client], workers: int, toy: bool, rounds: int) -> dict[str, Any]:
    """Return the seconds of each contender over the bound, by graph, and how many tasks were stolen in flows."""
    found: dict[str, Any] = {}
    rows = []
    count, steps = (4 * workers, 2) if toy else (20 * workers, 5)
    spread = [10 ** (2 * i / (count - 1) - 1) for i in range(count)]
    Random(0).shuffle(spread)
    for seconds in (1e-3,) if toy else (1e-3, 2e-2):
        for name, factors, slowness in (
            ("a slow worker", [1.0] * count, 3.0),
            ("wrong durations", spread, 1.0),
        ):
            lengths = [seconds * factor for factor in factors]
            bound = sum(lengths) * steps / (workers - 1 + 1 / slowness)
            # What is learnt: all chains take what one of the graph's own takes in the mean, on all workers.
            mean = sum(lengths) / count
            for client in contenders.values():
                client.compute(chains([mean] * count, steps, 1.0)).result()

            own = measure.in_turn(
                {c: partial(computed, client) for c, client in contenders.items()},
                rounds,
                prepare=lambda of=(lengths, steps, slowness): (chains(*of),),
            )
            title = f"{name}, {1e3 * seconds:g} ms"
            stolen = contenders["bundled"].run_on_scheduler(_stolen)
            found[title] = {
                "bound": bound,
                "stolen": stolen,
                **{c: [one / bound for one in of] for c, of in own.items()},
            }
            rows.append(
                [title, f"{bound:.3f}", *(f"{median(found[title][c]):.2f}" for c in contenders), str(stolen)]
            )
    measure.show(
        f"Chains on {workers} worker processes, {rounds} rounds: time over the bound",
        ["graph", "bound s", *contenders, "stolen in the last flow"],
        rows,
    )
    return found


def _stolen(*, dask_scheduler: Scheduler) -> int:
    part = part_of(dask_scheduler, BundleCosts)
    rows = part.flow_rows.since()[0] if part is not None else []
    return rows[-1].stolen if rows else 0


def submission(tasks: int) -> dict[str, float]:
    """Return the seconds in which a stencil of so many tasks is bundled, and planned as a flow of two members."""
    from dask_ferro.flow.costs import TaskCost
    from dask_ferro.lower.bundling.choice import CostFacts
    from dask_ferro.lower.bundling.rewrite import rewrite_graph
    from dask_ferro.lower.upstream import Task, TaskRef

    width = max(1, tasks // 100)
    graph: dict[Any, Any] = {}
    for step in range(tasks // width):
        for point in range(width):
            reads = _near(width, 1)(step, point) if step else ()
            key = ("busy-0", step, point)
            graph[key] = Task(key, busy, 1e-3, *(TaskRef(("busy-0", step - 1, p)) for p in reads))
    wanted = [("busy-0", tasks // width - 1, point) for point in range(0, width, 10)]
    found: dict[str, float] = {"tasks": len(graph)}
    # A flow of 100,000 tasks has to end within five seconds.
    for name, timer, each, members in (
        ("bundles", "seconds", 1e-3, 0),
        ("flow", "flow_seconds", 4e-5, 2),
    ):
        cost = TaskCost(each, 28)
        facts = CostFacts(
            lambda key, cost=cost: cost, lambda key: None, lambda key: None, 2, 1e9, 1e12, members=members
        )
        start = perf_counter()
        made = rewrite_graph(graph, wanted, {}, facts)
        found[timer] = perf_counter() - start
        found[name] = len(made.graph)
    return found


def simulated(toy: bool, note: Callable[[str], None]) -> dict[str, Any]:
    """Return, by workers and task length, the makespans in bundles and as a flow over that of tasks, under our policy.

    A flow has 32 members at most, and ends within 5 s.
    """
    found: dict[str, Any] = {}
    for workers in (2, 10) if toy else (2, 10, 100, 1_000, 10_000):
        cluster = VirtualCluster.local(workers)
        ratios = {}
        for seconds in (0.001, 0.01) if toy else (0.001, 0.01, 0.1, 1.0):
            graph = virtual_stencil(2 * workers, 4, seconds)
            made = in_bundles(graph, workers)
            single, bundled = (simulate(one, cluster).counts["elapsed"] for one in (graph, made))
            members = min(workers, FLOW_MEMBERS)
            is_short = len(graph.tasks) * seconds / members <= FLOW_LASTS
            flow = FLOW_STARTS + simulate_flow(graph, members).seconds if is_short else None
            length = f"{1e3 * seconds:g} ms"
            ratios[length] = {"bundles": bundled / single, "flow": None if flow is None else flow / single}
        found[str(workers)] = ratios
        note(f"{workers} workers: " + "  ".join(f"{length} {_both(r)}" for length, r in ratios.items()))
    lengths = list(next(iter(found.values())))
    rows = [[workers, *(_both(ratios[length]) for length in lengths)] for workers, ratios in found.items()]
    measure.show(
        "Simulated: makespan in bundles / as a flow, over that of tasks", ["workers", *lengths], rows
    )
    return found


def _both(ratios: dict[str, float | None]) -> str:
    return " / ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios.values())


def virtual_stencil(width: int, steps: int, seconds: float) -> TaskGraph:
    """Return a stencil for the simulator; each point's result has 1 kB."""
    builder = GraphBuilder("stencil", width=width, steps=steps, seconds=seconds)
    near = _near(width, 1)
    row: list[Any] = []
    for step in range(steps):
        before = row
        row = [
            builder.add(
                "cell",
                step,
                point,
                seconds=seconds,
                nbytes=1000,
                after=[before[p] for p in near(step, point)] if before else [],
            )
            for point in range(width)
        ]
    return builder.graph()


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = measure.options(__doc__.partition("\n")[0], rounds=5)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[2], help="worker processes of each cluster (2)"
    )
    parser.add_argument(
        "--only", choices=("metg", "long", "hop", "short", "uneven", "simulated"), help="one part alone"
    )
    parser.add_argument("--steps", type=int, default=25, help="steps of the graphs of METG (25)")
    parser.add_argument(
        "--contenders",
        choices=USUAL,
        nargs="+",
        default=USUAL,
        help="those of METG and hops alone (all)",
    )
    args = parser.parse_args(arguments)
    rounds = 1 if args.toy else args.rounds
    note = (lambda line: None) if args.quiet else (lambda line: print(line, flush=True))
    record: dict[str, Any] = measure.provenance(
        workers=args.workers, rounds=rounds, toy=args.toy, steps=args.steps
    )
    if args.only in (None, "simulated"):
        record["simulated"] = simulated(args.toy, note)
    with tempfile.TemporaryDirectory() as folder:
        for workers in [] if args.only == "simulated" else args.workers:
            names = tuple(args.contenders) if args.only in ("metg", "hop") else USUAL
            with clusters(names, workers, str(Path(folder, f"costs-{workers}"))) as contenders:
                if args.only in (None, "metg"):
                    steps = 3 if args.toy else args.steps
                    record[f"metg {workers}"] = _metg(contenders, workers, args.toy, steps, rounds, note)
                if args.only in (None, "long") and workers == args.workers[0]:
                    steps, alone = 6 if args.toy else LONG_STEPS, {"bundled": contenders["bundled"]}
                    record["long"] = _metg(alone, workers, args.toy, steps, rounds, note)
                if args.only in (None, "uneven"):
                    record[f"uneven {workers}"] = uneven(contenders, workers, args.toy, rounds)
                if args.only in (None, "short") and workers == args.workers[0]:
                    record["short"] = short(contenders, args.toy, rounds, note)
                    _show_short(record["short"], workers, rounds)
                # The last, as the scheduler believes for ten minutes what a hop takes beside a thread that computes.
                if args.only in (None, "hop") and workers == args.workers[0]:
                    record["hop"] = _hop(contenders, args.toy, rounds)
    record["submission"] = submission(1_000 if args.toy else 100_000)
    print(
        "\n{tasks:,} tasks are bundled as {bundles:,} in {seconds:.2f} s, "
        "and planned as a flow, with {flow:,} tasks of Dask's, in {flow_seconds:.2f} s".format(
            **record["submission"]
        )
    )
    if args.json:
        measure.write(args.json, record)
    return 0


def _metg(
    contenders: dict[str, Client],
    workers: int,
    toy: bool,
    steps: int,
    rounds: int,
    note: Callable[[str], None],
) -> dict[str, Any]:
    cores = min(workers, os.cpu_count() or 1)
    found: dict[str, Any] = {}
    rows = []
    for name in ["stencil_1d"] if toy else PATTERNS:
        for width in (workers, 4 * workers):
            own = {c: metg(client, name, width, steps, cores, rounds) for c, client in contenders.items()}
            found[f"{name}, width {width}"] = own
            cells = [f"{o['metg_ms']:.2f}" if o["metg_ms"] else "over 64" for o in own.values()]
            rows.append([f"{name}, width {width}", *cells])
            note("  ".join(rows[-1]))
    title = f"METG(50 %) in ms on {workers} worker processes, {cores} cores, {steps} steps"
    measure.show(title, ["pattern", *contenders], rows)
    return found


def _show_short(found: dict[str, Any], workers: int, rounds: int) -> None:
    rows = []
    for name, seconds in found.items():
        stock = seconds["stock"]
        cells = [
            f"{median(a / b for a, b in zip(seconds[c], stock, strict=True)):.2f}"
            for c in ("ours", "bundled")
        ]
        rows.append([name, f"{median(stock):.2f}", *cells])
    measure.show(
        f"Graphs of short tasks on {workers} worker processes, {rounds} rounds: over stock Dask",
        ["graph", "stock s", "ours", "bundled"],
        rows,
    )


if __name__ == "__main__":
    sys.exit(main())
