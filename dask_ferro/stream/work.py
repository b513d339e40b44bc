"""The work of a run: what is known before anything is created, and the task of a chunk.

A task reads the rows of a chunk, runs the model on them and writes their part of each output: rows of files never pass
through the client or the scheduler.
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
from dask_ferro.errors import InputError
from dask_ferro.graph.bundling.plan import Bundle
from dask_ferro.graph.ir.nodes import value_bytes
from dask_ferro.lower.inputs.tables import empty_results, read_table, result_columns
from dask_ferro.lower.preparation.model import PreparedModel
from dask_ferro.lower.preparation.remote import mask
from dask_ferro.lower.signature import Signature, check_arrays
from dask_ferro.lower.worker.sessions import ModelRef
from dask_ferro.lower.worker.task import BundleRef, run_bundle
from dask_ferro.stream import files
from dask_ferro.stream.chunks import Chunks, batch_rows
from dask_ferro.stream.endpoints import Endpoints
from dask_ferro.stream.formats import Array, check_numeric, pa, rows_of
from dask_ferro.stream.formats.images import ImageRows
from dask_ferro.stream.formats.tables import Schema, Table, digest_of
from dask_ferro.stream.journal import Header, Output
from dask_ferro.stream.sinks import Sink, check_kind

# Types and costs are computed for this number of rows: the overhead of a node is small for it, and an output of this
# length has a row for each input row, because another axis hardly has the size of a prime.
_SAMPLE_ROWS = 251
# The notes of a chunk beside its parts: what it left out, and digests of what it read.
_NOTE = "note-"


class ChunkCall(NamedTuple):
    """A call of a whole model: a bundle of its nodes, and others of outputs that are inputs.

    `outputs` are the bundle of each output, and its place there.  Of a table, `features` are the columns that go to the
    inputs, whose rows have `shapes` then, and `keep` those before the results; None of arrays.
    """

    model: ModelRef
    bundles: tuple[BundleRef, ...]
    outputs: Mapping[str, tuple[int, int]]
    sig: Signature
    title: str
    features: tuple[str, ...] | None
    keep: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]

    def results(self, inputs: Sequence[Array], copy: Any) -> dict[str, Any]:
        made = [bundle.each(run_bundle(self.model, bundle, *inputs, copy=copy)) for bundle in self.bundles]
        return {name: made[bundle][place] for name, (bundle, place) in self.outputs.items()}

    def inputs(self, read: Sequence[Any]) -> list[Array]:
        if self.features is None:
            return list(read)
        if isinstance(read[0], ImageRows):
            return [read[0].images]
        # Columns may be chosen twice, or in another order than the table's.
        found = read_table(read[0].select(list(dict.fromkeys(self.features))), self.sig, self.title)
        assert found is not None
        for name, array in found.arrays.items():
            if array.shape[1:] != self.shapes[name]:
                raise InputError(
                    f"input {name!r} has rows of shape {array.shape[1:]}, wanted {self.shapes[name]}, as in row 0"
                )
        return [found.arrays[spec.name] for spec in self.sig.inputs]

    def columns(self, table: Any, results: Mapping[str, Any], rows: int) -> Table:
        """Return results as columns of a table, after those that are kept."""
        made = result_columns(self.sig, results, rows, self.title, self.keep)
        # Kept columns never pass through numpy, so that dates and missing values stay as they are.
        kept = table.select(list(self.keep)).columns if self.keep else []
        try:
            values = [pa.array(v, pa.string() if v.dtype.kind == "O" else None) for v in made.values()]
        except pa.ArrowException as error:
            dtypes = ", ".join(f"{name} ({value.dtype})" for name, value in results.items())
            raise InputError(
                f"{self.title}: a table does not hold {dtypes}: {error}; write .npy or .zarr"
            ) from error
        return pa.table([*kept, *values], names=[*self.keep, *made])


class StreamJob(NamedTuple):
    """The part of a run that all its tasks share; some kilobytes, for every model and any number of rows."""

    call: ChunkCall
    chunks: Chunks
    sinks: tuple[Sink, ...]
    parts: str
    # The positions of what is identified by its name alone, of whose rows a digest is recorded.
    named: tuple[int, ...] = ()


def first_row(call: ChunkCall, copy: Any, *pieces: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and row shape of each output, from running the model on the first row of its batched inputs."""
    inputs = call.inputs(list(map(rows_of, pieces)))
    inputs = [rows[:1] if one else rows for rows, one in zip(inputs, call.sig.carries, strict=True)]
    results = {name: np.asarray(value) for name, value in call.results(inputs, copy).items()}
    return {name: (value.dtype.str, value.shape[1:]) for name, value in results.items()}


