"""The task of a chunk: read its rows, run the model on them, write the results, record the chunk as done.

All four steps are one task that returns None, so rows never pass through the client or the scheduler.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.lower.inputs.tables import classes_of, read_table, result_columns
from dask_ferro.lower.prepared.remote import shown
from dask_ferro.lower.signature import Signature
from dask_ferro.lower.worker.bundle_ref import BundleRef, ModelRef
from dask_ferro.lower.worker.task import run_bundle
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats.images import ImageRows
from dask_ferro.stream.formats.interfaces import Array, Layout, Sink, digest, row_digest
from dask_ferro.stream.formats.parquet import pyarrow_modules
from dask_ferro.stream.journal import Journal, line
from dask_ferro.stream.stores import files

Table = Any  # a pyarrow Table: pyarrow has no types

# In `ChunkCall.outputs`: the output is the model's input of that index, unchanged.
INPUT = -1


@dataclass(frozen=True)
class TableCall:
    """How a table is mapped to a model's inputs, and its outputs to a table.

    Attributes
    ----------
    sig : Signature
    title : str
        For errors.
    columns, keep : sequence of str
        The columns for the model, and those that are written before the results.
    outputs : sequence of str
    """

    sig: Signature
    title: str
    columns: Sequence[str]
    keep: Sequence[str]
    outputs: Sequence[str]

    def inputs(self, table: Table) -> list[Array]:
        """Return the model's inputs of the rows of a table."""
        if isinstance(table, ImageRows):
            return [table.images]
        found = read_table(table.select(list(dict.fromkeys(self.columns))), self.sig, self.title)
        assert found is not None
        return [found.arrays[spec.name] for spec in self.sig.inputs]

    def written(self, table: Table, results: Sequence[Any]) -> Table:
        """Return the columns to keep and those of the results."""
        # Kept columns never pass through numpy, so that dates and missing values stay as they are.
        kept = table.select(list(self.keep))
        named = dict(zip(self.outputs, results, strict=True))
        found = result_columns(named, table.num_rows, self.title, classes_of(self.sig), self.keep)
        pa, _ = pyarrow_modules()
        return pa.table([*kept.columns, *map(pa.array, found.values())], names=[*self.keep, *found])


@dataclass(frozen=True)
class ChunkCall:
    """A call of a whole model, named by its reference.

    Attributes
    ----------
    model : ModelRef
    bundle : BundleRef or None
        All nodes of the model; None when it has none.
    outputs : tuple of (bundle, index)
        The position of each wanted output: index of the bundle's results, or of the inputs (`INPUT`).
    table : TableCall, optional
        Set if the rows are those of a table, and the results one.
    """

    model: ModelRef
    bundle: BundleRef | None
    outputs: tuple[tuple[int, int], ...]
    table: TableCall | None = None


@dataclass(frozen=True)
class StreamJob:
    """The part of a run that all its tasks share; some kilobytes, for every model and any number of rows.

    `hashed` are the inputs whose rows are recorded by a digest, because their source may change without a change of its
    fingerprint.
    """

    call: ChunkCall
    chunks: Chunks
    sinks: tuple[Sink, ...]
    journal: Journal
    run: str
    hashed: tuple[int, ...] = ()


def results(call: ChunkCall, inputs: Sequence[Array], copy: Any = None) -> list[Any]:
    """Return the wanted outputs of the model for the rows of its inputs; of a table, one table of all of them."""
    if call.table is not None:
        (table,) = inputs
        return [call.table.written(table, results(replace(call, table=None), call.table.inputs(table), copy))]
    made: Any = ()
    if call.bundle is not None:
        made = run_bundle(call.model, call.bundle, *inputs, copy=copy)
        if len(call.bundle.outputs) == 1:
            made = (made,)
    return [inputs[index] if bundle == INPUT else made[index] for bundle, index in call.outputs]


def first_row(
    call: ChunkCall, carries: Sequence[bool], copy: Any, *pieces: Any
) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and row shape of each output, from running the model on the first row of its batched inputs."""
    inputs = [rows(p)[:1] if carried else rows(p) for p, carried in zip(pieces, carries, strict=True)]
    found = [np.asarray(v) for v in results(call, inputs, copy)]
    return [(value.dtype.str, value.shape[1:]) for value in found]


def run_chunk(job: StreamJob, number: int, copy: Any, *pieces: Any) -> None:
    """Compute and write a chunk.

    Parameters
    ----------
    number : int
        The chunk's number.
    copy : ndarray of uint8 or None
        The model file's content, for workers that cannot read its path.
    *pieces
        For each model input, its rows or their `LazyRows`.

    Raises
    ------
    ConfigError
        An output has another shape or dtype than the sink, or the sink belongs to another run now.
    """
    begin = time.perf_counter()
    given = [rows(p) for p in pieces]
    # Digested before the model runs, because a model may return its own input.
    read = read_digests(*(given[index] for index in job.hashed))
    values = results(job.call, given, copy)
    for sink, value in zip(job.sinks, values, strict=True):
        if job.call.table is not None:
            # Its columns were checked when it was made.
            continue
        _check(value, sink.layout, job.chunks.length(number), job.call.model.path)
    if not job.journal.is_current(job.run):
        raise ConfigError(
            f"{job.journal.folder!r} is not the journal of this run: it was overwritten, or cannot be read here"
        )
    digests = [sink.write(number, value) for sink, value in zip(job.sinks, values, strict=True)]
    took = time.perf_counter() - begin
    job.journal.record(line(job.run, number, job.chunks.length(number), took, digests, read))


def read_digests(*pieces: Any) -> list[str]:
    """Return a digest of each piece's rows: of their bytes, dtype and shape."""
    found = map(np.ascontiguousarray, map(rows, pieces))
    return [digest(f"{row_digest(a)} {a.dtype.str} {a.shape}".encode()) for a in found]


def rows(piece: Any) -> Array:
    """Return the rows of a piece, which may be the rows themselves.

    Raises
    ------
    ConfigError
        The rows have a mask, which writing them would drop.
    """
    found: Array = piece if isinstance(piece, np.ndarray) else piece.read()
    if isinstance(found, np.ma.MaskedArray):
        raise ConfigError(
            "its rows are a masked array, and models have no masks: fill it with .filled(value)"
        )
    return found


def _check(value: Any, layout: Layout, length: int, model: str) -> None:
    got = (getattr(value, "shape", None), getattr(value, "dtype", None))
    wanted = ((length, *layout.row_shape), layout.dtype)
    if got != wanted:
        raise ConfigError(
            f"model {os.path.basename(model)!r}: output {layout.name!r} is {got[1]}{list(got[0] or ())}, wanted"
            f" {wanted[1]}{list(wanted[0])}, as the model declares it or inference finds it: a streamed model must"
            " return one row for each row of its inputs, all of the same shape"
        )


def unseen(paths: Sequence[str], journal: Journal, run: str, parts: Sequence[str]) -> str | None:
    """Return the first of a run's paths that do not exist for this process, or None."""
    missing = [_hidden(p) for p in paths]
    if not journal.is_current(run):
        missing.append(shown(journal.folder))
    missing += [_hidden(p) for p in parts]
    return next((path for path in missing if path is not None), None)


def _hidden(path: str) -> str | None:
    """Return a path that this process does not see, with the reason where a store gives one, or None."""
    try:
        return None if files.reaches(path) else shown(path)
    except (OSError, ConfigError) as error:
        return f"{shown(path)} ({error})"
