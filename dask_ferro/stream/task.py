"""The task of a chunk: read its rows, run the model on them, write the results, note the chunk as done.

All four are one task, so rows never pass through the client or the scheduler; what a task returns is nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.lower.worker.bundle_ref import BundleRef, ModelRef
from dask_ferro.lower.worker.task import run_bundle
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats.interfaces import Array, Layout, Sink, digest
from dask_ferro.stream.journal import Journal, line

# In `ChunkCall.outputs`: the output is the model's input of that index, unchanged.
INPUT = -1


@dataclass(frozen=True)
class ChunkCall:
    """A call of a whole model, named by its reference.

    Attributes
    ----------
    model : ModelRef
    bundle : BundleRef or None
        All its nodes; None when it has none.
    outputs : tuple of (bundle, index)
        Where each wanted output is: index of the bundle's results, or of the inputs (`INPUT`).
    """

    model: ModelRef
    bundle: BundleRef | None
    outputs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StreamJob:
    """The part of a run that all its tasks share; some kilobytes, whatever the model and the rows.

    `hashed` are the inputs whose rows are noted by a digest, as their source may change under the same fingerprint.
    """

    call: ChunkCall
    chunks: Chunks
    sinks: tuple[Sink, ...]
    journal: Journal
    run: str
    hashed: tuple[int, ...] = ()


def results(call: ChunkCall, inputs: Sequence[Array], copy: Any = None) -> list[Any]:
    """Return the wanted outputs of the model on the rows of its inputs."""
    made: Any = ()
    if call.bundle is not None:
        made = run_bundle(call.model, call.bundle, *inputs, copy=copy)
        if len(call.bundle.outputs) == 1:
            made = (made,)
    return [inputs[index] if bundle == INPUT else made[index] for bundle, index in call.outputs]


def first_row(
    call: ChunkCall, carries: Sequence[bool], *pieces: Any, copy: Any = None
) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and row shape of each output, from running the first row of the inputs that have rows."""
    inputs = [rows(p)[:1] if carried else rows(p) for p, carried in zip(pieces, carries, strict=True)]
    found = [np.asarray(v) for v in results(call, inputs, copy)]
    return [(value.dtype.str, value.shape[1:]) for value in found]


def run_chunk(job: StreamJob, number: int, *pieces: Any, copy: Any = None) -> None:
    """Compute and write a chunk.

    Parameters
    ----------
    number : int
        Of the chunk.
    *pieces
        For each model input, its rows or their `LazyRows`.
    copy : ndarray of uint8, optional
        The model file's content, for workers that cannot see its path.

    Raises
    ------
    ConfigError
        When an output has another shape or dtype than the sink, or the sink was given to another run.
    """
    begin = time.perf_counter()
    given = [rows(p) for p in pieces]
    # Digested before the model runs: a model may return its own input.
    read = read_digests(*(given[index] for index in job.hashed))
    values = results(job.call, given, copy)
    for sink, value in zip(job.sinks, values, strict=True):
        _check(value, sink.layout, job.chunks.length(number), job.call.model.path)
    if not job.journal.is_current(job.run):
        raise ConfigError(
            f"{job.journal.folder!r} is not the journal of this run: it was overwritten, or is not seen"
        )
    digests = [sink.write(number, value) for sink, value in zip(job.sinks, values, strict=True)]
    took = time.perf_counter() - begin
    job.journal.record(line(job.run, number, job.chunks.length(number), took, digests, read))


def read_digests(*pieces: Any) -> list[str]:
    """Return the digests of the rows of some pieces: bytes, dtype and shape."""
    return [_read_digest(rows(piece)) for piece in pieces]


def _read_digest(found: Any) -> str:
    array = np.ascontiguousarray(found)
    return digest(f"{digest(array.reshape(-1).view(np.uint8).data)} {array.dtype.str} {array.shape}".encode())


def rows(piece: Any) -> Array:
    """Return the rows of a piece, which may be the rows themselves.

    Raises
    ------
    ConfigError
        When they have a mask, which writing them would drop.
    """
    found: Array = piece if isinstance(piece, np.ndarray) else piece.read()
    if isinstance(found, np.ma.MaskedArray):
        raise ConfigError(
            "its rows are a masked array, and models know no masks: fill it with .filled(value)"
        )
    return found


def _check(value: Any, layout: Layout, length: int, model: str) -> None:
    got = (getattr(value, "shape", None), getattr(value, "dtype", None))
    wanted = ((length, *layout.row_shape), layout.dtype)
    if got != wanted:
        raise ConfigError(
            f"model {os.path.basename(model)!r}: output {layout.name!r} is {got[1]}{list(got[0] or ())}, wanted"
            f" {wanted[1]}{list(wanted[0])}: a model that is streamed gives a row for each row that it takes, and"
            " all of one shape"
        )


def unseen(paths: Sequence[str], journal: Journal, run: str, parts: Sequence[str]) -> str | None:
    """Return the first of a run's paths that this process does not see, or None."""
    missing = [p for p in paths if not os.path.exists(p)]
    if not journal.is_current(run):
        missing.append(journal.folder)
    missing += [p for p in parts if not os.path.exists(p)]
    return missing[0] if missing else None