def run_chunk(job: StreamJob, number: int, known: Sequence[str] | None, copy: Any, *pieces: Any) -> None:
    """Compute a chunk and write its parts.

    Of one that is done, `known` are the digests of what it was computed from: it is read again, and refused if that
    changed.  `copy` is the model file's content, for workers that cannot read its path; `pieces` are the rows of each
    model input, or what reads them, and one for a table.
    """
    read = list(map(rows_of, pieces))
    skipped = getattr(read[0], "skipped", ())
    note = {"skipped": skipped, "read": [digest_of(read[index]) for index in job.named]}
    if known is not None:
        if note["read"] != known:
            first, stop = job.chunks.span(number)
            raise InputError(
                f"the source changed: rows {first} to {stop - 1} are done, and were computed from other rows than a"
                " dask collection of the same name has now. Call ff.predict_files with the earlier one to resume,"
                " or pass"
                " overwrite=True to start a new run"
            )
        return
    results = job.call.results(job.call.inputs(read), copy)
    if any(note.values()):
        # Before the part: a part that is there has nothing that is not recorded.
        files.put(files.join(job.parts, f"{_NOTE}{number}"), json.dumps(note).encode())
    rows = job.chunks.length(number) - len(skipped)
    parts = []
    for sink in job.sinks:
        if sink.schema is None:
            part = results[sink.name]
            _check(part, sink, rows, job.call.model.path)
        else:
            part = job.call.columns(read[0], {name: results[name] for name in sink.outputs}, rows)
        parts.append(part)
    for sink, part in zip(job.sinks, parts, strict=True):
        sink.write(number, part)


def _check(value: Any, sink: Sink, length: int, model: str) -> None:
    got = (getattr(value, "shape", None), getattr(value, "dtype", None))
    wanted = ((length, *sink.row_shape), sink.dtype)
    if got != wanted:
        raise InputError(
            f"model {os.path.basename(model)!r}: output {sink.name!r} is {got[1]}{list(got[0] or ())}, wanted"
            f" {wanted[1]}{list(wanted[0])}, as the model declares it or inference finds it: a streamed model must"
            " return one row for each row of its inputs, all of the same shape"
        )


def notes_in(parts: str) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Return the files that the tasks of a run left out, and digests of what they read, by chunk."""
    names = [name for name in files.names_in(parts) if name.startswith(_NOTE)]
    notes = {name.removeprefix(_NOTE): json.loads(files.read(files.join(parts, name))) for name in names}
    skipped = sorted(path for note in notes.values() for path in note["skipped"])
    return tuple(skipped), {number: note["read"] for number, note in notes.items() if note["read"]}


def missing_path(paths: Sequence[str]) -> str | None:
    """Return the first path that does not exist for this process, with the reason where a store gives one, or None."""
    for path in paths:
        try:
            if not files.exists(path):
                return mask(path)
        except (OSError, InputError) as error:
            return f"{mask(path)} ({error})"
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
    arrays = {}
    for name, source in ((spec.name, sources[spec.name]) for spec in sig.inputs):
        length = source.rows if rows is None or name not in sig.carried else rows
        # Broadcast from one number.
        one = np.array("" if source.dtype == np.dtype(object) else 0, source.dtype)
        arrays[name] = np.broadcast_to(one, (length, *source.row_shape))
    return arrays


def _measure_sample(opened: PreparedModel, sources: Mapping[str, Any]) -> tuple[int, Any]:
    """Return a number of rows, and the model's types and costs for it."""
    rows = opened.signature.fixed_rows or _SAMPLE_ROWS
    return rows, opened.sized(standins(opened.signature, sources, rows), rows)


def check_sources(sig: Signature, sources: Mapping[str, Any], title: str) -> int:
    """Return the number of rows to stream; raises `InputError` for sources that do not fit the model."""
    lengths = {name: sources[name].rows for name in sig.carried}
    if not lengths:
        raise InputError(
            f"{title} has no batch axis: its first input must have an axis 0, declared in the model"
        )
    if sig.held_elsewhere:
        raise InputError(
            f"{title}: its rows cannot be streamed in chunks: {sig.held_elsewhere}; call the model on all rows together"
        )
    if len(set(lengths.values())) > 1:
        raise InputError(f"{title}: sources differ in rows: {lengths}")
    rows = next(iter(lengths.values()))
    check_arrays(sig, standins(sig, sources, rows), title)
    return int(rows)


def default_batch(opened: PreparedModel, ends: Endpoints, rows: int, slots: int) -> int:
    sig = opened.signature
    sample, sized = _measure_sample(opened, ends.sources)
    weights = opened.loaded.model.graph.initializers
    largest = max((value_bytes(t) for name, t in sized.types.items() if name not in weights), default=0)
    read = [source for name, source in ends.read.items() if name in sig.carried or ends.table is not None]
    own = max(source.grain for source in read)
    return batch_rows(
        rows,
        row_bytes=largest / sample,
        row_seconds=sized.seconds / sample + sum(source.row_seconds for source in read),
        slots=slots,
        grain=own if own > 1 else max(1, sig.fixed_rows),
        is_cut=own > 1 and all(source.is_cut for source in read),
    )


