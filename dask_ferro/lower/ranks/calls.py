"""Call graphs of ranks on arrays by name: the outputs are sharded arrays, and tasks are written when needed.

    arrays --`feed`--> places of the tasks' inputs;  RankTasks, under a name of the call's own --> a layer, a graph

A graph of ranks (`spmd.Ranks`) is called, and so are the steps of a pipeline (`schedule`).  Calls that follow each
other, as in a training, have one template:

    call 0   tasks of its own, because its inputs come from anywhere
    call 1   reads outputs of call 0, and is the template of calls 2, 3, ... (`lower.repetition`)

Dask keeps all tasks that a part depends on: the tasks of every earlier step, batches included.  So an input that
depends on ``ferro.ranks.checkpoint-calls`` submissions is fetched by the client and becomes an array of the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from uuid import uuid4

import numpy as np

from dask_ferro import config
from dask_ferro.graph.sharding.parts import Port
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.lower.client import live_client
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import Homes, RankWorkers
from dask_ferro.lower.ranks.sharded_array import (
    Arrays,
    CallGraph,
    CallTasks,
    ShardedArray,
    calls_of,
    gather,
    write_layer,
)
from dask_ferro.lower.ranks.spmd_tasks import Places, RankTasks
from dask_ferro.lower.repetition import RepeatedTasks

Outputs = dict[str, ShardedArray]


class RankFunction(ABC):
    """A computation of ranks as a function of arrays by name."""

    workers: RankWorkers
    mesh: Mesh
    outputs: tuple[Port, ...]

    @abstractmethod
    def check(self, arrays: Arrays) -> None:
        """Raise `InputError` if inputs are unknown, or have another dtype or layout."""

    @abstractmethod
    def tasks(self, name: str, arrays: Arrays, later: Collection[str] = ()) -> tuple[RankTasks, Places]:
        """Return the tasks of a call, with a name in their keys, and the places of outputs.

        Each repeat of the tasks has arrays of its own for the inputs in `later`.
        """

    def __call__(self, arrays: Arrays) -> Outputs:
        """Return the outputs by name, lazily.

        Parameters
        ----------
        arrays : mapping of str to array, dask array or ShardedArray
            All inputs, by name in the model that was sharded.  NumPy arrays are part of the graph: Dask sends them
            again after a worker's death.  Do not write to them before the outputs are computed.

        Raises
        ------
        InputError
            If an input is missing or unknown, or has another dtype, shape or layout than the graph's.

        Notes
        -----
        If persisted inputs depend on ``ferro.ranks.checkpoint-calls`` or more successive calls, the call waits for
        them and fetches them: they become arrays of this call.
        """
        self.check(arrays)
        arrays = _cut_lineage(arrays)
        # It does not depend on the content: the scheduler may still release the tasks of an equal call.
        token = uuid4().hex
        tasks = CallTasks(partial(self._written, token, arrays), self.workers)
        tasks.written()  # so that its errors are raised by the call
        # A call on the results of another call is submitted together with that call, unless it was submitted already.
        sharded = [value for value in arrays.values() if isinstance(value, ShardedArray)]
        depth = max((value.depth + value.tasks.is_fixed for value in sharded), default=1)
        return {
            port.name: ShardedArray(port, self.mesh, tasks, port.name, (token, port.name), depth)
            for port in self.outputs
        }

    def _written(self, token: str, arrays: Arrays, homes: Homes) -> CallGraph:
        return write_layer(f"spmd-{token}", *self.tasks(token, arrays), homes)

    def successive(self, each: Sequence[Arrays], follow: Mapping[str, str]) -> list[Outputs]:
        """Return the outputs of calls that follow each other, lazily.

        All calls except the first lack the inputs in `follow`, which maps each to an output of the previous call.
        """
        outputs, rest = [self(each[0])], each[1:]
        arrays = chain.from_iterable(one.values() for one in rest)
        if len(rest) > 1 and all(isinstance(value, (np.ndarray, np.generic)) for value in arrays):
            for one in rest:
                self.check(one)
            return outputs + self._repeated(outputs[0], rest, follow)
        for one in rest:
            outputs.append(self({**one, **{name: outputs[-1][end] for name, end in follow.items()}}))
        return outputs

    def _repeated(self, first: Outputs, rest: Sequence[Arrays], follow: Mapping[str, str]) -> list[Outputs]:
        """Return the outputs of calls on `rest`, each on outputs of the previous call; `first` is the call before."""
        token = uuid4().hex
        tasks = CallTasks(partial(self._written_repeats, token, first, rest, follow), self.workers)
        tasks.written()  # so that its errors are raised by the call

        def output(one: ShardedArray, number: int) -> ShardedArray:
            name = _repeat_name(one.port.name, number)
            return ShardedArray(one.port, one.mesh, tasks, name, (token, name), one.depth)

        return [{end: output(one, number) for end, one in first.items()} for number in range(len(rest))]

    def _written_repeats(
        self, token: str, first: Outputs, rest: Sequence[Arrays], follow: Mapping[str, str], homes: Homes
    ) -> CallGraph:
        start = {name: first[end] for name, end in follow.items()}
        tasks, places = self.tasks(f"{token}-1", {**rest[0], **start}, later=rest[0].keys())
        carry: dict[Key, Key] = {}
        for name, end in follow.items():
            before, after = start[name].places, places[end]
            assert [place.index for place in before] == [place.index for place in after]
            carry |= {one.key: other.key for one, other in zip(before, after, strict=True)}
        # The results of a rank in all repeats are one tuple; each output is an item of it.
        packed = tasks.pack(f"spmd-ends-{token}", places, times=len(rest))
        ends = {_repeat_name(end, n): own for n, each in enumerate(packed) for end, own in each.items()}
        repeats = RepeatedTasks(token, tasks.tasks, carry, [tasks.parts(arrays) for arrays in rest])
        return write_layer(f"spmd-{token}", tasks, ends, homes, repeats)


def _repeat_name(name: str, number: int) -> str:
    return f"{name}[{number}]"


def member_tuples(arrays: Outputs, apart: Collection[str], workers: RankWorkers) -> Outputs:
    """Return arrays of calls that were not submitted, with their parts on one member in one tuple: one task for Dask.

    Those in `apart`, which the caller reads, are in tuples of their own, with other small ones.
    """
    token = uuid4().hex
    # A value that all members may read, such as a count of steps, is sent with its whole tuple.
    small = {*apart, *(name for name, array in arrays.items() if array.port.is_small)}

    def write(homes: Homes) -> CallGraph:
        tasks = RankTasks()
        tasks.below = {one.top: one.graph for one in calls_of(arrays.values())}
        [places] = tasks.pack(
            f"spmd-output-{token}", {name: array.places for name, array in arrays.items()}, small
        )
        return write_layer(f"spmd-outputs-{token}", tasks, places, homes)

    tasks = CallTasks(write, workers)
    return {
        name: ShardedArray(array.port, array.mesh, tasks, name, array.token, array.depth)
        for name, array in arrays.items()
    }


def _cut_lineage(arrays: Arrays) -> Arrays:
    """Return the inputs of a call; inputs that depend on too many submissions become arrays of this process."""
    client, most = live_client(), config.value("ranks.checkpoint-calls")
    if client is None or most is None:
        return arrays
    sharded = {name: value for name, value in arrays.items() if isinstance(value, ShardedArray)}
    deep = {name: value for name, value in sharded.items() if value.depth >= most and value.tasks.is_fixed}
    return {**arrays, **gather(deep, scheduler=client)} if deep else arrays
