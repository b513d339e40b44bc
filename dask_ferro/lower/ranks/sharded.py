"""`ShardedArray`: an output of a sharded graph, in parts on workers, and the joining of parts to whole arrays.

It is a Dask collection whose result is its parts, joined.  Its tasks are those of the call that made it, until it is
persisted; then it has futures of its parts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.base import get_scheduler, tokenize
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.engines.collectives import joined, reduced
from dask_ferro.errors import ConfigError
from dask_ferro.graph.sharding.parts import Port, holders
from dask_ferro.graph.sharding.placements import Partial, Placement, Shard
from dask_ferro.graph.sharding.redistribute import Mesh, text
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.client import client_name, client_of, written_for
from dask_ferro.lower.inputs.shipping import LARGE_GRAPHS
from dask_ferro.lower.ranks.collection import RankCollection, needed
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import Homes
from dask_ferro.lower.ranks.spmd_tasks import PartPlace
from dask_ferro.lower.signature import is_future
from dask_ferro.lower.worker.rank_functions import select_values


class Written(NamedTuple):
    """The tasks of a call: its graph, the places of each output's parts, a pipeline's action of each task."""

    graph: HighLevelGraph
    places: Mapping[str, Sequence[PartPlace]]
    actions: Mapping[Key, Any] = {}


class CallTasks:
    """The tasks of a call, written for the current client and its workers, and again for others under the same keys.

    Parameters
    ----------
    write : callable
        Writes them for the workers that `where` returned.
    where : callable
        Returns the workers of the ranks (`RankWorkers`); calls of one graph share it.
    is_fixed : bool
        Whether they do not depend on the client, as those of a call that was submitted.
    """

    def __init__(
        self, write: Callable[[Homes], Written], where: Callable[[], Homes], is_fixed: bool = False
    ) -> None:
        self._write, self._where, self.is_fixed = write, where, is_fixed
        # By the client's id: one that was closed is not kept alive here.
        self._last: tuple[str | None, Homes, Written] | None = None

    @classmethod
    def of(cls, written: Written) -> CallTasks:
        """Return tasks that do not depend on the client."""
        return cls(lambda there: written, Homes, is_fixed=True)

    def here(self) -> Written:
        """Return the tasks for the current client, as they were last written for it."""
        return self.fresh() if self._last is None or self._last[0] != client_name() else self._last[2]

    def fresh(self) -> Written:
        """Return the tasks for the current client and its present workers, as they are about to be submitted."""
        client, there = client_name(), self._where()
        if self._last is None or self._last[:2] != (client, there):
            self._last = client, there, self._write(there)
        return self._last[2]


class ShardedArray(RankCollection):
    """One output of a sharded graph: an array in parts, each on the worker that made it.

    Parameters
    ----------
    port : Port
        Name, layout and shape.
    mesh : Mesh
    tasks : CallTasks
        The tasks of its parts.
    token : hashable
        Identifies the array.
    depth : int
        The number of successive submissions that it depends on.
    name : str, optional
        Its name among the tasks' results; default: the port's.
    """

    def __init__(
        self,
        port: Port,
        mesh: Mesh,
        tasks: CallTasks,
        token: Hashable,
        depth: int = 1,
        name: str | None = None,
    ) -> None:
        self.port, self.mesh, self.tasks = port, mesh, tasks
        self.token, self.depth, self.name = token, depth, name or port.name

    @property
    def places(self) -> Sequence[PartPlace]:
        """The place of each rank's part."""
        return self.tasks.here().places[self.name]

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
        """The places that the whole array is joined from: of equal parts, that of the lowest rank."""
        places = self.places
        return [places[rank] for rank in holders(self.port.layout, self.mesh)]

    @property
    def graph(self) -> HighLevelGraph:
        """The graph of its parts."""
        return self.tasks.here().graph

    def __repr__(self) -> str:
        return f"<ShardedArray {self.port.name}: {self.port.shape}, {text(self.port.layout)}>"

    @property
    def top(self) -> str:
        """The last layer of its graph."""
        return next(reversed(list(self.graph.layers)))

    def check_lies(self, port: Port, mesh: Mesh) -> None:
        """Raise `ConfigError` unless it has the layout, shape and mesh of an input."""
        if (self.port.layout, self.port.shape, self.mesh) != (port.layout, port.shape, mesh):
            raise ConfigError(
                f"input {port.name!r}: wanted {port.shape} as {text(port.layout)} on {dict(mesh.axes)}, got "
                f"{self.port.shape} as {text(self.port.layout)} on {dict(self.mesh.axes)}; ask for output "
                f"{self.port.name!r} in the input's layout, or compute it first"
            )

    def held(self) -> dict[Key, Any] | None:
        """Return the future of each of its parts, or None if it has not been submitted."""
        # The tasks of a call that was not submitted may be many, and are written out by a look at one.
        if not self.tasks.is_fixed:
            return None
        layer = self.graph.layers[self.top]
        found = {key: layer[key] for key in self.keys}
        return found if all(map(is_future, found.values())) else None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the whole array, computed, as `np.asarray` of a dask array does."""
        return np.asarray(self.compute(), dtype)

    def __float__(self) -> float:
        return float(self.compute())

    def __dask_graph__(self) -> HighLevelGraph:
        return self.tasks.fresh().graph

    def __dask_keys__(self) -> list[Key]:
        return list(self.keys)

    def __dask_layers__(self) -> tuple[str, ...]:
        return (self.top,)

    def __dask_tokenize__(self) -> Hashable:
        return "ferro-sharded", self.token

    def __dask_postcompute__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return join, (self.items, self.port.layout, self.mesh.sizes)

    def persisted(self, graph: Mapping[Key, Any]) -> ShardedArray:
        """Return the array with a graph that holds its parts."""
        return on_results({self.name: self}, graph)[self.name]

    def compute(self, **kwargs: Any) -> Any:
        """Return the whole array, which the caller joins from its parts.

        Parameters
        ----------
        **kwargs
            `scheduler`, and the scheduler's own options.
        """
        return gather(self, **kwargs)


def gather(arrays: Tree, **kwargs: Any) -> Tree:
    """Return a tree of arrays whose sharded ones are whole; tasks that they share run once.

    When a worker dies, Dask computes its results again.

    Parameters
    ----------
    arrays : ShardedArray, or lists, tuples and dicts of them
        What is no sharded array stays as it is.
    **kwargs
        `scheduler`, and the scheduler's own options.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> out = ff.Ranks.of(ff.apply(y, "plan.yaml"))({"x": batch})  # doctest: +SKIP
    >>> ff.gather(out)["y"].shape                                  # doctest: +SKIP
    (4, 6)
    """
    kwargs.pop("optimize_graph", None)  # there is nothing that an optimizer could merge
    leaves = [leaf for _, leaf in pytree.paths(arrays)]
    values = [leaf for leaf in leaves if isinstance(leaf, ShardedArray)]
    if not values:
        return arrays
    schedule = get_scheduler(scheduler=kwargs.pop("scheduler", None), collections=values)
    client = client_of(schedule)
    with written_for(client), dask.config.set(LARGE_GRAPHS):
        # Results that are there, or under way, need no graph.
        held = None if kwargs else _futures_of(values, client)
        if held is not None:
            parts = _fetch(client, values, held)
        else:
            graph = merged(values)
            keys = list(dict.fromkeys(place.key for value in values for place in value.read))
            results = dict(zip(keys, schedule(needed(graph, keys), keys, **kwargs), strict=True))
            parts = {
                place: _item(results[place.key], place.index) for value in values for place in value.read
            }
        return pytree.like(
            arrays,
            [
                whole(map(parts.__getitem__, leaf.read), leaf.port.layout, leaf.mesh.sizes)
                if isinstance(leaf, ShardedArray)
                else leaf
                for leaf in leaves
            ],
        )


def _futures_of(values: Iterable[ShardedArray], client: Any) -> dict[Key, Any] | None:
    """Return the client's futures of the values' parts; None: not all are there, or it cannot be waited for."""
    found: dict[Key, Any] = {}
    for value in values:
        found |= value.held() or dict.fromkeys(value.keys)
    are_here = all(getattr(future, "client", None) is client for future in found.values())
    return found if client is not None and not client.asynchronous and are_here else None


def _fetch(client: Any, values: Sequence[ShardedArray], held: Mapping[Key, Any]) -> dict[PartPlace, Any]:
    """Return the parts by place; large ones are picked from their tuple where it is, others come with all of it."""
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


def on_results(arrays: Mapping[str, ShardedArray], graph: Mapping[Key, Any]) -> dict[str, ShardedArray]:
    """Return arrays on a graph that holds their parts.

    Arrays with the same keys share it.  Passed to the next call, none keeps the parts of another alive.
    """
    groups: dict[tuple[Key, ...], dict[str, Sequence[PartPlace]]] = {}
    for name, array in arrays.items():
        groups.setdefault(array.keys, {})[name] = array.places
    ends = {key for keys in groups for key in keys}
    tasks: dict[str, CallTasks] = {}
    for keys, places in groups.items():
        # A graph of tasks, which Dask has optimized and not run, is held whole.
        own = dict(graph) if graph.keys() - ends else {key: graph[key] for key in keys}
        held = HighLevelGraph.from_collections(f"ferro-held-{tokenize(keys)}", own, dependencies=[])
        tasks |= dict.fromkeys(places, CallTasks.of(Written(held, places)))
    return {
        name: ShardedArray(one.port, one.mesh, tasks[name], one.token, one.depth, name)
        for name, one in arrays.items()
    }


def merged(arrays: Iterable[ShardedArray]) -> HighLevelGraph:
    """Return one graph of all arrays; those of one call share theirs."""
    calls = {id(array.tasks): array.tasks for array in arrays}
    return HighLevelGraph.merge(*(tasks.fresh().graph for tasks in calls.values()))


def whole(parts: Iterable[Any], layout: Sequence[Placement], sizes: Sequence[int]) -> Any:
    """Return an array joined from its ranks' parts: by mesh axis, the last first; sums are in the order of ranks."""
    grid = list(parts)
    for placement, size in reversed([*zip(layout, sizes, strict=True)]):
        rows = [grid[i : i + size] for i in range(0, len(grid), size)]
        grid = [_one(row, placement) for row in rows]
    return grid[0]


def join(
    values: Iterable[Any], items: Sequence[int], layout: Sequence[Placement], sizes: Sequence[int]
) -> Any:
    """Return an array joined from the values of its keys, given the position of each part (`ShardedArray.items`)."""
    return whole(map(_item, values, items), layout, sizes)


def _item(value: Any, index: int) -> Any:
    return value if index < 0 else value[index]


def _one(row: Sequence[Any], placement: Placement) -> Any:
    if isinstance(placement, Shard):
        return joined(row, placement.dim)
    return reduced(row, placement.reduction) if isinstance(placement, Partial) else row[0]
