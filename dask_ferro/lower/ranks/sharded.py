"""`ShardedArray`: an output of a sharded graph, in parts on workers, and the joining of parts to whole arrays.

It is a Dask collection whose result is its parts, joined.  It keeps the call that made it until its lineage is cut
(`checkpoint`): where Dask has lost data that only the client can send again, the call's tasks are built again under the
same keys, so results of other flows that are still there are not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from dask.base import get_scheduler, tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_ferro.engines.collectives import joined, reduced
from dask_ferro.errors import ConfigError
from dask_ferro.graph.sharding.parts import Port, holders
from dask_ferro.graph.sharding.placements import Partial, Placement, Shard
from dask_ferro.graph.sharding.redistribute import Mesh, text
from dask_ferro.lower.client import client_name, client_of, written_for
from dask_ferro.lower.inputs.shipping import Sent
from dask_ferro.lower.ranks.collection import ContentKeyed, needed
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import RankWorkers
from dask_ferro.lower.repeated import RepeatedTasks
from dask_ferro.lower.retry import retried
from dask_ferro.lower.worker.rank_functions import select_values

# The status of a future whose data were lost, for good as far as Dask knows.
GONE = ("cancelled", "lost")

# Outputs of calls that were built again, by the call's token, so that a call shared by arrays is built once.
Memo: TypeAlias = dict[str, dict[str, "ShardedArray"]]


class Made(NamedTuple):
    """The origin of a sharded array.  It holds the client's input arrays, and nothing that is on workers.

    Attributes
    ----------
    again : callable
        Returns the same array under the same keys, with tasks built again from the client's data.
    calls : int
        The number of successive submissions that it depends on.
    """

    again: Callable[[Memo], ShardedArray]
    calls: int


class Written(NamedTuple):
    """The tasks of a call: its token, its graph, the keys of each output's parts, a pipeline's action of each task.

    The token is that of the call's results.  Keys also depend on how its inputs reach the tasks, so that two clients
    may compute one call.  `items` has the outputs whose keys hold tuples, with each part's position in its tuple.
    """

    token: str
    graph: HighLevelGraph
    keys: Mapping[str, tuple[Key, ...]]
    actions: Mapping[Key, Any] = {}
    items: Mapping[str, tuple[int, ...]] = {}


class Joining(NamedTuple):
    """How parts become a whole array, as `whole` takes it."""

    layout: tuple[Placement, ...]
    sizes: tuple[int, ...]
    items: tuple[int, ...]


class Parts(NamedTuple):
    """The keys that a whole array is read from, and how their values are joined."""

    keys: list[Key]
    joins: Joining


class _Writing(NamedTuple):
    """The tasks of a call as they were written, with the client's id, the workers of its ranks, and futures in them."""

    # By its id: a client that was closed is not kept alive here.
    client: str | None
    there: Any
    futures: tuple[Any, ...]
    tasks: Written


class CallTasks:
    """The tasks of a call, written for the current client, and again for another client or other workers.

    Parameters
    ----------
    write : callable
        Writes them for the workers that `where` returned.
    where : RankWorkers
        Of the workers of the ranks; calls of one graph share it.
    """

    def __init__(self, write: Callable[[Any], Written], where: RankWorkers) -> None:
        self._write, self._where = write, where
        self._made: _Writing | None = None
        self._fixed: Written | None = None
        self._futures: tuple[Any, ...] = ()

    @classmethod
    def of(cls, made: Written) -> CallTasks:
        """Return tasks that do not depend on the client."""
        found = cls(lambda there: made, RankWorkers(None, 1))
        found._fixed, found._futures = made, tuple(futures_in(made.graph))
        return found

    @property
    def is_fixed(self) -> bool:
        """Whether they do not depend on the client, as those of a call that was submitted."""
        return self._fixed is not None

    def is_lost(self) -> bool:
        """Return whether data in the tasks for the current client were lost."""
        self.refresh()
        futures = self._futures if self._made is None else self._made.futures
        return any(future.status in GONE for future in futures)

    def here(self) -> Written:
        """Return the tasks for the current client, as they were last written for it."""
        if self._fixed is not None:
            return self._fixed
        made, name = self._made, client_name()
        if made is None or made.client != name:
            made = self._made = self._written(name, self._where())
        return made.tasks

    def refresh(self) -> Written:
        """Return the tasks for the current client and its present workers; they are about to be submitted.

        They are written again where workers of the ranks have joined or left since, or where data that were sent for
        them were lost.  Keys stay the same.
        """
        if self._fixed is not None:
            return self._fixed
        made, name = self._made, client_name()
        there = self._where()
        is_stale = made is None or (made.client, made.there) != (name, there)
        if made is None or is_stale or any(future.status in GONE for future in made.futures):
            made = self._made = self._written(name, there)
        return made.tasks

    def _written(self, client: str | None, there: Any) -> _Writing:
        tasks = self._write(there)
        return _Writing(client, there, tuple(futures_in(tasks.graph)), tasks)


