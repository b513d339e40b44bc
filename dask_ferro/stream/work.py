"""The work of a run: what is known before anything is created, and the task of a chunk.

A task reads the rows of a chunk, runs the model on them and writes their part of each output: rows never pass through
the client or the scheduler.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dask_ferro.engines.selection import route
from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundling.plan import Plan, ValueSource
from dask_ferro.graph.ir.nodes import value_bytes
from dask_ferro.lower.inputs.tables import empty_results, read_table, result_columns
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.prepared.remote import shown
from dask_ferro.lower.signature import Signature, check_arrays
from dask_ferro.lower.worker.models import ModelRef
from dask_ferro.lower.worker.task import BundleRef, run_bundle
from dask_ferro.stream import files
from dask_ferro.stream.chunks import Chunks, batch_rows
from dask_ferro.stream.ends import TABLE, Ends
from dask_ferro.stream.formats import Array, numeric, pa, rows_of
from dask_ferro.stream.formats.images import ImageRows
from dask_ferro.stream.formats.tables import Table, digest_of
from dask_ferro.stream.journal import Header, Output
from dask_ferro.stream.sinks import Layout, Sink, check_kind

# Types and costs are computed for this number of rows: the overhead of a node is small for it, and an output of this
# length has a row for each input row, because another axis hardly has the size of a prime.
_SAMPLE_ROWS = 251
# In `ChunkCall.outputs`: the output is the model's input of that index, unchanged.
INPUT = -1
# The notes of a chunk beside its parts: what it left out, and digests of what it read.
_NOTE = "note-"


class TableCall(NamedTuple):
    """How a table is mapped to a model's inputs (`reads`), and its outputs to a table (`writes`)."""

    sig: Signature
    title: str
    columns: tuple[str, ...]
    keep: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: bool
    writes: bool

    def inputs(self, table: Table) -> list[Array]:
        if isinstance(table, ImageRows):
            return [table.images]
        # Columns may be chosen twice, or in another order than the table's.
        mapped = table.select(list(dict.fromkeys(self.columns)))
        found = read_table(mapped, self.sig, self.title)
        assert found is not None
        return [found.arrays[spec.name] for spec in self.sig.inputs]

    def written(self, table: Any, results: Mapping[str, Any], rows: int) -> Table:
        """Return results as columns of a table, after those that are kept."""
        made = result_columns(self.sig, results, rows, self.title, self.keep)
        # Kept columns never pass through numpy, so that dates and missing values stay as they are.
        kept = table.select(list(self.keep)).columns if self.keep else []
        values = [pa.array(v, pa.string() if v.dtype.kind == "O" else None) for v in made.values()]
        return pa.table([*kept, *values], names=[*self.keep, *made])


class ChunkCall(NamedTuple):
    """A call of a whole model, whose nodes are one bundle, if there are any.

    `outputs` are (bundle, index) of each wanted output: among the bundle's results, or the inputs (`INPUT`).
    """

    model: ModelRef
    bundle: BundleRef | None
    outputs: tuple[tuple[int, int], ...]
    table: TableCall | None = None

    def results(self, inputs: Sequence[Array], copy: Any) -> list[Any]:
        made: tuple[Any, ...] = ()
        if self.bundle is not None:
            made = self.bundle.each(run_bundle(self.model, self.bundle, *inputs, copy=copy))
        return [inputs[index] if bundle == INPUT else made[index] for bundle, index in self.outputs]

    def inputs(self, read: Sequence[Any]) -> list[Array]:
        return self.table.inputs(read[0]) if self.table is not None and self.table.reads else list(read)


class StreamJob(NamedTuple):
    """The part of a run that all its tasks share; some kilobytes, for every model and any number of rows."""

    call: ChunkCall
    chunks: Chunks
    sinks: tuple[Sink, ...]
    parts: str
    run: str
    # The positions of what is identified by its name alone, of whose rows a digest is recorded.
    named: tuple[int, ...] = ()


def digests(*pieces: Any) -> list[str]:
    return [digest_of(rows_of(piece)) for piece in pieces]


