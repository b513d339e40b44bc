"""`ShardedArray`: an output of a sharded graph, in parts on workers; parts are joined to whole arrays.

It is a Dask collection whose result is the whole array, joined from its parts.  Its tasks are the tasks of its call
until it is persisted; then it has only futures of its parts.  `CallOutputs` are several of them as one collection,
whose graph Dask reads only once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import dask
import numpy as np
from dask.base import DaskMethodsMixin, get_scheduler, tokenize
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_ferro.engines.collectives import join_pieces, reduce_arrays
from dask_ferro.errors import InputError
from dask_ferro.graph.sharding.parts import Port, holders
from dask_ferro.graph.sharding.placements import Partial, Placement, Shard
from dask_ferro.graph.sharding.redistribute import Mesh, text
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.client import client_of, use_client
from dask_ferro.lower.inputs.shipping import LARGE_GRAPHS
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import Homes, annotations_of
from dask_ferro.lower.ranks.spmd_tasks import PartPlace, Places, RankTasks
from dask_ferro.lower.repetition import RepeatedTasks
from dask_ferro.lower.signature import is_future
from dask_ferro.lower.worker.rank_functions import select_values

# Arrays of any kind by name: arrays of this process, dask arrays, sharded arrays.
Arrays = Mapping[str, Any]
C = TypeVar("C")

# A graph has outputs of earlier calls that are not requested.  For outputs that a scheduler still knows, it looks up
# their inputs, which it may have forgotten: it then refuses the graph, and later all graphs that share a task. A
# lambda, because it is sent with its graph: a scheduler need not have this package.
cull: Callable[..., HighLevelGraph] = lambda graph, keys, **kwargs: graph.cull({*flatten(keys)})  # noqa: E731


def persist(client: Any, collection: C) -> C:
    """Return a collection whose results a client has begun to compute and stores."""
    # Parameters are in the graph of a training's first step, and then once in many steps.
    with dask.config.set(LARGE_GRAPHS):
        persisted: C = client.persist(collection)
    return persisted


class CallGraph(NamedTuple):
    """The tasks of a call as a graph, its last layer, and the places of outputs."""

    graph: HighLevelGraph
    top: str
    places: Places


def write_layer(
    top: str, tasks: RankTasks, places: Places, homes: Homes, repeats: RepeatedTasks | None = None
) -> CallGraph:
    """Return tasks, or their repeats, as a layer with their homes, on top of the graphs that they read."""
    below, annotations = HighLevelGraph.merge(*tasks.below.values()), annotations_of(tasks, homes)
    own = MaterializedLayer(tasks.tasks, annotations) if repeats is None else repeats.layer(annotations)
    graph = HighLevelGraph({**below.layers, top: own}, {**below.dependencies, top: set(tasks.below)})
    return CallGraph(graph, top, places)


class CallTasks:
    """The tasks of a call, written for the current client and its workers, and again for others under the same keys.

    `homes` returns the workers of the ranks (`RankWorkers`), for which `write` writes the tasks.  Tasks that were
    submitted are fixed: they do not depend on the client.
    """

    def __init__(
        self, write: Callable[[Homes], CallGraph], homes: Callable[[], Homes], is_fixed: bool = False
    ) -> None:
        self._write, self._homes, self.is_fixed = write, homes, is_fixed
        self._last: tuple[Homes, CallGraph] | None = None

    def written(self) -> CallGraph:
        """Return the tasks for the current client and its present workers."""
        homes = self._homes()
        if self._last is None or self._last[0] != homes:
            self._last = homes, self._write(homes)
        return self._last[1]


class CallOutputs(DaskMethodsMixin):
    """Sharded arrays by name as one Dask collection.

    Its result is a tree of the whole arrays; `form` has their positions.
    """

    def __init__(self, arrays: Mapping[str, ShardedArray], form: Any = ()) -> None:
        self._arrays, self._form = arrays, form

    __dask_optimize__ = staticmethod(cull)
    __dask_scheduler__ = staticmethod(dask.threaded.get)

    @property
    def arrays(self) -> Mapping[str, ShardedArray]:
        """The arrays by name."""
        return self._arrays

    def __dask_graph__(self) -> HighLevelGraph:
        return HighLevelGraph.merge(*(one.graph for one in calls_of(self.arrays.values())))

    def __dask_keys__(self) -> list[Any]:
        return [list(array.keys) for array in self.arrays.values()]

    def __dask_layers__(self) -> tuple[str, ...]:
        return tuple(one.top for one in calls_of(self.arrays.values()))

    def __dask_tokenize__(self) -> Hashable:
        return type(self).__name__, tuple(array.token for array in self.arrays.values())

    def __dask_postcompute__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        joins = [(array.items, array.port.layout, array.mesh.sizes) for array in self.arrays.values()]
        return _result_of_parts, (joins, self._form)

    def __dask_postpersist__(self) -> tuple[Callable[..., Self], tuple[()]]:
        return self._persisted, ()

    def _persisted(self, graph: Mapping[Key, Any], *, rename: Mapping[str, str] | None = None) -> Self:
        """Return the collection with a graph that holds the values of its keys, or futures of them."""
        if rename:
            raise NotImplementedError(f"keys of a {type(self).__name__} name its calls and cannot be renamed")
        return self._on(attach_results(self.arrays, graph))

    def _on(self, arrays: Mapping[str, ShardedArray]) -> Self:
        """Return the collection of the same arrays with other tasks."""
        return type(self)(arrays, self._form)

    def compute(self, **kwargs: Any) -> Any:
        """Return the result, which the caller joins from its parts.

        If a worker dies, the whole step runs again on the remaining workers.

        Parameters
        ----------
        **kwargs
            `scheduler`, and the scheduler's own options.
        """
        return result_of(list(gather(self.arrays, **kwargs).values()), self._form)


class ShardedArray(CallOutputs):
    """One output of a sharded graph: an array in parts, each on the worker that computed it.

    `port` has its name, layout and shape, `name` is its name among the tasks' results, `token` identifies it, and
    `depth` is the number of successive submissions that it depends on.
    """

    def __init__(
        self, port: Port, mesh: Mesh, tasks: CallTasks, name: str, token: Hashable, depth: int = 1
    ) -> None:
        super().__init__({}, 0)
        self.port, self.mesh, self.tasks = port, mesh, tasks
        self.name, self.token, self.depth = name, token, depth

    @property
    def arrays(self) -> Mapping[str, ShardedArray]:
        """Itself by name."""
        return {self.name: self}

    @property
    def places(self) -> Sequence[PartPlace]:
        """The place of each rank's part."""
        return self.tasks.written().places[self.name]

    @property
    def keys(self) -> tuple[Key, ...]:
        """The key of each rank's part."""
        return tuple(place.key for place in self.places)

    @property
    def items(self) -> tuple[int, ...]:
        """The position of each part in the tuple that its key holds; -1: the key holds the part itself."""
        return tuple(place.index for place in self.places)

    @property
    def read(self) -> list[PartPlace]:
        """The places that the whole array is joined from; for equal parts, the place of the lowest rank."""
        places = self.places
        return [places[rank] for rank in holders(self.port.layout, self.mesh)]

    @property
    def graph(self) -> HighLevelGraph:
        """The graph of its parts."""
        return self.tasks.written().graph

    def __repr__(self) -> str:
        return f"<ShardedArray {self.port.name}: {self.port.shape}, {text(self.port.layout)}>"

    def check_lies(self, port: Port, mesh: Mesh) -> None:
        """Raise `InputError` unless it has the layout, shape and mesh of an input."""
        if (self.port.layout, self.port.shape, self.mesh) != (port.layout, port.shape, mesh):
            raise InputError(
                f"input {port.name!r}: wanted {port.shape} as {text(port.layout)} on {dict(mesh.axes)}, got "
                f"{self.port.shape} as {text(self.port.layout)} on {dict(self.mesh.axes)}; ask for output "
                f"{self.port.name!r} in the input's layout, or compute it first"
            )

    def held(self) -> dict[Key, Any] | None:
        """Return the future of each of its parts, or None if it has not been submitted."""
        # A call that was not submitted may have many tasks, and reading one of them writes out all.
        if not self.tasks.is_fixed:
            return None
        graph, top, _ = self.tasks.written()
        values = {key: graph.layers[top][key] for key in self.keys}
        return values if all(map(is_future, values.values())) else None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Compute and return the whole array, like `np.asarray` of a dask array."""
        return np.asarray(self.compute(), dtype)

    def __float__(self) -> float:
        return float(self.compute())

    def _on(self, arrays: Mapping[str, ShardedArray]) -> Self:
        return arrays[self.name]  # type: ignore[return-value]  # there are no subclasses


def gather(arrays: Tree, **kwargs: Any) -> Tree:
    """Return a tree of arrays whose sharded ones are whole; tasks that they share run once.

    If a worker dies, Dask computes its results again.

    Parameters
    ----------
    arrays : ShardedArray, or lists, tuples and dicts of them
        Values that are not sharded arrays are unchanged.
    **kwargs
        `scheduler`, and the scheduler's own options.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.parallel as fp
    >>> out = fp.Ranks.of(ff.apply_plan(y, "plan.yaml"))({"x": batch})  # doctest: +SKIP
    >>> fp.gather(out)["y"].shape                                  # doctest: +SKIP
    (4, 6)
    """
    kwargs.pop("optimize_graph", None)  # there is nothing that an optimizer could merge
    leaves = [leaf for _, leaf in pytree.paths(arrays)]
    values = [leaf for leaf in leaves if isinstance(leaf, ShardedArray)]
    if not values:
        return arrays
    schedule = get_scheduler(scheduler=kwargs.pop("scheduler", None), collections=values)
    client = client_of(schedule)
    with use_client(client), dask.config.set(LARGE_GRAPHS):
        # Results that exist, or are being computed, need no graph.
        held = None if kwargs else _futures_of(values, client)
        if held is not None:
            parts = _fetch(client, values, held)
        else:
            graph = CallOutputs({str(i): value for i, value in enumerate(values)}).__dask_graph__()
            keys = list(dict.fromkeys(place.key for value in values for place in value.read))
            results = dict(zip(keys, schedule(cull(graph, keys), keys, **kwargs), strict=True))
            parts = {
                place: _item(results[place.key], place.index) for value in values for place in value.read
            }
        return pytree.unflatten(
            arrays,
            [
                join_parts(map(parts.__getitem__, leaf.read), leaf.port.layout, leaf.mesh.sizes)
                if isinstance(leaf, ShardedArray)
                else leaf
                for leaf in leaves
            ],
        )


def _futures_of(values: Iterable[ShardedArray], client: Any) -> dict[Key, Any] | None:
    """Return the client's futures of the values' parts; None: some are missing, or the client cannot be waited for."""
    futures: dict[Key, Any] = {}
    for value in values:
        futures |= value.held() or dict.fromkeys(value.keys)
    are_here = all(getattr(future, "client", None) is client for future in futures.values())
    return futures if client is not None and not client.asynchronous and are_here else None


def _fetch(client: Any, values: Sequence[ShardedArray], held: Mapping[Key, Any]) -> dict[PartPlace, Any]:
    """Return the parts by place; large parts are picked from their tuples on the workers, others fetched with them."""
    places = {place: value.port.is_small for value in values for place in value.read}
    large = {place.key for place, is_small in places.items() if place.index >= 0 and not is_small}
    picked: dict[Key, list[int]] = {key: [] for key in large}
    for place in places:
        if place.key in large:
            picked[place.key].append(place.index)
    futures = {place.key: held[place.key] for place in places}
    for key, items in picked.items():
        picks = tuple((0, item) for item in items)
        futures[key] = client.submit(select_values, picks, held[key], pure=False)
    results = client.gather(futures)
    return {
        place: _item(
            results[place.key], picked[place.key].index(place.index) if place.key in large else place.index
        )
        for place in places
    }


def attach_results(arrays: Mapping[str, ShardedArray], graph: Mapping[Key, Any]) -> dict[str, ShardedArray]:
    """Return arrays on a graph that holds their parts.

    Arrays with the same keys share it.  An array that is passed to the next call does not keep the parts of another
    alive.
    """
    groups: dict[tuple[Key, ...], dict[str, Sequence[PartPlace]]] = {}
    for name, array in arrays.items():
        groups.setdefault(array.keys, {})[name] = array.places
    ends = {key for keys in groups for key in keys}
    tasks: dict[str, CallTasks] = {}
    for keys, places in groups.items():
        # A graph of tasks that Dask has optimized but not run is held whole.
        own = dict(graph) if graph.keys() - ends else {key: graph[key] for key in keys}
        top = f"ferro-held-{tokenize(keys)}"
        held = CallGraph(HighLevelGraph.from_collections(top, own, dependencies=[]), top, places)
        tasks |= dict.fromkeys(places, CallTasks(lambda _, held=held: held, Homes, is_fixed=True))  # type: ignore[misc]
    return {
        name: ShardedArray(one.port, one.mesh, tasks[name], name, one.token, one.depth)
        for name, one in arrays.items()
    }


def calls_of(arrays: Iterable[ShardedArray]) -> list[CallGraph]:
    """Return the tasks of each call that the arrays come from."""
    return [tasks.written() for tasks in {id(array.tasks): array.tasks for array in arrays}.values()]


def join_parts(parts: Iterable[Any], layout: Sequence[Placement], sizes: Sequence[int]) -> Any:
    """Return an array joined from its ranks' parts: by mesh axis, the last first; sums are in the order of ranks."""
    grid = list(parts)
    for placement, size in reversed([*zip(layout, sizes, strict=True)]):
        rows = [grid[i : i + size] for i in range(0, len(grid), size)]
        grid = [_join_row(row, placement) for row in rows]
    return grid[0]


def result_of(arrays: Sequence[Any], form: Any) -> Any:
    """Return a tree of whole arrays; outputs of micro-batches (a form by name) are joined along axis 0, or stacked."""
    result = pytree.unflatten(form, arrays)
    if not isinstance(result, dict):
        return result
    outputs = {
        name: np.concatenate(each) if each[0].ndim else np.stack(each) for name, each in result.items()
    }
    return outputs if len(outputs) > 1 else next(iter(outputs.values()))


def _result_of_parts(values: Sequence[Sequence[Any]], joins: Sequence[tuple[Any, ...]], form: Any) -> Any:
    arrays = [
        join_parts(map(_item, parts, items), layout, sizes)
        for parts, (items, layout, sizes) in zip(values, joins, strict=True)
    ]
    return result_of(arrays, form)


def _item(value: Any, index: int) -> Any:
    return value if index < 0 else value[index]


def _join_row(row: Sequence[Any], placement: Placement) -> Any:
    if isinstance(placement, Shard):
        return join_pieces(row, placement.dim)
    return reduce_arrays(row, placement.reduction) if isinstance(placement, Partial) else row[0]
