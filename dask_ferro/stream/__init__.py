"""`ff.predict_files`: a model over more rows than fit in memory, file to file and chunk by chunk; resumable.

    source --read--> rows --model--> rows --write--> part      one task a chunk, all of it in a worker
    parts --rename or copy--> sink                             when all are there

Before anything is created, sources and sinks (`ends`, `formats`, `sinks`), what the model makes of them (`work`) and
the rows of a chunk (`chunks`) are determined.  Then chunks run, a bounded number at a time (`window`, `pools`); chunks
whose parts are there (`journal`) are not computed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx

from dask_ferro.errors import InputError, ModelError, UnsupportedOpError
from dask_ferro.lower.client import current_client
from dask_ferro.lower.model.bound import check_batch_size, mark_batched
from dask_ferro.lower.model.collection import Model, defaults_of, from_onnx, prepared_model_of
from dask_ferro.lower.model.row_check import check_rows
from dask_ferro.stream import files
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.endpoints import Endpoints, Reading, check_places, endpoints_of, journal_folder
from dask_ferro.stream.formats.csv import CsvOptions
from dask_ferro.stream.formats.images import Preprocess
from dask_ferro.stream.journal import Header, Journal, Start, hold_sinks
from dask_ferro.stream.pools import AnyPool, pool_for, run_in_thread
from dask_ferro.stream.progress import bar
from dask_ferro.stream.sinks import finished_chunks
from dask_ferro.stream.window import ChunkFailed, drive
from dask_ferro.stream.work import (
    StreamJob,
    Work,
    check_sources,
    default_batch,
    notes_in,
    standins,
)

__all__ = ["Summary", "predict_files"]

# The errors that say what has to change, and those of a program; files, memory and workers may be there again.
_LASTING = (InputError, ModelError, UnsupportedOpError, TypeError, NameError, AttributeError, ImportError)
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
    skipped : tuple of str
        Paths of images that were left out, with ``unreadable="skip"``.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.predict_files("mlp.onnx", "images.npy", "scores.npy").rows  # doctest: +SKIP
    1000
    """

    rows: int
    rows_computed: int
    chunks_computed: int
    chunks_reused: int
    seconds: float
    skipped: tuple[str, ...] = ()

    @property
    def rows_per_second(self) -> float:
        """Rows per second that this run computed."""
        return self.rows_computed / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        reused = f", {self.chunks_reused} chunks reused" if self.chunks_reused else ""
        return (
            f"{self.rows:,} rows: {self.chunks_computed} chunks computed{reused};"
            f" {self.seconds:.3g} s, {self.rows_per_second:,.0f} rows/s"
            f"{f'; {len(self.skipped)} files skipped' if self.skipped else ''}"
        )


