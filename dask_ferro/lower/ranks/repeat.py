"""Calls of a sharded graph that follow each other, as in a training: the first one, and one that the others repeat.

    call 0   tasks of its own, as its inputs come from anywhere
    call 1   reads outputs of call 0, and is the template of calls 2, 3, ... (`lower.repeated`)

The results of a rank in all repeats are one tuple, of which each output has its item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from uuid import uuid4

import numpy as np
from dask.base import tokenize

from dask_ferro.graph.sharding.node_placement import UNPLACED
from dask_ferro.lower.ranks.calls import RankFunction
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import Homes, annotations_of
from dask_ferro.lower.ranks.sharded import CallTasks, ShardedArray, Written
from dask_ferro.lower.ranks.spmd_inputs import LATER, keys_read
from dask_ferro.lower.ranks.spmd_tasks import Home, PartPlace, grouped, picked
from dask_ferro.lower.repeated import RepeatedTasks
from dask_ferro.lower.worker.rank_functions import select_values

Outputs = dict[str, ShardedArray]


def successive_calls(steps: RankFunction, each: Sequence[Arrays], follow: Mapping[str, str]) -> list[Outputs]:
    """Return the outputs of each call by name, lazily.

    Parameters
    ----------
    steps : RankFunction
    each : sequence of mapping
        The inputs of each call; all but the first lack those that follow.
    follow : mapping of str to str
        By input, the output of the call before.
    """
    outputs, rest = [steps(each[0])], each[1:]
    arrays = chain.from_iterable(one.values() for one in rest)
    if len(rest) > 1 and all(isinstance(value, (np.ndarray, np.generic)) for value in arrays):
        for one in rest:
            steps.check(one)
        return outputs + _repeated(steps, outputs[0], rest, follow)
    for one in rest:
        outputs.append(steps({**one, **{name: outputs[-1][end] for name, end in follow.items()}}))
    return outputs


def _repeated(
    steps: RankFunction, first: Outputs, rest: Sequence[Arrays], follow: Mapping[str, str]
) -> list[Outputs]:
    """Return the outputs of calls on `rest`, each on outputs of the one before, the first on those of `first`."""
    kept = {name: first[end] for name, end in follow.items()}
    token = uuid4().hex
    tasks = CallTasks(partial(_written, steps, kept, rest, follow, token), steps.workers)
    tasks.here()  # so that its errors are raised by the call

    def output(end: str, number: int) -> ShardedArray:
        one, name = first[end], _of_repeat(end, number)
        return ShardedArray(one.port, one.mesh, tasks, (token, name), one.depth, name)

    return [{port.name: output(port.name, number) for port in steps.results} for number in range(len(rest))]


def _of_repeat(name: str, number: int) -> str:
    return f"{name}[{number}]"


def _written(
    steps: RankFunction,
    kept: Outputs,
    rest: Sequence[Arrays],
    follow: Mapping[str, str],
    token: str,
    there: Homes,
) -> Written:
    """Return the tasks of the repeats, whose first has the inputs `kept`."""
    name = tokenize(token, repr(keys_read(kept)))
    call = steps.tasks(f"{name}-1", {**dict.fromkeys(rest[0], LATER), **kept})
    tasks, places = call.tasks, call.places
    carry: dict[Key, Key] = {}
    for start, end in follow.items():
        before, after = kept[start].places, places[end]
        assert [place.index for place in before] == [place.index for place in after]
        carry |= {one.key: other.key for one, other in zip(before, after, strict=True)}
    # By rank and site, the places of its results, of whatever action.
    at: dict[str, list[tuple[Home, PartPlace]]] = {}
    for port in steps.results:
        sites = [tasks.home.get(place.key, (rank, UNPLACED)) for rank, place in enumerate(places[port.name])]
        homes = [(rank, site._replace(action=None)) for rank, site in sites]
        at[port.name] = list(zip(homes, places[port.name], strict=True))
    groups = grouped(at)
    keys = {
        home: tasks.add((f"spmd-ends-{name}", number), home, 0, select_values, *picked(list(own)))
        for number, (home, own) in enumerate(groups.items())
    }
    inputs = [dict(chain.from_iterable(one.parts(arrays).items() for one in call.calls)) for arrays in rest]
    layer = RepeatedTasks(name, tasks.tasks, carry, inputs).layer(annotations_of(tasks, there))
    ends = {
        _of_repeat(output, number): [
            PartPlace(keys[home], number * len(groups[home]) + groups[home][place]) for home, place in of
        ]
        for output, of in at.items()
        for number in range(len(rest))
    }
    return Written(call.graph(f"spmd-{name}", layer), ends)
