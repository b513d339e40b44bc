"""A sharded graph as a Dask collection: each rank's segments on its worker, collectives between them.

    Ranks(spmd)({"x": x, "w": w}) --> {"y": ShardedArray}       lazy; parts stay where they are made

A rank prefers a worker and never insists: when one dies, Dask computes again elsewhere what was lost, and the numbers
are the same, since every sum has its order (`exchange`).  A `ShardedArray` may be an input of the next call, where it
lies: so the parameters of a training step never leave their workers.  Weights are mapped from the model's file.
Inputs of up to 8 MiB a call travel in the graph, so that they can be sent again; larger ones go to their workers
directly, as Dask's own scattered data do, and are lost with them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import dask
import onnx_ir as ir
from dask._task_spec import TaskRef
from dask.base import DaskMethodsMixin, get_scheduler, is_dask_collection, tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.graph.apply import Applied
from dask_ferro.graph.cost import CPU, costs, seconds
from dask_ferro.graph.load import Limits, Loaded, load
from dask_ferro.graph.placements import Partial, Placement, Shard
from dask_ferro.graph.redistribute import Mesh, text
from dask_ferro.graph.segments import is_collective
from dask_ferro.graph.shapes import infer
from dask_ferro.graph.shard_parts import Port, Spmd
from dask_ferro.kernels.collectives import joined, reduced
from dask_ferro.kernels.route import check, support
from dask_ferro.lower.exchange import Key
from dask_ferro.lower.inputs import current_client
from dask_ferro.lower.shipping import copy_for
from dask_ferro.lower.spmd_tasks import Call, Place, source
from dask_ferro.lower.store import reference, spool
from dask_ferro.lower.task import ModelRef, remember
from dask_ferro.trace import ABOUT

# Dask warns of graphs above 10 MB, and moves them through the scheduler at two thirds of a worker's speed.
_IN_GRAPH_BYTES = 8 * 2**20


class _Opened(NamedTuple):
    """What `copy_for` asks of an opened model."""

    loaded: Loaded
    ref: ModelRef


class Ranks:
    """A sharded graph that can be called, once or step by step.

    Parameters
    ----------
    spmd : Spmd
        From `graph.spmd.lower`.
    workers : sequence of str or int, optional
        Address of each rank's worker, or its number in the order of workers' names; ranks share where there are
        fewer.  Without them, all workers of the client at hand, in that order.

    Raises
    ------
    UnsupportedOp
        Naming every node that no engine computes.
    """

    def __init__(self, spmd: Spmd, *, workers: Sequence[str | int] | None = None) -> None:
        path = spool(bytes(ir.to_proto(spmd.model).SerializeToString(deterministic=True)))
        loaded = load(path, limits=Limits(value_bytes=config.size("limits.value-bytes")))
        rows = support(loaded.model)
        nodes = zip(rows, loaded.model.graph, strict=True)
        check("cannot run the sharded graph", [row for row, node in nodes if not is_collective(node)])
        self.spmd, self.workers = spmd, workers
        self._opened = _Opened(loaded, reference(path, loaded.digest))
        each = _seconds(loaded.model)
        self._source = source(loaded.model, self._opened.ref, rows, each)
        remember(self._opened.ref, loaded)

    @classmethod
    def of(
        cls,
        applied: Applied,
        *,
        follow: Mapping[str, str] | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> Ranks:
        """Return a graph with its plan (`apply`), on the workers that the plan numbers, where all regions agree.

        Parameters and errors are those of `Applied.spmd`.
        """
        return cls(applied.spmd(follow=follow, dims=dims), workers=applied.workers)

    def __call__(self, arrays: Mapping[str, Any]) -> dict[str, ShardedArray]:
        """Return the outputs by name, lazily.

        Parameters
        ----------
        arrays : mapping of str to array or ShardedArray
            All inputs, by name in the model that was sharded.

        Raises
        ------
        ConfigError
            An input that is missing or unknown, has another shape, or lies otherwise than the graph wants it.
        """
        ports = {port.name: port for port in self.spmd.inputs}
        unknown = sorted(arrays.keys() - ports.keys())
        if unknown:
            raise ConfigError(f"inputs: the model has no {unknown}; wanted {sorted(ports)}")
        dtypes = {value.name: value.dtype for value in self.spmd.model.graph.inputs}
        for name, value in arrays.items():
            if isinstance(value, ShardedArray):
                value.check_lies(ports[name], self.spmd.mesh)
            else:
                _check_array(name, value, dtypes[ports[name].parts[0]])
        return self._outputs(arrays, current_client())

    def _outputs(self, arrays: Mapping[str, Any], client: Any) -> dict[str, ShardedArray]:
        live = None if client is None or client.asynchronous else client
        homes = _homes(self.workers, live)
        told = {n: v.token if isinstance(v, ShardedArray) else v for n, v in arrays.items()}
        token = tokenize(self._opened.ref.digest, sorted(told.items()), self.spmd.mesh.sizes)
        copy = copy_for(self._opened, live)  # type: ignore[arg-type]  # of an opened model it asks for these two
        extra = {} if copy is None else {"copy": TaskRef(copy.source.at(0))}
        call = Call(self._source, token, extra)
        below = [] if copy is None else [_Below(copy.layers, copy.dependencies, copy.top)]
        below += self._feed(call, arrays, homes, live)
        call.write()
        keys = {port.name: _ends(call, port) for port in self.spmd.outputs}
        graph = _graph(call, homes, below)
        mesh = self.spmd.mesh
        return {
            port.name: ShardedArray(port, mesh, keys[port.name], graph, (token, port.name))
            for port in self.spmd.outputs
        }

    def _feed(self, call: Call, arrays: Mapping[str, Any], homes: Sequence[str], client: Any) -> list[_Below]:
        """Give every input's parts their places; return what has to be in the graph for that."""
        kept = [(p, arrays[p.name]) for p in self.spmd.inputs if isinstance(arrays.get(p.name), ShardedArray)]
        for port, value in kept:
            call.places.update((name, Place(key)) for name, key in zip(port.parts, value.keys, strict=True))
        feeds = [_Below(v.graph.layers, v.graph.dependencies, v.top) for _, v in kept]
        whole = {port.name for port, _ in kept}
        rest = replace(self.spmd, inputs=tuple(p for p in self.spmd.inputs if p.name not in whole))
        parts = rest.split(arrays)
        first = {name: rank for port in rest.inputs for rank, name in reversed([*enumerate(port.parts)])}
        if client is None or sum(part.nbytes for part in parts.values()) <= _IN_GRAPH_BYTES:
            for name, part in parts.items():
                call.give(name, part, first[name])
            return feeds
        return feeds + [
            _scattered(call, client, name, part, homes[first[name] % len(homes)])
            for name, part in parts.items()
        ]


