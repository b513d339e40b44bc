"""Calls of what ranks compute, on arrays by name: their outputs are sharded arrays, and tasks are written when needed.

    arrays --tokens--> the name of the tasks;  --`feed`--> their inputs;  RankTasks --> a layer, a graph

A graph of ranks (`spmd.Ranks`) is called, and so are the steps of a pipeline (`pipeline.staged`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from dask.base import tokenize
from dask.highlevelgraph import MaterializedLayer

from dask_ferro import config
from dask_ferro.graph.sharding.parts import Port
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.lower.client import live_client
from dask_ferro.lower.ranks import checkpoint
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import Homes, RankWorkers, annotations_of
from dask_ferro.lower.ranks.sharded import CallTasks, Made, Memo, ShardedArray, Written
from dask_ferro.lower.ranks.spmd_inputs import Below, CallInputs, Fed, keys_read, stacked, tokens, travel_of
from dask_ferro.lower.ranks.spmd_tasks import PartPlace, RankTasks


class CallGraph(NamedTuple):
    """The tasks of a call.

    Attributes
    ----------
    tasks : RankTasks
    places : mapping of str to sequence of PartPlace
        The place of each rank's part of each output.
    fed : sequence of Fed
        Its inputs.
    below : sequence of Below
        Other layers that it reads.
    actions : mapping
        A pipeline's action of each task, and its rank.
    """

    tasks: RankTasks
    places: Mapping[str, Sequence[PartPlace]]
    fed: Sequence[Fed]
    below: Sequence[Below] = ()
    actions: Mapping[Key, Any] = {}

    def layers(self) -> list[Below]:
        """Return the layers that it reads."""
        return [*self.below, *(layer for one in self.fed for layer in one.below)]

    def later(self, arrays: Arrays) -> dict[Key, Any]:
        """Return the parts of inputs that were `LATER`, by the keys that the tasks have for them."""
        return {key: value for one in self.fed for key, value in one.later(arrays).items()}


class RankFunction(ABC):
    """What ranks compute, as a function of arrays by name.

    Attributes
    ----------
    workers : RankWorkers
    mesh : Mesh
    outputs, results : tuple of Port
        All outputs; those that a caller keeps of calls that follow each other.
    identity : str
        The hash of all but the inputs that the outputs depend on.
    """

    workers: RankWorkers
    mesh: Mesh
    outputs: tuple[Port, ...]
    results: tuple[Port, ...]
    identity: str

    @abstractmethod
    def check(self, arrays: Arrays) -> None:
        """Raise `ConfigError` for inputs that are unknown, or have another dtype or layout."""

    @abstractmethod
    def tasks(self, name: str, inputs: CallInputs, there: Homes) -> CallGraph:
        """Return the tasks of a call, with a name in their keys."""

    def __call__(self, arrays: Arrays) -> dict[str, ShardedArray]:
        """Return the outputs by name, lazily.

        Parameters
        ----------
        arrays : mapping of str to array, dask array or ShardedArray
            All inputs, by name in the model that was sharded.  They are kept until the result's lineage is cut, to be
            sent again after a worker's death: give each call arrays of its own.

        Raises
        ------
        ConfigError
            An input that is missing or unknown, or has another dtype, shape or layout than the graph's.

        Notes
        -----
        Where persisted inputs depend on ``ferro.ranks.checkpoint-calls`` successive calls or more, it waits
        for them and cuts their lineage.
        """
        self.check(arrays)
        return self._outputs(_shortened(arrays))

    def _outputs(self, arrays: Arrays) -> dict[str, ShardedArray]:
        # Data on workers are not held here, only their origin.
        given = {n: value.made if isinstance(value, ShardedArray) else value for n, value in arrays.items()}
        # A call on the results of another one is submitted together with it, unless that was submitted already.
        sharded = [value for value in arrays.values() if isinstance(value, ShardedArray)]
        calls = max((value.made.calls + value.tasks.is_fixed for value in sharded), default=1)
        tasks = CallTasks(partial(self._written, arrays), self.workers)
        token = tasks.here().token

        def again(name: str, memo: Memo) -> ShardedArray:
            if token not in memo:
                memo[token] = self._outputs(
                    {n: v.again(memo) if isinstance(v, Made) else v for n, v in given.items()}
                )
            return memo[token][name]

        return {
            port.name: ShardedArray(
                port, self.mesh, tasks, (token, port.name), Made(partial(again, port.name), calls)
            )
            for port in self.outputs
        }

    def _written(self, arrays: Arrays, there: Homes) -> Written:
        """Return a call on arrays as a graph for these workers."""
        told = tokens(arrays)
        # As text: Dask's tokens of long nested sequences take longer than the rest of a call.
        token = tokenize(self.identity, repr(sorted(told.items())))
        travel = travel_of(arrays)
        name = tokenize(token, travel.token, repr(keys_read(arrays)))
        call = self.tasks(name, CallInputs(arrays, told, travel), there)
        layer = MaterializedLayer(call.tasks.tasks, annotations=annotations_of(call.tasks, there))
        keys = {one: tuple(place.key for place in of) for one, of in call.places.items()}
        items = {one: tuple(place.index for place in of) for one, of in call.places.items()}
        return Written(token, stacked(f"spmd-{name}", layer, call.layers()), keys, call.actions, items)


def _shortened(arrays: Arrays) -> Arrays:
    """Return the inputs of a call, with the lineage cut of those that depend on too many calls."""
    client, most = live_client(), config.value("ranks.checkpoint-calls")
    if client is None or most is None:
        return arrays
    sharded = {name: value for name, value in arrays.items() if isinstance(value, ShardedArray)}
    long = {
        name: value for name, value in sharded.items() if value.made.calls >= most and value.tasks.is_fixed
    }
    return {**arrays, **(checkpoint.cut(long, client) if long else {})}
