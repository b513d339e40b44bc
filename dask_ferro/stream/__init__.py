"""`ff.run`: a model over more rows than fit in memory, file to file and chunk by chunk; resumable.

    source --read--> rows --model--> rows --write--> sink      one task a chunk, all of it in a worker
                                                 \\--> journal  a line a chunk that is done

Decided in order, each before anything is made: what the model takes (`prepare`), where rows come from and go
(`places` and a module for each format), how many make a chunk (`chunks`).  Then chunks fly, a bounded number
at a time (`window`, `pools`), and what the journal has as done is not done again.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx

from dask_ferro.errors import ConfigError
from dask_ferro.lock import held
from dask_ferro.lower import ModelGraph, from_onnx
from dask_ferro.lower.inputs.batching import batched as with_batched
from dask_ferro.lower.inputs.row_check import check_rows
from dask_ferro.lower.model.collection import defaults_of, opened_of
from dask_ferro.lower.model.results import run_here
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.stream import places, prepare, targets
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.finish import explain, finish
from dask_ferro.stream.formats.interfaces import RowSource, Sink
from dask_ferro.stream.journal import Header, Journal
from dask_ferro.stream.places import SinkPath
from dask_ferro.stream.pools import AnyPool, pool_for
from dask_ferro.stream.prepare import Work
from dask_ferro.stream.progress import bar
from dask_ferro.stream.reread import check_read
from dask_ferro.stream.targets import Start
from dask_ferro.stream.task import StreamJob
from dask_ferro.stream.window import ChunkFailed, drive

__all__ = ["Summary", "run"]


@dataclass(frozen=True)
class Summary:
    """The figures of a run.

    Attributes
    ----------
    rows : int
        In the sink.
    rows_computed : int
        By this run; the others were there from one before.
    chunks_computed, chunks_reused : int
    seconds : float
        From the first submission to the last chunk.
    """

    rows: int
    rows_computed: int
    chunks_computed: int
    chunks_reused: int
    seconds: float

    @property
    def rows_per_second(self) -> float:
        """Rows a second, of those that this run computed."""
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
) -> Summary:
    """Run a model over all rows of a source and write what it gives to a sink, in bounded memory.

    A run that was stopped or killed goes on when it is called again with the same arguments: chunks that its
    journal (``<sink>.ferro-progress``) has as done, and that still are what was written, are not computed again.
    A run that was completed reads what it wrote, and computes again what has changed since.  Of a dask array only the
    name is known, so either call also reads its rows again, for the chunks that are done, and refuses others.

    The sink is there when it is whole: chunks are written beside it (``<sink>.<run>.ferro-part``).  One run at a
    time holds a sink (``<sink>.ferro-lock``), from whatever host; a second one is refused.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or ModelGraph
        A model whose outputs have a row for each row of its inputs, which must not depend on the other rows: one
        that surely combines them is refused, and one that may is warned of.
    source : path, numpy array, dask array, or mapping of model inputs to these
        A ``.npy`` file, a zarr array (``x.zarr``, ``g.zarr/array``), a parquet file or a folder of them
        (``t.parquet``, ``t.parquet/column``).  Of a zarr group, the array that is called as the input; of a
        parquet table, the column so called, else all of its columns side by side.
    sink : path, or mapping of model outputs to paths
        Ends in ``.npy``, ``.zarr`` or ``.parquet`` (a folder of one file a chunk); without a suffix it is a
        folder with a ``.npy`` file for each output.
    batch : int, optional
        Rows of a chunk.  By default as many as make values of at most 32 MiB and some 50 ms of work or more,
        in multiples of the source's own chunks; a run that is gone on with keeps its own.
    client : distributed.Client, optional
        By default the current one; where there is none, threads of this process.
    progress : bool, optional
        Whether to show a bar on standard error; by default, where that is a terminal.
    input, output : str, optional
        The model's input that `source` is for; the only output to write.
    batched : str or collection of str, optional
        The inputs whose rows are streamed, where their axes 0 have different names or none and it cannot be told;
        the others go whole to each chunk.
    overwrite : bool
        Whether to begin anew where an output of `ff.run` lies at `sink`, which stays until the new one is whole.
        Nothing else is replaced.

    Returns
    -------
    Summary

    Raises
    ------
    ConfigError
        Before anything is submitted: rows that do not fit the model, a sink that exists and is not this
        run's, or is written by another run, an unknown format, files that a worker does not see.  At the end: a
        source that changed meanwhile (a dask array that changes while it is read is not noticed), something else at
        the sink.
    RuntimeError
        A chunk failed, of which it names the rows; those that were in flight are done and noted.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.run("mlp.onnx", "images.npy", "scores.npy")  # doctest: +SKIP
    """
    graph = model if isinstance(model, ModelGraph) else from_onnx(model)
    batch, batched = _chosen(graph, batch, batched)
    opened, sig = opened_of(graph), opened_of(graph).signature
    given = places.named_sources([s.name for s in sig.inputs], source, input)
    sinks = places.named_places([s.name for s in sig.outputs], sink, output)
    journal, title = Journal(places.journal_folder(sink, sinks)), f"model {opened.name!r}"
    sources = {spec.name: places.open_source(given[spec.name], spec) for spec in sig.inputs}
    opened = with_batched(opened, prepare.as_they_are(sources), batched, is_cut=True)
    paths = places.paths_of(given.values())
    places.check_places(paths, sinks.values(), journal.folder)
    rows = prepare.check_sources(opened.signature, sources, title)
    prepare.check_outputs(opened, sources, list(sinks), title)
    with held([place.path for place in sinks.values()]) as holds, pool_for(client) as pool:
        before = None if overwrite else targets.before(journal, sinks)
        if batch is None:
            batch = before.batch if before else prepare.default_batch(opened, sources, rows, pool.slots)
        wanted = _work(opened, sources, sinks, rows, batch)
        start = _begin(wanted, before, journal, pool)
        check_read(start, wanted.feeds(), wanted.hashed(), wanted.chunks, pool)
        job = _job(wanted, start, journal)
        if len(start.done) < job.chunks.count:
            pool.begin(opened, job, wanted.feeds(), paths)
        summary = _fly(job, pool, start.done, progress, partial(explain, start, sources, journal))
        if not journal.is_finished(job.run):
            with _writable(job.sinks):
                finish(start, sources, journal, holds)
        return summary


def _chosen(
    graph: ModelGraph, batch: int | None, batched: Collection[str] | None
) -> tuple[int | None, Collection[str] | None]:
    """Return `batch` and `batched`, those of the model where they are None."""
    defaults = defaults_of(graph)
    if defaults is None:
        raise ConfigError(
            f"model {graph.name!r} has its inputs already; pass the model, and the rows as source"
        )
    batch = _checked(batch if batch is not None else defaults.batch)
    return batch, batched if batched is not None else defaults.batched


def _checked(batch: Any) -> int | None:
    if batch is None:
        return None
    if not isinstance(batch, bool) and hasattr(batch, "__index__") and batch > 0:
        return operator.index(batch)
    raise ConfigError(f"batch={batch!r}, wanted a number of rows of at least 1, or None")


def _work(
    opened: PreparedModel,
    sources: Mapping[str, RowSource],
    sinks: Mapping[str, SinkPath],
    rows: int,
    batch: int,
) -> Work:
    """Return the work in chunks of `batch` rows, once they are known to be free to be cut."""
    # numpy takes no shape of 10**30, and no more rows are there.
    batch = min(batch, max(1, rows))
    if rows > batch:
        shapes = prepare.standins(opened.signature, sources, rows)
        check_rows(opened, shapes, partial(run_here, opened), sinks)
    return Work(opened, sources, sinks, Chunks(rows, batch))


def _job(wanted: Work, start: Start, journal: Journal) -> StreamJob:
    sinks = _sinks(start, journal)
    return StreamJob(wanted.call, wanted.chunks, sinks, journal, start.header.run, wanted.hashed())


def _begin(wanted: Work, before: Header | None, journal: Journal, pool: AnyPool) -> Start:
    """Make the parts and the journal, or go on with those that are there."""
    header = wanted.header(journal.folder)
    if before is None:
        layouts = wanted.known_layouts()
        if layouts is None:
            layouts = wanted.layouts(pool.first_row(wanted.opened, wanted.call, wanted.feeds()))
        with _writable(wanted.places.values()):
            return targets.anew(header, layouts, wanted.places, journal)
    targets.check_same(before, header, journal)
    layouts = wanted.layouts([before.outputs[n][2:4] for n in wanted.outputs])
    with _writable(wanted.places.values()):
        return targets.again(before, layouts, wanted.places, journal)


def _sinks(start: Start, journal: Journal) -> tuple[Sink, ...]:
    """Return the sinks, ready to be written when a chunk is left."""
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
    """Compute the chunks that are not done, and close the journal."""
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
    """Raise errors of chunks with the rows that failed, the chunks that are kept, and how to resume."""
    try:
        yield
    except ChunkFailed as failed:
        start, stop_row = job.chunks.span(failed.number)
        others = f" ({failed.others} other chunks failed too)" if failed.others else ""
        kind = ConfigError if isinstance(failed.error, ConfigError) else RuntimeError
        what = (
            f"rows {start} to {stop_row - 1} failed: {type(failed.error).__name__}: {failed.error}{others}."
        )
        raise kind(
            f"{what}{why(what)} {_kept(job)}; call ff.run as before to go on with the others"
        ) from failed.error
    except BaseException as stop:
        # An interrupt, or the end of the cluster: chunks that are done stay done.
        stop.add_note(f"{_kept(job)}; call ff.run as before to go on")
        raise


def _kept(job: StreamJob) -> str:
    done = len(job.journal.done(job.run))
    return f"{done} of {job.chunks.count} chunks are done, and noted in {job.journal.folder!r}"
