"""Task graphs by cost as Dask graphs: sleeps of the given length, or the real kernels of Cholesky and GEMM.

A sleep waits on its thread and uses no CPU, so that many workers fit on a few cores and the schedule shows.  Its
result is as many bytes as the graph says.  Real kernels compute on float64 tiles of the size that the graph
says, and are as right as LAPACK: the factor of a Cholesky graph is the factor of `matrix(...)`.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from math import isqrt
from typing import Any

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client, Future, get_worker, wait

from dask_ferro.errors import ConfigError
from dask_ferro.lower.upstream import List, Task, TaskRef
from dask_ferro.simulate.graphs.taskgraph import Key, TaskGraph, TaskSpec
from dask_ferro.testing import declared_device

# How much longer a task takes on the slow worker: coiled/benchmarks' straggler.
SLOWER = 10.0
_FLOAT = 8


def dask_graph(
    graph: TaskGraph, *, kernel: str = "sleep", time_scale: float = 1.0, slow_worker: str | None = None
) -> tuple[dict[Key, Task], list[Key]]:
    """Return the graph's tasks for Dask, and the keys that no task of it reads.

    Parameters
    ----------
    kernel : {"sleep", "real", "declared"}
        "real": the kernels that the graph names; tasks that name none still sleep.  "declared": those of declared
        devices (`declared_device.compute`), which sleep for as long as the worker's would take.
    time_scale : float
        Sleeps take so many times their seconds.
    slow_worker : str, optional
        The address of a worker on which sleeps take ten times as long.

    Raises
    ------
    ConfigError
        For another kernel, a graph of which none is known, or where scipy is missing.
    """
    if kernel not in ("sleep", "real", "declared"):
        raise ConfigError(f'kernel: got {kernel!r}, wanted "sleep", "real" or "declared"')
    if kernel == "real":
        _check_real(graph)
    tasks = {}
    for spec in graph.tasks:
        inputs = List(*map(_reference, spec.dependencies))
        if kernel == "real" and spec.kernel in KERNELS:
            tasks[spec.key] = Task(spec.key, compute, spec.kernel, _index(spec), _rows(spec), inputs)
        elif kernel == "declared":
            seconds, references = spec.seconds * time_scale, map(_reference, spec.dependencies)
            tasks[spec.key] = Task(spec.key, declared_device.compute, seconds, spec.nbytes, *references)
        else:
            seconds = spec.seconds * time_scale
            tasks[spec.key] = Task(spec.key, sleep, seconds, spec.nbytes, slow_worker, inputs)
    return tasks, [key for key, after in graph.dependents.items() if not after]


def _reference(key: Any) -> TaskRef:
    return TaskRef(key)


def submit(client: Client, graph: TaskGraph, **options: Any) -> list[Future]:
    """Return futures of the graph's outputs, with its estimates and pins as annotations.

    Parameters
    ----------
    **options
        Those of `dask_graph`.
    """
    tasks, outputs = dask_graph(graph, **options)
    annotations: dict[str, Callable[[Key], Any]] = {}
    estimates = {t.key: {"seconds": t.annotated} for t in graph.tasks if t.annotated is not None}
    if estimates:
        annotations["ferro"] = estimates.get
    if graph.pinned == "one":
        # -1: all of them, where Dask tells of five; and the same one in every run.
        first = min(client.scheduler_info(n_workers=-1)["workers"])
        annotations["workers"] = {t.key: [first] for t in graph.tasks if not t.dependencies}.get
    layer = MaterializedLayer(tasks, annotations=annotations)
    return client.get(HighLevelGraph({graph.name: layer}, {graph.name: set()}), outputs, sync=False)


def run(
    client: Client, graph: TaskGraph, *, submitted: Callable[[], object] = lambda: None, **options: Any
) -> float:
    """Return the seconds from the graph's submission until all of its outputs are on the cluster.

    The outputs stay there; when this returns they are released, and the scheduler has forgotten all tasks, so
    that the same graph can run again.

    Parameters
    ----------
    submitted : callable
        Called when the graph is on its way.
    **options
        Those of `dask_graph`.
    """
    start = time.perf_counter()
    futures = submit(client, graph, **options)
    submitted()
    # `wait` waits in the loop of the current client, whosever futures they are.
    with client.as_current():
        done = wait(futures)
    seconds = time.perf_counter() - start
    failed = next((future for future in done.done if future.status == "error"), None)
    try:
        if failed is not None:
            failed.result()
    finally:
        for future in futures:
            future.release()
        await_forgotten(client, [task.key for task in graph.tasks])
    return seconds


def await_forgotten(client: Client, keys: Sequence[Key], patience: float = 30.0) -> None:
    """Return when the scheduler knows none of the keys: computed again before that, they would be as they are.

    Raises
    ------
    TimeoutError
        After `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while left := client.run_on_scheduler(_known, keys=keys):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{left} tasks are still on the scheduler after {patience:g} s")
        time.sleep(0.01)


def _known(keys: Sequence[Key], dask_scheduler: Any) -> int:
    return sum(key in dask_scheduler.tasks for key in keys)


# ---- in the worker -----------------------------------------------------------------------------------------


def sleep(seconds: float, nbytes: int, slow_worker: str | None, inputs: Sequence[Any]) -> bytes:
    """Wait, and return so many bytes."""
    if slow_worker is not None and get_worker().address == slow_worker:
        seconds *= SLOWER
    if seconds > 0:
        time.sleep(seconds)
    return bytes(nbytes)


def compute(kernel: str, index: tuple[int, ...], rows: int, inputs: Sequence[Any]) -> Any:
    """Return the tile that a real kernel makes of its inputs."""
    return KERNELS[kernel](index, rows, list(inputs))


def matrix(i: int, j: int, rows: int) -> Any:
    """Return tile (i, j) of the symmetric positive definite matrix that Cholesky graphs factor."""
    import numpy as np

    at = np.arange(rows)
    row, column = i * rows + at[:, None], j * rows + at[None, :]
    # Of an exponential covariance; the diagonal keeps it well conditioned whatever its size.
    return np.exp(-np.abs(row - column) / 8.0) + (row == column)


def operand(i: int, j: int, rows: int) -> Any:
    """Return tile (i, j) of both operands of GEMM graphs."""
    import numpy as np

    at = np.arange(rows)
    return np.cos(0.1 * (i * rows + at[:, None]) + 0.3 * (j * rows + at[None, :]))


def _linalg() -> Any:
    # Real kernels alone need it.
    return import_module("scipy.linalg")


def _potrf(index: tuple[int, ...], rows: int, inputs: list[Any]) -> Any:
    (k,) = index
    return _linalg().cholesky(inputs[0] if inputs else matrix(k, k, rows), lower=True)


def _trsm(index: tuple[int, ...], rows: int, inputs: list[Any]) -> Any:
    i, k = index
    tile = inputs[1] if len(inputs) > 1 else matrix(i, k, rows)
    return _linalg().solve_triangular(inputs[0], tile.T, lower=True).T


def _syrk(index: tuple[int, ...], rows: int, inputs: list[Any]) -> Any:
    i, _ = index
    tile = inputs[1] if len(inputs) > 1 else matrix(i, i, rows)
    return tile - inputs[0] @ inputs[0].T


def _update(index: tuple[int, ...], rows: int, inputs: list[Any]) -> Any:
    """Cholesky's update of tile (i, j)."""
    i, j, _ = index
    tile = inputs[2] if len(inputs) > 2 else matrix(i, j, rows)
    return tile - inputs[0] @ inputs[1].T


def _product(index: tuple[int, ...], rows: int, inputs: list[Any]) -> Any:
    product = inputs[0] @ inputs[1]
    return product + inputs[2] if len(inputs) > 2 else product


def _tile(index: tuple[int, ...], rows: int, inputs: list[Any]) -> Any:
    i, j = index
    return operand(i, j, rows)


KERNELS: Mapping[str, Callable[[tuple[int, ...], int, list[Any]], Any]] = {
    "potrf": _potrf,
    "trsm": _trsm,
    "syrk": _syrk,
    "gemm": _update,
    "product": _product,
    "tile": _tile,
}


def _index(spec: TaskSpec) -> tuple[int, ...]:
    assert isinstance(spec.key, tuple)
    return spec.key[1:]


def _rows(spec: TaskSpec) -> int:
    """The rows of a square float64 tile of the task's bytes."""
    return max(isqrt(spec.nbytes // _FLOAT), 1)


def _check_real(graph: TaskGraph) -> None:
    if not any(spec.kernel in KERNELS for spec in graph.tasks):
        raise ConfigError(f"workload {graph.name}: it has sleeps alone; real kernels: cholesky, gemm")
    if importlib.util.find_spec("scipy") is None:
        raise ConfigError('real kernels need scipy: pip install "dask-ferro[bench]"')
