"""The benchmark graphs: one seeded generator each; equal arguments give equal graphs.

With the defaults most graphs take 1 to 4 s on 8 threads; ferroflow's keep their published sizes.  Generators do not
depend on workers: for workloads with a special cluster (scale-up, straggler) the caller provides it.

Dask decides by names: tuple keys with the same first item are one group, and a group with more than twice as many
tasks as threads and fewer than five dependencies is "root-ish": it waits in the scheduler's queue.  Each generator
says whether its groups are.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from math import floor
from typing import Any

from dask_ferro.errors import InputError
from dask_ferro.simulate.graphs.taskgraph import Key, TaskGraph
from simulated.graph_builder import GraphBuilder
from simulated.tiled_linalg import cholesky, gemm, sparse_gemm

_KB, _MB = 1024, 1024**2


# ---- independent tasks -------------------------------------------------------------------------------------


def _independent(builder: GraphBuilder, seconds: Iterable[float], nbytes: int) -> TaskGraph:
    for index, each in enumerate(seconds):
        builder.add(builder.name, index, seconds=each, nbytes=nbytes)
    return builder.graph()


def _lognormal(count: int, sigma: float, mean: float, most: float, seed: int) -> list[float]:
    """Return lognormal durations with the given mean, none longer than `most` means."""
    chance = random.Random(seed)
    drawn = [chance.lognormvariate(0.0, sigma) for _ in range(count)]
    average = sum(drawn) / count
    cut = [min(value, most * average) for value in drawn]
    return [value * mean * count / sum(cut) for value in cut]


# Keys are made from the arguments by name, so `locals()` is read before any other name is set.


def skew(
    tasks: int = 160, sigma: float = 1.0, mean: float = 0.06, nbytes: int = _KB, seed: int = 0
) -> TaskGraph:
    """Return independent tasks of one prefix with lognormal durations: a tenth of them takes half of the time.

    Root-ish.
    """
    return _independent(GraphBuilder("skew", **locals()), _lognormal(tasks, sigma, mean, 5.0, seed), nbytes)


def lognormal(
    tasks: int = 500, sigma: float = 1.3, mean: float = 0.04, nbytes: int = _KB, seed: int = 42
) -> TaskGraph:
    """Return independent tasks of lognormal(1, 1.3) durations: coiled/benchmarks' inhomogeneous workload.

    As there, the longest are cut, at 9.5 means.  Root-ish.
    """
    return _independent(
        GraphBuilder("lognormal", **locals()), _lognormal(tasks, sigma, mean, 9.5, seed), nbytes
    )


def straggler(tasks: int = 200, seconds: float = 0.05, nbytes: int = _KB) -> TaskGraph:
    """Return equal independent tasks, for a cluster with one worker ten times slower than the others.  Root-ish."""
    return _independent(GraphBuilder("straggler", **locals()), [seconds] * tasks, nbytes)


# ---- tasks that read others' results ----------------------------------------------------------------------


def _readers(
    builder: GraphBuilder, roots: Sequence[Key], tasks: int, prefix: str, seconds: float, nbytes: int = _KB
) -> None:
    for index in range(tasks):
        builder.add(prefix, index, seconds=seconds, nbytes=nbytes, after=[roots[index % len(roots)]])


def hot_block(tasks: int = 800, seconds: float = 0.02, block_bytes: int = 16 * _MB) -> TaskGraph:
    """Return many tasks that all read one big block.  Root-ish: one dependency."""
    builder = GraphBuilder("hot-block", **locals())
    block = builder.add("block", 0, seconds=0.01, nbytes=block_bytes)
    _readers(builder, [block], tasks, "hot", seconds)
    return builder.graph()


def short(tasks: int = 1000, roots: int = 40, seconds: float = 0.01) -> TaskGraph:
    """Return short tasks: a few root-ish ones, and many that are not and read one of those each."""
    builder = GraphBuilder("short", **locals())
    made = [builder.add("short-root", index, seconds=seconds, nbytes=_KB) for index in range(roots)]
    _readers(builder, made, tasks - roots, "short", seconds)
    return builder.graph()


def balanced_roots(
    per_thread: int = 20, threads: int = 8, seconds: float = 0.05, root_bytes: int = _MB
) -> TaskGraph:
    """Return equal tasks, balanced over threads, each reading one of as many large roots: no task needs to move.

    The readers are not root-ish: they run where their root is.
    """
    builder = GraphBuilder("balanced-roots", **locals())
    made = [builder.add("balanced-root", i, seconds=0.02, nbytes=root_bytes) for i in range(threads)]
    _readers(builder, made, per_thread * threads, "balanced", seconds)
    return builder.graph()


def scale_up(tasks: int = 400, roots: int = 8, seconds: float = 0.05, nbytes: int = 8 * _KB) -> TaskGraph:
    """Return tasks that are all queued with their roots on the first workers when others join.  Not root-ish."""
    builder = GraphBuilder("scale-up", **locals())
    made = [builder.add("scale-up-root", index, seconds=0.01, nbytes=nbytes) for index in range(roots)]
    _readers(builder, made, tasks, "scale-up", seconds)
    return builder.graph()


def pinned(tasks: int = 40, roots: int = 6, seconds: float = 0.1, nbytes: int = 8 * _KB) -> TaskGraph:
    """Return tasks that all start on one worker, since all of their roots are pinned to it.

    Several roots, so that the tasks are not root-ish.
    """
    builder = GraphBuilder("pinned", **locals())
    made = [builder.add("pinned-root", index, seconds=0.001, nbytes=nbytes) for index in range(roots)]
    _readers(builder, made, tasks, "pinned", seconds)
    return builder.graph("one")


# ---- chains and layers -------------------------------------------------------------------------------------


def chains(
    count: int = 24, length: int = 16, seconds: float = 0.025, fast: float = 0.001, every: int = 2
) -> TaskGraph:
    """Return chains of equally many ops, with a fast op after every few of them.

    Only the first op of a chain is a root; all chains are one group, which is not root-ish.
    """
    builder = GraphBuilder("chains", **locals())
    for chain in range(count):
        last: list[Key] = []
        for step in range(length):
            last = [builder.add("op", chain, step, seconds=seconds, nbytes=_KB, after=last)]
            if step % every == every - 1:
                last = [builder.add("fast-op", chain, step, seconds=fast, nbytes=_KB, after=last)]
    return builder.graph()


def random_dag(
    layers: int = 10,
    width: int = 24,
    least: float = 0.01,
    most: float = 0.08,
    nbytes: int = 8 * _KB,
    seed: int = 0,
) -> TaskGraph:
    """Return a layered graph: each task reads one to three of the layer before; durations are uniform.

    One prefix, and one group per layer; the first is root-ish on up to 11 threads.
    """
    builder = GraphBuilder("random-dag", **locals())
    rng = random.Random(seed)
    before: list[Key] = []
    for layer in range(layers):
        now: list[Key] = []
        for index in range(width):
            read = sorted(rng.sample(range(width), rng.randint(1, min(3, width)))) if before else []
            after, takes = [before[i] for i in read], rng.uniform(least, most)
            now.append(
                builder.add("random-dag", index, seconds=takes, nbytes=nbytes, after=after, part=layer)
            )
        before = now
    return builder.graph()


def fork_join(stages: int = 5, width: int = 40, seconds: float = 0.05, nbytes: int = 8 * _KB) -> TaskGraph:
    """Return stages of equal parallel tasks, each stage joined before the next one forks.

    The forks of a stage read the join before them and are root-ish.
    """
    builder = GraphBuilder("fork-join", **locals())
    join: list[Key] = []
    for stage in range(stages):
        forks = [
            builder.add("fork", index, seconds=seconds, nbytes=nbytes, after=join, part=stage)
            for index in range(width)
        ]
        join = [builder.add("join", stage, seconds=0.002, nbytes=nbytes, after=forks)]
    return builder.graph()


# ---- ferroflow's, with published rates -------------------------------------------------------------


def wide(
    branches: int = 8, length: int = 5, skew: float = 0.25, slow: float = 0.005, fast: float = 0.001
) -> TaskGraph:
    """Return ferroflow's "wide": chains on one root, a share `skew` of them slow."""
    return _branches("wide", branches, length, skew, slow, fast)


