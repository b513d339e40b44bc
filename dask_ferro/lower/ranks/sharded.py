"""`ShardedArray`: an output of a sharded graph, in parts on workers, and how parts become whole arrays.

It is a collection: what it computes to are its parts, joined.  It remembers the call that it came from until its
lineage is cut (`checkpoint`): where Dask has lost what only the client can send again, the call is written once more,
under the same keys, so what is still there is not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from dask.base import get_scheduler, tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_ferro.engines.collectives import joined, reduced
from dask_ferro.errors import ConfigError
from dask_ferro.graph.sharding.parts import Port, Spmd
from dask_ferro.graph.sharding.placements import Partial, Placement, Shard
from dask_ferro.graph.sharding.redistribute import Mesh, text
from dask_ferro.lower.ranks.collection import Arrays, ContentKeyed, needed
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.retry import retried

# The status of a future whose data were lost, for good as far as Dask knows.
GONE = ("cancelled", "lost")


# Outputs of calls that were written again, by the call's token, so that what several arrays come from is written once.
Memo: TypeAlias = dict[str, dict[str, "ShardedArray"]]


class Made(NamedTuple):
    """The origin of a sharded array.  It holds the arrays that the client gave, and nothing that lies on workers.

    Attributes
    ----------
    again : callable
        Writes it again, from what the client has; the same array under the same keys.
    calls : int
        How many calls, one behind the other, it depends on.
    """

    again: Callable[[Memo], ShardedArray]
    calls: int


class ShardedArray(ContentKeyed):
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
    made : Made
    """

    def __init__(
        self,
        port: Port,
        mesh: Mesh,
        keys: tuple[Key, ...],
        graph: HighLevelGraph,
        token: Hashable,
        made: Made,
    ) -> None:
        self.port, self.mesh, self.keys, self.graph = port, mesh, keys, graph
        self.token, self.made = token, made

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

    def futures(self) -> Iterator[Any]:
        """Yield the futures in its graph."""
        for layer in self.graph.layers.values():
            # A dask array's layers are not asked: to list what a Blockwise layer has would write all of its tasks.
            if isinstance(layer, MaterializedLayer):
                yield from (value for value in layer.mapping.values() if hasattr(value, "add_done_callback"))

    def held(self) -> dict[Key, Any] | None:
        """Return the future of each of its parts, or None if some part has yet to be asked for."""
        known = {future.key: future for future in self.futures()}
        return {key: known[key] for key in self.keys} if known.keys() >= set(self.keys) else None

    def is_lost(self) -> bool:
        """Whether Dask lost a result that the array needs, and cannot compute it again."""
        return any(future.status in GONE for future in self.futures())

    def renew(self, memo: Memo | None = None) -> None:
        """Replace the graph by the call that made the array, written again under the same keys.

        Parameters
        ----------
        memo : dict, optional
            What has been written again for others; it grows.

        Raises
        ------
        ConfigError
            An array that the call was given has been changed since.
        """
        again = self.made.again({} if memo is None else memo)
        if again.token != self.token:
            raise ConfigError(
                f"{self!r}: a worker died and took it along, and the arrays that it was made of have been changed "
                "since; give each call arrays of its own, or set ferro.ranks.checkpoint-calls lower"
            )
        self.keys, self.graph = again.keys, again.graph

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

    def persisted(self, graph: Mapping[Key, Any]) -> ShardedArray:
        """Return the array on a graph that holds its parts."""
        held = HighLevelGraph.from_collections(f"ferro-held-{tokenize(self)}", dict(graph), dependencies=[])
        return ShardedArray(self.port, self.mesh, self.keys, held, self.token, self.made)

    def compute(self, **kwargs: Any) -> Any:
        """Return the whole array; its parts come straight to the caller.

        Parameters
        ----------
        **kwargs
            `scheduler`, and what it takes.
        """
        return gather({"it": self}, **kwargs)["it"]


class Written(NamedTuple):
    """A call as tasks: its token, its graph, and for each output the keys of its parts."""

    token: str
    graph: HighLevelGraph
    keys: Mapping[str, tuple[Key, ...]]


def call_outputs(
    spmd: Spmd,
    arrays: Arrays,
    made: Written,
    write: Callable[[Arrays], Written],
    calls: int = 1,
) -> dict[str, ShardedArray]:
    """Return the outputs of a call on arrays, by name.

    Parameters
    ----------
    spmd : Spmd
    arrays : mapping of str to array, dask array or ShardedArray
        They are kept, to be sent again after a worker's death.
    made : Written
        The call.
    write : callable
        Writes it again, on arrays like those; the same keys for the same arrays.
    calls : int, optional
        How much longer its lineage is than that of its arrays.
    """
    # What lies on workers is not held here: only what it was made of.
    given = {n: value.made if isinstance(value, ShardedArray) else value for n, value in arrays.items()}
    longest = max((value.calls for value in given.values() if isinstance(value, Made)), default=0)

    token = made.token  # not `made`: its graph holds futures of the arrays, and of what was sent

    def again(name: str, memo: Memo) -> ShardedArray:
        if token not in memo:
            here = {n: v.again(memo) if isinstance(v, Made) else v for n, v in given.items()}
            memo[token] = call_outputs(spmd, here, write(here), write, calls)
        return memo[token][name]

    return {
        port.name: ShardedArray(
            *(port, spmd.mesh, made.keys[port.name], made.graph, (made.token, port.name)),
            Made(partial(again, port.name), longest + calls),
        )
        for port in spmd.outputs
    }


def gather(arrays: Mapping[str, ShardedArray], **kwargs: Any) -> dict[str, Any]:
    """Return sharded arrays as whole ones, by the same names; what they share is computed once.

    A worker's death costs what it held: that is computed again, from what the client sends again where it has to.

    Parameters
    ----------
    arrays : mapping of str to ShardedArray
    **kwargs
        `scheduler`, and what it takes.

    Raises
    ------
    CancelledError
        Several workers died, and with them both a part and its copy.
    """
    kwargs.pop("optimize_graph", None)  # there is nothing that an optimizer could merge
    values = list(arrays.values())
    schedule = get_scheduler(scheduler=kwargs.pop("scheduler", None), collections=values)

    def run() -> Any:
        keys = [value.__dask_keys__() for value in values]
        return schedule(needed(merged(values), keys), keys, **kwargs)

    def renew() -> None:
        memo: Memo = {}
        for value in values:
            value.renew(memo)

    pairs = zip(arrays.items(), retried(run, renew), strict=True)
    return {name: whole(held, value.port.layout, value.mesh.sizes) for (name, value), held in pairs}


def merged(arrays: Iterable[ShardedArray]) -> HighLevelGraph:
    """Return one graph of all arrays; those of one call share theirs."""
    graphs = {id(array.graph): array.graph for array in arrays}
    return HighLevelGraph.merge(*graphs.values())


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
