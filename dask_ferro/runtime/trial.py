"""One trial: a model on a cluster, measured, beside what was projected.  The value behind `dask ferro run`.

A model is checked, and so are its inputs, before a cluster is started.  The first of several runs is cold
(workers open the model and build sessions): the median is that of the others.  Durations are seconds.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from dask.system import CPU_COUNT
from distributed import Client

from dask_ferro.errors import ConfigError
from dask_ferro.graph import workloads
from dask_ferro.graph.bundle import Granularity
from dask_ferro.graph.dag import dag
from dask_ferro.graph.summary import OpRow, bound, over_chunks, per_op
from dask_ferro.lower import ModelGraph, from_onnx
from dask_ferro.lower.inventory import slices, spec_as_dict
from dask_ferro.lower.signature import Signature, ValueSpec, by_name, synthetic
from dask_ferro.runtime.execute import Watch, WorkerShare, execute
from dask_ferro.runtime.interrupts import held
from dask_ferro.runtime.local import LocalCluster

# A chunk of its own is given to a thread when it is worth this much: five times what a task costs in all.
_WORTH_A_CHUNK_S = 0.012
# A cluster that is named exists; its workers may still be on their way.
_CONNECT_S = 10
_WORKERS_S = 30


@dataclass(frozen=True)
class Request:
    """What to run, where, and how often; the options of `dask ferro run`, which explains them."""

    model: str | None = None
    dag: str | None = None
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
    quiet: bool = True


@dataclass(frozen=True)
class Place:
    """A cluster: its scheduler, dashboard, and threads by worker address."""

    scheduler: str
    dashboard: str | None
    threads: Mapping[str, int]

    @property
    def slots(self) -> int:
        """Tasks that run at a time."""
        return sum(self.threads.values())


@dataclass(frozen=True)
class Trial:
    """What ran, where, how long it took, and how long it should have taken.

    Attributes
    ----------
    rows, batch : int or None
        Rows in all and per task; None for a graph that has no batch.
    runs : int
        How often the model's nodes ran: chunks, times the slices of a fixed batch size.
    seconds : tuple of float
        Of each repetition, from submission until the result was in the client.
    projected : float
        Makespan with Dask's overheads, for the kernels' speed on a laptop's core.
    bound : float
        max(work / threads, critical path), from the same seconds.
    shares : tuple of WorkerShare
        Of the last repetition.
    """

    name: str
    digest: str
    source: str
    inputs: tuple[ValueSpec, ...]
    outputs: Mapping[str, tuple[str, tuple[int, ...]]]
    place: Place
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
        """Seconds of a run that is not the first, where there is one."""
        return median(self.seconds[1:] or self.seconds)

    @property
    def ops_per_s(self) -> float:
        """Nodes that ran in a second."""
        return self.runs * sum(row.nodes for row in self.ops) / self.median

    @property
    def rows_per_s(self) -> float | None:
        """Rows that were answered in a second."""
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
    request: Request,
    *,
    tell: Callable[[str], None] = lambda line: None,
    watching: Callable[[], AbstractContextManager[Watch | None]] = lambda: nullcontext(None),
) -> Trial:
    """Run a model or a built-in graph, and return what was measured beside what was projected.

    Parameters
    ----------
    request : Request
    tell : callable
        Told in a line what happens next.
    watching : callable
        Returns a context, entered once for each run, of a function that is told (tasks done, tasks in all).

    Raises
    ------
    ModelError, UnsupportedOp
        Before a cluster is started.
    ConfigError
        For inputs, outputs or an address that do not fit.
    Exception
        The error of a task that failed.
    """
    model = _model(request)
    arrays, origin = _inputs(request, model)
    _check_sink(request.sink, model)
    model(arrays)  # what does not fit is told before a cluster is started
    with _cluster(request) as (client, place):
        tell(f"{place.scheduler}: {len(place.threads)} workers, {place.slots} threads")
        if place.dashboard:
            tell(f"dashboard at {place.dashboard}")
        batch = request.batch or (chunk_rows(model, arrays, place.slots) if request.model else None)
        bound_model = model(arrays, batch=batch)
        seconds = []
        for number in range(request.repeat):
            with watching() as watch:
                measured = execute(client, bound_model, watch=watch)
            seconds.append(measured.seconds)
            tell(f"run {number + 1} of {request.repeat}: {measured.seconds:.4g} s")
        results = _named(bound_model, measured.result)
        if request.sink:
            save(request.sink, results)
        return _compared(
            request, bound_model, arrays, batch, place, seconds, measured.workers, results, origin
        )


# ---- before it runs ----------------------------------------------------------------------------------------


def _model(request: Request) -> ModelGraph:
    source = request.model if request.model else workloads.build(str(request.dag), **dict(request.params))
    return from_onnx(source, granularity=request.granularity)


def _inputs(request: Request, model: ModelGraph) -> tuple[dict[str, Any], str]:
    """The arrays by name, and where they come from."""
    sig = model._opened.signature
    if request.source is None:
        free = (
            replace(sig, batch=None) if request.rows else sig
        )  # rows of a fixed batch size are run in slices
        return synthetic(free, request.rows), "synthetic, seeded"
    return by_name(sig, read(request.source), str(request.source)), str(request.source)


def read(path: Path) -> Any:
    """Return the array of an .npy file, memory-mapped, or the arrays of an .npz file by name.

    Raises
    ------
    ConfigError
        For a file that is neither, or that holds Python objects.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"input {str(path)!r} is not a readable {path.suffix} file: {error}") from error


