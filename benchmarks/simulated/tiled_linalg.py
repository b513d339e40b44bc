"""Tiled linear algebra as task graphs: Cholesky factorization, dense and block-sparse matrix products.

Durations are seconds, sizes bytes.  The kernels' names are those of kernels that compute real tiles; a kernel reads
its tiles in the order of its dependencies, and updates the last one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from dask_ferro.simulate.graphs.taskgraph import Key, TaskGraph
from simulated.graph_builder import GraphBuilder

_KB = 1024


def cholesky(nt: int = 10, seconds: float = 0.04, tile_bytes: int = 8 * _KB) -> TaskGraph:
    """Return the right-looking tile Cholesky factorization of nt x nt tiles.

    Each tile is made by the first task that reads it, so there is only one root task.  No group is root-ish.

    Parameters
    ----------
    seconds : float
        Of a triangular solve; the other kernels' durations are in proportion to their flops at small tiles.
    """
    builder = GraphBuilder("cholesky", **locals())
    _factorize(builder, nt, seconds, tile_bytes, {}, None)
    return builder.graph()


def _factorize(
    builder: GraphBuilder,
    nt: int,
    seconds: float,
    tile_bytes: int,
    tile: dict[tuple[int, int], Key],
    part: int | None,
) -> None:
    """Add the tasks of a factorization; `tile` maps each tile to the last task that wrote it."""

    def run(kernel: str, share: float, index: tuple[int, ...], reads: Sequence[Key], i: int, j: int) -> None:
        after = [*reads, tile[i, j]] if (i, j) in tile else list(reads)
        tile[i, j] = builder.add(
            kernel, *index, seconds=share * seconds, nbytes=tile_bytes, after=after, kernel=kernel, part=part
        )

    for k in range(nt):
        run("potrf", 0.75, (k,), [], k, k)
        for i in range(k + 1, nt):
            run("trsm", 1.0, (i, k), [tile[k, k]], i, k)
        for i in range(k + 1, nt):
            run("syrk", 1.0, (i, k), [tile[i, k]], i, i)
            for j in range(k + 1, i):
                run("gemm", 1.25, (i, j, k), [tile[i, k], tile[j, k]], i, j)


def _tiles(
    builder: GraphBuilder, name: str, places: Iterable[tuple[int, int]], tile_bytes: int
) -> dict[tuple[int, int], Key]:
    """Add a task that makes a tile for each place of a matrix."""
    return {at: builder.add(name, *at, seconds=0.002, nbytes=tile_bytes, kernel="tile") for at in places}


def gemm(nt: int = 6, seconds: float = 0.04, tile_bytes: int = 8 * _KB) -> TaskGraph:
    """Return the tile product C += A B of nt x nt tiles, with a chain over k for each tile of C.

    The tiles of A and B are root-ish, the products are not.
    """
    builder = GraphBuilder("gemm", **locals())
    add = partial(builder.add, "product", seconds=seconds, nbytes=tile_bytes, kernel="product")
    places = list(product(range(nt), range(nt)))
    a = _tiles(builder, "tile-a", places, tile_bytes)
    b = _tiles(builder, "tile-b", places, tile_bytes)
    for i, j in places:
        last: list[Key] = []
        for k in range(nt):
            after = [a[i, k], b[k, j], *last]
            last = [add(i, j, k, after=after)]
    return builder.graph()


def sparse_gemm(
    nt: int = 12, density: float = 0.5, seconds: float = 0.025, tile_bytes: int = 64 * _KB, seed: int = 0
) -> TaskGraph:
    """Return a block-sparse product of nt x nt tiles: half of the tiles exist, unevenly over the rows of A.

    As in the paper's contraction, A is stored in row panels, and B's tiles are made where they are used; so a row's
    products run where its panel is, and the work of rows differs ninefold.  No group is root-ish.

    Parameters
    ----------
    density : float
        Share of tiles that exist; for A's rows it goes from 0.2 to 1.8 times this.
    """
    builder = GraphBuilder("sparse-gemm", **locals())
    rng = random.Random(seed)
    b = {at for at in product(range(nt), repeat=2) if rng.random() < density}
    shares = [min(density * (0.2 + 1.6 * (i + 0.5) / nt), 1.0) for i in range(nt)]
    rng.shuffle(shares)
    for i, share in enumerate(shares):
        there = [k for k in range(nt) if rng.random() < share]
        panel = builder.add("panel", i, seconds=0.002, nbytes=tile_bytes * len(there))
        for j in range(nt):
            last: list[Key] = []
            for k in (k for k in there if (k, j) in b):
                made = builder.add(
                    "sparse-product", i, j, k, seconds=seconds, nbytes=tile_bytes, after=[panel, *last]
                )
                last = [made]
    return builder.graph()


def matmul_parallel(
    chains: int = 32, length: int = 4, sizes: Sequence[int] = (512, 1024, 2048), seconds: float = 1.0
) -> TaskGraph:
    """Return chains of products of square float32 matrices of several sizes, which share one factor per size.

    Like ferroflow's matmul-parallel, with mixed sizes.  Tasks are annotated with durations; no group is root-ish.

    Parameters
    ----------
    seconds : float
        Of a product of the largest size on a worker of speed 1; others take less in proportion to their flops.
    """
    sizes = tuple(sizes)
    builder = GraphBuilder("matmul-parallel", **locals())
    weights = {n: builder.add("weight", n, seconds=0.001, nbytes=4 * n * n) for n in sizes}
    for chain in range(chains):
        n = sizes[chain % len(sizes)]
        last: list[Key] = []
        for step in range(length):
            each = seconds * (n / max(sizes)) ** 3
            after = [weights[n], *last]
            last = [builder.add("matmul", chain, step, seconds=each, nbytes=4 * n * n, after=after)]
    graph = builder.graph()
    return replace(graph, tasks=tuple(task._replace(annotated=task.seconds) for task in graph.tasks))


def iterated_gemm(
    nt: int = 8, iterations: int = 6, seconds: float = 0.04, tile_bytes: int = 8 * _KB
) -> TaskGraph:
    """Return C += A B by nt x nt tiles, repeatedly: each iteration adds to the C of the one before.

    The first phase makes the tiles of A, B and C, the others are the iterations.
    """
    builder = GraphBuilder("iterated-gemm", **locals())
    add = partial(builder.add, "product", seconds=seconds, nbytes=tile_bytes, kernel="product")
    places = list(product(range(nt), range(nt)))
    a = _tiles(builder, "tile-a", places, tile_bytes)
    b = _tiles(builder, "tile-b", places, tile_bytes)
    c = _tiles(builder, "tile-c", places, tile_bytes)
    phases = [len(builder.tasks)]
    for step in range(iterations):
        for i, j in places:
            for k in range(nt):
                after = [a[i, k], b[k, j], c[i, j]]
                c[i, j] = add(i, j, k, after=after, part=step)
        phases.append(nt**3)
    return replace(builder.graph(), phases=tuple(phases))


def iterated_cholesky(
    nt: int = 12, iterations: int = 6, seconds: float = 0.04, tile_bytes: int = 8 * _KB
) -> TaskGraph:
    """Return the tile Cholesky factorization of one matrix, repeatedly, from the same tiles.

    The first phase makes the tiles, the others are the iterations.
    """
    builder = GraphBuilder("iterated-cholesky", **locals())
    lower = [(i, j) for i, j in product(range(nt), repeat=2) if j <= i]
    made = _tiles(builder, "tile-a", lower, tile_bytes)
    phases = [len(builder.tasks)]
    for step in range(iterations):
        _factorize(builder, nt, seconds, tile_bytes, dict(made), step)
        phases.append(len(builder.tasks) - sum(phases))
    return replace(builder.graph(), phases=tuple(phases))