def predict_files(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | Model,
    source: Any,
    sink: Any,
    *,
    batch_size: int | None = None,
    client: Any = None,
    progress: bool | None = None,
    batch_inputs: Collection[str] | None = None,
    overwrite: bool = False,
    passthrough: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    preprocess: str | Preprocess | None = None,
    unreadable: str = "raise",
    separator: str = ",",
    encoding: str = "utf-8",
    null_values: Collection[str] | None = None,
    types: Mapping[str, str] | None = None,
) -> Any:
    """Run a model over all rows of a source and write its outputs to a sink, in bounded memory.

    A run that was stopped or killed resumes when it is called again with the same arguments: chunks whose parts exist
    (below ``<sink>.ferro-progress``) are not computed again.  If the sink is complete, nothing is computed.

    The sink appears only when it is complete.  One run at a time holds a sink (``<sink>.ferro-lock``); a second run is
    refused.

    Sources and sinks may be addresses that fsspec reads (``https://host/x.npy``, ``s3://bucket/x.zarr``), which workers
    read and write themselves, with the credentials of their own environment or fsspec configuration.  No message,
    record or table shows a password or a query.  At an address, objects of a folder are copied to the sink one by one;
    the last one, ``zarr.json`` or ``_SUCCESS``, makes them complete.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or Model
        A model whose outputs have a row for each row of its inputs, independent of the other rows;
        ``ff.from_onnx(path, outputs=...)`` chooses from several outputs.  A model that certainly combines rows is
        refused; a model that may combine them causes a warning.
    source : path, array, frame, or mapping of model inputs to arrays
        An array: of numpy or Dask, a ``.npy`` file, or a zarr array (``x.zarr``, ``g.zarr/array``); in a zarr group,
        the array with the name of the input.  Or a table, whose columns become the inputs as in
        ``model.predict(table)``: a frame (of pandas, polars, pyarrow or dask.dataframe), CSV with a header (``t.csv``,
        ``t.csv.gz``), or a parquet file, a folder of parquet files or a pattern (``in/*.parquet``), in which folders
        ``key=value`` are columns, and a column of lists of one length is a matrix.  Or images, see `preprocess`.
    sink : path, or mapping of model outputs to paths
        An array, ``.npy`` or ``.zarr``, has one output; without a suffix it is a folder with a ``.npy`` file for each.
        A table, ``.parquet`` (a folder of one file a chunk) or ``.csv`` (one file), has all outputs as columns, after
        the columns of `passthrough`: ``name``, or ``name_0``, ``name_1`` and so on if rows have several numbers.  An
        address names an object store (``s3://``, ``gs://``, ``az://``, ``abfs://``, ``memory://``).
    batch_size : int, optional
        Rows of a chunk.  By default, values take at most 32 MiB and a chunk is at least about 50 ms of work; a resumed
        run keeps its number.
    client : distributed.Client, optional
        Client whose workers compute.  Default: the current client, or threads of this process if there is none.  With
        an asynchronous client, await the returned object: the run has its own thread and client to the same scheduler,
        and stops when it is cancelled.
    progress : bool, optional
        Whether to show a bar on standard error; by default, if standard error is a terminal.
    batch_inputs : str or collection of str, optional
        The inputs whose rows are streamed; the other inputs are passed whole to each chunk.  They have to be named if
        the first axes of the inputs have different names or none.
    overwrite : bool
        Whether to start a new run if `sink` is an output of `ff.predict_files`; this output stays until the new one is
        complete.  No other file is replaced.
    passthrough : str or sequence of str, optional
        Columns of a table, of any type, which are written before the results.  A column of a CSV file is written as
        text if a number would lose characters, as in ``0000001``.
    columns : sequence of str, optional
        Columns of a table for a model with one input of (rows, columns), in this order, or one column of lists.
        Default: the columns that the model names, or else all columns that are not in `passthrough`.
    preprocess : "imagenet" or callable, optional
        For a source of images (``images/*.jpg``, or a folder of them): a function in the worker that takes an image of
        Pillow and returns an array for the model's input, without its rows; "imagenet" resizes, crops and normalizes as
        torchvision does for networks that were trained on ImageNet.  A table has the images' paths as its column
        ``path``.  Another function, or one with other arguments, defaults or state, is another run.
    unreadable : "raise" or "skip"
        Whether an image that cannot be read ends the run, or is left out of the table and named in the summary.
    separator, encoding : str
        Separator of the columns and encoding of a CSV file.
    null_values : collection of str, optional
        Words of a CSV file for missing values; by default pandas' words.
    types : mapping of str to str, optional
        Types of columns of a CSV file, such as ``{"id": "string"}``, by pyarrow's names; by default, types are inferred
        from the file's first megabyte.

    Returns
    -------
    Summary, or an awaitable of one

    Raises
    ------
    InputError
        If rows do not fit the model, the sink exists and is not this run's, or another run writes it, a format is
        unknown, a worker cannot read files or addresses, or a package that an address needs is not installed; this is
        checked before anything is submitted.  At the end, if a source changed during the run (a change of a dask
        collection while it is read is not noticed), or another file is at the sink.
    RuntimeError
        If a chunk failed; the message names its rows.  The chunks that were running are completed first.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.predict_files("mlp.onnx", "images.npy", "scores.npy")                         # doctest: +SKIP
    >>> ff.predict_files("risk.onnx", "customers.csv", "risk.parquet", passthrough=["id"])      # doctest: +SKIP
    >>> ff.predict_files("risk.onnx", "s3://bucket/in/*.csv", "s3://bucket/out.csv", batch_size=500)  # doctest: +SKIP
    >>> ff.predict_files("squeezenet.onnx", "images/*.jpg", "scores.parquet", preprocess="imagenet")  # doctest: +SKIP
    """
    csv = CsvOptions(separator, encoding, types=tuple(sorted((types or {}).items())))
    csv = csv if null_values is None else csv._replace(null_values=tuple(null_values))
    passthrough = (passthrough,) if isinstance(passthrough, str) else passthrough
    kept = None if passthrough is None else tuple(dict.fromkeys(passthrough))
    reading = Reading(kept, columns, preprocess, unreadable, csv)
    started = partial(_run, model, source, sink, reading, batch_size, progress, batch_inputs, overwrite)
    client = client if client is not None else current_client()
    return run_in_thread(started, client) if client is not None and client.asynchronous else started(client)