def first_row(
    call: ChunkCall, carries: Sequence[bool], copy: Any, *pieces: Any
) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and row shape of each output, from running the model on the first row of its batched inputs."""
    inputs = call.inputs(list(map(rows_of, pieces)))
    if call.table is None or not call.table.reads:
        inputs = [rows[:1] if carried else rows for rows, carried in zip(inputs, carries, strict=True)]
    return [(value.dtype.str, value.shape[1:]) for value in map(np.asarray, call.results(inputs, copy))]


def run_chunk(job: StreamJob, number: int, copy: Any, *pieces: Any) -> None:
    """Compute a chunk and write its parts.

    `copy` is the model file's content, for workers that cannot read its path; `pieces` are the rows of each model
    input, or what reads them, and one for a table.
    """
    read = list(map(rows_of, pieces))
    skipped = getattr(read[0], "skipped", ())
    note = {"skipped": skipped, "read": [digest_of(read[index]) for index in job.named]}
    values = job.call.results(job.call.inputs(read), copy)
    if any(note.values()):
        # Before the part: a part that is there has nothing that is not recorded.
        files.put(files.joined(job.parts, f"{_NOTE}{number}"), json.dumps(note).encode())
    table = job.call.table
    if table is not None and table.writes:
        named = dict(zip(table.outputs, values, strict=True))
        values = [table.written(read[0], named, read[0].num_rows if table.reads else len(values[0]))]
    for sink, value in zip(job.sinks, values, strict=True):
        if sink.layout.schema is None:
            _check(value, sink.layout, job.chunks.length(number) - len(skipped), job.call.model.path)
    for sink, value in zip(job.sinks, values, strict=True):
        sink.write(number, value)


def _check(value: Any, layout: Layout, length: int, model: str) -> None:
    got = (getattr(value, "shape", None), getattr(value, "dtype", None))
    wanted = ((length, *layout.row_shape), layout.dtype)
    if got != wanted:
        raise ConfigError(
            f"model {os.path.basename(model)!r}: output {layout.name!r} is {got[1]}{list(got[0] or ())}, wanted"
            f" {wanted[1]}{list(wanted[0])}, as the model declares it or inference finds it: a streamed model must"
            " return one row for each row of its inputs, all of the same shape"
        )


def notes_in(parts: str) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Return the files that the tasks of a run left out, and digests of what they read, by chunk."""
    names = [name for name in files.names_in(parts) if name.startswith(_NOTE)]
    notes = {name.removeprefix(_NOTE): json.loads(files.read(files.joined(parts, name))) for name in names}
    skipped = sorted(path for note in notes.values() for path in note["skipped"])
    return tuple(skipped), {number: note["read"] for number, note in notes.items() if note["read"]}


def unseen(paths: Sequence[str], parts: Sequence[str]) -> str | None:
    """Return the first path that does not exist for this process, with the reason where a store gives one, or None."""
    for path in (*paths, *parts):
        try:
            is_there = files.exists(path) if "://" in path else os.path.exists(path)
        except (OSError, ConfigError) as error:
            return f"{shown(path)} ({error})"
        if not is_there:
            return shown(path)
    return None


# ---- before it begins -----------------------------------------------------------------------------------------


class RowFeed(NamedTuple):
    """The rows of one model input by chunk number; the same rows for all chunks where it carries no batch."""

    piece: Callable[[int], Any]
    carries: bool

    def at(self, number: int) -> Any:
        return self.piece(number if self.carries else 0)


def standins(sig: Signature, sources: Mapping[str, Any], rows: int | None = None) -> dict[str, Array]:
    """Return arrays of the shapes and dtypes of the inputs, which take no memory.

    Inputs that carry the batch have `rows` rows, where they are given; others have those of their source.
    """
    pairs = ((sources[s.name], s.name, carries) for s, carries in zip(sig.inputs, sig.carries, strict=True))
    return {
        # Broadcast from one number.
        name: np.broadcast_to(
            np.array("" if source.dtype == np.dtype(object) else 0, source.dtype),
            (source.rows if rows is None or not carries else rows, *source.row_shape),
        )
        for source, name, carries in pairs
    }


def _sampled(opened: PreparedModel, sources: Mapping[str, Any]) -> tuple[int, Any]:
    """Return a number of rows, and the model's types and costs for it."""
    rows = opened.signature.fixed_rows or _SAMPLE_ROWS
    return rows, opened.sized(standins(opened.signature, sources, rows), rows)


