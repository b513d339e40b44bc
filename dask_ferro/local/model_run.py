"""A measured run of a model on a cluster, compared with projections: the value behind `dask ferro benchmark`.

The model and its inputs are checked before a cluster is started.  The first of several runs is cold (workers open the
model and build sessions): the median is that of the others.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from distributed import Client, get_task_stream

from dask_ferro import testing
from dask_ferro.errors import InputError
from dask_ferro.graph.bundling.plan import Granularity, dag
from dask_ferro.graph.bundling.summary import OpRow, bound, over_chunks, per_op
from dask_ferro.local.array_files import read, save
from dask_ferro.local.cluster_context import connect, start_cluster
from dask_ferro.local.progress import Progress, follow
from dask_ferro.lower.model.collection import Model, from_onnx, opened_of
from dask_ferro.lower.model.inventory import spec_as_dict
from dask_ferro.lower.signature import Signature, ValueSpec, by_name, synthetic
from dask_ferro.observe.tracing import profile, trace_suffix


@dataclass(frozen=True)
class RunRequest:
    """The model to run, the cluster, and the number of runs: the options of `dask ferro benchmark`, documented
    there.
    """

    model: str | None = None
    workload: str | None = None
    params: Sequence[tuple[str, int | float]] = ()
    source: Path | None = None
    sink: Path | None = None
    workers: int | None = None
    threads: int | None = None
    batch: int | None = None
    rows: int | None = None
    scheduler: str | None = None
    granularity: Granularity = "auto"
    dashboard: bool = False
    repeat: int = 1
    trace: str | None = None
    quiet: bool = True


class WorkerShare(NamedTuple):
    """One worker's share: tasks run, and seconds spent in them."""

    address: str
    tasks: int
    busy: float


class RunningCluster(NamedTuple):
    """The cluster of a run: its scheduler, its dashboard, and threads by worker address."""

    scheduler: str
    dashboard: str | None
    workers: Mapping[str, int]

    @property
    def slots(self) -> int:
        """The number of tasks that run at a time."""
        return sum(self.workers.values())


class MeasuredRun(NamedTuple):
    """A measured run: the result in the client, the seconds until it arrived, and each worker's share."""

    result: Any
    seconds: float
    workers: tuple[WorkerShare, ...]


Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class Trial:
    """The measurements of a model's runs, with the projections; the fields are those of the JSON output.

    Attributes
    ----------
    rows, batch : int or None
        Total rows, and rows per task; None for a graph without batch.
    runs : int
        Number of executions of the model's nodes: chunks times slices of a fixed batch size.
    seconds : tuple of float
        Seconds of each run, from submission until the result was in the client.
    projected_seconds : float
        Projected makespan with Dask's overheads, for the kernels' speed on a laptop's core.
    bound_seconds : float
        Lower bound max(work / threads, critical path), from the same seconds.
    workers : tuple of WorkerShare
        Workers' shares of the last run.
    output : str or None
        The file with the outputs.
    """

    model: str
    digest: str
    source: str
    inputs: tuple[ValueSpec, ...]
    outputs: Mapping[str, tuple[str, tuple[int, ...]]]
    cluster: RunningCluster
    ops: tuple[OpRow, ...]
    bundles: int
    chunks: int
    rows: int | None
    batch: int | None
    runs: int
    seconds: tuple[float, ...]
    projected_seconds: float
    bound_seconds: float
    workers: tuple[WorkerShare, ...]
    output: str | None

    @property
    def median(self) -> float:
        """The median of all runs but the first, or the only run."""
        return median(self.seconds[1:] or self.seconds)

    @property
    def ops_per_s(self) -> float:
        """Executed nodes per second."""
        return self.runs * sum(row.nodes for row in self.ops) / self.median

    @property
    def rows_per_s(self) -> float | None:
        """Processed rows per second."""
        return None if self.rows is None else self.rows / self.median

    def as_dict(self) -> dict[str, Any]:
        """Return the trial in JSON's types."""
        return {
            **vars(self),
            "inputs": [spec_as_dict(s) for s in self.inputs],
            "outputs": {n: {"dtype": d, "shape": list(s)} for n, (d, s) in self.outputs.items()},
            "cluster": self.cluster._asdict(),
            "ops": [row._asdict() for row in self.ops],
            "workers": [share._asdict() for share in self.workers],
            "median_seconds": self.median,
            "ops_per_s": self.ops_per_s,
            "rows_per_s": self.rows_per_s,
        }


