"""CPU and GPU workers in one cluster: makespans compared with stock Dask's and with HEFT's plan.

    python benchmarks/heterogeneous.py                   # declared devices in worker processes, and the simulator
    python benchmarks/heterogeneous.py --only mixed      # one part

No GPU is used: a worker with a declared device sleeps for a twentieth of a core's seconds, and copying its results to
the host takes time.  The benchmark measures where tasks are placed.

mixed       matmul-parallel of 512, 1024 and 2048 on 1 "gpu", 20 times as fast, and 4 "cpu"; contenders take turns on
            one cluster.  HEFT: the makespan of its plan, which knows every duration and ignores messages.
simulated   the same on a virtual cluster, by policy.
paper       block-sparse GEMM, dense GEMM and Cholesky by tiles on 4, 8 and 16 virtual nodes of 4 GPUs: NVLink inside,
            200 Gb/s between, a quarter of it for each GPU (John and Milthorpe, PaRSEC on V100s).  The gain is that of
            our placement with stealing over the same without.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import measure  # noqa: E402
from distributed import Client, Nanny, Scheduler  # noqa: E402
from distributed.deploy.spec import SpecCluster  # noqa: E402
from emulated import declared as declared_device  # noqa: E402
from emulated import workload_kernels  # noqa: E402
from simulated import clusters  # noqa: E402
from simulated.contenders import simulate  # noqa: E402
from simulated.heft import heft  # noqa: E402
from simulated.tiled_linalg import cholesky, gemm, matmul_parallel, sparse_gemm  # noqa: E402

import dask_ferro as ff  # noqa: E402
from dask_ferro.policy.estimates import Link  # noqa: E402
from dask_ferro.simulate.cluster import VirtualCluster  # noqa: E402
from dask_ferro.simulate.graphs.taskgraph import TaskGraph  # noqa: E402

PARTS = ("mixed", "simulated", "paper")
CONTENDERS = ("stock", "ferro")
FASTER, CPUS = 20.0, 4
NODES = (4, 8, 16)
# HDR InfiniBand's 25 GB/s, which four GPUs share; the latency is that of Dask's messages over TCP.
BETWEEN_HOSTS = Link(0.003, 6e9)
TILE_BYTES = 8_000_000
# Seconds of a tile's product on a virtual GPU: much more than the 2 ms that Dask needs for a dependency.
TILE_SECONDS = 0.05
Note = Callable[[str], None]


# ---- declared devices in worker processes ------------------------------------------------------------------


@contextmanager
def cluster(cpus: int = CPUS) -> Iterator[Client]:
    """Start a worker with a declared GPU and some CPU workers, each in a process."""
    devices = {"gpu-0": declared_device.DeclaredDevice("gpu", FASTER)}
    devices |= {f"cpu-{n}": declared_device.DeclaredDevice("cpu", 1.0) for n in range(cpus)}
    quiet = {"silence_logs": logging.WARNING}
    options = {"nthreads": 1, "memory_limit": 0, "dashboard": False, **quiet}
    workers = {
        name: {"cls": Nanny, "options": {**options, "plugins": (device,)}} for name, device in devices.items()
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "dashboard_address": ":0"}}
    with SpecCluster(workers=workers, scheduler=scheduler, **quiet) as running, Client(running) as client:
        client.wait_for_workers(len(workers), timeout=60)
        yield client


def take_over(client: Client, contender: str) -> None:
    """Install a contender's scheduler, and wait until it knows its workers."""
    if contender == "stock":
        ff.uninstall(client)
        return
    ff.install(client)
    client.run_on_scheduler(_until_reported)


async def _until_reported(dask_scheduler: Any) -> None:
    """Wait for a heartbeat of every worker, which reports its device."""
    ledger = dask_scheduler.extensions["stealing"].ledger
    for _ in range(500):
        speeds, rows = ledger.durations.speeds, ledger.rows.values()
        if len(speeds) == 2 and any(row.most for row in rows):
            return
        await asyncio.sleep(0.02)
    raise TimeoutError("the workers with declared devices sent no heartbeat in time")


def mixed(rounds: int, toy: bool, note: Note) -> dict[str, Any]:
    """Return makespans of matmul-parallel on 1 "gpu" and some "cpu"."""
    cpus = 1 if toy else CPUS
    graph = matmul_parallel(6, 2, seconds=0.2) if toy else matmul_parallel()
    plan = heft(graph, virtual(cpus))
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with cluster(cpus) as client:
        for number in range(rounds + 1):
            for name in CONTENDERS if number % 2 else reversed(CONTENDERS):
                take_over(client, name)
                taken = workload_kernels.run(client, graph, kernel="declared")
                note(f"{f'round {number}' if number else 'warm-up'}: {name} {taken:.3f} s")
                if number:
                    seconds[name].append(taken)
    of = measure.Summary.of
    return {
        "tasks": len(graph.tasks),
        "heft": plan.makespan,
        "seconds": {name: of(taken) for name, taken in seconds.items()},
        "over_heft": {name: of([s / plan.makespan for s in taken]) for name, taken in seconds.items()},
        "faster_than_stock": of([a / b for a, b in zip(seconds["stock"], seconds["ferro"], strict=True)]),
    }


# ---- virtual clusters --------------------------------------------------------------------------------------


