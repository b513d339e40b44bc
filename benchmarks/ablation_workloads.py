"""The workloads of the ablation: graphs on virtual clusters, and graphs on jobs that come and go.

A workload runs under a `Setup`, which a rule changes.  The seed is that of the graph where one is drawn, and of all
chance in the simulation: eight one-thread workers share eight cores, so each message takes a little more or less.
Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from simulated import records
from simulated.clusters import gpus as gpu_hosts
from simulated.clusters import hosts
from simulated.elastic.controllers import Scaling
from simulated.elastic.pools import VirtualPool
from simulated.elastic.run import simulate_elastic
from simulated.generators import NAMES, build
from simulated.graph_builder import GraphBuilder
from simulated.tiled_linalg import (
    cholesky,
    gemm,
    iterated_gemm,
    matmul_parallel,
    sparse_gemm,
)

from dask_ferro.policy.estimates import Link
from dask_ferro.policy.scaling.step import ScalingParameters
from dask_ferro.policy.scheduling_core import SchedulingSettings
from dask_ferro.simulate.cluster import Change, VirtualCluster, VirtualWorker
from dask_ferro.simulate.engine import StuckError, simulate
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec
from dask_ferro.trace import Trace

KB, MB = 1024, 1_000_000
# Generators that draw their graphs from a seed.
DRAWN = frozenset({"skew", "lognormal", "random-dag", "sparse-gemm"})
# Sizes of generators whose defaults take 0.1 s of a core and more for one run.
SMALLER: Mapping[str, Mapping[str, Any]] = {
    "cholesky": {"nt": 8}, "gemm": {"nt": 5}, "sparse-gemm": {"nt": 9}, "hot-block": {"tasks": 300},
    "short": {"tasks": 400}, "chains": {"count": 12}, "lognormal": {"tasks": 300}, "scale-up": {"tasks": 250},
    "xlarge-wide": {"length": 5},
}  # fmt: skip
# Virtual seconds after which a run is given up; the longest takes 400.
LIMIT = 2000.0


class Figures(NamedTuple):
    """What one run cost: seconds, moved tasks, lost results, seconds of nodes, and bytes beyond a device's memory."""

    makespan: float
    moves: float
    lost: float
    node_seconds: float
    short: float
    stuck: bool = False


@dataclass(frozen=True)
class Setup:
    """All rules on, but for those that somebody switched off."""

    policy: str = "informed"
    settings: SchedulingSettings = field(default_factory=SchedulingSettings)
    scaling: Callable[[ScalingParameters], ScalingParameters] = lambda bounds: bounds


class Workload(NamedTuple):
    """A graph and where it runs; `elastic`: on jobs, which scaling requests."""

    run: Callable[[Setup, int], Figures]
    elastic: bool = False


def _figures(trace: Trace, node_seconds: float = 0.0) -> Figures:
    counts = trace.counts
    lost = sum(1 for _ in trace.of("compute")) - len(trace.tasks)
    return Figures(counts["elapsed"], counts["confirmed"], lost, node_seconds, counts["bytes_short"])


# ---- on a cluster that stays -------------------------------------------------------------------------------


def fixed(
    make: Callable[[int], TaskGraph],
    cluster: VirtualCluster,
    *,
    policy: str | None = None,
    known: bool = False,
) -> Workload:
    """Return a workload on a cluster; `known`: earlier runs measured its durations; `policy`: not the setup's."""
    graph_of = cache(make)

    def run(setup: Setup, seed: int) -> Figures:
        graph = graph_of(seed)
        trace = simulate(
            graph, cluster, policy=policy or setup.policy, rules=setup.settings, seed=seed,
            known=_means(graph) if known else None,
        )  # fmt: skip
        return _figures(trace)

    return Workload(run)