def check_sources(sig: Signature, sources: Mapping[str, Any], title: str) -> int:
    """Return the number of rows to stream; raises `ConfigError` for sources that do not fit the model."""
    lengths = {s.name: sources[s.name].rows for s, c in zip(sig.inputs, sig.carries, strict=True) if c}
    if not lengths:
        raise ConfigError(
            f"{title} has no batch axis: its first input must have an axis 0, declared in the model"
        )
    if sig.held_elsewhere:
        raise ConfigError(
            f"{title}: its rows cannot be streamed in chunks: {sig.held_elsewhere}; call the model on all rows at once"
        )
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"{title}: sources differ in rows: {lengths}")
    rows = next(iter(lengths.values()))
    check_arrays(sig, standins(sig, sources, rows), title)
    return int(rows)


def check_outputs(
    opened: PreparedModel, sources: Mapping[str, Any], names: Sequence[str], title: str
) -> None:
    """Raise `ConfigError` for outputs that are known not to have a row for each row of the inputs."""
    sig = opened.signature
    sample, sized = _sampled(opened, sources)
    problems = []
    for spec in (spec for spec in sig.outputs if spec.name in names):
        shape = sized.types[spec.name].shape
        if spec.kind != "tensor":
            problems.append(f"output {spec.name!r} is a {spec.kind}, wanted a tensor")
        elif shape is not None and (not shape or (isinstance(shape[0], int) and shape[0] != sample)):
            problems.append(f"output {spec} does not carry the batch axis, so it is not one of rows")
    if problems:
        raise ConfigError(
            f"{title}: {'; '.join(problems)}; name the outputs to write with output= or a mapping"
        )


def default_batch(opened: PreparedModel, ends: Ends, rows: int, slots: int) -> int:
    sig = opened.signature
    sample, sized = _sampled(opened, ends.sources)
    weights = opened.loaded.model.graph.initializers
    largest = max((value_bytes(t) for name, t in sized.types.items() if name not in weights), default=0)
    carried = {s.name for s, c in zip(sig.inputs, sig.carries, strict=True) if c}
    read = [source for name, source in ends.read.items() if name in carried or ends.columns is not None]
    own = max(source.grain for source in read)
    return batch_rows(
        rows,
        row_bytes=largest / sample,
        row_seconds=sized.seconds / sample + sum(source.row_seconds for source in read),
        slots=slots,
        grain=own if own > 1 else max(1, sig.fixed_rows),
        is_cut=own > 1 and all(getattr(source, "is_cut", source.grain == 1) for source in read),
    )


