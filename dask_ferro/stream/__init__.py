"""`ff.run`: a model over more rows than fit in memory, file to file and chunk by chunk; resumable.

    source --read--> rows --model--> rows --write--> sink      one task a chunk, all of it in a worker
                                                 \\--> journal  a line a chunk that is done

Before anything is created, the model's inputs (`prepare`), sources and sinks (`places` and a module per format) and the
rows of a chunk (`chunks`) are determined, in this order.  Then chunks run, a bounded number at a time (`window`,
`pools`); chunks that the journal records as done are not computed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import onnx

from dask_ferro.errors import ConfigError, ModelError, UnsupportedOp
from dask_ferro.lower.client import current_client
from dask_ferro.lower.inputs.batching import batched as with_batched
from dask_ferro.lower.inputs.row_check import check_rows
from dask_ferro.lower.model.bound import checked_batch
from dask_ferro.lower.model.collection import ModelGraph, defaults_of, opened_of
from dask_ferro.lower.model.from_onnx import from_onnx
from dask_ferro.lower.model.results import run_here
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.stream import places, prepare, tables, targets
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.finish import check_read, explain, finish
from dask_ferro.stream.formats.images import Preprocess
from dask_ferro.stream.formats.interfaces import RowSource, Sink
from dask_ferro.stream.journal import Header, Journal
from dask_ferro.stream.places import SinkPath
from dask_ferro.stream.pools import AnyPool, beside, pool_for
from dask_ferro.stream.prepare import Work
from dask_ferro.stream.progress import bar
from dask_ferro.stream.stores.leases import held
from dask_ferro.stream.tables import TableColumns, TableWork
from dask_ferro.stream.targets import Start
from dask_ferro.stream.task import StreamJob
from dask_ferro.stream.window import ChunkFailed, drive

__all__ = ["Summary", "run"]

# The errors that say what has to change, and those of a program; files, memory and workers may be there again.
_LASTING = (ConfigError, ModelError, UnsupportedOp, TypeError, NameError, AttributeError, ImportError)
_CORRECT = "the same call fails again until the cause is corrected; for other rows or models, overwrite=True"


@dataclass(frozen=True)
class Summary:
    """The figures of a run.

    Attributes
    ----------
    rows : int
        Rows in the sink.
    rows_computed : int
        Rows that this run computed; earlier runs computed the others.
    chunks_computed, chunks_reused : int
    seconds : float
        Time from the first submission to the last chunk.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.run("mlp.onnx", "images.npy", "scores.npy").rows  # doctest: +SKIP
    1000
    """

    rows: int
    rows_computed: int
    chunks_computed: int
    chunks_reused: int
    seconds: float

    @property
    def rows_per_second(self) -> float:
        """Rows per second that this run computed."""
        return self.rows_computed / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        reused = f", {self.chunks_reused} chunks reused" if self.chunks_reused else ""
        return (
            f"{self.rows:,} rows: {self.chunks_computed} chunks computed{reused};"
            f" {self.seconds:.3g} s, {self.rows_per_second:,.0f} rows/s"
        )


def run(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | ModelGraph,
    source: Any,
    sink: Any,
    *,
    batch: int | None = None,
    client: Any = None,
    progress: bool | None = None,
    input: str | None = None,
    output: str | None = None,
    batched: Collection[str] | None = None,
    overwrite: bool = False,
    keep: str | Sequence[str] | None = None,
    preprocess: str | Preprocess | None = None,
) -> Any:
    """Run a model over all rows of a source and write its outputs to a sink, in bounded memory.

    A run that was stopped or killed resumes when it is called again with the same arguments: chunks that its journal
    (``<sink>.ferro-progress``) records as done, and that are unchanged in the sink, are not computed again.  A call of
    a completed run reads its output, and computes changed chunks again.  A dask array is identified by its name alone,
    so either call also reads the rows of done chunks again, and raises where they have changed.

    The sink appears only when it is complete: chunks are written beside it (``<sink>.<run>.ferro-part``).  One run at
    a time, from any host, holds a sink (``<sink>.ferro-lock``); a second run is refused.

    Sources and sinks may be addresses that fsspec reads (``https://host/x.npy``, ``s3://bucket/x.zarr``), which workers
    read and write themselves, with the credentials of their own environment or fsspec configuration.  No message,
    journal or table shows a password or a query.  At an address, objects of the part are copied to the sink one by one;
    the last one, ``zarr.json`` or ``_SUCCESS``, makes them complete.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or ModelGraph
        A model whose outputs have a row for each row of its inputs, independent of the other rows.  A model that
        certainly combines rows is refused; for one that may combine them a warning is given.
    source : path, numpy array, dask array, or mapping of model inputs to these
        A ``.npy`` file, a zarr array (``x.zarr``, ``g.zarr/array``), a parquet file, a folder of them or a pattern
        (``t.parquet``, ``t.parquet/column``, ``in/*.parquet``); or their address.  In a zarr group, the array with the
        name of the input is read; in a parquet table, the column with that name, else all columns side by side.  A CSV
        file with a header (``t.csv``), or a parquet table with columns of several types, is read as a table: see
        `keep`.
    sink : path, or mapping of model outputs to paths
        Ends in ``.npy``, ``.zarr`` or ``.parquet`` (a folder of one file a chunk); without a suffix it is a
        folder with a ``.npy`` file for each output.  An address is that of an object store (``s3://``, ``gs://``,
        ``az://``, ``abfs://``, ``memory://``), and not of a ``.npy`` file.  Of a table, one table: ``.parquet`` or
        ``.csv``, a folder of one file a chunk.
    batch : int, optional
        Rows of a chunk.  By default, values take at most 32 MiB and a chunk at least some 50 ms of work, and the
        number is a multiple of the source's own chunks; a resumed run keeps its number.
    client : distributed.Client, optional
        By default the current client; without one, threads of this process.  With an asynchronous client, await what
        this returns: the run has its own thread and client to the same scheduler, and stops when it is cancelled.
    progress : bool, optional
        Whether to show a bar on standard error; by default, if that is a terminal.
    input, output : str, optional
        The model's input for `source`; the only output to write.
    batched : str or collection of str, optional
        The inputs whose rows are streamed, where their axes 0 have different names or none, so that the model does
        not tell; the other inputs are passed whole to each chunk.
    overwrite : bool
        Whether to start a new run where `sink` is an output of `ff.run`, which stays until the new one is complete.
        Nothing else is replaced.
    keep : str or sequence of str, optional
        Columns of a source that is a table (``.parquet``, ``.csv``), of any type, which are written before the
        results.  Given, also as an empty list, all outputs are written to one table at `sink`, with columns as of
        ``model.predict(table)``; so they are of a CSV file, of strings, and of a parquet table where the model has
        several inputs or outputs.

    preprocess : "imagenet" or callable, optional
        For a source of images (``images/*.jpg``, or a folder of them): a function in the worker that takes an image of
        Pillow and returns an array for the model's input, without its rows; "imagenet" resizes, crops and normalizes as
        networks that were trained on ImageNet expect it.  A table has the images' paths as its column ``path``.

    Returns
    -------
    Summary, or an awaitable of one

    Raises
    ------
    ConfigError
        Before anything is submitted: rows that do not fit the model, a sink that exists and is not this run's, or
        is written by another run, an unknown format, files or addresses that a worker cannot read, a package of an
        address that is not installed.  At the end: a source that
        changed during the run (a change of a dask array while it is read is not detected), another file at the
        sink.
    RuntimeError
        A chunk failed; the message names its rows.  The chunks in flight were completed and recorded.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.run("mlp.onnx", "images.npy", "scores.npy")                         # doctest: +SKIP
    >>> ff.run("risk.onnx", "customers.csv", "risk.parquet", keep=["id"])      # doctest: +SKIP
    >>> ff.run("risk.onnx", "s3://bucket/in/*.parquet", "s3://bucket/out.parquet", keep=["id"])  # doctest: +SKIP
    >>> ff.run("squeezenet.onnx", "images/*.jpg", "scores.parquet", preprocess="imagenet")  # doctest: +SKIP
    """
    wanted = _Wanted(
        model, source, sink, batch, progress, input, output, batched, overwrite, keep, preprocess
    )
    found = client if client is not None else current_client()
    return beside(wanted.run, found) if found is not None and found.asynchronous else wanted.run(found)


class _Wanted(NamedTuple):
    """The arguments of a run."""

    model: str | os.PathLike[str] | bytes | onnx.ModelProto | ModelGraph
    source: object
    sink: object
    batch: int | None
    progress: bool | None
    input: str | None
    output: str | None
    batched: Collection[str] | None
    overwrite: bool
    keep: str | Sequence[str] | None
    preprocess: str | Preprocess | None

    def run(self, client: Any) -> Summary:
        """Run it on a client's workers, or in this process."""
        return _run(self, client)


def _run(asked: _Wanted, client: Any) -> Summary:
    sink = asked.sink
    graph = asked.model if isinstance(asked.model, ModelGraph) else from_onnx(asked.model)
    batch, batched = _chosen(graph, asked.batch, asked.batched)
    opened, title = opened_of(graph), f"model {graph.name!r}"
    ends = tables.ends_of(
        opened.signature,
        (asked.source, asked.input),
        (sink, asked.output),
        asked.keep,
        asked.preprocess,
        title,
    )
    sources, sinks, paths, columns = ends
    journal = Journal(places.journal_folder(sink, sinks))
    opened = with_batched(opened, prepare.as_they_are(sources), batched, is_cut=True)
    places.check_places(paths, sinks.values(), journal.folder)
    rows = prepare.check_sources(opened.signature, sources, title)
    prepare.check_outputs(opened, sources, list(sinks) if columns is None else list(graph.outputs), title)
    with held([place.path for place in sinks.values()]) as holds, pool_for(client) as pool:
        before = None if asked.overwrite else targets.before(journal, sinks)
        if batch is None:
            batch = before.batch if before else prepare.default_batch(opened, sources, rows, pool.slots)
        wanted = _work(opened, sources, sinks, rows, batch, columns)
        start = _begin(wanted, before, journal, pool)
        check_read(start, wanted.feeds(), wanted.hashed(), wanted.chunks, pool)
        job = _job(wanted, start, journal)
        if len(start.done) < job.chunks.count:
            pool.begin(opened, job, wanted.feeds(), paths)
        summary = _fly(job, pool, start.done, asked.progress, partial(explain, start, sources, journal))
        if not journal.is_finished(job.run):
            with _writable(job.sinks):
                finish(start, sources, journal, holds)
        return summary


def _chosen(
    graph: ModelGraph, batch: int | None, batched: Collection[str] | None
) -> tuple[int | None, Collection[str] | None]:
    """Return `batch` and `batched`, by default those of the model."""
    defaults = defaults_of(graph)
    if defaults is None:
        raise ConfigError(
            f"model {graph.name!r} already has its inputs; pass the model, and the rows as source"
        )
    batch = checked_batch(batch if batch is not None else defaults.batch, f"model {graph.name!r}")
    return batch, batched if batched is not None else defaults.batched


def _work(
    opened: PreparedModel,
    sources: Mapping[str, RowSource],
    sinks: Mapping[str, SinkPath],
    rows: int,
    batch: int,
    columns: TableColumns | None,
) -> Work:
    """Return the work in chunks of `batch` rows, once the model is known to allow cutting rows."""
    # Clipped to the rows of the source, because numpy accepts no shape of 10**30.
    batch = min(batch, max(1, rows))
    if rows > batch:
        shapes = prepare.standins(opened.signature, sources, rows)
        check_rows(opened, shapes, partial(run_here, opened), sinks if columns is None else None)
    if columns is not None:
        return TableWork(opened, sources, sinks, Chunks(rows, batch), columns)
    return Work(opened, sources, sinks, Chunks(rows, batch))


def _job(wanted: Work, start: Start, journal: Journal) -> StreamJob:
    sinks = _sinks(start, journal)
    return StreamJob(wanted.call, wanted.chunks, sinks, journal, start.header.run, wanted.hashed())


def _begin(wanted: Work, before: Header | None, journal: Journal, pool: AnyPool) -> Start:
    """Create the parts and the journal, or resume with existing ones."""
    header = wanted.header(journal.folder)
    if before is None:
        layouts = wanted.known_layouts()
        if layouts is None:
            layouts = wanted.layouts(pool.first_row(wanted.opened, wanted.call, wanted.feeds()))
        with _writable(wanted.places.values()):
            return targets.anew(header, layouts, wanted.places, journal)
    targets.check_same(before, header, journal)
    layouts = wanted.layouts([before.outputs[n][2:4] for n in wanted.places])
    with _writable(wanted.places.values()):
        return targets.again(before, layouts, wanted.places, journal)


def _sinks(start: Start, journal: Journal) -> tuple[Sink, ...]:
    """Return the sinks, prepared for writing where a chunk is left."""
    sinks = tuple(target.sink() for target in start.targets)
    if len(start.done) == sinks[0].layout.chunks.count:
        return sinks
    with _writable(sinks):
        return targets.reopened(start, journal)


@contextmanager
def _writable(sinks: Iterable[SinkPath | Sink]) -> Iterator[None]:
    """Raise `ConfigError` with sink and reason where the file system refuses a write."""
    try:
        yield
    except OSError as error:
        names = ", ".join(repr(sink.path) for sink in sinks)
        raise ConfigError(
            f"sink {names} cannot be written: {error.strerror or error} ({error.filename!r}); make room or choose"
            " another path, and call ff.run again"
        ) from error


def _fly(
    job: StreamJob, pool: AnyPool, done: Collection[int], progress: bool | None, why: Callable[[str], str]
) -> Summary:
    """Compute the chunks that are not done, and return the figures of the run."""
    chunks = job.chunks
    left = [number for number in range(chunks.count) if number not in done]
    rows = sum(map(chunks.length, left))
    start = time.perf_counter()
    with _resumable(job, why), bar("rows", chunks.rows, chunks.rows - rows, progress) as advance:
        for number in drive(left, pool):
            advance(chunks.length(number))
    seconds = time.perf_counter() - start
    return Summary(chunks.rows, rows, len(left), chunks.count - len(left), seconds)


@contextmanager
def _resumable(job: StreamJob, why: Callable[[str], str]) -> Iterator[None]:
    """Raise errors of chunks with the failed rows, the number of done chunks, and how to resume."""
    try:
        yield
    except ChunkFailed as failed:
        start, stop_row = job.chunks.span(failed.number)
        others = f" ({failed.others} other chunks failed too)" if failed.others else ""
        kind = ConfigError if isinstance(failed.error, ConfigError) else RuntimeError
        what = (
            f"rows {start} to {stop_row - 1} failed: {type(failed.error).__name__}: {failed.error}{others}."
        )
        # A source that changed may be restored, whatever error its new rows gave.
        changed = why(what)
        lasts = isinstance(failed.error, _LASTING) and not changed
        remedy = _CORRECT if lasts else "call ff.run as before to compute the others"
        raise kind(f"{what}{changed} {_kept(job)}; {remedy}") from failed.error
    except BaseException as stop:
        # An interrupt, or the end of the cluster: done chunks stay done.
        remedy = _CORRECT if isinstance(stop, _LASTING) else "call ff.run as before to resume"
        stop.add_note(f"{_kept(job)}; {remedy}")
        raise


def _kept(job: StreamJob) -> str:
    done = len(job.journal.done(job.run))
    return f"{done} of {job.chunks.count} chunks are done, and recorded in {job.journal.folder!r}"