def _seconds(model: ir.Model) -> list[float]:
    """Projected seconds of each node on one thread."""
    types = infer(model)
    return [seconds(n, c, CPU, types=types) for n, c in zip(model.graph, costs(model, types), strict=True)]


def _check_array(name: str, value: Any, wanted: ir.DataType | None) -> None:
    if is_dask_collection(value) or not hasattr(value, "dtype"):
        kind = type(value).__name__
        raise ConfigError(
            f"input {name!r}: got {kind}, wanted an array, or a part of an earlier call's result"
        )
    if wanted is not None and value.dtype != wanted.numpy():
        raise ConfigError(
            f"input {name!r}: got {value.dtype}, wanted {wanted.numpy()}; convert it with astype"
        )


class ShardedArray(DaskMethodsMixin):
    """One output of a sharded graph: an array in parts, each on the worker that made it.

    Parameters
    ----------
    port : Port
        Name, layout and shape.
    mesh : Mesh
    keys : tuple of key
        What holds each rank's part.
    graph : HighLevelGraph
    token : hashable
        Tells it from all others.
    """

    __dask_optimize__ = staticmethod(lambda dsk, keys, **kwargs: dsk)
    __dask_scheduler__ = staticmethod(dask.threaded.get)

    def __init__(
        self, port: Port, mesh: Mesh, keys: tuple[Key, ...], graph: HighLevelGraph, token: Hashable
    ) -> None:
        self.port, self.mesh, self.keys, self.graph, self.token = port, mesh, keys, graph, token

    def __repr__(self) -> str:
        return f"<ShardedArray {self.port.name}: {self.port.shape}, {text(self.port.layout)}>"

    @property
    def top(self) -> str:
        """The last layer of its graph."""
        return next(reversed(list(self.graph.layers)))

    def check_lies(self, port: Port, mesh: Mesh) -> None:
        """Raise `ConfigError` unless it lies as an input wants it."""
        if (self.port.layout, self.port.shape, self.mesh) != (port.layout, port.shape, mesh):
            raise ConfigError(
                f"input {port.name!r}: wanted {port.shape} as {text(port.layout)} on {dict(mesh.axes)}, got "
                f"{self.port.shape} as {text(self.port.layout)} on {dict(self.mesh.axes)}; ask for output "
                f"{self.port.name!r} in the input's layout, or compute it first"
            )

    def __dask_graph__(self) -> HighLevelGraph:
        return self.graph

    def __dask_keys__(self) -> list[Key]:
        return list(self.keys)

    def __dask_layers__(self) -> tuple[str, ...]:
        return (self.top,)

    def __dask_tokenize__(self) -> Hashable:
        return "ferro-sharded", self.token

    def __dask_postcompute__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return whole, (self.port.layout, self.mesh.sizes)

    def __dask_postpersist__(self) -> tuple[Callable[..., ShardedArray], tuple[Any, ...]]:
        return self._persisted, ()

    def _persisted(
        self, graph: Mapping[Key, Any], *, rename: Mapping[str, str] | None = None
    ) -> ShardedArray:
        if rename:
            raise NotImplementedError("keys of a sharded array name its content and cannot be renamed")
        held = HighLevelGraph.from_collections(f"ferro-held-{tokenize(self)}", dict(graph), dependencies=[])
        return ShardedArray(self.port, self.mesh, self.keys, held, self.token)

    def compute(self, **kwargs: Any) -> Any:
        """Return the whole array; its parts come straight to the caller.

        Parameters
        ----------
        **kwargs
            `scheduler`, and what it takes.
        """
        return gather({"it": self}, **kwargs)["it"]


