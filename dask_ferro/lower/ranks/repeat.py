"""Calls of a sharded graph that follow each other, as in a training: the first one, and one that the others repeat.

    call 0   tasks of its own, as its inputs come from anywhere
    call 1   reads outputs of call 0, and is the template of calls 2, 3, ... (`lower.repeated`)

The results of a rank in all repeats are one tuple, of which each output has its item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.base import tokenize

from dask_ferro.graph.sharding.node_placement import UNPLACED
from dask_ferro.graph.sharding.parts import holders_of
from dask_ferro.lower.client import live_client
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import Homes
from dask_ferro.lower.ranks.sharded import CallTasks, Made, Memo, ShardedArray, Written
from dask_ferro.lower.ranks.spmd_inputs import (
    IN_GRAPH_BYTES,
    Travel,
    checked,
    feed,
    keys_read,
    nbytes_of,
    stacked,
    tokens,
)
from dask_ferro.lower.ranks.spmd_tasks import Home, PartPlace, RankCall
from dask_ferro.lower.repeated import RepeatedTasks

if TYPE_CHECKING:
    from dask_ferro.lower.ranks.spmd import Ranks

Outputs = dict[str, ShardedArray]


def successive_calls(ranks: Ranks, each: Sequence[Arrays], follow: Mapping[str, str]) -> list[Outputs]:
    """Return the outputs of each call by name, lazily.

    Parameters
    ----------
    ranks : Ranks
    each : sequence of mapping
        The inputs of each call; all but the first lack those that follow.
    follow : mapping of str to str
        By input, the output of the call before.
    """
    outputs, rest = [ranks(each[0])], each[1:]
    arrays = list(chain.from_iterable(one.values() for one in rest))
    is_here = all(isinstance(value, (np.ndarray, np.generic)) for value in arrays)
    # Larger ones are sent to the workers, each by itself.
    if len(rest) > 1 and is_here and sum(map(nbytes_of, rest)) <= IN_GRAPH_BYTES:
        for one in rest:
            checked(ranks.spmd, one)
        return outputs + _repeated(ranks, outputs[0], rest, follow)
    for one in rest:
        outputs.append(ranks({**one, **{name: outputs[-1][end] for name, end in follow.items()}}))
    return outputs


def _repeated(
    ranks: Ranks, first: Outputs, rest: Sequence[Arrays], follow: Mapping[str, str]
) -> list[Outputs]:
    spmd, start = ranks.spmd, {name: array.made for name, array in first.items()}
    tasks = CallTasks(partial(_written, ranks, first, rest, follow), ranks.workers)
    token = tasks.here().token

    def again(name: str, memo: Memo) -> ShardedArray:
        if token not in memo:
            rebuilt = {one: made.again(memo) for one, made in start.items()}
            outputs = _repeated(ranks, rebuilt, rest, follow)
            memo[token] = {array.name: array for one in outputs for array in one.values()}
        return memo[token][name]

    def output(port: Any, number: int) -> ShardedArray:
        name = _of_repeat(port.name, number)
        made = Made(partial(again, name), start[port.name].calls)
        return ShardedArray(port, spmd.mesh, tasks, (token, name), made, name)

    return [{port.name: output(port, number) for port in spmd.outputs} for number in range(len(rest))]


def _of_repeat(name: str, number: int) -> str:
    return f"{name}[{number}]"


def _written(
    ranks: Ranks, first: Outputs, rest: Sequence[Arrays], follow: Mapping[str, str], there: Homes
) -> Written:
    """Return the tasks of calls on `rest`, each on outputs of the one before, the first on those of `first`."""
    spmd, client = ranks.spmd, live_client()
    kept = {name: first[end] for name, end in follow.items()}
    told = [sorted(tokens(arrays).items()) for arrays in (kept, *rest)]
    token = tokenize(ranks.digest, ranks.source.exact, repr(told), spmd.mesh.sizes)
    name = tokenize(token, repr(keys_read(kept)))
    extra, below = ranks.content(client)
    call = RankCall(ranks.source, f"{name}-1", extra)
    stay = tuple(port for port in spmd.inputs if port.name in kept)
    change = replace(spmd, inputs=tuple(port for port in spmd.inputs if port.name not in kept))
    below += feed(call, replace(spmd, inputs=stay), kept, {}, there, client, Travel())
    slots = {part: call.slot(part) for part in holders_of(change.inputs)}
    inputs = [{slots[part]: value for part, value in change.split(arrays).items()} for arrays in rest]
    call.write()
    ends = call.ends(holders_of(spmd.outputs), ranks.packed)
    places = {port.name: [ends[part] for part in port.parts] for port in spmd.outputs}
    carry: dict[Key, Key] = {}
    for end in follow.values():
        assert [place.index for place in places[end]] == list(first[end].items)
        carry |= zip(first[end].keys, (place.key for place in places[end]), strict=True)
    # By rank and site, the places of its results.
    groups: dict[Home, dict[PartPlace, int]] = {}
    at: dict[str, list[tuple[Home, PartPlace]]] = {}
    for port in spmd.outputs:
        homes = [call.home.get(place.key, (rank, UNPLACED)) for rank, place in enumerate(places[port.name])]
        at[port.name] = list(zip(homes, places[port.name], strict=True))
        for home, place in at[port.name]:
            own = groups.setdefault(home, {})
            own.setdefault(place, len(own))
    keys = {
        home: call.collect((f"spmd-ends-{name}", number), home, list(own))
        for number, (home, own) in enumerate(groups.items())
    }
    layer = ranks.layer(call, there)
    layer = RepeatedTasks(name, call.tasks, carry, inputs).layer(layer.annotations or {})
    of_keys: dict[str, tuple[Key, ...]] = {}
    items: dict[str, tuple[int, ...]] = {}
    for output, of in at.items():
        for number in range(len(rest)):
            one = _of_repeat(output, number)
            of_keys[one] = tuple(keys[home] for home, _ in of)
            items[one] = tuple(number * len(groups[home]) + groups[home][place] for home, place in of)
    return Written(token, stacked(f"spmd-{name}", layer, below), of_keys, items=items)
