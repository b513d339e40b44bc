"""Calls of a sharded graph that follow each other, as in a training: the first one, and one that the others repeat.

    call 0   tasks of its own, as its inputs come from anywhere
    call 1   reads outputs of call 0, and is the template of calls 2, 3, ... (`lower.repeated`)

The results of a rank in all repeats are one tuple, of which each output has its item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from dask.base import tokenize

from dask_ferro.graph.sharding.node_placement import UNPLACED
from dask_ferro.lower.ranks.calls import RankFunction
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import Homes, annotations_of
from dask_ferro.lower.ranks.sharded import CallTasks, Made, Memo, ShardedArray, Written
from dask_ferro.lower.ranks.spmd_inputs import (
    IN_GRAPH_BYTES,
    LATER,
    CallInputs,
    keys_read,
    nbytes_of,
    stacked,
    tokens,
)
from dask_ferro.lower.ranks.spmd_tasks import Home, PartPlace, grouped
from dask_ferro.lower.repeated import RepeatedTasks

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
    arrays = list(chain.from_iterable(one.values() for one in rest))
    is_here = all(isinstance(value, (np.ndarray, np.generic)) for value in arrays)
    # Larger ones are sent to the workers, each by itself.
    if len(rest) > 1 and is_here and sum(map(nbytes_of, rest)) <= IN_GRAPH_BYTES:
        for one in rest:
            steps.check(one)
        return outputs + _repeated(steps, outputs[0], rest, follow)
    for one in rest:
        outputs.append(steps({**one, **{name: outputs[-1][end] for name, end in follow.items()}}))
    return outputs


def _repeated(
    steps: RankFunction, first: Outputs, rest: Sequence[Arrays], follow: Mapping[str, str]
) -> list[Outputs]:
    start = {port.name: first[port.name].made for port in steps.results}
    tasks = CallTasks(partial(_written, steps, first, rest, follow), steps.workers)
    token = tasks.here().token

    def again(name: str, memo: Memo) -> ShardedArray:
        if token not in memo:
            rebuilt = {one: made.again(memo) for one, made in start.items()}
            outputs = _repeated(steps, rebuilt, rest, follow)
            memo[token] = {array.name: array for one in outputs for array in one.values()}
        return memo[token][name]

    def output(port: Any, number: int) -> ShardedArray:
        name = _of_repeat(port.name, number)
        made = Made(partial(again, name), start[port.name].calls)
        return ShardedArray(port, first[port.name].mesh, tasks, (token, name), made, name)

    return [{port.name: output(port, number) for port in steps.results} for number in range(len(rest))]


def _of_repeat(name: str, number: int) -> str:
    return f"{name}[{number}]"


def _written(
    steps: RankFunction, first: Outputs, rest: Sequence[Arrays], follow: Mapping[str, str], there: Homes
) -> Written:
    """Return the tasks of calls on `rest`, each on outputs of the one before, the first on those of `first`."""
    kept = {name: first[end] for name, end in follow.items()}
    told = [sorted(tokens(arrays).items()) for arrays in (kept, *rest)]
    token = tokenize(steps.identity, repr(told))
    name = tokenize(token, repr(keys_read(kept)))
    call = steps.tasks(f"{name}-1", CallInputs({**dict.fromkeys(rest[0], LATER), **kept}), there)
    tasks, places = call.tasks, call.places
    carry: dict[Key, Key] = {}
    for end in follow.values():
        assert [place.index for place in places[end]] == list(first[end].items)
        carry |= zip(first[end].keys, (place.key for place in places[end]), strict=True)
    # By rank and site, the places of its results, of whatever action.
    at: dict[str, list[tuple[Home, PartPlace]]] = {}
    for port in steps.results:
        sites = [tasks.home.get(place.key, (rank, UNPLACED)) for rank, place in enumerate(places[port.name])]
        homes = [(rank, site._replace(action=None)) for rank, site in sites]
        at[port.name] = list(zip(homes, places[port.name], strict=True))
    groups = grouped(at)
    keys = {
        home: tasks.collect((f"spmd-ends-{name}", number), home, list(own))
        for number, (home, own) in enumerate(groups.items())
    }
    inputs = [call.later(arrays) for arrays in rest]
    layer = RepeatedTasks(name, tasks.tasks, carry, inputs).layer(annotations_of(tasks, there))
    of_keys: dict[str, tuple[Key, ...]] = {}
    items: dict[str, tuple[int, ...]] = {}
    for output, of in at.items():
        for number in range(len(rest)):
            one = _of_repeat(output, number)
            of_keys[one] = tuple(keys[home] for home, _ in of)
            items[one] = tuple(number * len(groups[home]) + groups[home][place] for home, place in of)
    return Written(token, stacked(f"spmd-{name}", layer, call.layers()), of_keys, items=items)