def recorded(name: str, workers: int, hosts_: int, factor: float) -> Workload:
    """Return a recorded program, as many copies of it side by side as workers are more than four."""
    content = records.read(name)

    def run(setup: Setup, seed: int) -> Figures:
        graph, order = records.graph_of(content, workers // 4, factor=factor, spread=0.1, seed=seed)
        trace = simulate(
            graph,
            hosts(hosts_, workers // hosts_),
            policy=setup.policy,
            rules=setup.settings,
            seed=seed,
            order=order,
        )
        return _figures(trace)

    return Workload(run)


def _means(graph: TaskGraph) -> Mapping[str, float]:
    seconds: dict[str, list[float]] = {}
    for task in graph.tasks:
        seconds.setdefault(task.prefix, []).append(task.seconds)
    return {prefix: sum(some) / len(some) for prefix, some in seconds.items()}


def _built(name: str, **params: Any) -> Callable[[int], TaskGraph]:
    sizes = {**SMALLER.get(name, {}), **params}
    return lambda seed: build(name, **sizes, **({"seed": seed} if name in DRAWN else {}))


def _late(first: int, last: int, at: float = 0.3) -> VirtualCluster:
    """Return a cluster of a few workers that others join when the graph is queued."""
    changes = [Change(at + 0.01 * i, "join", f"w{i:05d}") for i in range(first, last)]
    return VirtualCluster.local(last, changes=changes, cores=last)


def _asleep(seed: int) -> TaskGraph:
    """Return a long task, and short readers of what lies where it runs: calls of a model behind a sleep."""
    tasks = [TaskSpec(("call-root", i), "root", "root", 0.001, 246_000) for i in range(6)]
    tasks.append(TaskSpec("sleep", "sleep", "sleep", 4.0))
    tasks += [
        TaskSpec(("call", i), "call", "call", 0.00058, 1000, (("call-root", i % 6),)) for i in range(60)
    ]
    return TaskGraph("asleep", tuple(tasks))


def _two_kinds(seed: int) -> TaskGraph:
    """Return tasks of one prefix, some of them 500 times as long as the others."""
    builder = GraphBuilder("two-kinds")
    roots = [builder.add("two-root", i, seconds=0.002, nbytes=8 * KB) for i in range(6)]
    for i in range(120):
        long = (i * 7 + seed) % 20 == 0
        builder.add("two", i, seconds=1.0 if long else 0.002, nbytes=KB, after=[roots[i % 6]])
    return builder.graph()


def _wrong(seed: int) -> TaskGraph:
    """Return tasks that say of themselves that they take ten times as long as they do."""
    tasks = build("random-dag", seed=seed).tasks
    return TaskGraph("wrong", tuple(task._replace(annotated=10 * task.seconds) for task in tasks))


def _blocks(count: int) -> TaskGraph:
    """Return blocks that are loaded, worked on and summed up: they fill a device unless some wait."""
    builder = GraphBuilder("blocks", count=count)
    starts = [builder.add("start", i, seconds=0.02, nbytes=10) for i in range(6)]
    sums = []
    for i in range(count):
        loaded = builder.add("load", i, seconds=2.0, nbytes=100 * MB, after=starts)
        worked = builder.add("work", i, seconds=2.0, nbytes=100 * MB, after=[loaded])
        sums.append(builder.add("sum", i, seconds=0.2, nbytes=8, after=[worked]))
    builder.add("total", 0, seconds=0.01, nbytes=8, after=sums)
    return builder.graph()


def _fill(seed: int) -> TaskGraph:
    """Return results that stay until the end, more than the devices hold."""
    builder = GraphBuilder("fill")
    start = builder.add("start", 0, seconds=0.0)
    for i in range(24):
        builder.add("keep", i, seconds=0.5, nbytes=(5 + (7 * i + seed) % 11) * MB, after=[start])
    return builder.graph()


def _independent(count: int, seconds: float, nbytes: int = 1000, name: str = "task") -> TaskGraph:
    group = f"{name}-0"
    return TaskGraph(name, tuple(TaskSpec((group, i), name, group, seconds, nbytes) for i in range(count)))


LOCAL = VirtualCluster.local(8, cores=8)
HURT = VirtualCluster.local(
    8, cores=8,
    changes=[Change(0.3, "pause", "w00002"), Change(0.6, "kill", "w00005"), Change(1.2, "resume", "w00002")],
)  # fmt: skip
STRAGGLER = VirtualCluster(
    tuple(VirtualWorker(f"w{i}", speed=0.1 if i == 0 else 1.0) for i in range(10)), cores=10
)
TWO_SLOW = VirtualCluster(
    tuple(VirtualWorker(f"w{i}", speed=0.1 if i < 2 else 1.0) for i in range(8)), cores=8
)
TWO_CORES = VirtualCluster.local(8, cores=2)
NODES = replace(hosts(4, 2, 2), cores=16)
ONE_GPU = gpu_hosts(1, 1, cores=4)
GPUS = gpu_hosts(2, 4, same_host=Link(0.0001, 50e9), other_host=Link(0.003, 6e9))
FULL = {"memory": 400 * MB + 1000}


def _fixed() -> dict[str, Workload]:
    clusters = {"scale-up": _late(2, 20), "straggler": STRAGGLER}
    found = {name: fixed(_built(name), clusters.get(name, LOCAL)) for name in NAMES}
    for name in ("cholesky", "sparse-gemm", "chains"):
        found[f"{name}, known"] = fixed(_built(name), LOCAL, known=True)
    for name in ("cholesky", "random-dag"):
        found[f"{name}, annotated"] = fixed(_built(name, annotated=True), LOCAL)
    for name in ("cholesky", "sparse-gemm", "short"):
        found[f"{name}, no stealing"] = fixed(_built(name), LOCAL, policy="none")
    for name in ("svd_compressed", "rechunk_tasks", "fft"):
        found[f"{name}, 16 workers"] = recorded(name, 16, 1, 1.0)
        found[f"{name}, 8 hosts, large chunks"] = recorded(name, 16, 8, 100.0)
    return found | {
        "no-ops, two cores": fixed(lambda seed: _independent(400, 0.0), VirtualCluster.local(4, cores=2)),
        "cholesky, two cores": fixed(_built("cholesky"), TWO_CORES),
        "large-wide, two cores": fixed(_built("large-wide"), TWO_CORES),
        "cholesky, two slow workers": fixed(_built("cholesky"), TWO_SLOW),
        "chains, two slow workers": fixed(_built("chains"), TWO_SLOW),
        "scale-up, slow messages": fixed(_built("scale-up"), replace(_late(2, 20), wire=0.03)),
        "cholesky, four hosts": fixed(_built("cholesky"), NODES),
        "gemm, large tiles": fixed(lambda seed: gemm(5, 0.04, 8 * MB), LOCAL),
        "sparse-gemm, large tiles": fixed(lambda seed: sparse_gemm(10, tile_bytes=4 * MB, seed=seed), NODES),
        "hot-block, 256 MB": fixed(_built("hot-block", block_bytes=256 * MB), NODES),
        "sleep before calls": fixed(_asleep, VirtualCluster.local(3, cores=3)),
        "two kinds of one prefix": fixed(_two_kinds, LOCAL),
        "wrong annotations": fixed(_wrong, LOCAL),
        "killed and paused": fixed(_built("random-dag"), HURT),
        "iterated gemm": fixed(lambda seed: iterated_gemm(3, 4), LOCAL),
        "scale-up to 48": fixed(_built("scale-up", tasks=300), _late(2, 48)),
        "GPU and cores, matmul": fixed(lambda seed: matmul_parallel(), ONE_GPU),
        "GPU and cores, queued": fixed(lambda seed: _independent(120, 0.5), ONE_GPU),
        "GPU and cores, cholesky": fixed(lambda seed: cholesky(8, 0.8, 8 * MB), ONE_GPU),
        "GPUs, sparse-gemm": fixed(lambda seed: sparse_gemm(12, seconds=1.0, tile_bytes=8 * MB, seed=seed), GPUS),
        "GPUs, cholesky": fixed(lambda seed: cholesky(10, 1.0, 8 * MB), GPUS),
        "full GPU": fixed(lambda seed: _blocks(16 + seed), gpu_hosts(1, 1, **FULL)),
        "full GPUs and cores": fixed(lambda seed: _blocks(16 + seed), gpu_hosts(1, 2, cores=2, **FULL)),
        "overfull GPUs": fixed(_fill, gpu_hosts(1, 2, memory=50 * MB)),
    }  # fmt: skip


# ---- on jobs that come and go ------------------------------------------------------------------------------


def elastic(
    make: Callable[[int], TaskGraph],
    *pools: VirtualPool,
    resize: Mapping[int, int] | None = None,
    at_start: int = 0,
    **bounds: float,
) -> Workload:
    """Return a workload on jobs; `bounds` are parameters of scaling, `resize` as in `Scaling`."""
    graph_of = cache(make)

    def run(setup: Setup, seed: int) -> Figures:
        controller = Scaling(setup.scaling(ScalingParameters(**bounds)), resize=resize or {})
        try:
            ran = simulate_elastic(
                graph_of(seed), pools, controller, at_start={pools[0].name: at_start} if at_start else None,
                policy=setup.policy, rules=setup.settings, seed=seed, limit=LIMIT,
            )  # fmt: skip
        except StuckError:
            return Figures(LIMIT, 0.0, 0.0, 0.0, 0.0, stuck=True)
        return _figures(ran.trace, ran.node_seconds)

    return Workload(run, elastic=True)


def _bursts(seed: int) -> TaskGraph:
    """Return wide stages with a long task between them."""
    builder = GraphBuilder("bursts")
    last: list[Any] = []
    for stage in range(3):
        wide = [
            builder.add("wide", i, seconds=2.0, nbytes=8 * KB, after=last, part=stage)
            for i in range(40 + seed % 4)
        ]
        last = [builder.add("narrow", stage, seconds=15.0, nbytes=8 * KB, after=wide)]
    return builder.graph()


def _lasting(seed: int) -> TaskGraph:
    """Return tasks of 40 s and of 1 s that say so, for jobs that live a minute."""
    long = _independent(6, 40.0, name="long").tasks
    short = _independent(150 + 5 * seed, 1.0, name="short").tasks
    return TaskGraph("lasting", tuple(task._replace(annotated=task.seconds) for task in (*short, *long)))


def _handed_over(seed: int) -> TaskGraph:
    """Return blocks of 200 MB that are read again when the jobs that made them have ended."""
    builder = GraphBuilder("handed-over")
    blocks = [builder.add("block", i, seconds=2.0, nbytes=200 * MB) for i in range(12)]
    last = blocks
    for step in range(3):
        last = [
            builder.add(
                "read", i, seconds=6.0 + 0.2 * seed, nbytes=MB, after=[last[i - 1], blocks[i]], part=step
            )
            for i in range(12)
        ]
    builder.add("sum", 0, seconds=0.1, after=last)
    return builder.graph()


def _chains(seed: int) -> TaskGraph:
    return build("chains", count=16, length=8, seconds=3.0 + 0.1 * seed, fast=0.1)


NEAR, SLOW = VirtualPool(queue_wait=0.2, start_up=0.3), VirtualPool(queue_wait=5.0, start_up=3.0)


def _elastic() -> dict[str, Workload]:
    gemm_ = cache(lambda seed: iterated_gemm(4, 4, seconds=0.08, tile_bytes=64 * KB))
    quick, cheap = (
        VirtualPool("quick", queue_wait=2.0, cost=3.0),
        VirtualPool("cheap", queue_wait=60.0, sigma=0.5),
    )
    cpus, gpus = VirtualPool("cpus", threads=4), VirtualPool("gpus", device="gpu", speed=10.0, cost=5.0)
    life, short = VirtualPool(walltime=25.0), VirtualPool(walltime=60.0, queue_wait=3.0)
    return {
        "from zero to 24": elastic(lambda seed: _independent(240, 2.0), SLOW, maximum=24),
        "8 grow to 16": elastic(gemm_, NEAR, minimum=8, maximum=8, at_start=8, resize={4: 16}),
        "16 shrink to 8": elastic(gemm_, NEAR, minimum=16, maximum=16, at_start=16, resize={4: 8}),
        "12, 4, 12": elastic(gemm_, SLOW, minimum=12, maximum=12, at_start=12, resize={3: 4, 4: 12}),
        "lives of 25 s": elastic(lambda seed: _independent(20 + seed, 8.0), life, minimum=2, maximum=2),
        "lives of 25 s, surge": elastic(
            lambda seed: _independent(20 + seed, 8.0), life, minimum=2, maximum=2, surge=2
        ),
        "lives of 60 s": elastic(_lasting, short, maximum=8),
        "data handed over": elastic(_handed_over, VirtualPool(walltime=30.0), maximum=4),
        "uncertain queue": elastic(
            lambda seed: _independent(150, 2.0), VirtualPool(queue_wait=20.0, sigma=1.0), maximum=32
        ),
        "bursts": elastic(_bursts, SLOW, maximum=32),
        "bursts, slow queue": elastic(_bursts, VirtualPool(queue_wait=40.0, sigma=0.5), maximum=32),
        "quick and cheap": elastic(lambda seed: _independent(200, 5.0), quick, cheap, maximum=40),
        "cores and GPUs": elastic(lambda seed: _independent(200 + seed, 5.0), cpus, gpus, maximum=16),
        "long tail": elastic(
            lambda seed: build("lognormal", tasks=100, mean=4.0, seed=seed), SLOW, maximum=24
        ),
        "room for four": elastic(lambda seed: _independent(60, 2.0), VirtualPool(slots=4, sigma=0.5), maximum=12),
        "nodes of four": elastic(
            lambda seed: _independent(200 + seed, 1.5), VirtualPool(threads=2, processes=4), maximum=12
        ),
        "unknown, long": elastic(lambda seed: _independent(30 + seed, 20.0), SLOW, maximum=12),
        "chains": elastic(_chains, SLOW, maximum=32),
    }  # fmt: skip


WORKLOADS: Mapping[str, Workload] = {**_fixed(), **{f"jobs: {name}": w for name, w in _elastic().items()}}
# Small ones, that show whether every rule can be switched off.
QUICK = ("pinned", "wide", "GPU and cores, queued", "overfull GPUs", "jobs: lives of 25 s")
