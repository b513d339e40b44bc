"""A measured run of a model on a cluster, compared with projections: the value behind `dask ferro run`.

The model and its inputs are checked before a cluster is started.  The first of several runs is cold (workers open the
model and build sessions): the median is that of the others.  Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from distributed import Client

from dask_ferro.errors import ConfigError
from dask_ferro.graph import workloads
from dask_ferro.graph.bundling.plan import dag
from dask_ferro.graph.bundling.select import Granularity
from dask_ferro.graph.bundling.summary import OpRow, bound, over_chunks, per_op
from dask_ferro.lower import ModelGraph, from_onnx
from dask_ferro.lower.model.collection import opened_of
from dask_ferro.lower.model.inventory import slices, spec_as_dict
from dask_ferro.lower.signature import Signature, ValueSpec, by_name, synthetic
from dask_ferro.runtime.local.array_files import read, save
from dask_ferro.runtime.local.cluster_context import RunningCluster, connected, started
from dask_ferro.runtime.local.execute import Watch, WorkerShare, execute
from dask_ferro.runtime.telemetry.tracing import checked, trace


@dataclass(frozen=True)
class RunRequest:
    """The model to run, the cluster, and the number of runs: the options of `dask ferro run`, documented there."""

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


@dataclass(frozen=True)
class Trial:
    """The measurements of a model's runs, with the projections.

    Attributes
    ----------
    rows, batch : int or None
        Total rows, and rows per task; None for a graph without batch.
    runs : int
        Number of executions of the model's nodes: chunks times slices of a fixed batch size.
    seconds : tuple of float
        Seconds of each run, from submission until the result was in the client.
    projected : float
        Projected makespan with Dask's overheads, for the kernels' speed on a laptop's core.
    bound : float
        Lower bound max(work / threads, critical path), from the same seconds.
    shares : tuple of WorkerShare
        Workers' shares of the last run.
    """

    name: str
    digest: str
    source: str
    inputs: tuple[ValueSpec, ...]
    outputs: Mapping[str, tuple[str, tuple[int, ...]]]
    place: RunningCluster
    ops: tuple[OpRow, ...]
    bundles: int
    chunks: int
    rows: int | None
    batch: int | None
    runs: int
    seconds: tuple[float, ...]
    projected: float
    bound: float
    shares: tuple[WorkerShare, ...]
    sink: str | None

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
            "model": self.name,
            "digest": self.digest,
            "source": self.source,
            "inputs": [spec_as_dict(s) for s in self.inputs],
            "outputs": {n: {"dtype": d, "shape": list(s)} for n, (d, s) in self.outputs.items()},
            "cluster": {
                "scheduler": self.place.scheduler,
                "dashboard": self.place.dashboard,
                "workers": dict(self.place.threads),
            },
            "rows": self.rows,
            "batch": self.batch,
            "chunks": self.chunks,
            "bundles": self.bundles,
            "runs": self.runs,
            "ops": [row._asdict() for row in self.ops],
            "seconds": list(self.seconds),
            "median_seconds": self.median,
            "ops_per_s": self.ops_per_s,
            "rows_per_s": self.rows_per_s,
            "projected_seconds": self.projected,
            "bound_seconds": self.bound,
            "workers": [share._asdict() for share in self.shares],
            "output": self.sink,
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
    ModelError, UnsupportedOp
        For an invalid model, before a cluster is started.
    ConfigError
        For unsuitable inputs, outputs or addresses.
    Exception
        The error of a failed task.
    """
    model = _model(request)
    arrays, origin = _inputs(request, model)
    _check_sink(request.sink, model)
    if request.trace:
        checked(request.trace)
    # Unsuitable inputs are reported before a cluster is started.
    model(arrays)
    with _cluster(request) as (client, place):
        tell(f"{place.scheduler}: {len(place.threads)} workers, {place.slots} threads")
        if place.dashboard:
            tell(f"dashboard at {place.dashboard}")
        batch = request.batch
        if batch is None and request.model:
            batch = chunk_per_thread(model, arrays, place.slots)
        bound_model = model(arrays, batch=batch)
        seconds = []
        for number in range(request.repeat):
            # Only one run is traced: the last, which is warm.
            is_last = number + 1 == request.repeat
            recording = trace(client) if request.trace and is_last else None
            with recording or nullcontext(), watching() as watch:
                measured = execute(client, bound_model, watch=watch)
            if request.trace and recording is not None:
                recording.write(request.trace)
            seconds.append(measured.seconds)
            tell(f"run {number + 1} of {request.repeat}: {measured.seconds:.4g} s")
        if request.trace:
            tell(f"trace in {request.trace}")
        results = _named(bound_model, measured.result)
        if request.sink:
            save(request.sink, results)
        ran = _Ran(place, batch, tuple(seconds), measured.workers, results)
        return _compared(request, bound_model, arrays, origin, ran)