def trial(
    request: RunRequest,
    *,
    tell: Callable[[str], None] = lambda line: None,
    watching: Callable[[], AbstractContextManager[Watch | None]] = lambda: nullcontext(None),
) -> Trial:
    """Run a model or a built-in graph, and return measurements and projections.

    Parameters
    ----------
    request : RunRequest
    tell : callable
        Called with a line of text about each step.
    watching : callable
        Returns a context manager, entered for each run, whose value receives the progress.

    Raises
    ------
    ModelError, UnsupportedOpError
        For an invalid model, before a cluster is started.
    InputError
        For unsuitable inputs, outputs or addresses.
    Exception
        The error of a failed task.
    """
    model = _model(request)
    arrays, origin = _inputs(request, model)
    _check_sink(request.sink, model)
    if request.trace:
        trace_suffix(request.trace)
    # Unsuitable inputs are reported before a cluster is started.
    model(arrays)
    with _client(request) as client:
        place = _place(request, client)
        tell(f"{place.scheduler}: {len(place.workers)} workers, {place.slots} threads")
        if place.dashboard:
            tell(f"dashboard at {place.dashboard}")
        batch = request.batch
        if batch is None and request.model:
            batch = chunk_per_thread(model, arrays, place.slots)
        planned, results_of_rows = model.planned(arrays, batch_size=batch), model(arrays, batch_size=batch)
        seconds = []
        for number in range(request.repeat):
            # Only one run is traced: the last, which is warm.
            is_last = number + 1 == request.repeat
            recording = profile(client) if request.trace and is_last else None
            with recording or nullcontext(), watching() as watch:
                measured = execute(client, results_of_rows, watch=watch)
            if request.trace and recording is not None:
                recording.write(request.trace)
            seconds.append(measured.seconds)
            tell(f"run {number + 1} of {request.repeat}: {measured.seconds:.4g} s")
        if request.trace:
            tell(f"trace in {request.trace}")
        specs = opened_of(model).signature.outputs
        results = {specs[0].name: measured.result} if len(specs) == 1 else dict(measured.result)
        if request.sink:
            save(request.sink, results)
        opened, chunks = planned.model, planned.chunks
        sig, ir_model = opened.signature, opened.loaded.model
        rows = row_count(sig, arrays) if request.model else None
        of_chunk = rows if rows is None else min(rows, batch or rows)
        sized = opened.sized(arrays, of_chunk)
        # A model of batch 1 runs once for each row.
        repeats = of_chunk if of_chunk and sig.fixed_rows else 1
        return Trial(
            model=model.name,
            digest=model.digest,
            source=origin,
            inputs=sig.inputs,
            outputs={
                n: (str(getattr(r, "dtype", type(r).__name__)), np.shape(r)) for n, r in results.items()
            },
            cluster=place,
            ops=tuple(per_op(ir_model, sized.cost)),
            bundles=len(planned.bundles),
            chunks=chunks,
            rows=rows,
            batch=batch,
            runs=chunks * repeats,
            seconds=tuple(seconds),
            projected_seconds=over_chunks(planned.plan, chunks, workers=place.slots, slices=repeats),
            bound_seconds=bound(dag(ir_model, sized.types, sized.cost.seconds)).over(
                place.slots, chunks * repeats
            ),
            workers=measured.workers,
            output=str(request.sink) if request.sink else None,
        )


def _client(request: RunRequest) -> AbstractContextManager[Client]:
    if request.scheduler:
        return connect(request.scheduler)
    return start_cluster(request.workers, request.threads, dashboard=request.dashboard, quiet=request.quiet)


