"""The graphs that schedulers are measured on: one seeded generator each, the same graph for the same arguments.

With the defaults the work of most is worth 1 to 4 s on 8 threads; ferroflow's graphs keep their published sizes.
Nothing here knows of workers: where a workload needs a cluster of its own (scale-up, straggler), the caller
provides it.

Dask decides by names: tuple keys that share their first item are one group, and a group of more than twice as
many tasks as threads that depends on fewer than five tasks is "root-ish": it waits in the scheduler's own queue.
Each generator says which side of that line it is on.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from math import floor
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.simulate.draft import Draft
from dask_ferro.simulate.taskgraph import Key, TaskGraph
from dask_ferro.simulate.tiles import cholesky, gemm, sparse_gemm

_KB, _MB = 1024, 1024**2


# ---- independent tasks -------------------------------------------------------------------------------------


def _lognormal(count: int, sigma: float, mean: float, most: float, rng: random.Random) -> list[float]:
    """Lognormal durations of the given mean, none longer than `most` means."""
    drawn = [rng.lognormvariate(0.0, sigma) for _ in range(count)]
    average = sum(drawn) / count
    cut = [min(value, most * average) for value in drawn]
    return [value * mean * count / sum(cut) for value in cut]


def skew(
    tasks: int = 160, sigma: float = 1.0, mean: float = 0.06, nbytes: int = _KB, seed: int = 0
) -> TaskGraph:
    """Return independent tasks of one prefix whose durations are lognormal: one in ten takes half of the time.

    Root-ish.
    """
    draft = Draft("skew", tasks=tasks, sigma=sigma, mean=mean, nbytes=nbytes, seed=seed)
    for index, seconds in enumerate(_lognormal(tasks, sigma, mean, 5.0, random.Random(seed))):
        draft.add("skew", index, seconds=seconds, nbytes=nbytes)
    return draft.graph()


def lognormal(
    tasks: int = 500, sigma: float = 1.3, mean: float = 0.04, nbytes: int = _KB, seed: int = 42
) -> TaskGraph:
    """Return independent tasks of lognormal(1, 1.3) durations: coiled/benchmarks' inhomogeneous workload.

    As there, the longest are cut, at 9.5 means.  Root-ish.
    """
    draft = Draft("lognormal", tasks=tasks, sigma=sigma, mean=mean, nbytes=nbytes, seed=seed)
    for index, seconds in enumerate(_lognormal(tasks, sigma, mean, 9.5, random.Random(seed))):
        draft.add("lognormal", index, seconds=seconds, nbytes=nbytes)
    return draft.graph()


def straggler(tasks: int = 200, seconds: float = 0.05, nbytes: int = _KB) -> TaskGraph:
    """Return equal independent tasks, for a cluster of which one worker is ten times slower.  Root-ish."""
    draft = Draft("straggler", tasks=tasks, seconds=seconds, nbytes=nbytes)
    for index in range(tasks):
        draft.add("straggler", index, seconds=seconds, nbytes=nbytes)
    return draft.graph()


# ---- tasks that read what others made ----------------------------------------------------------------------


def _readers(
    draft: Draft, roots: Sequence[Key], tasks: int, prefix: str, seconds: float, nbytes: int = _KB
) -> None:
    for index in range(tasks):
        draft.add(prefix, index, seconds=seconds, nbytes=nbytes, after=[roots[index % len(roots)]])


def hot_block(tasks: int = 800, seconds: float = 0.02, block_bytes: int = 16 * _MB) -> TaskGraph:
    """Return many tasks that all read one big block.  Root-ish: one dependency."""
    draft = Draft("hot-block", tasks=tasks, seconds=seconds, block_bytes=block_bytes)
    block = draft.add("block", 0, seconds=0.01, nbytes=block_bytes)
    _readers(draft, [block], tasks, "hot", seconds)
    return draft.graph()


def short(tasks: int = 1000, roots: int = 40, seconds: float = 0.01) -> TaskGraph:
    """Return short tasks: a few root-ish ones, and many that each read one of those and are not."""
    draft = Draft("short", tasks=tasks, roots=roots, seconds=seconds)
    made = [draft.add("short-root", index, seconds=seconds, nbytes=_KB) for index in range(roots)]
    _readers(draft, made, tasks - roots, "short", seconds)
    return draft.graph()


def balanced_roots(
    per_thread: int = 20, threads: int = 8, seconds: float = 0.05, root_bytes: int = _MB
) -> TaskGraph:
    """Return equal tasks, as many for each thread, one on each of as many big roots: nothing is to be moved.

    The readers are not root-ish: each root's readers run where the root is.
    """
    draft = Draft(
        "balanced-roots", per_thread=per_thread, threads=threads, seconds=seconds, root_bytes=root_bytes
    )
    made = [draft.add("balanced-root", i, seconds=0.02, nbytes=root_bytes) for i in range(threads)]
    _readers(draft, made, per_thread * threads, "balanced", seconds)
    return draft.graph()


def scale_up(tasks: int = 400, roots: int = 8, seconds: float = 0.05, nbytes: int = 8 * _KB) -> TaskGraph:
    """Return tasks that all sit with their roots on the first workers when others join.  Not root-ish."""
    draft = Draft("scale-up", tasks=tasks, roots=roots, seconds=seconds, nbytes=nbytes)
    made = [draft.add("scale-up-root", index, seconds=0.01, nbytes=nbytes) for index in range(roots)]
    _readers(draft, made, tasks, "scale-up", seconds)
    return draft.graph()


def pinned(tasks: int = 40, roots: int = 6, seconds: float = 0.1, nbytes: int = 8 * _KB) -> TaskGraph:
    """Return tasks that all start on one worker, since all of their roots are pinned to it.

    Not root-ish, therefore more than one root.
    """
    draft = Draft("pinned", tasks=tasks, roots=roots, seconds=seconds, nbytes=nbytes)
    made = [draft.add("pinned-root", index, seconds=0.001, nbytes=nbytes) for index in range(roots)]
    _readers(draft, made, tasks, "pinned", seconds)
    return draft.graph("one")


# ---- chains and layers -------------------------------------------------------------------------------------


def chains(
    count: int = 24, length: int = 16, seconds: float = 0.025, fast: float = 0.001, every: int = 2
) -> TaskGraph:
    """Return chains of ops of one length with a fast op after every few of them.

    Only the first op of a chain is a root; its group holds the whole of all chains, so it is not root-ish.
    """
    draft = Draft("chains", count=count, length=length, seconds=seconds, fast=fast, every=every)
    for chain in range(count):
        last: list[Key] = []
        for step in range(length):
            last = [draft.add("op", chain, step, seconds=seconds, nbytes=_KB, after=last)]
            if step % every == every - 1:
                last = [draft.add("fast-op", chain, step, seconds=fast, nbytes=_KB, after=last)]
    return draft.graph()


def random_dag(
    layers: int = 10,
    width: int = 24,
    least: float = 0.01,
    most: float = 0.08,
    nbytes: int = 8 * _KB,
    seed: int = 0,
) -> TaskGraph:
    """Return a layered graph: each task reads one to three of the layer before; durations are uniform.

    One prefix, one group a layer, of which the first is root-ish on up to 11 threads.
    """
    draft = Draft("random-dag", layers=layers, width=width, least=least, most=most, nbytes=nbytes, seed=seed)
    rng = random.Random(seed)
    before: list[Key] = []
    for layer in range(layers):
        now: list[Key] = []
        for index in range(width):
            read = sorted(rng.sample(range(width), rng.randint(1, min(3, width)))) if before else []
            now.append(
                draft.add(
                    "random-dag",
                    index,
                    seconds=rng.uniform(least, most),
                    nbytes=nbytes,
                    after=[before[i] for i in read],
                    part=layer,
                )
            )
        before = now
    return draft.graph()


def fork_join(stages: int = 5, width: int = 40, seconds: float = 0.05, nbytes: int = 8 * _KB) -> TaskGraph:
    """Return stages of equal tasks side by side, each stage joined before the next one forks.

    The forks of a stage read the join before them and are root-ish.
    """
    draft = Draft("fork-join", stages=stages, width=width, seconds=seconds, nbytes=nbytes)
    join: list[Key] = []
    for stage in range(stages):
        forks = [
            draft.add("fork", index, seconds=seconds, nbytes=nbytes, after=join, part=stage)
            for index in range(width)
        ]
        join = [draft.add("join", stage, seconds=0.002, nbytes=nbytes, after=forks)]
    return draft.graph()


# ---- ferroflow's, which it publishes rates for -------------------------------------------------------------


def wide(
    branches: int = 8, length: int = 5, skew: float = 0.25, slow: float = 0.005, fast: float = 0.001
) -> TaskGraph:
    """Return ferroflow's "wide": chains on one root, of which the share `skew` is slow."""
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
    draft = Draft(name, branches=branches, length=length, skew=skew, slow=slow, fast=fast)
    slow_ones = floor(branches * skew + 0.5)  # half up, as ferroflow rounds
    root = draft.add("wide-root", 0, seconds=0.0, nbytes=_KB)
    for branch in range(branches):
        kind, seconds = ("wide-slow", slow) if branch < slow_ones else ("wide-fast", fast)
        last = root
        for step in range(length):
            last = draft.add(kind, branch, step, seconds=seconds, nbytes=_KB, after=[last])
    return draft.graph()


