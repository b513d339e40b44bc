"""Feed a sharded graph's inputs to its tasks: part by part, each to the rank that reads it.

    an array            inside the tasks that read it if its part is small, else a task of its own: Dask has it in the
                        graph, and sends it again when a worker dies
    a dask array        a chunk is a part: an array with other chunks is rechunked lazily; nothing is gathered
    a sharded array     its parts, on the workers that hold them
    an input in `later` what each repeat of the tasks has (`calls`)

The graph defines the parts; the call defines the key that holds each.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.sharding.parts import Port, Spmd, holders_of, local_shape, part
from dask_ferro.graph.sharding.placements import Partial
from dask_ferro.graph.sharding.redistribute import Mesh, text
from dask_ferro.lower.layer import layers_of
from dask_ferro.lower.ranks.sharded_array import Arrays, ShardedArray
from dask_ferro.lower.ranks.spmd_tasks import RankCall, take_rows
from dask_ferro.lower.signature import is_dask_array


def check_inputs(spmd: Spmd, arrays: Arrays) -> None:
    """Raise `InputError` if a name is unknown, or an input has another dtype or layout than the graph's.

    Missing inputs and other shapes are reported when inputs are cut into parts.
    """
    ports = {port.name: port for port in spmd.inputs}
    unknown = sorted(arrays.keys() - ports.keys())
    if unknown:
        raise InputError(f"inputs: the model has no {unknown}; wanted {sorted(ports)}")
    dtypes = {value.name: value.dtype for value in spmd.model.graph.inputs}
    for name, value in arrays.items():
        if isinstance(value, ShardedArray):
            value.check_lies(ports[name], spmd.mesh)
        else:
            _check_array(name, value, dtypes[ports[name].parts[0]])


def _check_array(name: str, value: Any, dtype: ir.DataType | None) -> None:
    # A delayed value has any attribute.
    if not isinstance(getattr(value, "dtype", None), np.dtype):
        kind = type(value).__name__
        raise InputError(f"input {name!r}: got {kind}, wanted an array, or an output of an earlier call")
    if dtype == ir.DataType.STRING and value.dtype.kind in "OUT":
        return
    if dtype is not None and value.dtype != dtype.numpy():
        raise InputError(f"input {name!r}: got {value.dtype}, wanted {dtype.numpy()}; convert it with astype")


def feed(
    call: RankCall,
    spmd: Spmd,
    arrays: Arrays,
    later: Collection[str] = (),
    names: Collection[str] | None = None,
    rows: slice | None = None,
) -> None:
    """Add the parts of checked inputs to a call: only the inputs in `names` and these rows; default: all.

    Raises `InputError` if an input is missing, or has another shape.
    """
    here: list[Port] = []
    expected: list[Port] = []
    for port in spmd.inputs:
        value = arrays.get(port.name)
        if names is not None and port.name not in names:
            continue
        if isinstance(value, ShardedArray):
            graph, top, places = value.tasks.written()
            call.below[top] = graph
            call.keep(port.parts, places[value.name])
        elif port.name in later:
            expected.append(port)
        elif is_dask_array(value):
            _chunks(call, port, take_rows(value, rows), spmd.mesh)
        else:
            here.append(port)
    if expected:
        call.expect(replace(spmd, inputs=tuple(expected)), rows)
    own = {port.name: take_rows(arrays[port.name], rows) for port in here if port.name in arrays}
    parts = replace(spmd, inputs=tuple(here)).split(own)
    for name, rank in holders_of(here).items():
        call.give(name, parts[name], rank)


def _chunks(call: RankCall, port: Port, value: Any, mesh: Mesh) -> None:
    """Add the parts of a dask array to a call, rechunked so that its chunks are its parts."""
    if port.shape is None or len(port.shape) != value.ndim or any(map(_differs, port.shape, value.shape)):
        raise InputError(
            f"input {port.name!r}: want shape {port.shape}, got a dask array of shape {value.shape}"
        )
    if any(isinstance(placement, Partial) for placement in port.layout):
        raise InputError(
            f"input {port.name!r}: got a dask array, wanted {text(port.layout)}, which is terms of a sum; "
            "compute it first"
        )
    chunk: tuple[Any, ...] = local_shape(value.shape, port.layout, mesh)
    array = value.rechunk(chunk)
    for name, rank in holders_of([port]).items():
        index = part(value.shape, port.layout, mesh, rank)
        at = ((cut.start or 0) // max(1, size) for cut, size in zip(index, chunk, strict=True))
        call.values[name] = {rank: call.at_reader((array.name, *at), name, rank)}
    graph, top = layers_of(port.name, array)
    call.below[top] = graph


def _differs(size: Any, actual: Any) -> bool:
    """Whether an actual size differs; a size that is not known before it is computed (NaN) always differs."""
    return actual != actual or (isinstance(size, int) and size != actual)