def _place(request: RunRequest, client: Client) -> RunningCluster:
    scheduler: Any = client.scheduler
    link = client.dashboard_link if request.scheduler or request.dashboard else None
    return RunningCluster(scheduler.address, link or None, dict(client.nthreads()))


# ---- a run ------------------------------------------------------------------------------------------------


def execute(client: Client, collection: object, *, watch: Watch | None = None) -> MeasuredRun:
    """Compute a collection and fetch its result.

    Parameters
    ----------
    client : distributed.Client
    collection : Dask collection
    watch : callable, optional
        ``watch(progress)``, called at intervals during the run.

    Raises
    ------
    Exception
        The error of the failed task, as raised in the worker.
    """
    # Opened before the submission, since the first tasks may be done when that returns.
    with get_task_stream(client) as stream:
        start = time.perf_counter()
        future = client.compute(collection)
        # Beside the run, which its end does not have to wait for.
        loop: Any = client.loop
        watching = asyncio.run_coroutine_threadsafe(_watch(client, future, watch), loop.asyncio_loop)
        try:
            result = future.result()
            elapsed = time.perf_counter() - start
            watching.result()
        finally:
            watching.cancel()
    return MeasuredRun(result, elapsed, shares(stream.data))


async def _watch(client: Client, future: Any, watch: Watch | None) -> None:
    if watch is not None:
        async for seen in follow(client, [future]):
            watch(seen)


def shares(records: Iterable[dict[str, Any]]) -> tuple[WorkerShare, ...]:
    """Return each worker's share from the records of a task stream, by address."""
    tasks: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    for record in records:
        tasks[record["worker"]] += 1
        for span in record["startstops"]:
            if span["action"] == "compute":
                busy[record["worker"]] += span["stop"] - span["start"]
    return tuple(WorkerShare(w, tasks[w], float(busy[w])) for w in sorted(tasks))


# ---- before it runs ----------------------------------------------------------------------------------------


def _model(request: RunRequest) -> Model:
    source = request.model if request.model else testing.build(str(request.workload), **dict(request.params))
    return from_onnx(source, granularity=request.granularity)


def _inputs(request: RunRequest, model: Model) -> tuple[dict[str, Any], str]:
    """Return the arrays by name, and their origin."""
    sig = opened_of(model).signature
    if request.source is None:
        # With a given number of rows, a model of fixed batch size is run slice by slice.
        free = replace(sig, batch=None) if request.rows else sig
        return synthetic(free, request.rows), "synthetic, seeded"
    return by_name(sig, read(request.source), str(request.source)), str(request.source)


def _check_sink(sink: Path | None, model: Model) -> None:
    if sink is None:
        return
    specs = opened_of(model).signature.outputs
    if sink.suffix == ".npy" and len(specs) > 1:
        names = ", ".join(s.name for s in specs)
        raise InputError(
            f"output {str(sink)!r} holds one array, the model has {len(specs)} ({names}): use .npz"
        )
    other = [f"{s.name} is a {s.kind}" for s in specs if s.kind != "tensor"]
    if other:
        raise InputError(f"output {str(sink)!r} holds arrays, but {', '.join(other)}; run it from Python")


def row_count(sig: Signature, arrays: Mapping[str, Any]) -> int | None:
    """Return the length of the inputs along the batch axis; None if the model declares no batch."""
    carried = [arrays[s.name] for s, c in zip(sig.inputs, sig.carries, strict=True) if c]
    return len(carried[0]) if carried else None


def chunk_per_thread(model: Model, arrays: Mapping[str, Any], threads: int) -> int | None:
    """Return the rows of a chunk so that each thread has one; None if rows are not known to be independent."""
    sig = opened_of(model).signature
    rows = {len(arrays[s.name]) for s, c in zip(sig.inputs, sig.carries, strict=True) if c}
    if len(rows) != 1 or not all(sig.gives) or (isinstance(sig.batch, int) and not sig.fixed_rows):
        return None
    (count,) = rows
    # Checked last, as it follows rows through the whole graph.
    if threads < 2 or count < 2 or opened_of(model).row_dependence(arrays):
        return None
    return ceil(count / threads)
