"""Outputs of calls as one Dask collection: Dask looks at its graph once, and has one task for each member.

client.persist(CallOutputs(member_tuples(out, ...))).arrays --> the outputs by name, which stay on their workers
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_ferro.flow.run import MEMBER, MemberTask
from dask_ferro.lower.ranks.collection import RankCollection
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import RankWorkers
from dask_ferro.lower.ranks.sharded import CallTasks, ShardedArray, Written, merged, on_results
from dask_ferro.lower.ranks.spmd_tasks import PartPlace, grouped, picked
from dask_ferro.lower.upstream import Task
from dask_ferro.lower.worker.rank_functions import select_values


class CallOutputs(RankCollection):
    """The outputs of a call by name.

    Attributes
    ----------
    arrays : mapping of str to ShardedArray
    """

    def __init__(self, arrays: Mapping[str, ShardedArray]) -> None:
        self.arrays = arrays

    def __dask_graph__(self) -> HighLevelGraph:
        return merged(self.arrays.values())

    def __dask_keys__(self) -> list[Key]:
        return list(dict.fromkeys(chain.from_iterable(array.keys for array in self.arrays.values())))

    def __dask_layers__(self) -> tuple[str, ...]:
        tasks = {id(array.tasks): array for array in self.arrays.values()}
        return tuple(dict.fromkeys(array.top for array in tasks.values()))

    def __dask_tokenize__(self) -> Any:
        return "ferro-outputs", [array.token for array in self.arrays.values()]

    def __dask_postcompute__(self) -> tuple[Any, tuple[()]]:
        # The values of its keys: whole arrays are computed by `gather`.
        return list, ()

    def persisted(self, graph: Mapping[Key, Any]) -> CallOutputs:
        """Return the outputs on a graph that holds their parts."""
        return CallOutputs(on_results(self.arrays, graph))


def member_tuples(
    arrays: Mapping[str, ShardedArray], apart: Collection[str], where: RankWorkers
) -> dict[str, ShardedArray]:
    """Return arrays whose parts on one member are in one tuple, which takes Dask one task.

    Parameters
    ----------
    arrays : mapping of str to ShardedArray
        Of calls that were not submitted.
    apart : collection of str
        Those that the caller reads, in tuples of their own, with other small ones.
    where : RankWorkers
        Of the workers of the ranks.
    """
    token = tokenize([(name, array.token) for name, array in arrays.items()], sorted(apart))
    tasks = CallTasks(lambda there: _tuples(token, arrays, apart), where)
    return {
        name: ShardedArray(array.port, array.mesh, tasks, array.token, array.depth, name)
        for name, array in arrays.items()
    }


def _tuples(token: str, arrays: Mapping[str, ShardedArray], apart: Collection[str]) -> Written:
    """Return the tasks of the tuples, above those of the arrays."""
    graph = merged(arrays.values())
    at: dict[str, list[tuple[tuple[bool, MemberTask | None], PartPlace]]] = {}
    # A look at each call: arrays ask for the current client.
    calls = {id(array.tasks): (array.tasks.here(), array.top) for array in arrays.values()}
    for name, array in arrays.items():
        written, top = calls[id(array.tasks)]
        member_of = (graph.layers[top].annotations or {}).get(MEMBER)
        at[name] = []
        for place in written.places[array.name]:
            member = None if member_of is None else member_of(place.key)._replace(order=0)
            # What all members may read, as a count of steps, takes its tuple along.
            at[name].append(((array.port.is_small or name in apart, member), place))
    keys, members, tasks, groups = {}, {}, {}, grouped(at)
    for number, (group, places) in enumerate(groups.items()):
        # Where ranks' workers are others now, other values are in a tuple.
        key = keys[group] = (f"spmd-output-{tokenize(token, list(places))}", number)
        tasks[key], members[key] = Task(key, select_values, *picked(list(places))), group[1]
    annotations = {} if None in members.values() else {MEMBER: members.__getitem__}
    layer = f"spmd-outputs-{token}"
    return Written(
        HighLevelGraph(
            {**graph.layers, layer: MaterializedLayer(tasks, annotations=annotations)},
            {**graph.dependencies, layer: {top for _, top in calls.values()}},
        ),
        {
            name: [PartPlace(keys[group], groups[group][place]) for group, place in of]
            for name, of in at.items()
        },
    )