def gather(arrays: Mapping[str, ShardedArray], **kwargs: Any) -> dict[str, Any]:
    """Return sharded arrays as whole ones, by the same names; what they share is computed once.

    Parameters
    ----------
    arrays : mapping of str to ShardedArray
    **kwargs
        `scheduler`, and what it takes.
    """
    kwargs.pop("optimize_graph", None)  # there is nothing that an optimizer could merge
    schedule = get_scheduler(scheduler=kwargs.pop("scheduler", None), collections=list(arrays.values()))
    graph = HighLevelGraph.merge(*(value.graph for value in arrays.values()))
    parts = schedule(graph, [value.__dask_keys__() for value in arrays.values()], **kwargs)
    pairs = zip(arrays.items(), parts, strict=True)
    return {name: whole(held, value.port.layout, value.mesh.sizes) for (name, value), held in pairs}


def whole(parts: Iterable[Any], layout: Sequence[Placement], sizes: Sequence[int]) -> Any:
    """Return the array of which each rank holds a part: axis by axis, the last first, terms by rank."""
    grid = list(parts)
    for placement, size in reversed([*zip(layout, sizes, strict=True)]):
        rows = [grid[i : i + size] for i in range(0, len(grid), size)]
        grid = [_one(row, placement) for row in rows]
    return grid[0]


def _one(row: Sequence[Any], placement: Placement) -> Any:
    if isinstance(placement, Shard):
        return joined(row, placement.dim)
    return reduced(row, placement.reduction) if isinstance(placement, Partial) else row[0]


# The graph.


class _Below(NamedTuple):
    """Layers that a call reads from, and the last of them."""

    layers: Mapping[str, Any]
    dependencies: Mapping[str, Iterable[str]]
    top: str | None


class _Looked(dict[Key, Any]):
    """A table that Dask asks for the annotation of each key."""

    def __call__(self, key: Key) -> Any:
        return self[key]


def _ends(call: Call, port: Port) -> tuple[Key, ...]:
    first = {name: rank for rank, name in reversed([*enumerate(port.parts)])}
    return tuple(call.end(name, first[name]) for name in port.parts)


def _graph(call: Call, homes: Sequence[str], below: Sequence[_Below]) -> HighLevelGraph:
    annotations: dict[str, Any] = {"priority": _Looked(call.priority), ABOUT: call.about.get}
    if homes:
        where = {key: [homes[rank % len(homes)]] for key, rank in call.rank.items()}
        annotations |= {"workers": _Looked(where), "allow_other_workers": True}
    name = f"spmd-{call.token}"
    layers: dict[str, Any] = {}
    needs: dict[str, set[str]] = {}
    for feed in below:
        layers.update(feed.layers)
        needs.update({layer: set(others) for layer, others in feed.dependencies.items()})
    layer = MaterializedLayer(call.tasks, annotations=annotations)
    tops = {feed.top for feed in below if feed.top is not None}
    return HighLevelGraph({**layers, name: layer}, {**needs, name: tops})


def _homes(workers: Sequence[str | int] | None, client: Any) -> list[str]:
    """The address of each rank's worker, to be repeated; none without a cluster."""
    if client is None:
        return []
    known = client.scheduler_info(n_workers=-1)["workers"]
    order = sorted(known, key=lambda a: (isinstance(known[a]["name"], str), known[a]["name"]))
    by_name: dict[str | int, str] = {**dict(enumerate(order)), **{address: address for address in order}}
    wanted = list(range(len(order))) if workers is None else list(workers)
    if not wanted or (missing := [worker for worker in wanted if worker not in by_name]):
        got = f"no {missing}" if wanted else "none"
        raise ConfigError(f"workers: the cluster has {got}; it has {order}, or 0 to {len(order) - 1}")
    return [by_name[worker] for worker in wanted]


def _scattered(call: Call, client: Any, name: str, part: Any, home: str) -> _Below:
    label = f"spmd-sent-{tokenize(call.token, name)}"
    future = client.scatter({label: part}, workers=[home], direct=True)[label]
    call.places[name] = Place(label)
    return _Below({label: {label: future}}, {label: set()}, label)