def _run(
    model: Any,
    source: Any,
    sink: Any,
    reading: Reading,
    batch_size: int | None,
    progress: bool | None,
    batch_inputs: Collection[str] | None,
    overwrite: bool,
    client: Any,
) -> Summary:
    graph = model if isinstance(model, Model) else from_onnx(model)
    opened, title, defaults = prepared_model_of(graph), f"model {graph.name!r}", defaults_of(graph)
    batch_size = check_batch_size(batch_size if batch_size is not None else defaults.batch_size, title)
    ends = endpoints_of(opened.signature, source, sink, reading, title, client)
    journal = Journal(journal_folder(sink, ends.places))
    shapes = standins(opened.signature, ends.sources)
    opened = mark_batched(
        opened, shapes, batch_inputs if batch_inputs is not None else defaults.batch_inputs, is_cut=True
    )
    check_places(ends.paths, ends.places.values(), journal.folder)
    rows = check_sources(opened.signature, ends.sources, title)
    with hold_sinks([place.path for place in ends.places.values()]) as holds, pool_for(client) as pool:
        was = journal.header()
        before = None if overwrite else was
        if batch_size is None:
            batch_size = before.work["batch"] if before else default_batch(opened, ends, rows, pool.slots)
        # Clipped to the rows of the source, because numpy accepts no shape of 10**30.
        work = Work(opened, ends, Chunks(rows, min(batch_size, max(1, rows))))
        if rows > work.chunks.batch:
            shapes = standins(opened.signature, ends.sources, rows)
            check_rows(opened, shapes)
        start = _begin(work, was, before, journal, pool)
        job = StreamJob(work.call, work.chunks, start.sinks, journal.parts(start.header.run), work.named)
        if job.named or len(start.done) < job.chunks.count:
            pool.begin(opened, job, work.feeds(), [*ends.paths, *journal.seen(start)])
        computed, seconds = _run_chunks(job, pool, start, ends, journal, progress)
        header = start.header
        if not header.is_finished:
            header = _finish(start, job, ends, journal, holds)
    left = rows - sum(map(job.chunks.length, start.done))
    return Summary(
        rows - len(header.skipped), left, computed, len(start.done), seconds, tuple(header.skipped)
    )


def _begin(work: Work, was: Header | None, before: Header | None, journal: Journal, pool: AnyPool) -> Start:
    """Begin a run in place of the one that was, or resume the one before."""
    header = work.header(journal.folder)
    if before is not None:
        journal.check_same(before, header)
    rows = work.known_rows()
    sinks = work.sinks(pool.first_row(work.opened, work.call, work.feeds()) if rows is None else rows)
    with _name_write_errors(work.ends):
        if before is None:
            return journal.anew(header, was, sinks)
        return journal.again(header, before, sinks)