def large_wide(
    branches: int = 32, length: int = 10, skew: float = 0.5, slow: float = 0.005, fast: float = 0.001
) -> TaskGraph:
    """Return ferroflow's "large-wide"."""
    return _branches("large-wide", branches, length, skew, slow, fast)


def xlarge_wide(
    branches: int = 64, length: int = 10, skew: float = 0.5, slow: float = 0.005, fast: float = 0.001
) -> TaskGraph:
    """Return ferroflow's "xlarge-wide" in its long form."""
    return _branches("xlarge-wide", branches, length, skew, slow, fast)


def _branches(name: str, branches: int, length: int, skew: float, slow: float, fast: float) -> TaskGraph:
    builder = GraphBuilder(**locals())
    # Rounded half up, as in ferroflow.
    slow_ones = floor(branches * skew + 0.5)
    root = builder.add("wide-root", 0, seconds=0.0, nbytes=_KB)
    for branch in range(branches):
        kind, seconds = ("wide-slow", slow) if branch < slow_ones else ("wide-fast", fast)
        last = root
        for step in range(length):
            last = builder.add(kind, branch, step, seconds=seconds, nbytes=_KB, after=[last])
    return builder.graph()


def imbalanced(
    long: int = 4, short: int = 200, long_seconds: float = 0.2, short_seconds: float = 0.001
) -> TaskGraph:
    """Return ferroflow's "imbalanced": a few long ops and many short ones on one root, the long ones first."""
    builder = GraphBuilder("imbalanced", **locals())
    root = builder.add("imbalanced-root", 0, seconds=0.0, nbytes=_KB)
    for count, kind, seconds in ((long, "long", long_seconds), (short, "brief", short_seconds)):
        _readers(builder, [root], count, f"imbalanced-{kind}", seconds)
    return builder.graph()


# ---- by name -----------------------------------------------------------------------------------------------

WORKLOADS: Mapping[str, Callable[..., TaskGraph]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        cholesky, gemm, sparse_gemm, skew, hot_block, short, chains, random_dag, fork_join, balanced_roots,
        lognormal, scale_up, straggler, pinned, wide, large_wide, xlarge_wide, imbalanced,
    )
}  # fmt: skip
NAMES: tuple[str, ...] = tuple(WORKLOADS)


def build(name: str, *, annotated: bool = False, **params: Any) -> TaskGraph:
    """Return a workload by name.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    annotated : bool
        Whether the graph annotates its tasks with their durations.
    **params
        Parameters of the generator, in place of its defaults.

    Raises
    ------
    InputError
        For an unknown name or parameter.
    """
    make = WORKLOADS.get(name.replace("_", "-"))
    if make is None:
        raise InputError(f"workload: got {name!r}, wanted one of {', '.join(NAMES)}")
    known = signature(make).parameters
    if wrong := sorted(set(params) - set(known)):
        raise InputError(f"workload {name}: no parameter {', '.join(wrong)}; it takes {', '.join(known)}")
    graph = make(**params)
    if not annotated:
        return graph
    told = tuple(task._replace(annotated=task.seconds) for task in graph.tasks)
    return TaskGraph(graph.name, told, graph.pinned)
