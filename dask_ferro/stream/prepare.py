"""Preparation of a run: rows, chunks and outputs are determined and checked before anything is created."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dask_ferro.engines.selection import route
from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundling.plan import Plan, ValueSource
from dask_ferro.graph.ir.inference import ValueType
from dask_ferro.graph.ir.nodes import value_bytes
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.signature import Signature, check_arrays
from dask_ferro.lower.worker.bundle_ref import BundleRef
from dask_ferro.stream.chunks import Chunks, batch_rows
from dask_ferro.stream.formats.interfaces import Array, Layout, RowSource, numeric
from dask_ferro.stream.journal import Header, Output
from dask_ferro.stream.places import SinkPath
from dask_ferro.stream.pools import RowFeed
from dask_ferro.stream.task import INPUT, ChunkCall

# Types and costs are computed for this number of rows: the overhead of a node is small for it, and an output of this
# length has a row for each input row, because another axis hardly has the size of a prime.
_SAMPLE_ROWS = 251


def standins(sig: Signature, sources: Mapping[str, RowSource], rows: int) -> dict[str, Array]:
    """Return arrays of the shapes and dtypes of the inputs with `rows` rows, which take no memory."""
    pairs = zip(sig.inputs, sig.carries, strict=True)
    return {s.name: _standin(sources[s.name], rows if carries else None) for s, carries in pairs}


def as_they_are(sources: Mapping[str, RowSource]) -> dict[str, Array]:
    """Return arrays of the shapes and dtypes of the sources, which take no memory."""
    return {name: _standin(source) for name, source in sources.items()}


def _standin(source: RowSource, rows: int | None = None) -> Array:
    # Broadcast from one number, which takes no memory for any shape.
    return np.broadcast_to(
        np.array("" if source.dtype == np.dtype(object) else 0, source.dtype),
        (source.rows if rows is None else rows, *source.row_shape),
    )


def check_sources(sig: Signature, sources: Mapping[str, RowSource], title: str) -> int:
    """Return the number of rows to stream.

    Raises
    ------
    ConfigError
        Dtypes or shapes do not fit the model, sources differ in length, or the model has no batch axis.
    """
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
    return rows


def check_outputs(
    opened: PreparedModel, sources: Mapping[str, RowSource], names: Sequence[str], title: str
) -> None:
    """Raise `ConfigError` for outputs that are known not to have a row for each row of the inputs."""
    sig = opened.signature
    sample = sig.fixed_rows or _SAMPLE_ROWS
    types = opened.sized(standins(sig, sources, sample), sample).types
    problems = []
    for spec in sig.outputs:
        shape = types[spec.name].shape
        if spec.name in names and spec.kind != "tensor":
            problems.append(f"output {spec.name!r} is a {spec.kind}, wanted a tensor")
        elif (
            spec.name in names
            and shape is not None
            and (not shape or (isinstance(shape[0], int) and shape[0] != sample))
        ):
            problems.append(f"output {spec} does not carry the batch axis, so it is not one of rows")
    if problems:
        raise ConfigError(
            f"{title}: {'; '.join(problems)}; name the outputs to write with output= or a mapping"
        )


def default_batch(opened: PreparedModel, sources: Mapping[str, RowSource], rows: int, slots: int) -> int:
    """Return the default number of rows of a chunk."""
    sig = opened.signature
    sample = sig.fixed_rows or _SAMPLE_ROWS
    sized = opened.sized(standins(sig, sources, sample), sample)
    weights = opened.loaded.model.graph.initializers
    largest = max((value_bytes(t) for name, t in sized.types.items() if name not in weights), default=0)
    own = max(sources[s.name].grain for s, c in zip(sig.inputs, sig.carries, strict=True) if c)
    return batch_rows(
        rows,
        row_bytes=largest / sample,
        row_seconds=sized.seconds / sample,
        slots=slots,
        grain=own if own > 1 else max(1, sig.fixed_rows),
    )


@dataclass(frozen=True)
class Work:
    """The work of a run: a model, its sources, its sinks and its chunks.

    Attributes
    ----------
    opened : PreparedModel
    sources : mapping of model inputs to RowSource
    places : mapping of the wanted outputs to SinkPath, in the model's order
    chunks : Chunks
    """

    opened: PreparedModel
    sources: Mapping[str, RowSource]
    places: Mapping[str, SinkPath]
    chunks: Chunks

    @property
    def outputs(self) -> list[str]:
        """Names of the wanted outputs."""
        return list(self.places)

    @cached_property
    def call(self) -> ChunkCall:
        """The model as one bundle, and the positions of the outputs in its results."""
        sig, chunks = self.opened.signature, self.chunks
        shapes = standins(sig, self.sources, chunks.batch)
        plan = self.opened.plan(shapes, chunks.batch, max(1, chunks.count), "model")
        found = dict(zip((s.name for s in sig.outputs), plan.outputs, strict=True))
        outputs = tuple(_where(plan, n, found[n]) for n in self.outputs)
        computed = [bundle for bundle in plan.bundles if bundle.nodes]
        if not computed:
            return ChunkCall(self.opened.ref, None, outputs)
        (whole,) = computed
        taken = [source.place for source in whole.sources]
        splits = bool(sig.fixed_rows) and (chunks.batch != sig.fixed_rows or chunks.rows % chunks.batch != 0)
        bundle = BundleRef(
            whole.inputs,
            whole.outputs,
            route(self.opened.support, whole.nodes),
            tuple((index, -1) for index in taken),
            rows=sig.fixed_rows if splits else 0,
            split=tuple(sig.carries[index] for index in taken) if splits else (),
        )
        return ChunkCall(self.opened.ref, bundle, outputs)

    def feeds(self) -> list[RowFeed]:
        """Return the rows of each model input, in the model's order; a row of zeros for a source without rows."""
        sig = self.opened.signature
        row = standins(sig, self.sources, 1)
        feeds = []
        for spec, carries in zip(sig.inputs, sig.carries, strict=True):
            source = self.sources[spec.name]
            if carries and not source.rows:
                feeds.append(_zeros(row[spec.name]))
            else:
                chunks = self.chunks if carries else Chunks(source.rows, max(1, source.rows))
                feeds.append(RowFeed(source.pieces(chunks), carries))
        return feeds

    def header(self, folder: str) -> Header:
        """Return the header of a new run with its journal in `folder`, without the outputs' layouts."""
        above = os.path.dirname(folder)
        outputs = {n: Output(p.kind, os.path.relpath(p.path, above), "", ()) for n, p in self.places.items()}
        prints = {name: source.fingerprint() for name, source in self.sources.items()}
        sig = self.opened.signature
        batched = tuple(s.name for s, carries in zip(sig.inputs, sig.carries, strict=True) if carries)
        return Header(
            self.opened.loaded.digest, prints, self.chunks.rows, self.chunks.batch, outputs, batched=batched
        )

    def hashed(self) -> tuple[int, ...]:
        """Return the positions of the inputs whose source may change without a change of its fingerprint."""
        names = [spec.name for spec in self.opened.signature.inputs]
        return tuple(i for i, name in enumerate(names) if not self.sources[name].tells_content)

    def known_layouts(self) -> list[Layout] | None:
        """Return the outputs' layouts from the model's types, or None when these are incomplete."""
        sig, batch = self.opened.signature, self.chunks.batch
        types = self.opened.sized(standins(sig, self.sources, batch), batch).types
        dtypes = {spec.name: spec.dtype for spec in sig.outputs}
        found = [(name, dtypes[name], _row_shape(types[name])) for name in self.outputs]
        if any(dtype is None or shape is None for _, dtype, shape in found):
            return None
        return self.layouts([(dtype, shape) for _, dtype, shape in found])

    def layouts(self, found: Sequence[tuple[Any, Any]]) -> list[Layout]:
        """Return the outputs' layouts from dtype and row shape of each."""
        return [
            Layout(name, self.chunks, numeric(np.dtype(dtype), f"output {name!r}"), tuple(row_shape))
            for name, (dtype, row_shape) in zip(self.outputs, found, strict=True)
        ]


def _where(plan: Plan, name: str, source: ValueSource) -> tuple[int, int]:
    """Return an output's position: among the results of a chunk's task, or among its inputs."""
    bundle = plan.bundles[source.bundle]
    if bundle.nodes:
        return source.bundle, source.place
    # No node computes it: it is an unchanged input, or a weight.
    if not bundle.sources:
        raise ConfigError(
            f"output {name!r} is a weight of the model: there is nothing to compute, leave it out"
        )
    return INPUT, bundle.sources[0].place


def _zeros(array: Array) -> RowFeed:
    return RowFeed(lambda number: np.array(array), True)


def _row_shape(found: ValueType) -> tuple[int, ...] | None:
    shape = found.shape[1:] if found.shape else (None,)
    known = tuple(d for d in shape if isinstance(d, int))
    return known if len(known) == len(shape) else None
