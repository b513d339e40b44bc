"""Calls of what ranks compute, on arrays by name: their outputs are sharded arrays, and tasks are written when needed.

    arrays --`feed`--> places of the tasks' inputs;  RankTasks, under a name of the call's own --> a layer, a graph

A graph of ranks (`spmd.Ranks`) is called, and so are the steps of a pipeline (`pipeline.step_tasks`).

Dask keeps the tasks that made a part, those of every step before, batches included.  So an input that depends on
``ferro.ranks.checkpoint-calls`` submissions is fetched by the client, and goes on as an array of the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from uuid import uuid4

from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_ferro import config
from dask_ferro.graph.sharding.parts import Port
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.lower.client import live_client
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import Homes, RankWorkers, annotations_of
from dask_ferro.lower.ranks.sharded import CallTasks, ShardedArray, Written, gather
from dask_ferro.lower.ranks.spmd_inputs import keys_read
from dask_ferro.lower.ranks.spmd_tasks import PartPlace, RankCall, RankTasks


class CallGraph(NamedTuple):
    """The tasks of a call.

    Attributes
    ----------
    tasks : RankTasks
    places : mapping of str to sequence of PartPlace
        The place of each rank's part of each output.
    calls : sequence of RankCall
        Those that have its inputs.
    actions : mapping
        A pipeline's action of each task, and its rank.
    """

    tasks: RankTasks
    places: Mapping[str, Sequence[PartPlace]]
    calls: Sequence[RankCall]
    actions: Mapping[Key, Any] = {}

    def graph(self, name: str, layer: MaterializedLayer) -> HighLevelGraph:
        """Return the graph of a named layer on top of the graphs that the calls read from."""
        below = dict(chain.from_iterable(call.below.items() for call in self.calls))
        graph = HighLevelGraph.merge(*below.values())
        return HighLevelGraph({**graph.layers, name: layer}, {**graph.dependencies, name: set(below)})


class RankFunction(ABC):
    """What ranks compute, as a function of arrays by name.

    Attributes
    ----------
    workers : RankWorkers
    mesh : Mesh
    outputs, results : tuple of Port
        All outputs; those that a caller keeps of calls that follow each other.
    """

    workers: RankWorkers
    mesh: Mesh
    outputs: tuple[Port, ...]
    results: tuple[Port, ...]

    @abstractmethod
    def check(self, arrays: Arrays) -> None:
        """Raise `ConfigError` for inputs that are unknown, or have another dtype or layout."""

    @abstractmethod
    def tasks(self, name: str, arrays: Arrays) -> CallGraph:
        """Return the tasks of a call, with a name in their keys."""

    def __call__(self, arrays: Arrays) -> dict[str, ShardedArray]:
        """Return the outputs by name, lazily.

        Parameters
        ----------
        arrays : mapping of str to array, dask array or ShardedArray
            All inputs, by name in the model that was sharded.  NumPy arrays are part of the graph: Dask sends them
            again after a worker's death.  Do not write to them before the outputs are computed.

        Raises
        ------
        ConfigError
            An input that is missing or unknown, or has another dtype, shape or layout than the graph's.

        Notes
        -----
        Where persisted inputs depend on ``ferro.ranks.checkpoint-calls`` successive calls or more, it waits for them
        and fetches them: they are arrays of this call.
        """
        self.check(arrays)
        arrays = _cut_lineage(arrays)
        # Not of the content: the scheduler may still release the tasks of an equal call.
        token = uuid4().hex
        tasks = CallTasks(partial(self._written, token, arrays), self.workers)
        tasks.here()  # so that its errors are raised by the call
        # A call on the results of another one is submitted together with it, unless that was submitted already.
        sharded = [value for value in arrays.values() if isinstance(value, ShardedArray)]
        depth = max((value.depth + value.tasks.is_fixed for value in sharded), default=1)
        return {
            port.name: ShardedArray(port, self.mesh, tasks, (token, port.name), depth)
            for port in self.outputs
        }

    def _written(self, token: str, arrays: Arrays, there: Homes) -> Written:
        """Return a call on arrays as a graph for these workers."""
        name = tokenize(token, repr(keys_read(arrays)))
        call = self.tasks(name, arrays)
        layer = MaterializedLayer(call.tasks.tasks, annotations=annotations_of(call.tasks, there))
        return Written(call.graph(f"spmd-{name}", layer), call.places, call.actions)


def _cut_lineage(arrays: Arrays) -> Arrays:
    """Return the inputs of a call, of which those that depend on too many submissions are arrays of this process."""
    client, most = live_client(), config.value("ranks.checkpoint-calls")
    if client is None or most is None:
        return arrays
    sharded = {name: value for name, value in arrays.items() if isinstance(value, ShardedArray)}
    deep = {name: value for name, value in sharded.items() if value.depth >= most and value.tasks.is_fixed}
    return {**arrays, **gather(deep, scheduler=client)} if deep else arrays