@dataclass(frozen=True)
class Work:
    """The work of a run: a model, its ends and its chunks."""

    opened: PreparedModel
    ends: Endpoints
    chunks: Chunks

    @cached_property
    def call(self) -> ChunkCall:
        """The call of a chunk."""
        sig, chunks, ends = self.opened.signature, self.chunks, self.ends
        shapes = standins(sig, ends.sources, chunks.batch)
        plan = self.opened.plan(shapes, chunks.batch, max(1, chunks.count), "model")
        outputs = {s.name: (o.bundle, o.place) for s, o in zip(sig.outputs, plan.outputs, strict=True)}
        splits = bool(sig.fixed_rows) and (chunks.batch != sig.fixed_rows or chunks.rows % chunks.batch != 0)
        bundles = tuple(self._bundle(bundle, splits=splits) for bundle in plan.bundles)
        given = {name: source.row_shape for name, source in ends.sources.items()}
        title = f"model {self.opened.name!r}"
        return ChunkCall(self.opened.ref, bundles, outputs, sig, title, ends.features, ends.keep, given)

    def _bundle(self, bundle: Bundle, *, splits: bool) -> BundleRef:
        taken = [source.place for source in bundle.sources]
        engines = route(self.opened.support, bundle.nodes)
        carries = tuple(self.opened.signature.carries[place] for place in taken)
        split = carries if splits and any(carries) else ()
        return BundleRef(
            bundle.inputs, bundle.outputs, engines, tuple((place, -1) for place in taken), split=split
        )

    def feeds(self) -> list[RowFeed]:
        """Return the rows of each model input, in the model's order; of a table all in one piece."""
        sig = self.opened.signature
        if self.ends.table is not None:
            return [RowFeed(self.ends.table.pieces(self.chunks), True)]
        feeds = []
        for spec, carries in zip(sig.inputs, sig.carries, strict=True):
            source = self.ends.sources[spec.name]
            chunks = self.chunks if carries else Chunks(source.rows, max(1, source.rows))
            feeds.append(RowFeed(source.pieces(chunks), carries))
        return feeds

    @property
    def named(self) -> tuple[int, ...]:
        """The positions of what is identified by its name alone: such a name stays when a file behind it changes."""
        return tuple(k for k, source in enumerate(self.ends.read.values()) if source.is_named)

    def header(self, folder: str) -> Header:
        above = os.path.dirname(folder)
        outputs = {n: Output(p.kind, _relative(p.path, above)) for n, p in self.ends.places.items()}
        work = {
            "the model": self.opened.loaded.digest,
            **{f"source of {name!r}": source.fingerprint() for name, source in self.ends.read.items()},
            "rows": self.chunks.rows,
            "batch": self.chunks.batch,
            "batched": list(self.opened.signature.carried),
            **self.ends.settings,
            **{f"sink of {name!r}": f"{output.sink} ({output.kind})" for name, output in outputs.items()},
        }
        return Header(work, outputs)

    def known_rows(self) -> dict[str, tuple[Any, Any]] | None:
        """Return dtype and row shape of the outputs from the model's types, or None when these are incomplete.

        Raises `InputError` for outputs that are known not to have a row for each row of the inputs.
        """
        sample, sized = _measure_sample(self.opened, self.ends.sources)
        known, problems = {}, []
        for spec in self.opened.signature.outputs:
            shape = sized.types[spec.name].shape
            if spec.kind != "tensor":
                problems.append(f"output {spec.name!r} is a {spec.kind}, wanted a tensor")
            elif shape is not None and (not shape or (isinstance(shape[0], int) and shape[0] != sample)):
                problems.append(f"output {spec} does not carry the batch axis, so it is not one of rows")
            known[spec.name] = (spec.dtype, (shape or (0, None))[1:])
        if problems:
            raise InputError(
                f"{self.call.title}: {'; '.join(problems)}; choose others by ff.from_onnx(model, outputs=...)"
            )
        arrays = [known[place.outputs[0]] for place in self.ends.places.values() if not place.is_table]
        is_known = all(d is not None and all(isinstance(n, int) for n in rest) for d, rest in arrays)
        return known if is_known else None

    def sinks(self, rows: Mapping[str, Sequence[Any]]) -> list[Sink]:
        """Return the sinks, from dtype and row shape of each output that is an array."""
        made = []
        for place in self.ends.places.values():
            check_kind(place.kind)
            if place.is_table:
                schema = self._schema(place.outputs)
                made.append(Sink(place.kind, place.outputs, self.chunks, np.dtype(object), (), schema))
            else:
                (name,) = place.outputs
                dtype = check_numeric(np.dtype(rows[name][0]), f"output {name!r}")
                made.append(Sink(place.kind, place.outputs, self.chunks, dtype, tuple(rows[name][1])))
        return made

    def _schema(self, outputs: Sequence[str]) -> Schema:
        """Return the columns of a table of some outputs, as far as the model declares these."""
        empty = {n: v for n, v in empty_results(self.opened.signature).items() if n in outputs}
        table = self.ends.table
        return self.call.columns(table and table.schema.empty_table(), empty, 0).schema


def _relative(path: str, above: str) -> str:
    return path[len(above.rstrip("/")) + 1 :] if "://" in path else os.path.relpath(path, above)
