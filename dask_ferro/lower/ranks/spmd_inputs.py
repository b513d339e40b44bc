"""Feeds of a sharded graph's inputs to its tasks: part by part, each to the rank that reads it.

    an array            inside the tasks that read it if its part is small, else a task of its own: Dask has it in the
                        graph, and sends it again when a worker dies
    a dask array        a chunk is a part: an array with other chunks is rechunked lazily; nothing is gathered
    a sharded array     its parts, on the workers that hold them
    `LATER`             what each repeat of a template gives (`repeat`)

The graph defines the parts; the call defines the key that holds each.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.sharding.parts import Port, Spmd, holders_of, local_shape, part
from dask_ferro.graph.sharding.placements import Partial
from dask_ferro.graph.sharding.redistribute import Mesh, text
from dask_ferro.lower.layer import layers_of
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.sharded import ShardedArray
from dask_ferro.lower.ranks.spmd_tasks import PartPlace, RankCall, take_rows
from dask_ferro.lower.signature import is_dask_array

# In place of an input that is given when the tasks run (`RankCall.parts`).
LATER = object()


def checked(spmd: Spmd, arrays: Arrays) -> None:
    """Raise `ConfigError` for unknown names, and for inputs of another dtype or layout than the graph's.

    Missing inputs and other shapes are reported when inputs are cut into parts.
    """
    ports = {port.name: port for port in spmd.inputs}
    unknown = sorted(arrays.keys() - ports.keys())
    if unknown:
        raise ConfigError(f"inputs: the model has no {unknown}; wanted {sorted(ports)}")
    dtypes = {value.name: value.dtype for value in spmd.model.graph.inputs}
    for name, value in arrays.items():
        if isinstance(value, ShardedArray):
            value.check_lies(ports[name], spmd.mesh)
        else:
            _check_array(name, value, dtypes[ports[name].parts[0]])


def _check_array(name: str, value: Any, wanted: ir.DataType | None) -> None:
    # A delayed value has any attribute.
    if not isinstance(getattr(value, "dtype", None), np.dtype):
        kind = type(value).__name__
        raise ConfigError(f"input {name!r}: got {kind}, wanted an array, or an output of an earlier call")
    if wanted == ir.DataType.STRING and value.dtype.kind in "OUT":
        return
    if wanted is not None and value.dtype != wanted.numpy():
        raise ConfigError(
            f"input {name!r}: got {value.dtype}, wanted {wanted.numpy()}; convert it with astype"
        )


def keys_read(arrays: Arrays) -> list[tuple[str, tuple[Key, ...]]]:
    """Return the keys of the sharded inputs, which depend on how they were submitted (`call_outputs`)."""
    return sorted((name, value.keys) for name, value in arrays.items() if isinstance(value, ShardedArray))


def feed(
    call: RankCall,
    spmd: Spmd,
    arrays: Arrays,
    names: Container[str] | None = None,
    rows: slice | None = None,
) -> None:
    """Give a call the parts of its inputs.

    Parameters
    ----------
    call : RankCall
    spmd : Spmd
    arrays : mapping of str to array, dask array, ShardedArray or `LATER`
        Those that passed `checked`.
    names : container of str, optional
        Of the graph's inputs, those to give; default: all.
    rows : slice, optional
        The rows that the tasks read; default: all.

    Raises
    ------
    ConfigError
        An input that is missing, or has another shape.
    """
    here: list[Port] = []
    later: list[Port] = []
    for port in spmd.inputs:
        value = arrays.get(port.name)
        if names is not None and port.name not in names:
            continue
        if isinstance(value, ShardedArray):
            # Outputs of one call share their graph.
            call.below[value.top] = value.tasks.fresh().graph
            call.keep(port.parts, value.places)
        elif value is LATER:
            later.append(port)
        elif is_dask_array(value):
            _chunks(call, port, take_rows(value, rows), spmd.mesh)
        else:
            here.append(port)
    call.expect(replace(spmd, inputs=tuple(later)), rows)
    own = {port.name: take_rows(arrays[port.name], rows) for port in here if port.name in arrays}
    parts = replace(spmd, inputs=tuple(here)).split(own)
    for name, rank in holders_of(here).items():
        call.give(name, parts[name], rank)


def _chunks(call: RankCall, port: Port, value: Any, mesh: Mesh) -> None:
    """Give a call the parts of a dask array, rechunked so that its chunks are its parts."""
    if port.shape is None or len(port.shape) != value.ndim or any(map(_differs, port.shape, value.shape)):
        raise ConfigError(
            f"input {port.name!r}: want shape {port.shape}, got a dask array of shape {value.shape}"
        )
    if any(isinstance(placement, Partial) for placement in port.layout):
        raise ConfigError(
            f"input {port.name!r}: got a dask array, wanted {text(port.layout)}, which is terms of a sum; "
            "compute it first"
        )
    chunk: tuple[Any, ...] = local_shape(value.shape, port.layout, mesh)
    array = value.rechunk(chunk)
    for rank, name in enumerate(port.parts):
        index = part(value.shape, port.layout, mesh, rank)
        at = ((cut.start or 0) // max(1, size) for cut, size in zip(index, chunk, strict=True))
        call.places[name] = PartPlace((array.name, *at))
    graph, top = layers_of(port.name, array)
    call.below[top] = graph


def _differs(wanted: Any, got: Any) -> bool:
    """Whether a size differs from the wanted one; a size that is not known before it is computed (NaN) always does."""
    return got != got or (isinstance(wanted, int) and wanted != got)
