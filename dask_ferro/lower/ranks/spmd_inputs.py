"""Feeds of a sharded graph's inputs to its tasks: part by part, each to the worker that reads it.

    an array            inside the graph, which sends it again when needed, as long as all arrays of a call come to
                        8 MiB; the largest ones beyond that directly to the workers, and again if they die
    a dask array        a chunk is a part: an array with other chunks is rechunked lazily; nothing is gathered
    a sharded array     its parts, on the workers that hold them

The graph defines the parts; the call defines the key that holds each.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from dask.base import is_dask_collection, tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_ferro.errors import ConfigError
from dask_ferro.graph.sharding.parts import Port, Spmd, holders_of, local_shape, part
from dask_ferro.graph.sharding.placements import Partial
from dask_ferro.graph.sharding.redistribute import Mesh, text
from dask_ferro.lower.client import live_client
from dask_ferro.lower.inputs.shipping import copy_for, sent, usable_here
from dask_ferro.lower.layer import Feed, layers_of
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import Homes
from dask_ferro.lower.ranks.sharded import Memo, ShardedArray
from dask_ferro.lower.ranks.spmd_tasks import PartPlace, RankCall
from dask_ferro.lower.signature import is_dask_array
from dask_ferro.lower.upstream import TaskRef

# Dask warns of graphs above 10 MB, and moves them through the scheduler at two thirds of a worker's speed.
IN_GRAPH_BYTES = 8 * 2**20
# Up to this, an input is inside all tasks that read it: a task of its own costs more bytes in the graph.
_SMALL_BYTES = 256
# Up to this, all arrays of a call are inside the tasks that read them.
INLINE_BYTES = 2 * 2**20


class Travel(NamedTuple):
    """How the arrays of this process reach the tasks that read them.

    Attributes
    ----------
    sent : frozenset of str
        Inputs that are sent to the workers directly; the others are in the graph.
    inline : frozenset of str
        Those of the others that are inside the tasks that read them, and not in tasks of their own.
    """

    sent: frozenset[str] = frozenset()
    inline: frozenset[str] = frozenset()

    @property
    def token(self) -> tuple[list[str], list[str]]:
        """The part of each task's key: tasks that get an input in another way are other tasks."""
        return sorted(self.sent), sorted(self.inline)


# In place of an input that is given when the tasks run (`Fed.later`).
LATER = object()


class Below(NamedTuple):
    """Layers that a call reads from, with the name of the last one."""

    layers: Mapping[str, Any]
    dependencies: Mapping[str, Iterable[str]]
    top: str | None


def stacked(name: str, layer: MaterializedLayer, below: Iterable[Below | Feed]) -> HighLevelGraph:
    """Return the graph of a named layer on top of those that it reads from."""
    layers: dict[str, Any] = {}
    needs: dict[str, set[str]] = {}
    tops: set[str] = set()
    for one in below:
        layers.update(one.layers)
        needs.update({layer: set(others) for layer, others in one.dependencies.items()})
        tops |= {one.top} if one.top is not None else set()
    return HighLevelGraph({**layers, name: layer}, {**needs, name: tops})


class CallInputs(NamedTuple):
    """The inputs of a call: arrays by name, or `LATER`; their tokens, and how they travel."""

    arrays: Arrays
    told: Mapping[str, Any] = {}
    travel: Travel = Travel()


class Fed(NamedTuple):
    """Tasks that have their inputs, the layers that hold these, and the rows of the batch that the tasks read."""

    call: RankCall
    spmd: Spmd
    rows: slice | None
    below: list[Below]

    def later(self, arrays: Arrays) -> dict[Key, Any]:
        """Return the parts of inputs that were `LATER`, by the keys that the tasks have for them."""
        own = {port.name: _of_rows(arrays[port.name], self.rows) for port in self.call.later}
        parts = replace(self.spmd, inputs=tuple(self.call.later)).split(own)
        return {self.call.places[name].key: value for name, value in parts.items()}


def content_of(opened: PreparedModel) -> tuple[dict[str, TaskRef], list[Below]]:
    """Return a model's content as a task argument, and its layer, where workers cannot see the model's file."""
    client = live_client()
    copy = None if client is None else copy_for(opened, client)
    if copy is None:
        return {}, []
    return {"copy": TaskRef(copy.source.at(0))}, [Below(copy.layers, copy.dependencies, copy.top)]


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


def tokens(arrays: Arrays) -> dict[str, Any]:
    """Return the token of each input: a hash of its content, or of its key where it is lazy."""
    return {n: v.token if isinstance(v, ShardedArray) else tokenize(v) for n, v in arrays.items()}


def keys_read(arrays: Arrays) -> list[tuple[str, tuple[Key, ...]]]:
    """Return the keys of the sharded inputs, which depend on how the inputs of their calls travelled."""
    return sorted((name, value.keys) for name, value in arrays.items() if isinstance(value, ShardedArray))


def nbytes_of(arrays: Arrays) -> int:
    """Return the bytes of the arrays of this process."""
    return sum(_sizes(arrays).values())