def virtual(cpus: int = CPUS) -> VirtualCluster:
    """Return the virtual cluster of the same workers."""
    return clusters.gpus(1, 1, faster=FASTER, cores=cpus)


def simulated() -> dict[str, Any]:
    """Return makespans of matmul-parallel on a virtual cluster, by policy."""
    graph = matmul_parallel()
    plan = heft(graph, virtual())
    policies = ("stock-none", "stock", "none", "informed")
    return {
        "tasks": len(graph.tasks),
        "heft": plan.makespan,
        "seconds": {p: simulate(graph, virtual(), policy=p).counts["elapsed"] for p in policies},
    }


class Size(NamedTuple):
    """Numbers of tiles along the three matrices' sides, by nodes: just enough work for each GPU."""

    sparse: int
    dense: int
    factor: int

    @classmethod
    def of(cls, nodes: int) -> Size:
        return {4: cls(24, 14, 24), 8: cls(32, 19, 32), 16: cls(40, 24, 40)}.get(nodes, cls(8, 4, 6))


def graphs(nodes: int) -> dict[str, TaskGraph]:
    """Return the paper's three graphs for a number of nodes; a virtual GPU is 20 times as fast as their seconds."""
    size, seconds = Size.of(nodes), TILE_SECONDS * FASTER
    return {
        "block-sparse GEMM": sparse_gemm(size.sparse, seconds=seconds, tile_bytes=TILE_BYTES),
        "dense GEMM": gemm(size.dense, seconds, TILE_BYTES),
        "Cholesky": cholesky(size.factor, seconds, TILE_BYTES),
    }


def paper(nodes: Sequence[int], note: Note) -> list[dict[str, Any]]:
    """Return makespans with and without stealing, and stock Dask's, for each graph and number of nodes."""
    rows = []
    for count in nodes:
        for name, graph in graphs(count).items():
            where = clusters.gpus(count, 4, faster=FASTER, other_host=BETWEEN_HOSTS)
            traces = {p: simulate(graph, where, policy=p) for p in ("none", "informed", "stock")}
            seconds = {p: trace.counts["elapsed"] for p, trace in traces.items()}
            note(f"{name}, {count} nodes: {seconds}")
            rows.append(
                {
                    "graph": name,
                    "nodes": count,
                    "tasks": len(graph.tasks),
                    "bound": max(graph.critical_path / FASTER, graph.work / where.power),
                    "seconds": seconds,
                    "gain": seconds["none"] / seconds["informed"] - 1.0,
                    "steals": traces["informed"].counts["confirmed"],
                    "moved": {p: trace.counts["bytes_moved"] for p, trace in traces.items()},
                }
            )
    return rows


# ---- all of it ---------------------------------------------------------------------------------------------


def show_mixed(record: Mapping[str, Any]) -> None:
    rows = [
        (
            name,
            f"{summary.median:.2f}",
            f"{summary.low:.2f} to {summary.high:.2f}",
            f"{record['over_heft'][name].median:.3f}",
        )
        for name, summary in record["seconds"].items()
    ]
    title = f"mixed: {record['tasks']} tasks; HEFT's plan takes {record['heft']:.2f} s"
    faster = record["faster_than_stock"]
    notes = (f"{faster.median:.2f} times as fast as stock, {faster.low:.2f} to {faster.high:.2f}",)
    measure.show(title, ("", "seconds", "spread", "/ HEFT"), rows, notes)


def show_simulated(record: Mapping[str, Any]) -> None:
    rows = [
        (policy, f"{seconds:.2f}", f"{seconds / record['heft']:.3f}")
        for policy, seconds in record["seconds"].items()
    ]
    measure.show("simulated: the same", ("", "seconds", "/ HEFT"), rows)


def show_paper(records: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            f"{r['graph']}, {r['nodes']} x 4",
            f"{r['tasks']:,}",
            f"{r['bound']:.2f}",
            *(f"{r['seconds'][p]:.2f}" for p in ("stock", "none", "informed")),
            f"{100 * r['gain']:.0f} %",
            f"{r['steals']:.0f}",
        )
        for r in records
    ]
    columns = ("", "tasks", "bound, s", "stock", "no stealing", "stealing", "gain", "steals")
    measure.show("paper: virtual nodes of 4 GPUs, seconds", columns, rows)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options("CPU and GPU workers in one cluster, beside stock Dask and HEFT.", rounds=5)
    parser.add_argument("--only", choices=PARTS, action="append", help="run only this part")
    options = parser.parse_args(arguments)
    note: Note = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    rounds = 1 if options.toy else options.rounds
    parts = options.only or PARTS
    record = measure.provenance(rounds=rounds, toy=options.toy, faster=FASTER, cpus=CPUS)
    results: dict[str, Any] = {}
    if "mixed" in parts:
        results["mixed"] = mixed(rounds, options.toy, note)
        show_mixed(results["mixed"])
    if "simulated" in parts:
        results["simulated"] = simulated()
        show_simulated(results["simulated"])
    if "paper" in parts:
        results["paper"] = paper((2,) if options.toy else NODES, note)
        show_paper(results["paper"])
    record["results"] = results
    if options.json:
        measure.write(options.json, record)
    return record


if __name__ == "__main__":
    main()