def futures_in(graph: HighLevelGraph, sent: bool = True) -> Iterator[Any]:
    """Yield the futures in a graph; with `sent`, those of data that this process has sent too."""
    for layer in graph.layers.values():
        # A dask array's layers are skipped: listing those of a Blockwise layer would build all of its tasks.
        # Tasks that repeat have none, and are listed when they run.
        if isinstance(layer, MaterializedLayer) and not isinstance(layer.mapping, RepeatedTasks):
            for value in layer.mapping.values():
                if isinstance(value, Sent):
                    if sent:
                        yield value.future
                elif hasattr(value, "add_done_callback"):
                    yield value


class ShardedArray(ContentKeyed):
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
    made : Made
    name : str, optional
        Its name among the tasks' results; default: the port's.
    """

    def __init__(
        self, port: Port, mesh: Mesh, tasks: CallTasks, token: Hashable, made: Made, name: str | None = None
    ) -> None:
        self.port, self.mesh, self.tasks = port, mesh, tasks
        self.token, self.made, self.name = token, made, name or port.name

    @property
    def keys(self) -> tuple[Key, ...]:
        """The key of each rank's part."""
        return self.tasks.here().keys[self.name]

    @property
    def items(self) -> tuple[int, ...]:
        """The position of each part in the tuple that its key holds; -1: the key holds the part itself."""
        return self.tasks.here().items.get(self.name, (-1,) * len(self.port.parts))

    @property
    def read(self) -> Parts:
        """The parts that the whole array is joined from: of equal parts, that of the lowest rank."""
        keys, items = self.keys, self.items
        ranks = holders(self.port.layout, self.mesh)
        joins = Joining(self.port.layout, self.mesh.sizes, tuple(items[rank] for rank in ranks))
        return Parts([keys[rank] for rank in ranks], joins)

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

    def futures(self) -> Iterator[Any]:
        """Return the futures in its graph."""
        return futures_in(self.graph)

    def held(self) -> dict[Key, Any] | None:
        """Return the future of each of its parts, or None if some part has not been submitted."""
        known, keys = {future.key: future for future in self.futures()}, self.keys
        return {key: known[key] for key in keys} if known.keys() >= set(keys) else None

    def renew(self, memo: Memo | None = None) -> None:
        """Replace the graph by that of the call that made the array, built again under the same keys.

        Parameters
        ----------
        memo : dict, optional
            Outputs of calls that were built again for other arrays; it is added to.

        Raises
        ------
        ConfigError
            An input array of the call has been changed since, or its data was lost with a worker.
        """
        again = self.made.again({} if memo is None else memo)
        before: set[str] = set()
        # What became lost since is made again too; what is lost still, no task makes.
        while gone := again.lost_inputs():
            if before & gone:
                raise ConfigError(
                    f"{self!r}: it was lost with a worker, and so was data that it was made from, which no task makes"
                    f" again: {', '.join(sorted(gone)[:3])}; keep replicas of what is scattered (Client.replicate), or"
                    " go on from a checkpoint"
                )
            before |= gone
            again = self.made.again({})
        if again.token != self.token:
            raise ConfigError(
                f"{self!r}: it was lost with a worker, and the arrays that it was made from have been changed "
                "since; pass arrays of its own to each call, or set ferro.ranks.checkpoint-calls lower"
            )
        self.tasks = again.tasks

    def lost_inputs(self) -> set[str]:
        """Return the keys of the futures in its graph whose data is lost, apart from those that are sent again."""
        found = futures_in(self.tasks.refresh().graph, sent=False)
        return {str(future.key) for future in found if future.status in GONE}

    def __dask_graph__(self) -> HighLevelGraph:
        return self.tasks.refresh().graph

    def __dask_keys__(self) -> list[Key]:
        return list(self.keys)

    def __dask_layers__(self) -> tuple[str, ...]:
        return (self.top,)

    def __dask_tokenize__(self) -> Hashable:
        return "ferro-sharded", self.token

    def __dask_postcompute__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return whole, Joining(self.port.layout, self.mesh.sizes, self.items)

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
        return gather({"it": self}, **kwargs)["it"]