def _sizes(arrays: Arrays) -> dict[str, int]:
    # A sharded array is asked first: the question whether it is a collection looks at its graph.
    here = {
        name: array
        for name, array in arrays.items()
        if not isinstance(array, ShardedArray) and not is_dask_collection(array)
    }
    return {name: int(getattr(array, "nbytes", 0)) for name, array in here.items()}


def travel_of(arrays: Arrays) -> Travel:
    """Return how the arrays of a call reach its tasks: by the client directly, the largest first, or in the graph.

    Parameters
    ----------
    arrays : mapping of str to array
        All inputs of the call: each alone may be small enough for the graph where together they are not.
    """
    sizes = _sizes(arrays)
    left = total = sum(sizes.values())
    direct = set()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)) if live_client() is not None else ():
        if left <= IN_GRAPH_BYTES:
            break
        direct.add(name)
        left -= sizes[name]
    few = arrays if total <= INLINE_BYTES else {n for n, size in sizes.items() if size <= _SMALL_BYTES}
    return Travel(frozenset(direct), frozenset(few) - direct)


def feed(
    call: RankCall,
    spmd: Spmd,
    inputs: CallInputs,
    homes: Homes,
    names: Container[str] | None = None,
    rows: slice | None = None,
) -> Fed:
    """Assign keys to the parts of inputs in `call.places`; return the layers that hold these keys.

    Parameters
    ----------
    call : RankCall
    spmd : Spmd
    inputs : CallInputs
        Arrays that passed `checked`, or `LATER`.
    homes : Homes
    names : container of str, optional
        Of the graph's inputs, those to assign; default: all.
    rows : slice, optional
        The rows that the tasks read; default: all.

    Raises
    ------
    ConfigError
        An input that is missing, or has another shape.
    """
    arrays, told, travel = inputs
    _refresh(arrays)
    feeds: list[Below] = []
    # Outputs of one call share their graph.
    kept: dict[int, Below] = {}
    rest: list[Port] = []
    for port in spmd.inputs:
        if names is not None and port.name not in names:
            continue
        value = arrays.get(port.name)
        if isinstance(value, ShardedArray):
            _keep(call, port, value, kept)
        elif value is LATER:
            call.expect(port)
        elif is_dask_array(value):
            feeds.append(_chunks(call, port, _of_rows(value, rows), spmd.mesh))
        else:
            rest.append(port)
    feeds += kept.values()
    own = {port.name: _of_rows(arrays[port.name], rows) for port in rest if port.name in arrays}
    parts = replace(spmd, inputs=tuple(rest)).split(own)
    # A part's name has its layout and rank, and not the mesh that it was cut for.
    where = "x".join(map(str, spmd.mesh.sizes)) + ("" if rows is None else f"-{rows.start}-{rows.stop}")
    for port in rest:
        for name, rank in holders_of([port]).items():
            if port.name not in travel.sent:
                call.give(name, parts[name], rank, inline=port.name in travel.inline)
                continue
            to = [homes.of(rank, call.reader(name))] if homes.order else None
            label = f"spmd-sent-{told[port.name]}-{where}-{name}"
            one = usable_here(sent(label, parts[name], live_client(), workers=to), parts[name])
            call.places[name] = PartPlace(one.source.at(0))
            feeds.append(Below(one.layers, one.dependencies, one.top))
    return Fed(call, spmd, rows, feeds)


def _of_rows(array: Any, rows: slice | None) -> Any:
    return array if rows is None else array[rows]


def _keep(call: RankCall, port: Port, value: ShardedArray, kept: dict[int, Below]) -> None:
    """Assign the parts of a sharded array; add the layers of its tasks, which other arrays share."""
    call.keep(port.parts, value.keys, value.items)
    if id(value.tasks) not in kept:
        graph = value.graph
        kept[id(value.tasks)] = Below(graph.layers, graph.dependencies, value.top)


def _refresh(arrays: Arrays) -> None:
    """Write the tasks of sharded arrays again whose workers have changed, or whose results were lost."""
    values = [value for value in arrays.values() if isinstance(value, ShardedArray)]
    lost = {}
    # Outputs of one call share its tasks, and each look at the workers is a message.
    for tasks in {id(value.tasks): value.tasks for value in values}.values():
        lost[id(tasks)] = tasks.is_lost()
    memo: Memo = {}
    for value in values:
        # One array may be given for several inputs, and has other tasks once it is renewed.
        if lost.get(id(value.tasks), False):
            value.renew(memo)


def _chunks(call: RankCall, port: Port, value: Any, mesh: Mesh) -> Below:
    """Return the layers of a dask array, rechunked so that its chunks are its parts."""
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
    return Below(graph.layers, graph.dependencies, top)


def _differs(wanted: Any, got: Any) -> bool:
    """Whether a size differs from the wanted one; a size that is not known before it is computed (NaN) always does."""
    return got != got or (isinstance(wanted, int) and wanted != got)