def imbalanced(
    long: int = 4, short: int = 200, long_seconds: float = 0.2, short_seconds: float = 0.001
) -> TaskGraph:
    """Return ferroflow's "imbalanced": a few long ops and many short ones on one root, the long ones first."""
    draft = Draft(
        "imbalanced", long=long, short=short, long_seconds=long_seconds, short_seconds=short_seconds
    )
    root = draft.add("imbalanced-root", 0, seconds=0.0, nbytes=_KB)
    for count, kind, seconds in ((long, "long", long_seconds), (short, "brief", short_seconds)):
        _readers(draft, [root], count, f"imbalanced-{kind}", seconds)
    return draft.graph()


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
    """Return the workload of that name.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    annotated : bool
        Let the graph itself say how long its tasks take.
    **params
        Those of the generator, instead of its defaults.

    Raises
    ------
    ConfigError
        For a name or a parameter that is not there.
    """
    make = WORKLOADS.get(name.replace("_", "-"))
    if make is None:
        raise ConfigError(f"workload: got {name!r}, wanted one of {', '.join(NAMES)}")
    known = signature(make).parameters
    if wrong := sorted(set(params) - set(known)):
        raise ConfigError(f"workload {name}: no parameter {', '.join(wrong)}; it takes {', '.join(known)}")
    graph = make(**params)
    if not annotated:
        return graph
    told = tuple(task._replace(annotated=task.seconds) for task in graph.tasks)
    return TaskGraph(graph.name, told, graph.pinned)