def _cluster(request: RunRequest) -> AbstractContextManager[tuple[Client, RunningCluster]]:
    if request.scheduler:
        return connected(request.scheduler)
    return started(request.workers, request.threads, dashboard=request.dashboard, quiet=request.quiet)


# ---- before it runs ----------------------------------------------------------------------------------------


def _model(request: RunRequest) -> ModelGraph:
    source = (
        request.model if request.model else workloads.build(str(request.workload), **dict(request.params))
    )
    return from_onnx(source, granularity=request.granularity)


def _inputs(request: RunRequest, model: ModelGraph) -> tuple[dict[str, Any], str]:
    """Return the arrays by name, and their origin."""
    sig = opened_of(model).signature
    if request.source is None:
        # With a given number of rows, a model of fixed batch size is run slice by slice.
        free = replace(sig, batch=None) if request.rows else sig
        return synthetic(free, request.rows), "synthetic, seeded"
    return by_name(sig, read(request.source), str(request.source)), str(request.source)


def _check_sink(sink: Path | None, model: ModelGraph) -> None:
    if sink is None:
        return
    specs = opened_of(model).signature.outputs
    if sink.suffix == ".npy" and len(specs) > 1:
        names = ", ".join(s.name for s in specs)
        raise ConfigError(
            f"output {str(sink)!r} holds one array, the model has {len(specs)} ({names}): use .npz"
        )
    other = [f"{s.name} is a {s.kind}" for s in specs if s.kind != "tensor"]
    if other:
        raise ConfigError(f"output {str(sink)!r} holds arrays, but {', '.join(other)}; run it from Python")


def row_count(sig: Signature, arrays: Mapping[str, Any]) -> int | None:
    """Return the length of the inputs along the batch axis; None if the model declares no batch."""
    carried = [arrays[s.name] for s, c in zip(sig.inputs, sig.carries, strict=True) if c]
    return len(carried[0]) if carried else None


def chunk_per_thread(model: ModelGraph, arrays: Mapping[str, Any], threads: int) -> int | None:
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


# ---- after it ran ------------------------------------------------------------------------------------------


def _named(model: ModelGraph, result: Any) -> dict[str, Any]:
    specs = opened_of(model).signature.outputs
    return {specs[0].name: result} if len(specs) == 1 else dict(result)


class _Ran(NamedTuple):
    place: RunningCluster
    batch: int | None
    seconds: tuple[float, ...]
    shares: tuple[WorkerShare, ...]
    results: Mapping[str, Any]


def _compared(
    request: RunRequest, model: ModelGraph, arrays: Mapping[str, object], origin: str, ran: _Ran
) -> Trial:
    opened, chunks = opened_of(model), model.chunks
    sig, ir_model = opened.signature, opened.loaded.model
    rows = row_count(sig, arrays) if request.model else None
    of_chunk = rows if rows is None else min(rows, ran.batch or rows)
    types = opened.sized(arrays, of_chunk).types
    repeats = slices(sig, of_chunk) if of_chunk else 1
    whole = bound(dag(ir_model, types))
    return Trial(
        name=model.name,
        digest=model.digest,
        source=origin,
        inputs=sig.inputs,
        outputs={
            n: (str(getattr(r, "dtype", type(r).__name__)), np.shape(r)) for n, r in ran.results.items()
        },
        place=ran.place,
        ops=tuple(per_op(ir_model, types)),
        bundles=len(model.bundles),
        chunks=chunks,
        rows=rows,
        batch=ran.batch,
        runs=chunks * repeats,
        seconds=ran.seconds,
        projected=over_chunks(model.plan, chunks, workers=ran.place.slots, slices=repeats),
        bound=whole.over(ran.place.slots, chunks * repeats),
        shares=ran.shares,
        sink=str(request.sink) if request.sink else None,
    )