@dataclass(frozen=True)
class Work:
    """The work of a run: a model, its ends and its chunks."""

    opened: PreparedModel
    ends: Ends
    chunks: Chunks

    @cached_property
    def call(self) -> ChunkCall:
        """The model as one bundle, and the positions of the outputs in its results."""
        sig, chunks, ends = self.opened.signature, self.chunks, self.ends
        shapes = standins(sig, ends.sources, chunks.batch)
        plan = self.opened.plan(shapes, chunks.batch, max(1, chunks.count), "model")
        found = dict(zip((s.name for s in sig.outputs), plan.outputs, strict=True))
        outputs = tuple(_where(plan, n, found[n]) for n in ends.outputs)
        computed = [bundle for bundle in plan.bundles if bundle.nodes]
        if not computed:
            return ChunkCall(self.opened.ref, None, outputs, self._table)
        (whole,) = computed
        taken = [source.place for source in whole.sources]
        splits = bool(sig.fixed_rows) and (chunks.batch != sig.fixed_rows or chunks.rows % chunks.batch != 0)
        bundle = BundleRef(
            whole.inputs,
            whole.outputs,
            route(self.opened.support, whole.nodes),
            tuple((index, -1) for index in taken),
            split=tuple(sig.carries[index] for index in taken) if splits else (),
        )
        return ChunkCall(self.opened.ref, bundle, outputs, self._table)

    @property
    def _table(self) -> TableCall | None:
        columns, writes = self.ends.columns, self.ends.is_table
        if columns is None and not writes:
            return None
        sig, title = self.opened.signature, f"model {self.opened.name!r}"
        features, keep = (columns.features, columns.keep) if columns else ((), ())
        return TableCall(sig, title, features, keep, tuple(self.ends.outputs), columns is not None, writes)

    def feeds(self) -> list[RowFeed]:
        """Return the rows of each model input, in the model's order; of a table all in one piece."""
        sig, columns = self.opened.signature, self.ends.columns
        if columns is not None:
            if self.chunks.rows or self.ends.is_table:
                return [RowFeed(columns.table.pieces(self.chunks), True)]
            return []
        # A row of zeros for a source without rows, by which the shapes of outputs are known.
        row = standins(sig, self.ends.sources, 1)
        feeds = []
        for spec, carries in zip(sig.inputs, sig.carries, strict=True):
            source = self.ends.sources[spec.name]
            if carries and not source.rows:
                feeds.append(RowFeed(lambda number, array=row[spec.name]: np.array(array), True))  # type: ignore[misc]
            else:
                chunks = self.chunks if carries else Chunks(source.rows, max(1, source.rows))
                feeds.append(RowFeed(source.pieces(chunks), carries))
        return feeds

    @property
    def named(self) -> tuple[int, ...]:
        """The positions of what is identified by its name alone: such a name stays when a file behind it changes."""
        return tuple(
            k for k, source in enumerate(self.ends.read.values()) if getattr(source, "is_named", False)
        )

    def header(self, folder: str) -> Header:
        above = os.path.dirname(folder)
        places = self.ends.places.items()
        outputs = {n: Output(p.kind, _relative(p.path, above), "", ()) for n, p in places}
        sig = self.opened.signature
        batched = [s.name for s, carries in zip(sig.inputs, sig.carries, strict=True) if carries]
        settings = {"batched": batched, "outputs": self.ends.outputs, **self.ends.settings}
        sources = {name: source.fingerprint() for name, source in self.ends.read.items()}
        rows, batch = self.chunks.rows, self.chunks.batch
        return Header(self.opened.loaded.digest, sources, rows, batch, settings, outputs)

    def known_layouts(self) -> list[Layout] | None:
        """Return the outputs' layouts from the model's types, or None when these are incomplete."""
        if self.ends.is_table:
            return self.layouts([])
        sig, batch = self.opened.signature, self.chunks.batch
        types = self.opened.sized(standins(sig, self.ends.sources, batch), batch).types
        dtypes = {spec.name: spec.dtype for spec in sig.outputs}
        known = [(dtypes[name], (types[name].shape or (0, None))[1:]) for name in self.ends.outputs]
        if any(dtype is None or not all(isinstance(d, int) for d in rest) for dtype, rest in known):
            return None
        return self.layouts(known)

    def layouts(self, found: Sequence[tuple[Any, Any]]) -> list[Layout]:
        """Return the outputs' layouts from dtype and row shape of each."""
        if self._table is not None and self._table.writes:
            return [Layout(TABLE, self.chunks, np.dtype(object), (), self._empty(self._table).schema)]
        made = [
            Layout(name, self.chunks, numeric(np.dtype(dtype), f"output {name!r}"), tuple(shape))
            for name, (dtype, shape) in zip(self.ends.outputs, found, strict=True)
        ]
        for layout in made:
            place = self.ends.places[layout.name]
            check_kind(place.kind, place.path, layout.dtype)
        return made

    def _empty(self, call: TableCall) -> Table:
        """Return the table of results for no rows, as far as the model declares its outputs."""
        results = {n: v for n, v in (empty_results(call.sig) or {}).items() if n in call.outputs}
        columns = self.ends.columns
        return call.written(columns and columns.table.schema.empty_table(), results, 0)


def _relative(path: str, above: str) -> str:
    return path[len(above.rstrip("/")) + 1 :] if "://" in path else os.path.relpath(path, above)


def _where(plan: Plan, name: str, source: ValueSource) -> tuple[int, int]:
    bundle = plan.bundles[source.bundle]
    if bundle.nodes:
        return source.bundle, source.place
    # No node computes it: it is an unchanged input, or a weight.
    if not bundle.sources:
        raise ConfigError(
            f"output {name!r} is a weight of the model: there is nothing to compute, leave it out"
        )
    return INPUT, bundle.sources[0].place