def gather(arrays: Mapping[str, ShardedArray], **kwargs: Any) -> dict[str, Any]:
    """Return sharded arrays as whole ones, by the same names; tasks that they share run once.

    When a worker dies, its results are computed again, from data that the client sends again where needed.

    Parameters
    ----------
    arrays : mapping of str to ShardedArray
    **kwargs
        `scheduler`, and the scheduler's own options.

    Raises
    ------
    CancelledError
        Several workers died, and both a part and its copy were lost.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> out = ff.Ranks.of(ff.apply(y, "plan.yaml"))({"x": batch})  # doctest: +SKIP
    >>> ff.gather(out)["y"].shape                                  # doctest: +SKIP
    (4, 6)
    """
    kwargs.pop("optimize_graph", None)  # there is nothing that an optimizer could merge
    values = list(arrays.values())
    schedule = get_scheduler(scheduler=kwargs.pop("scheduler", None), collections=values)

    client = client_of(schedule)

    reads: list[Parts] = []

    def run() -> Any:
        with written_for(client):
            reads[:] = [value.read for value in values]
            # Results that are there, or under way, need no graph.
            if client is not None and not kwargs and (held := _held(values, client)) is not None:
                return _fetched(client, values, reads, held)
            graph, keys = merged(values), [read.keys for read in reads]
        return schedule(needed(graph, keys), keys, **kwargs)

    def renew() -> None:
        memo: Memo = {}
        with written_for(client):
            for value in values:
                value.renew(memo)

    results = retried(run, renew)
    return {name: whole(found, *read.joins) for name, found, read in zip(arrays, results, reads, strict=True)}


def _held(values: Sequence[ShardedArray], client: Any) -> dict[Key, Any] | None:
    """Return the futures of the values' parts, if all are there; None otherwise."""
    found: dict[Key, Any] = {}
    for tasks in {id(value.tasks): value.tasks for value in values}.values():
        found |= {future.key: future for future in futures_in(tasks.here().graph) if future.client is client}
    if client.asynchronous or any(future.status in GONE for future in found.values()):
        return None
    return found if found.keys() >= set(chain.from_iterable(value.keys for value in values)) else None


def _fetched(
    client: Any, values: Sequence[ShardedArray], reads: list[Parts], held: Mapping[Key, Any]
) -> list[list[Any]]:
    """Return the parts of each value; large ones are taken from their tuple where it is, others come with all of it."""
    items: dict[Key, dict[int, int]] = {}
    for value, read in zip(values, reads, strict=True):
        for key, item in zip(read.keys, read.joins.items, strict=True):
            if item >= 0 and not value.port.is_small:
                own = items.setdefault(key, {})
                own.setdefault(item, len(own))
    sent = {
        key: client.submit(select_values, tuple((0, item) for item in own), held[key], pure=False)
        for key, own in items.items()
    }
    found = client.gather({key: sent.get(key, held[key]) for read in reads for key in read.keys})

    def part(key: Key, item: int) -> Any:
        return found[key] if item < 0 else found[key][items[key][item] if key in items else item]

    parts = [list(map(part, read.keys, read.joins.items)) for read in reads]
    reads[:] = [read._replace(joins=read.joins._replace(items=())) for read in reads]
    return parts


def on_results(arrays: Mapping[str, ShardedArray], graph: Mapping[Key, Any]) -> dict[str, ShardedArray]:
    """Return arrays on a graph that holds their parts.

    Arrays with the same keys share it.  Passed to the next call, none keeps the parts of another alive.
    """
    groups: dict[tuple[Key, ...], list[str]] = {}
    for name, array in arrays.items():
        groups.setdefault(array.keys, []).append(name)
    ends = set(chain.from_iterable(groups))
    found: dict[str, ShardedArray] = {}
    for keys, names in groups.items():
        # A graph of tasks, which Dask has optimized and not run, is held whole.
        own = dict(graph) if graph.keys() - ends else {key: graph[key] for key in keys}
        held = HighLevelGraph.from_collections(f"ferro-held-{tokenize(keys)}", own, dependencies=[])
        items = {name: arrays[name].items for name in names}
        tasks = CallTasks.of(Written(f"{tokenize(keys)}", held, dict.fromkeys(names, keys), items=items))
        for name in names:
            one = arrays[name]
            found[name] = ShardedArray(one.port, one.mesh, tasks, one.token, one.made, name)
    return {name: found[name] for name in arrays}


def merged(arrays: Iterable[ShardedArray]) -> HighLevelGraph:
    """Return one graph of all arrays; those of one call share theirs."""
    calls = {id(array.tasks): array.tasks for array in arrays}
    return HighLevelGraph.merge(*(tasks.refresh().graph for tasks in calls.values()))


def whole(
    parts: Iterable[Any], layout: Sequence[Placement], sizes: Sequence[int], items: Sequence[int] = ()
) -> Any:
    """Return an array joined from its ranks' parts: by mesh axis, the last first; sums are in the order of ranks.

    `items` are the positions of the parts where tuples are given; without them, or where one is -1, parts are given.
    """
    grid = list(parts)
    grid = [
        part if item < 0 else part[item] for part, item in zip(grid, items or (-1,) * len(grid), strict=True)
    ]
    for placement, size in reversed([*zip(layout, sizes, strict=True)]):
        rows = [grid[i : i + size] for i in range(0, len(grid), size)]
        grid = [_one(row, placement) for row in rows]
    return grid[0]


def _one(row: Sequence[Any], placement: Placement) -> Any:
    if isinstance(placement, Shard):
        return joined(row, placement.dim)
    return reduced(row, placement.reduction) if isinstance(placement, Partial) else row[0]
