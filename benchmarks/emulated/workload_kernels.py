"""The simulator's task graphs as Dask graphs: tasks sleep for their seconds, or run real kernels of Cholesky and GEMM.

A sleep occupies its thread and uses no CPU, so that many workers fit on a few cores and the makespan shows the schedule
alone.  Its result has the task's number of bytes.  Real kernels compute on float64 tiles of that size by LAPACK: a
Cholesky graph returns the factor of `matrix(...)`.
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

from dask_ferro.errors import InputError
from dask_ferro.lower.upstream import List, Task, TaskRef
from dask_ferro.simulate.graphs.taskgraph import Key, TaskGraph, TaskSpec
from emulated import declared as declared_device

# The factor by which a task takes longer on the slow worker, as in the straggler test of coiled/benchmarks.
SLOWER = 10.0
_FLOAT = 8


def dask_graph(
    graph: TaskGraph, *, kernel: str = "sleep", time_scale: float = 1.0, slow_worker: str | None = None
) -> tuple[dict[Key, Task], list[Key]]:
    """Return the graph's tasks for Dask, and the keys of its outputs.

    Parameters
    ----------
    kernel : {"sleep", "real", "declared"}
        "real": the kernels that the graph names; a task without one still sleeps.  "declared": kernels of declared
        devices (`declared_device.compute`), which sleep as long as the worker's device would take.
    time_scale : float
        A factor for the seconds of all sleeps.
    slow_worker : str, optional
        The address of a worker on which sleeps take ten times as long.

    Raises
    ------
    InputError
        For an unknown kernel, "real" with a graph that names no kernel, or if scipy is missing.
    """
    if kernel not in ("sleep", "real", "declared"):
        raise InputError(f'kernel: got {kernel!r}, wanted "sleep", "real" or "declared"')
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
    """Submit a graph with its estimates and pinned tasks as annotations; return futures of its outputs.

    Parameters
    ----------
    **options
        Options of `dask_graph`.
    """
    tasks, outputs = dask_graph(graph, **options)
    annotations: dict[str, Callable[[Key], Any]] = {}
    estimates = {t.key: {"seconds": t.annotated} for t in graph.tasks if t.annotated is not None}
    if estimates:
        annotations["ferro"] = estimates.get
    if graph.pinned == "one":
        # -1: all workers, as Dask returns five by default; the smallest address is the same in every run.
        first = min(client.scheduler_info(n_workers=-1)["workers"])
        annotations["workers"] = {t.key: [first] for t in graph.tasks if not t.dependencies}.get
    layer = MaterializedLayer(tasks, annotations=annotations)
    return client.get(HighLevelGraph({graph.name: layer}, {graph.name: set()}), outputs, sync=False)


def run(
    client: Client, graph: TaskGraph, *, submitted: Callable[[], object] = lambda: None, **options: Any
) -> float:
    """Run a graph, and return the seconds from its submission until all outputs are computed.

    The outputs are not gathered.  They are released before this returns, and the scheduler has then forgotten all
    tasks, so that the same graph can run again.

    Parameters
    ----------
    submitted : callable
        Called after the submission.
    **options
        Options of `dask_graph`.
    """
    start = time.perf_counter()
    futures = submit(client, graph, **options)
    submitted()
    # `wait` uses the event loop of the current client, even for futures of another.
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
    """Wait until the scheduler has forgotten the keys; submitted before that, they would not be computed again.

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
    """Sleep for the given seconds, and return `nbytes` bytes."""
    if slow_worker is not None and get_worker().address == slow_worker:
        seconds *= SLOWER
    if seconds > 0:
        time.sleep(seconds)
    return bytes(nbytes)


def compute(kernel: str, index: tuple[int, ...], rows: int, inputs: Sequence[Any]) -> Any:
    """Return the tile that a real kernel computes from its inputs."""
    return KERNELS[kernel](index, rows, list(inputs))


def matrix(i: int, j: int, rows: int) -> Any:
    """Return tile (i, j) of the symmetric positive definite matrix that Cholesky graphs factor."""
    import numpy as np

    at = np.arange(rows)
    row, column = i * rows + at[:, None], j * rows + at[None, :]
    # An exponential covariance; adding the identity keeps it well conditioned at any size.
    return np.exp(-np.abs(row - column) / 8.0) + (row == column)


def operand(i: int, j: int, rows: int) -> Any:
    """Return tile (i, j) of both operands of GEMM graphs."""
    import numpy as np

    at = np.arange(rows)
    return np.cos(0.1 * (i * rows + at[:, None]) + 0.3 * (j * rows + at[None, :]))


def _linalg() -> Any:
    # Imported late: only real kernels need scipy.
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
    """Return Cholesky's update of tile (i, j)."""
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
    """Return the rows of a square float64 tile that has the task's bytes."""
    return max(isqrt(spec.nbytes // _FLOAT), 1)


def _check_real(graph: TaskGraph) -> None:
    if not any(spec.kernel in KERNELS for spec in graph.tasks):
        raise InputError(
            f'workload {graph.name}: its tasks have no real kernels; wanted cholesky, gemm, or kernel "sleep"'
        )
    if importlib.util.find_spec("scipy") is None:
        raise InputError('real kernels need scipy: pip install "dask-ferro[bench]"')