def _check_sink(sink: Path | None, model: ModelGraph) -> None:
    if sink is None:
        return
    specs = model._opened.signature.outputs
    if sink.suffix == ".npy" and len(specs) > 1:
        names = ", ".join(s.name for s in specs)
        raise ConfigError(
            f"output {str(sink)!r} holds one array, the model has {len(specs)} ({names}): use .npz"
        )
    other = [f"{s.name} is a {s.kind}" for s in specs if s.kind != "tensor"]
    if other:
        raise ConfigError(f"output {str(sink)!r} holds arrays, but {', '.join(other)}; run it from Python")


def chunk_rows(model: ModelGraph, arrays: Mapping[str, Any], slots: int) -> int | None:
    """Return rows per task so that each thread has one, where that is worth it; None to leave inputs whole."""
    sig = model._opened.signature
    rows = row_count(sig, arrays)
    if rows is None or not all(sig.gives):
        return None
    whole = model._opened.sized(arrays, rows).seconds * slices(sig, rows)
    pieces = min(slots, rows, int(whole / _WORTH_A_CHUNK_S))
    return ceil(rows / pieces) if pieces > 1 else None


def row_count(sig: Signature, arrays: Mapping[str, Any]) -> int | None:
    """Return the length of the inputs along the batch axis; None where the model declares no batch."""
    carried = [arrays[s.name] for s, c in zip(sig.inputs, sig.carries, strict=True) if c]
    return len(carried[0]) if carried else None


# ---- where it runs -----------------------------------------------------------------------------------------


@contextmanager
def _cluster(request: Request) -> Iterator[tuple[Client, Place]]:
    if request.scheduler:
        with _connected(request.scheduler) as client:
            yield client, _place(client, dashboard=True)
        return
    with ExitStack() as stack:
        with held():
            cluster = stack.enter_context(_local(request))
        client = stack.enter_context(Client(cluster))
        yield client, _place(client, dashboard=request.dashboard)


def _local(request: Request) -> LocalCluster:
    threads = request.threads or 1
    return LocalCluster(
        n_workers=request.workers or max(1, CPU_COUNT // threads),
        threads_per_worker=threads,
        dashboard_address=":8787" if request.dashboard else ":0",
        scheduler_kwargs={"dashboard": request.dashboard},  # Dask serves metrics in any case: at any port
        silence_logs=logging.CRITICAL if request.quiet else logging.WARNING,
    )


def _connected(address: str) -> Client:
    try:
        client = Client(address, timeout=f"{_CONNECT_S}s")
    except (OSError, ValueError, TimeoutError) as error:
        raise ConfigError(f"scheduler {address!r}: cannot connect: {error}") from error
    try:
        client.wait_for_workers(1, timeout=_WORKERS_S)
    except TimeoutError:
        client.close()
        raise ConfigError(f"scheduler {address!r}: no worker within {_WORKERS_S} s; start one") from None
    return client


def _place(client: Client, *, dashboard: bool) -> Place:
    scheduler: Any = client.scheduler
    link = client.dashboard_link if dashboard else None
    return Place(scheduler.address, link or None, dict(client.nthreads()))


# ---- after it ran ------------------------------------------------------------------------------------------


def _named(model: ModelGraph, result: Any) -> dict[str, Any]:
    specs = model._opened.signature.outputs
    return {specs[0].name: result} if len(specs) == 1 else dict(result)


def save(path: Path, results: Mapping[str, Any]) -> None:
    """Write arrays to an .npy or .npz file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            if path.suffix == ".npy":
                np.save(file, _storable(next(iter(results.values()))), allow_pickle=False)
            else:
                _write_npz(file, results)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _write_npz(file: Any, results: Mapping[str, Any]) -> None:
    # numpy.savez takes names as keywords, so an output called "file" would be lost.
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in results.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, _storable(value), allow_pickle=False)


def _storable(value: Any) -> Any:
    array = np.asarray(value)
    return array.astype(np.str_) if array.dtype.kind == "O" else array


def _compared(
    request: Request,
    model: ModelGraph,
    arrays: Mapping[str, Any],
    batch: int | None,
    place: Place,
    seconds: Sequence[float],
    shares: tuple[WorkerShare, ...],
    results: Mapping[str, Any],
    origin: str,
) -> Trial:
    sig, chunks = model._opened.signature, model.chunks
    rows = row_count(sig, arrays) if request.model else None
    of_chunk = rows if rows is None else min(rows, batch or rows)
    types = model._opened.sized(arrays, of_chunk).types
    ir_model = model._opened.loaded.model
    repeats = slices(sig, of_chunk) if of_chunk else 1
    whole = bound(dag(ir_model, types))
    return Trial(
        name=model.name,
        digest=model.digest,
        source=origin,
        inputs=sig.inputs,
        outputs={n: (str(getattr(r, "dtype", type(r).__name__)), np.shape(r)) for n, r in results.items()},
        place=place,
        ops=tuple(per_op(ir_model, types)),
        bundles=len(model.bundles),
        chunks=chunks,
        rows=rows,
        batch=batch,
        runs=chunks * repeats,
        seconds=tuple(seconds),
        projected=over_chunks(model.plan, chunks, workers=place.slots, slices=repeats),
        bound=whole.over(place.slots, chunks * repeats),
        shares=shares,
        sink=str(request.sink) if request.sink else None,
    )