@contextmanager
def _name_write_errors(ends: Endpoints) -> Iterator[None]:
    """Raise `InputError` with sink and reason where the file system refuses a write."""
    try:
        yield
    except OSError as error:
        names = ", ".join(repr(place.path) for place in ends.places.values())
        raise InputError(
            f"sink {names} cannot be written: {error.strerror or error} ({error.filename!r}); make room or choose"
            " another path, and call ff.predict_files again"
        ) from error


def _run_chunks(
    job: StreamJob, pool: AnyPool, start: Start, ends: Endpoints, journal: Journal, progress: bool | None
) -> tuple[int, float]:
    """Compute the chunks that are not done, and read the others again whose source has but a name.

    Return how many were computed, and the seconds.

    Errors tell the failed rows, the number of done chunks, and how to resume.
    """
    chunks = job.chunks
    left = [number for number in range(chunks.count) if number not in start.done]
    rows = sum(map(chunks.length, left))
    again = sorted(start.done) if job.named else []
    noted = start.header.read if start.header.is_finished or not again else notes_in(job.parts)[1]
    begin = time.perf_counter()
    try:
        with bar("rows", chunks.rows, chunks.rows - rows, progress) as advance:
            known = [(number, noted.get(str(number), [])) for number in again]
            for number in drive([*known, *((number, None) for number in left)], pool):
                advance(0 if number in start.done else chunks.length(number))
    except ChunkFailed as failed:
        first, stop_row = job.chunks.span(failed.number)
        others = f" ({failed.others} other chunks failed too)" if failed.others else ""
        kind = InputError if isinstance(failed.error, InputError) else RuntimeError
        what = (
            f"rows {first} to {stop_row - 1} failed: {type(failed.error).__name__}: {failed.error}{others}."
        )
        # It is not known of which rows the chunks are.
        _check_sources(start, ends, journal, f" The first to fail: {what}")
        remedy = (
            _CORRECT
            if isinstance(failed.error, _LASTING)
            else "call ff.predict_files as before to compute the others"
        )
        raise kind(f"{what} {_resume_note(job)}; {remedy}") from failed.error
    except BaseException as stop:
        # An interrupt, or the end of the cluster: done chunks stay done.
        remedy = _CORRECT if isinstance(stop, _LASTING) else "call ff.predict_files as before to resume"
        stop.add_note(f"{_resume_note(job)}; {remedy}")
        raise
    return len(left), time.perf_counter() - begin


def _resume_note(job: StreamJob) -> str:
    return f"{len(finished_chunks(job.sinks, job.chunks))} of {job.chunks.count} chunks are done, and in {job.parts!r}"


def _check_sources(start: Start, ends: Endpoints, journal: Journal, failed: str = "") -> None:
    """Raise where a source has changed; which rows the chunks have is not known then, so none counts.

    `failed` tells of a chunk that failed before the end.
    """
    for name, source in ends.read.items():
        was = start.header.work[f"source of {name!r}"]
        try:
            now = source.fingerprint()
        except (OSError, InputError) as error:
            if failed:
                # It may be available again when the run resumes.
                continue
            raise InputError(
                f"source of {name!r} can no longer be read, to check that it is unchanged: {error}. All chunks are"
                " done; call ff.predict_files as before when the source is available again"
            ) from error
        if now != was:
            files.remove(journal.parts(start.header.run))
            raise InputError(
                f"source of {name!r} changed while the run read it. No result is kept; call ff.predict_files with"
                f" overwrite=True"
                f" when the source no longer changes (it was {was}, and is {now}).{failed}"
            )


def _finish(start: Start, job: StreamJob, ends: Endpoints, journal: Journal, holds: Sequence[Any]) -> Header:
    _check_sources(start, ends, journal)
    if missing := sorted(frozenset(range(job.chunks.count)) - finished_chunks(job.sinks, job.chunks)):
        raise RuntimeError(
            f"{len(missing)} parts are gone from {job.parts!r} (the first: {missing[0]}); call ff.predict_files as"
            f" before to"
            " compute these again"
        )
    for hold in holds:
        hold.check()
    with _name_write_errors(ends):
        return journal.publish(start, *notes_in(job.parts))
